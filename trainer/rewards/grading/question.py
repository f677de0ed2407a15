"""What a question asks of its answer: a form, an order, a unit, and which spellings it gives away itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from trainer.rewards.grading.measurement_units import Unit, nouns, unit
from trainer.rewards.grading.notation import common_notation

MAX_CHARS = 6_000
"""Characters of a question that are read, from its end: what is asked for stands there."""

Form = Literal[
    "factored", "expanded", "simplified", "fraction", "mixed", "decimal", "percent", "scientific", "rounded",
    "power", "equation", "expression", "converted", "evaluated", "ordered", "code", "interval",
    "share",
]  # fmt: skip
_FORMS: tuple[tuple[Form, str], ...] = (
    ("factored", r"\bfactor(?:i[sz])?(?:e|ed|ing|ization)?\b|分解"),
    ("expanded", r"\bexpand(?:ed)?\b|multiply out|remove (?:the )?(?:brackets|parentheses)|展开"),
    ("simplified",
     r"\bsimplif|\breduc(?:e|ed)\b|\bsimplest\b|lowest terms|rationali[sz]e|like terms|化简|约分"),
    ("fraction", r"(?:\bas|\bin|\binto|\bto) (?:an? )?(?:[a-z]+ ){0,2}fractions?\b|fraction(?:al)? form"),
    ("mixed", r"\bmixed (?:number|numeral|fraction)"),
    ("decimal",
     r"(?:\bas|\bin|\binto|\bto) (?:an? )?(?:[a-z]+ )?decimals?\b|decimal (?:form|number|notation)"),
    ("percent", r"(?:\bas|\bin|\binto|\bto) (?:an? )?percent"),
    ("share",
     r"\b(?:what|which|find|give|calculate|how (?:many|much|large))\b[^.?!%0-9]{0,60}?\bpercent|\(%\)"),
    ("scientific", r"scientific notation|standard index form"),
    ("rounded", r"decimal (?:place|point)|\bround(?:ed)?\b|(?:to|significant) (?:figures|digits)"
     r"|nearest (?:ten|hundred|thousand|whole|integer|cent)"),
    ("power", r"\bas an? (?:single )?power\b|in exponential form"),
    ("equation", r"\b(?:write|form|set up|which|give|find|state|what)\b[^.?!]{0,40}?"
     r"\b(?:equation|inequality|formula)\b"),
    ("expression", r"\b(?:write|form|set up|which|give|find)\b[^.?!]{0,30}?\bexpression\b"),
    ("evaluated", r"\b(?:evaluate|compute|calculate|work out)\b|计算"),
    ("converted", r"\bconvert|\bchange [^.?!]{1,40} (?:to|into)\b|\bexpress [^.?!]{1,40} in\b"),
    ("ordered", r"\b(?:in|by|into) (?:[a-z]+ )?order\b(?! to\b)|\border(?:ed|ing)?\b(?! (?:of|did|does|do)\b)"
     r"|\b(?:ascending|descending)\b|\b(?:least|smallest|shortest|lowest|lightest|largest|greatest|highest"
     r"|tallest|longest|biggest|oldest|youngest|slowest|fastest|earliest|latest|first|most|left|top|nearest"
     r"|farthest|cheapest)(?: [a-z]+)? (?:to|first)\b|\b(?:rank|arrange|sort)(?:ed|ing)?\b"
     r"|\bfirst (?:two|three|four|five|six|seven|eight|nine|ten|few|n|\d+)\b"
     r"|\bsequence\b|\bconsecutive(?:ly)?\b|\brespectively\b|\bchronological|\bin turn\b"
     r"|\b(?:by|in) (?:height|size|age|weight|length)\b|从小到大|从大到小|顺序|排列"),
    ("code", r"\b(?:version|release|build|code|serial|part number|number plate|licen[cs]e|phone|fax|zip"
     r"|postal|isbn|barcode|account|invoice|model number|id|label(?:led)?|stamp|score|route"
     r"|room number|seats?|gate|flight|vitamin|highway|seasons?|dated?)\b"),
    ("interval", r"\b(?:intervals?|domain|range|inequalit|solution set|values? (?:of|for)|for (?:which|what))"
     r"|[<>≤≥]|\\[lg]eq?(?![a-z])"),
)  # fmt: skip
_PATTERNS = {form: re.compile(pattern, re.IGNORECASE) for form, pattern in _FORMS}
_COUNTED = re.compile(
    r"\b(?:how (?:many|much)|(?:the )?(?:total )?number of)\s+((?:[a-z]+[ -]?){1,4})", re.IGNORECASE
)
_PHRASE_ENDS = re.compile(
    r"\b(?:is|are|was|were|be|do|does|did|can|could|will|would|has|have|had|in|of|on|at|to|for|from|with|than"
    r"|there|that|which|who|if|the|more|fewer|less|left|altogether|total|and|or)\b.*",
    re.IGNORECASE,
)
_MEASURED = re.compile(
    r"(?:\b(?:in|into|to)|\()\s*(?:the unit )?((?:(?:square|cubic) )?[a-zA-Z°/^0-9]+"
    r"(?: per [a-z]+)?(?: squared| cubed)?)\s*(?=[?.,;:)]|$|\n|and\b)"
)
_LETTER_UNITS = frozenset("mgshLNJWV")


@dataclass(frozen=True)
class Asked:
    """What a question asks for."""

    forms: frozenset[Form] = frozenset()
    units: tuple[Unit, ...] = ()
    """Units that it names for its answer: `in meters`, `how many dollars`."""
    counted: frozenset[str] = frozenset()
    """Nouns whose number it asks for: `girls` of "how many girls are in the class?", in the singular."""
    percents: bool = False
    """Whether it states some, so that an answer may be one that is given."""
    text: str = ""
    """The whole question, spelled as `spelling` spells answers."""

    def shows(self, answer: str) -> bool:
        """Whether the question itself states this answer, which is given as `spelling` spells it."""
        if not answer or answer not in self.text:
            return False
        before = r"(?<![0-9.])" if answer[0] in "0123456789." else ""
        after = r"(?!\.?[0-9]|%)" if answer[-1].isdigit() else ""
        return re.search(before + re.escape(answer) + after, self.text) is not None


NOTHING = Asked()


@lru_cache(maxsize=2048)
def read_question(question: str) -> Asked:
    """What a question asks for."""
    question = question[-MAX_CHARS:]
    if not question.strip():
        return NOTHING
    units: list[Unit] = []
    counted: set[str] = set()
    for phrase in _COUNTED.findall(question):
        words = _PHRASE_ENDS.sub("", phrase.strip()).split()
        known = next(filter(None, (unit(" ".join(words[:n])) for n in (3, 2, 1) if len(words) >= n)), None)
        if known is not None and known.dimensions:
            units.append(known)
        else:
            counted |= nouns(" ".join(words))
    for phrase in _MEASURED.findall(question):
        known = unit(phrase) if len(phrase) > 1 or phrase in _LETTER_UNITS else None
        if known is not None and known.dimensions:
            units.append(known)
    forms = {form for form, pattern in _PATTERNS.items() if pattern.search(question)}
    percents = re.search(r"[0-9]\s*(?:\\?%|percent)", question) is not None
    return Asked(frozenset(forms), tuple(units), frozenset(counted), percents, spelling(question))


_SIGNS = re.compile(r"\\(?:cdot|times|ast)(?![a-zA-Z])|\*")
_BRACED = re.compile(r"(?<=\^)\{(\w+)\}|\{(\w)\}")
_FRACTION = re.compile(r"\\frac\{(\\?\w+(?:\{\w+\})?)\}\{(\\?\w+(?:\{\w+\})?)\}")
_GROUPED = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")


@lru_cache(maxsize=8192)
def spelling(text: str) -> str:
    r"""A text without what changes nothing but its look: spaces, signs of multiplication, single braces."""
    s = common_notation(text).rstrip("?!")
    s = _SIGNS.sub("·", _GROUPED.sub("", s))
    s = _FRACTION.sub(r"\1/\2", s)
    return _BRACED.sub(r"\1\2", s).replace(" ", "").replace("\\div", "/")
