"""Draws two steps of rollouts, whole and carried over, into docs/carried.svg:
`python docs/draw_carried.py`."""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).with_name("carried.svg")
LENGTHS = ((2, 3, 3, 4, 5, 12), (2, 2, 4, 4, 6, 11), (1, 3, 3, 5, 4, 10))
"""Tokens of the completions of the steps s, s+1 and s+2; an example."""
LIMIT = 6
"""`rollout.tokens_per_step` of the example, with `rollout.staleness` 1."""
COLORS = ("#3b6fb6", "#c8553d", "#588157")
"""By the step that is trained on a completion."""
WIDE = 25
HIGH = 11
GAP = 3
"""Pixels of a token and of a slot, and between slots."""
LEFT = 112
TOP = 52
BETWEEN = 30
"""Pixels before the first phase, above a row, and between two phases."""


def begun(step: int) -> list[tuple[int, int]]:
    """(step, tokens) of the first pieces of a step's completions."""
    return [(step, min(tokens, LIMIT)) for tokens in LENGTHS[step]]


def ended(step: int) -> list[tuple[int, int]]:
    """(step, tokens) of the last pieces of those that were cut."""
    return [(step, tokens - LIMIT) for tokens in LENGTHS[step] if tokens > LIMIT]


def whole(step: int) -> list[tuple[int, int]]:
    """(step, tokens) of a step's completions."""
    return [(step, tokens) for tokens in LENGTHS[step]]


ROWS = (
    ("whole", (whole(0), whole(1))),
    (f"at most {LIMIT} a phase", (ended(0) + begun(1), ended(1) + begun(2))),
)


def phase(pieces: list[tuple[int, int]], x: int, title: str) -> tuple[list[str], int]:
    """Slots of a phase from x on, and where it ends."""
    longest = max(tokens for _, tokens in pieces)
    deep = len(pieces) * (HIGH + GAP)
    out = [
        f'<rect x="{x}" y="0" width="{longest * WIDE}" height="{deep}" fill="#f1f1f1"/>',
        f'<text x="{x}" y="-8">{title}: {longest} iterations</text>',
    ]
    for slot, (step, tokens) in enumerate(pieces):
        y = slot * (HIGH + GAP)
        width = tokens * WIDE - 1
        out.append(f'<rect x="{x}" y="{y}" width="{width}" height="{HIGH}" fill="{COLORS[step]}"/>')
    return out, x + longest * WIDE


def drawn() -> str:
    """The picture as SVG."""
    body = []
    top = TOP
    right = 0
    for name, phases in ROWS:
        inner = [f'<text x="0" y="{HIGH}">{name}</text>']
        x = LEFT
        for number, pieces in enumerate(phases):
            after = f"+{number}" if number else ""
            found, end = phase(pieces, x, f"phase of s{after}")
            inner += found
            x = end + BETWEEN
        right = max(right, x)
        body.append(f'<g transform="translate(10,{top})">{"".join(inner)}</g>')
        top += max(map(len, phases)) * (HIGH + GAP) + TOP
    for step, color in enumerate(COLORS):
        after = f"+{step}" if step else ""
        x = 10 + LEFT + step * 130
        body.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{color}"/>')
        body.append(f'<text x="{x + 18}" y="18">trained in step s{after}</text>')
    style = "font-family:sans-serif;font-size:12px;fill:#333"
    lines = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {top - TOP + 10}">'
        f'<rect width="100%" height="100%" fill="#fff"/>\n<g style="{style}">\n{lines}\n</g></svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn())
