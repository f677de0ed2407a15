"""The launcher of a node, which marks its attempt as alive every half second instead of every minute."""

import sys

from trainer.node import __main__ as launcher
from trainer.node.watch import attempt_holder

attempt_holder.BEAT_S = attempt_holder.POLL_S = 0.5

if __name__ == "__main__":
    sys.exit(launcher.main())
