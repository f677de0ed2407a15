"""`python -m recipes.gpu_check`, with limits for a machine whose processor does a card's work too."""

from __future__ import annotations

import sys
from dataclasses import replace

from recipes import gpu_check

PATIENCE = 20

if __name__ == "__main__":
    gpu_check.CHECKS = tuple(replace(check, limit_s=PATIENCE * check.limit_s) for check in gpu_check.CHECKS)
    sys.exit(gpu_check.main())
