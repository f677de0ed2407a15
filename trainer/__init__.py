"""The trainer; runs on the nodes.

Lives here: a room for each part of a run; `loops` are its programs, `node` starts them, `shell` installs
what they need.
In: a RunConfig as YAML, a prepared dataset, a model. Out: metrics, checkpoints and weights, in the run's
folder and bucket.
May import: downward only, in the order of pyproject.toml's contracts; never `recipes`, `data_prep` or
`examples`.
"""

import os

# Started through `uv run`, Ray would run its workers through `uv run` too, in an environment of its own
# making.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
