"""What preflight finds of this node's GPUs, as JSON: preflight.py HOW_MANY."""

from __future__ import annotations

import dataclasses
import json
import sys

from trainer.node.preflight import gpus, host

if __name__ == "__main__":
    found = [dataclasses.asdict(finding) for finding in gpus.check_gpus(0, int(sys.argv[1]))]
    print(json.dumps({"findings": found, "visible": host.count_gpus()}))
