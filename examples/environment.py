"""An environment of your own, with a tool that shows a picture. See docs/turns.md.

    python3 launch.py demo --set turns.environment=examples/environment.py:Ruler \\
        --set data.prompt_max_tokens=2048

The demo's tiny model has a token a character, so that the tools alone take 500 of them; it learns no calls.

A reply that calls `grid` sees the picture again under numbered lines; any other reply ends the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import ImageDraw

from trainer.turns.episode import Observation, Situation

MOST_LINES = 16


class Ruler:
    """What a model may call is in `tools`: JSON schemas of functions, as chat templates take them."""

    tools: Sequence[dict[str, Any]] = [
        {
            "type": "function",
            "function": {
                "name": "grid",
                "description": "Shows the picture under a grid of so many lines each way.",
                "parameters": {
                    "type": "object",
                    "properties": {"lines": {"type": "integer", "description": f"1 to {MOST_LINES}"}},
                    "required": ["lines"],
                },
            },
        }
    ]
    shows_images = True
    """Without it an observation with images is a tool failure."""

    def answer(self, situation: Situation, replies: Sequence[str]) -> Observation | str | None:
        """What comes back for the last of the replies: an observation, a text, or None at the end."""
        call = situation.call(replies[-1])  # a call that is malformed is answered for you
        if call is None:
            return None
        lines = call.arguments.get("lines")
        if type(lines) is not int or not 1 <= lines <= MOST_LINES:
            return f"Error: lines is a whole number from 1 to {MOST_LINES}"
        if not situation.pictures:
            return "Error: there is no picture"
        shown = situation.pictures[0].image.convert("RGB")
        pen = ImageDraw.Draw(shown)
        for number in range(1, lines + 1):
            across = shown.width * number // (lines + 1)
            down = shown.height * number // (lines + 1)
            pen.line([(across, 0), (across, shown.height)], fill="red")
            pen.line([(0, down), (shown.width, down)], fill="red")
        return Observation(f"The picture under {lines} lines each way:", [shown])
