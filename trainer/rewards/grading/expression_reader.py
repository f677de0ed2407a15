r"""Reads LaTeX or plain mathematics as a function of a point (`values.py`).

Symbols keep their case, subscript, prime and accent: `R` is not `r`, `y'` is not `y`, and
`\frac{dy}{dx}` is one symbol, not a quotient. Whatever is not understood is Unreadable, and never
skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trainer.rewards.grading import values
from trainer.rewards.grading.exact import PRIMES, Inexact
from trainer.rewards.grading.notation import GREEK
from trainer.rewards.grading.values import Node, Point, Undefined, Unreadable

MAX_CHARS = 600
MAX_DEPTH = 40


@dataclass(frozen=True)
class Expression:
    value: Node
    symbols: frozenset[str]
    analytic: bool
    """Whether it has no |x| and the like, so that its values at complex points have a meaning."""
    bare_log: bool
    arithmetic: bool
    r"""Whether it has a sum, or a product by a sign or a bracket: `10 + 2`, `7(12)`, not `2\sqrt{3}`."""

    @cached_property
    def exact(self) -> bool:
        """Whether exact arithmetic has a value for it. Raises Unreadable for what is too large."""
        try:
            values.value(self.value, Point(1, "residue", PRIMES[0]))
        except Inexact:
            return False
        except Undefined:
            return True
        return True


_OWN_NAMES = "sin cos tan cot sec csc sinh cosh tanh coth asin acos atan ln log lg exp"
FUNCTIONS: dict[str, str] = {name: name for name in _OWN_NAMES.split()}
for _name in _OWN_NAMES.split()[:9]:  # to tanh
    FUNCTIONS["arc" + _name] = "a" + _name
FUNCTIONS |= {"tg": "tan", "ctg": "cot", "arctg": "atan"}
"""mpmath's names of functions, by how they are written."""
_PLAIN_WORDS = frozenset([*FUNCTIONS, "sqrt", "pi"])

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9,])|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"|\\[a-zA-Z]+|(?P<word>[a-zA-Z]+)|⟪[^⟫]*⟫|[-+*/^_()\[\]{}|!',°%≔])",
    re.ASCII,
)
_ORDER = r"(?:\^\s*(?:\{\s*([0-9n])\s*\}|([0-9n])))?"
_DERIVATIVE = re.compile(
    rf"\\frac\s*\{{\s*(d|\\partial)\s*{_ORDER}\s*(\\?[a-zA-Z]*'*)\s*\}}\s*"
    rf"\{{\s*\1\s*(\\?[a-zA-Z])\s*{_ORDER}\s*\}}|(?<![A-Za-z\\])(d)([a-zA-Z])\s*/\s*d([a-zA-Z])(?![a-zA-Z])",
    re.ASCII,
)
_SYMBOLS = {name: name for name in (*GREEK, "Upsilon", "hbar", "infty") if name != "pi"} | {
    "ell": "l", "varepsilon": "epsilon", "vartheta": "theta", "varphi": "phi", "varrho": "rho",
    "varsigma": "sigma",
}  # fmt: skip
_ACCENT_NAMES = (
    "vec hat bar overline tilde dot ddot overrightarrow widehat widetilde mathcal mathscr mathfrak mathbb"
)
_ACCENTS = frozenset(_ACCENT_NAMES.split())
_VECTORS = ("\\vec", "\\overrightarrow", "\\hat")
_TRIGONOMETRIC = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))
_GROUPS = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_TIMES = ("*", "\\cdot", "\\times", "\\ast", "\\bullet")
_OVER = ("/", "\\div")
_ENDS = frozenset(("+", "-", ")", "]", "}", ",", "\\rfloor", "\\rceil"))
_IN_ARGUMENTS = frozenset("\\" + name for name in (*_SYMBOLS, "pi", "frac", "sqrt"))
"""Commands that go on with an argument without brackets."""
_ARGUMENTS = {"frac": "/", "binom": "binomial"}
"""Commands of two arguments."""


@lru_cache(maxsize=2048)
def read(text: str) -> Expression:
    """Reads a cleaned expression. Raises Unreadable."""
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    reader = _Reader(text)
    node = reader.sum()
    if reader.next:
        raise Unreadable(f"unexpected {reader.next!r}")
    return Expression(node, frozenset(reader.symbols), reader.analytic, reader.bare_log, reader.arithmetic)


class _Reader:
    """Recursive descent over the tokens: sum -> product -> signed -> power -> atom."""

    def __init__(self, text: str):
        self.tokens = tokens(text)
        self.at = 0
        self.depth = 0
        self.symbols: set[str] = set()
        self.analytic = True
        self.bare_log = False
        self.arithmetic = False
        self.bars = False
        """Whether the reader is inside of |…|, which the next bar closes."""
        self.angle = False
        """Whether the reader is in a trigonometric function, where degrees become radians."""

    @property
    def next(self) -> str:
        """The next token; empty at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next_is(self, *expected: str) -> bool:
        return self.tokens[self.at : self.at + len(expected)] == list(expected)

    def take(self, expected: str = "") -> str:
        token = self.next
        if not token or (expected and token != expected):
            raise Unreadable(f"{token!r} instead of {expected!r}")
        self.at += 1
        return token

    def sum(self) -> Node:
        node = self.product()
        while self.next in ("+", "-"):
            self.arithmetic = True
            node = Node(self.take(), (node, self.product()))
        return node

    def product(self) -> Node:
        start = self.at
        node = self.factors(self.signed())
        while self.next in _TIMES or self.next in _OVER:
            middle = self.at
            token = self.take()
            self.arithmetic |= token != "/"
            if token == "\\times" and self.is_vector(start, middle):
                factors = node, self.factors(self.signed())
                crossed = self.is_vector(middle, self.at)
                node = Node("application", factors, "cross") if crossed else Node("*", factors)
            else:
                node = Node("*" if token in _TIMES else "/", (node, self.signed()))
            node = self.factors(node)
        return node

    def factors(self, node: Node) -> Node:
        """The product of `node` and the factors that follow it without a sign."""
        while (token := self.next) and token not in _ENDS and not (token == "|" and self.bars):
            if token in _TIMES or token in _OVER:
                break
            if is_number(token):
                raise Unreadable("a number after a factor")  # 1 2
            self.arithmetic |= token in _GROUPS
            node = Node("*", (node, self.power()))
        return node

    def is_vector(self, start: int, end: int) -> bool:
        """Whether these tokens are a vector: `2\\vec{a}`, not its length."""
        held = self.tokens[start:end]
        return "|" not in held and any(token in _VECTORS for token in held)

    def signed(self) -> Node:
        if self.next not in ("+", "-"):
            return self.power()
        minus = self.take() == "-"
        node = self.deeper(self.signed)
        return Node("negative", (node,)) if minus else node

    def deeper(self, parse: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        node = parse()
        self.depth -= 1
        return node

    def power(self) -> Node:
        start = self.at
        node = self.postfix(self.atom())
        if self.next != "^":
            return self.mixed(start, node)
        self.take()
        exponent_at = self.at
        node = Node("^", (node, self.exponent()))
        letters = set(filter(str.isalpha, self.tokens[exponent_at : self.at]))
        if not letters <= {"e", "i"}:
            # A power with a letter in its exponent has a value for positive bases.
            self.analytic = False
        if self.next == "^":
            raise Unreadable("a tower without braces")
        return self.postfix(node)

    def mixed(self, start: int, node: Node) -> Node:
        r"""`3\frac{1}{2}` is a mixed number, `2\frac{\pi}{3}` and `2\frac{5}{3}` are products."""
        held = self.tokens[start : start + 8]
        if self.at != start + 1 or len(held) < 8:
            return node
        whole, _, _, top, _, _, bottom, _ = held
        if held != [whole, "\\frac", "{", top, "}", "{", bottom, "}"]:
            return node
        proper = whole.isdigit() and top.isdigit() and bottom.isdigit() and int(top) < int(bottom)
        return Node("mixed", (node, self.atom())) if proper else node

    def postfix(self, node: Node) -> Node:
        while self.next in ("!", "%", "°"):
            match self.take():
                case "!":
                    node = Node("factorial", (node,))
                case "%":
                    node = Node("/", (node, constant("100")))
                case _ if self.angle:
                    node = Node("degrees", (node,))
            if self.next == "!":
                raise Unreadable("a double factorial")
        return node

    def exponent(self) -> Node:
        if self.next in ("-", "+"):
            return Node("negative", (self.atom(),)) if self.take() == "-" else self.atom()
        return self.group() if self.next in ("{", "(") else self.atom()

    def group(self) -> Node:
        opening = self.take()
        if opening not in _GROUPS:
            raise Unreadable(f"{opening!r} instead of a bracket")
        bars = self.bars
        self.bars = False
        node = self.deeper(self.sum)
        self.take(_GROUPS[opening])
        self.bars = bars
        return node

    def braced(self) -> Node:
        """The argument of a command: a group, or one atom."""
        return self.group() if self.next == "{" else self.atom()

    def name(self, base: str) -> str:
        """A symbol with its subscript and primes."""
        if self.next == "_":
            self.take()
            base += "_" + self.raw()
        while self.next == "'":
            base += self.take()
        if base in ("e", "i") or self.at + 3 >= len(self.tokens):
            return base
        # A derivative: y^{(3)}.
        order = self.tokens[self.at + 3]
        if order in "123456789n" and self.next_is("^", "{", "(", order, ")", "}"):
            self.at += 6
            base += "^(n)" if order == "n" else "'" * int(order)
        return base

    def raw(self) -> str:
        """The next token, or the text of a group in braces."""
        text = self.take()
        if text != "{":
            return text
        depth = 1
        while depth:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token, 0)
            text += token
        return text[1:-1]

    def symbol(self, name: str) -> Node:
        self.symbols.add(name)
        return Node("symbol", (), name)

    def letter(self, letter: str) -> Node:
        name = self.name(letter)
        if self.next == "(" and (letter in "fgF" or name.endswith("'")):
            return self.application(name)
        return Node("symbol", (), name) if name in ("e", "i") else self.symbol(name)

    def application(self, name: str) -> Node:
        """A function that is not known, and its arguments."""
        self.take("(")
        arguments = [self.deeper(self.sum)]
        while self.next == ",":
            self.take()
            arguments.append(self.deeper(self.sum))
        self.take(")")
        self.symbols.add(name)
        return Node("application", tuple(arguments), name)

    def atom(self) -> Node:
        token = self.next
        if is_number(token):
            self.take()
            if self.next in ("\\overline", "\\dot", "\\bar"):
                raise Unreadable("a recurring decimal inside of an expression")
            return constant(token.replace(",", ""))
        if token[:1] == "⟪":
            return self.symbol(self.take())
        if token.isalpha():
            return self.letter(self.take())
        if token[:1] == "\\":
            return self.command(self.take()[1:])
        return self.absolute() if token == "|" else self.group()

    def absolute(self) -> Node:
        if self.bars:
            raise Unreadable("bars within bars")
        self.take("|")
        self.bars = True
        self.analytic = False
        node = self.deeper(self.sum)
        self.take("|")
        self.bars = False
        return Node("absolute", (node,))

    def command(self, name: str) -> Node:
        if name in FUNCTIONS:
            return self.function(FUNCTIONS[name])
        if name in _SYMBOLS:
            return self.symbol(self.name(_SYMBOLS[name]))
        if name in _ACCENTS:
            accent = "vec" if name == "overrightarrow" else name
            return self.symbol(self.name(f"{accent} {self.raw()}"))
        match name:
            case "pi":
                return Node("symbol", (), "\\pi")
            case "imath":
                return Node("symbol", (), "i")
            case "frac" | "binom":
                return Node(_ARGUMENTS[name], (self.braced(), self.braced()))
            case "sqrt":
                degree = self.group() if self.next == "[" else constant("2")
                return Node("root", (self.braced(), degree))
            case "sum" | "prod":
                return self.series(name)
            case "lfloor" | "lceil":
                self.at -= 1
                self.analytic = False
                return Node(name[1:], (self.group(),))
        raise Unreadable(f"\\{name} is not known")

    def function(self, name: str) -> Node:
        r"""A function and its argument: `\sin^2 x`, `\sin^{-1} x`, `\log_2 8`, `\sin 2x`, `\ln|x|`.

        An argument without brackets ends at a sign or a function.
        """
        bases: list[Node] = []
        exponent = None
        angle = name in _TRIGONOMETRIC
        for _ in range(2):
            if self.next == "_" and name == "log" and not bases:
                self.take()
                bases.append(self.braced())
            elif self.next == "^" and exponent is None:
                self.take()
                if angle and self.next_is("{", "-", "1", "}"):
                    self.at += 4
                    name = "a" + name
                    angle = False
                else:
                    exponent = self.exponent()
        self.bare_log |= name == "log" and not bases
        outside = self.angle
        self.angle = angle
        argument = self.argument()
        self.angle = outside
        node = Node(name, (argument, *bases))
        return node if exponent is None else Node("^", (node, exponent))

    def argument(self) -> Node:
        if self.next in ("(", "[", "{"):
            return self.group()
        if self.next == "|" and not self.bars:
            return self.absolute()
        node = self.deeper(self.power)
        while self.next.isalpha() or self.next[:1] == "⟪" or self.next in _IN_ARGUMENTS:
            node = Node("*", (node, self.deeper(self.power)))
        return node

    def series(self, name: str) -> Node:
        r"""A sum or product whose number of terms is known: `\sum_{k=1}^{9} k^2`."""
        self.take("_")
        self.take("{")
        index = self.take()
        if len(index) > 1 or not index.isalpha():
            raise Unreadable(f"the index {index!r}")
        self.take("≔")
        first = self.sum()
        self.take("}")
        self.take("^")
        last = self.exponent()
        known = index in self.symbols
        term = self.deeper(self.product)
        if not known:
            self.symbols.discard(index)
        return Node(name, (first, last, term), index)


def constant(digits: str) -> Node:
    return Node("number", (), digits)


def is_number(token: str) -> bool:
    return token[:1].isdigit() or (token[:1] == "." and len(token) > 1)


def _derivative(m: re.Match[str]) -> str:
    order = m[2] or m[3] or "1", m[6] or m[7] or "1"
    parts = (m[8], m[9], m[10], "1", "1") if m[8] else (m[1], m[4].strip(), m[5], *order)
    return "⟪" + " ".join(parts).replace("\\", "") + "⟫"


def tokens(text: str) -> list[str]:
    """Numbers, commands, letters, derivatives and signs. Raises Unreadable."""
    parts: list[str] = []
    text = _DERIVATIVE.sub(_derivative, text)
    position = 0
    while text[position:].strip():
        if (match := _TOKEN.match(text, position)) is None:
            raise Unreadable(f"unexpected {text[position:][:10]!r}")
        if match["number"] and match.start("number") == position and parts and parts[-1].isalpha():
            parts.append("_")  # x1
        parts += _split_word(match["word"]) if match["word"] else [match[0].strip()]
        position = match.end()
    return parts


def _split_word(word: str) -> list[str]:
    """A known name is a command (`sin`, `2xsin`), other letters stand for themselves; a long word is no
    mathematics."""
    for start in range(min(3, len(word))):
        if word[start:] in _PLAIN_WORDS:
            return [*word[:start], "\\" + word[start:]]
    if len(word) > 5:
        raise Unreadable(f"the word {word!r}")
    return list(word)
