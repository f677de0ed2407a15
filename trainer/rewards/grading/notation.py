r"""Gives each notation one spelling: LaTeX, Unicode and plain text become a small common subset before
they are compared.

`60^{\circ}`, `60\degree`, `٦٠°` and `60°` all become `60°`; `\dfrac12` becomes `\frac{1}{2}`; `\text{ cm}`
becomes ` cm`. Every pattern takes linear time on the short strings that it gets
(`extraction.MAX_BOX_CHARS`).
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

DOLLAR = "＄"
"""Sign of money, after the dollar signs of mathematics were taken off."""

_CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-", "＋": "+", "÷": "/",
    "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ",
    "∕": "/", "⁄": "/", "。": ".", "、": ",", "和": " and ", "或": " or ", "′": "'", "″": "''", "∞": "\\infty ",
    "∛": "\\sqrt[3]", "∜": "\\sqrt[4]", "√": "\\sqrt", "ℝ": "\\mathbb{R}", "∂": "\\partial ", "…": "\\ldots ",
    "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ", "∪": "\\cup ", "∩": "\\cap ",
    "∈": "\\in ", "∖": "\\setminus ", "∣": "|", "⩽": "\\le ", "⩾": "\\ge ", "Ω": "\\Omega ", "µ": "\\mu ",
    "ϕ": "\\phi ",
    "∅": "\\emptyset ", "º": "°", "˚": "°", "∘": "°", "℃": "°C", "℉": "°F", "∠": "\\angle ",
    "½": " \\frac{1}{2}", "⅓": " \\frac{1}{3}", "⅔": " \\frac{2}{3}", "¼": " \\frac{1}{4}",
    "¾": " \\frac{3}{4}", "⅕": " \\frac{1}{5}", "⅛": " \\frac{1}{8}", "⅜": " \\frac{3}{8}",
    "⅝": " \\frac{5}{8}", "⅞": " \\frac{7}{8}",
    "٫": ".", "٬": ",", "،": ",", "٪": "%",
    "“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "",
}  # fmt: skip
for _number, _subscript in enumerate("₀₁₂₃₄₅₆₇₈₉"):
    _CHARACTERS[_subscript] = f"_{{{_number}}}"
for _full_width in range(0xFF01, 0xFF5F):
    if chr(_full_width) != DOLLAR:
        _CHARACTERS[chr(_full_width)] = chr(_full_width - 0xFEE0)
_GREEK_TEXT = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon "
    "phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
GREEK = tuple(_GREEK_TEXT.split())
_LETTERS = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
for _letter, _name in zip(_LETTERS, GREEK, strict=True):
    _CHARACTERS[_letter] = f"\\{_name} "
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ"
_SUPERSCRIPTS = str.maketrans(_RAISED, "0123456789-+n")

_COMMANDS = {
    "dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac", "dbinom": "\\binom", "tbinom": "\\binom",
    "vert": "|", "lvert": "|", "rvert": "|", "varnothing": "\\emptyset", "geq": "\\ge", "geqslant": "\\ge",
    "leq": "\\le", "leqslant": "\\le", "neq": "\\ne", "gt": ">", "lt": "<", "lbrace": "\\{", "rbrace": "\\}",
}  # fmt: skip
_RULES = [
    (" ".join(_RAISED), rf"[{_RAISED}]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}"),
    ("phantom space", r"\\[hv]?phantom\s*\{(?:[^{}]|\{[^{}]*\})*\}|\\[hv]space\*?\s*\{[^{}]*\}", " "),
    ("color", r"\\(?:text)?color\s*\{[a-zA-Z]{3,20}\}", " "),
    ("\\dot", r"\\dot\s*\{?([0-9])\}?([0-9]*)\\dot\s*\{?([0-9])\}?", r"\\overline{\1\2\3}"),
    ("\\\\", r"\\\\(?=[a-zA-Z])(?!.*\\begin)", r"\\"),
    ("\\left \\right \\big \\Big style \\limits",
     r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle|textstyle|limits)(?![a-zA-Z])\.?", ""),
    ("\\! {}", r"\\!\s*|(?<![a-zA-Z\]}])\{\}", ""),
    ("\\, \\; \\: \\_ ~ quad", r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
    ("{,}", r"\{,\}", ","),
    ("\\", rf"\\({'|'.join(_COMMANDS)})(?![a-zA-Z])", lambda m: _COMMANDS[m[1]]),
    ("^", r"(\\[a-zA-Z]+|[a-zA-Z])\s*\^\s*([0-9n]|\{[^{}]*\})\s*_\s*(\w|\{[^{}]*\})", r"\1_\3^\2"),
    ("\\sum \\prod", r"(\\(?:sum|prod)\s*_\s*\{\s*[a-zA-Z]\s*)=", r"\1≔"),
    ("\\choose", r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    ("\\mathbb \\Bbb", r"\\(?:mathbb|Bbb)\s*(?:\{\s*R\s*\}|R(?![a-zA-Z]))", r"\\mathbb{R}"),
    ("\\not", r"\\not\s*(?:=|\\eq(?![a-zA-Z]))", r"\\ne "),
    ("^", r"\^\s*(?:\{((?:\s*(?:\\prime(?![a-zA-Z])|'))+)\s*\}|(\\prime(?![a-zA-Z])))",
     lambda m: "'" * (m[0].count("prime") + m[0].count("'"))),
    ("circ ° degree",
     r"\^\s*\{?\s*(?:\\circ|°)(?![a-zA-Z])\s*\}?|\\(?:text)?degree(?![a-zA-Z])|\\circ(?![a-zA-Z])",
     "°"),
    ("frac", r"\\frac\s*([0-9a-z])\s*([0-9a-z])", r"\\frac{\1}{\2}"),
    ("frac", r"\\frac\s*([0-9a-z])\s*\{", r"\\frac{\1}{"),
    ("frac", r"(\\frac\s*\{[^{}]*\})\s*([0-9a-z])", r"\1{\2}"),
    ("sqrt", r"(?<![\\a-zA-Z])sqrt(?![a-zA-Z])", r"\\sqrt"),
    ("sqrt", r"\\sqrt\s*((?:\[[^][{}]*\])?)\s*"
          r"([0-9]+(?:\.[0-9]+)?|[a-zA-Z]|\\(?:pi|alpha|beta|theta)(?![a-zA-Z]))",
     r"\\sqrt\1{\2}"),
    ("sqrt", r"\\sqrt\s*((?:\[[^][{}]*\])?)\s*\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)", r"\\sqrt\1{\2}"),
    ("pi", r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
    ("inf oo", r"(?<![\\a-zA-Z])(?:inf|infinity|oo)(?![a-zA-Z])", r"\\infty "),
    ("**", r"\*\*(?=[\s{(0-9-])", "^"),
    ("\\%", r"\\%", "%"),
    ("\\# \\&", r"\\([#&])", r"\1"),
    ("<=", r"<=", r"\\le "),
    (">=", r">=", r"\\ge "),
    ("!=", r"!=", r"\\ne "),
    ("", r"\s+", " "),
    ("/", r"(?<![0-9./])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9/.])", r"\1\\frac{\2}{\3}"),
]  # fmt: skip
"""(what it needs, pattern, replacement). A rule is tried if the text has one of the needed strings, of which
`_` stands for a blank."""
_COMPILED: list[tuple[list[str], re.Pattern[str], Any]] = [
    ([need.replace("_", " ") for need in needs.split() or [""]], re.compile(p), replacement)
    for needs, p, replacement in _RULES
]
_PLAIN_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?", re.ASCII)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|textsf|mathrm|mathbf|mathit|mathsf|mathtt|mbox|hbox|operatorname|bf|rm"
    r"|bold|boldsymbol|underline|overline(?=\{[A-Z]{2}\}))\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_LONE_DOLLAR = re.compile(r"\A\$(?=-?\s*[0-9.][^$]*\Z)")
_QUOTED = re.compile(r"\A([\"'`])([^\"'`]+)\1\Z")
_OLD_FONT = re.compile(r"\{?\\(?:bf|rm|it|mathrm|mathbf)(?![a-zA-Z{])\s*([^{}\\]*)\}?")


@lru_cache(maxsize=4096)
def common_notation(content: str) -> str:
    """The common spelling of a box's content. Any string gives some string."""
    s = content.strip().strip("\0")
    if "&" in s and ";" in s:
        s = html.unescape(s)
    if _PLAIN_NUMBER.fullmatch(s):
        return s
    if not s.isascii():
        s = "".join(_CHARACTERS.get(c) or _digit(c) for c in s)
    while len(s) > 4 and s.startswith("**") and s.endswith("**"):
        s = s[2:-2].strip()
    s = _LONE_DOLLAR.sub(DOLLAR, s.replace("\\$", DOLLAR))
    s = _QUOTED.sub(r"\2", s).replace("$", " ")
    for bracket in "()[]":
        s = s.replace("\\" + bracket, bracket)
    for _ in range(3):
        unwrapped = _WRAPPER.sub(r" \1 ", s)
        if unwrapped == s:
            break
        s = unwrapped
    if "\\" in s:
        s = _OLD_FONT.sub(r" \1 ", s)
    for needs, pattern, replacement in _COMPILED:
        for need in needs:
            if need in s:
                s = pattern.sub(replacement, s)
                break
    s = s.strip()
    if s.endswith((".", ",", ";")) and not s.endswith("..."):
        s = s[:-1].rstrip()
    return s


def _digit(character: str) -> str:
    """A digit of any script (Arabic, Devanagari) as one of ours; any other character as it is."""
    return str(unicodedata.decimal(character, character))


_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def open_brackets(s: str) -> Iterator[int]:
    """How many brackets are open behind each character; intervals may close with the other kind."""
    depth = 0
    for character in s:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        yield depth


def split_top(s: str, separators: str = ",;") -> list[str]:
    """Splits at separators outside of all brackets."""
    parts = []
    start = 0
    for i, depth in enumerate(open_brackets(s)):
        if depth == 0 and s[i] in separators:
            parts.append(s[start:i].strip())
            start = i + 1
    return [*parts, s[start:].strip()]


def strip_outer(s: str) -> str:
    r"""Takes off brackets that hold the whole of a single value: `(5)`, `{5}`; not `(1, 2)`, not `\{5\}`."""
    for _ in range(3):
        enclosed = len(s) > 2 and s[0] in "({" and s[-1] == _BRACKETS[s[0]] and is_one_group(s)
        if not enclosed or "," in s:
            return s
        s = s[1:-1].strip()
    return s


def is_one_group(s: str) -> bool:
    """Whether the bracket that opens `s` is closed by its last character and no sooner."""
    closing = next((i for i, depth in enumerate(open_brackets(s)) if depth == 0), -1)
    return bool(s) and closing == len(s) - 1
