"""The trainer; runs on the nodes."""

import os

# Started through `uv run`, Ray would run its workers through `uv run` too, in an environment of its own
# making.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
