"""Tools of a server of OpenEnv's: `turns.environment=examples/openenv_tools.py:Tools` (docs/turns.md)."""

from __future__ import annotations

import os

from trainer.turns.openenv import OpenEnvTools


class Tools(OpenEnvTools):
    """The prompt offers the server's tools, a call is a step, and the sum of the rewards grades the episode.

    With `score = Environment.score` (trainer/turns/episode.py) the run's graders grade the last reply.
    """

    url = os.environ.get("OPENENV_URL", "ws://127.0.0.1:8000")
    shows_images = True
