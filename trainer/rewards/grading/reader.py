r"""Reads LaTeX or plain mathematics as a function of a point (`values.py`).

Symbols keep their case, subscript, prime and accent: `R` is not `r`, `y'` is not `y`, and
`\frac{dy}{dx}` is one symbol, not a quotient. Whatever is not understood is Unreadable, and never
skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from trainer.rewards.grading import values
from trainer.rewards.grading.exact import PRIMES, Inexact
from trainer.rewards.grading.notation import GREEK
from trainer.rewards.grading.tokens import FUNCTIONS, tokens
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


_SYMBOLS = {name: name for name in (*GREEK, "Upsilon", "hbar", "infty") if name != "pi"} | {
    "ell": "l",
    "varepsilon": "epsilon",
    "vartheta": "theta",
    "varphi": "phi",
    "varrho": "rho",
    "varsigma": "sigma",
}
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


@lru_cache(maxsize=2048)
def read(text: str) -> Expression:
    """Reads a cleaned expression. Raises Unreadable."""
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    reader = _Reader(text)
    node = reader.sum()
    if reader.next is not None:
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
    def next(self) -> str | None:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else None

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.next
        if token is None or (expected is not None and token != expected):
            raise Unreadable(f"{token!r} instead of {expected!r}")
        self.at += 1
        return token

    def sum(self) -> Node:
        node = self.product()
        while self.next in ("+", "-"):
            self.arithmetic = True
            node = values.binary(self.take(), node, self.product())
        return node

    def product(self) -> Node:
        start = self.at
        node = self.factors(self.signed())
        while (token := self.next) in _TIMES or token in _OVER:
            middle = self.at
            self.take()
            self.arithmetic |= token != "/"
            if token == "\\times" and self.vectors(start, middle):
                right = self.factors(self.signed())
                crossed = self.vectors(middle, self.at)
                node = values.cross_product(node, right) if crossed else values.binary("*", node, right)
            else:
                node = values.binary("*" if token in _TIMES else "/", node, self.signed())
            node = self.factors(node)
        return node

    def factors(self, node: Node) -> Node:
        """The product of `node` and the factors that follow it without a sign."""
        while (token := self.next) is not None and token not in _ENDS and not (token == "|" and self.bars):
            if token in _TIMES or token in _OVER:
                break
            if self.kind == "number":
                raise Unreadable("a number after a factor")  # 1 2
            self.arithmetic |= token in _GROUPS
            node = values.binary("*", node, self.power())
        return node

    def vectors(self, start: int, end: int) -> bool:
        """Whether these tokens are a vector: `2\\vec{a}`, not its length."""
        tokens = self.texts(start, end)
        return "|" not in tokens and any(token in _VECTORS for token in tokens)

    def texts(self, start: int, end: int) -> list[str]:
        """These tokens without their kinds."""
        return [text for _, text in self.tokens[start:end]]

    def signed(self) -> Node:
        if self.next in ("+", "-"):
            minus = self.take() == "-"
            with_sign = self.deeper(self.signed)
            return values.negative(with_sign) if minus else with_sign
        return self.power()

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
        node = values.power(node, self.exponent())
        letters = [text for kind, text in self.tokens[exponent_at : self.at] if kind == "letter"]
        if not {"e", "i"}.issuperset(letters):
            # A power with a letter in its exponent has a value for positive bases.
            self.analytic = False
        if self.next == "^":
            raise Unreadable("a tower without braces")
        return self.postfix(node)

    def mixed(self, start: int, node: Node) -> Node:
        r"""`3\frac{1}{2}` is a mixed number, `2\frac{\pi}{3}` and `2\frac{5}{3}` are products."""
        tokens = self.texts(start, start + 8)
        if self.at != start + 1 or len(tokens) < 8:
            return node
        whole = tokens[0]
        top = tokens[3]
        bottom = tokens[6]
        if tokens != [whole, "\\frac", "{", top, "}", "{", bottom, "}"]:
            return node
        proper = whole.isdigit() and top.isdigit() and bottom.isdigit() and int(top) < int(bottom)
        return values.binary("+", node, self.atom(), "mixed") if proper else node

    def postfix(self, node: Node) -> Node:
        while self.next in ("!", "%", "°"):
            match self.take():
                case "!":
                    node = values.factorial(node)
                case "%":
                    node = values.binary("/", node, values.constant("100"))
                case _:
                    node = values.degrees(node) if self.angle else node
            if self.next == "!":
                raise Unreadable("a double factorial")
        return node

    def exponent(self) -> Node:
        if self.next in ("-", "+"):
            return values.negative(self.atom()) if self.take() == "-" else self.atom()
        return self.group() if self.next in ("{", "(") else self.atom()

    def group(self) -> Node:
        opening = self.take()
        closing = _GROUPS.get(opening)
        if closing is None:
            raise Unreadable(f"{opening!r} instead of a bracket")
        bars = self.bars
        self.bars = False
        node = self.deeper(self.sum)
        self.take(closing)
        self.bars = bars
        return node

    def braced(self) -> Node:
        """The argument of a command: a group, or one atom."""
        return self.group() if self.next == "{" else self.atom()

    def name(self, base: str) -> str:
        """A symbol with its subscript and primes."""
        if self.next == "_":
            self.take()
            base += "_" + (self.raw() if self.next == "{" else self.take())
        while self.next == "'":
            base += self.take()
        if base in ("e", "i") or self.at + 3 >= len(self.tokens):
            return base
        # A derivative: y^{(3)}.
        order = self.tokens[self.at + 3][1]
        if order in "123456789n" and self.next_is("^", "{", "(", order, ")", "}"):
            self.at += 6
            base += "^(n)" if order == "n" else "'" * int(order)
        return base

    def raw(self) -> str:
        """The text of a group in braces."""
        text = ""
        depth = 0
        while True:
            token = self.take()
            if token == "{":
                depth += 1
            elif token == "}":
                depth -= 1
            if depth == 0:
                return text.removeprefix("{")
            text += token

    def symbol(self, name: str) -> Node:
        self.symbols.add(name)
        return values.symbol(name)

    def letter(self, letter: str) -> Node:
        name = self.name(letter)
        if self.next == "(" and (letter in "fgF" or name.endswith("'")):
            return self.application(name)
        return values.symbol(name) if name in ("e", "i") else self.symbol(name)

    def application(self, name: str) -> Node:
        """A function that is not known: each name has a cosine of its own, so that f(x) is not f(y),
        nor f times x."""
        self.take("(")
        arguments = [self.deeper(self.sum)]
        while self.next == ",":
            self.take()
            arguments.append(self.deeper(self.sum))
        self.take(")")
        self.symbols.add(name)
        parts = [(f"{name} {i}", argument) for i, argument in enumerate(arguments)]

        def apply(p: Point) -> Any:
            total = p.symbol(name)
            for part, argument in parts:
                total += p.symbol(part) * values.check_size(argument.at(p), p)
            return p.context.cos(total)

        return values.Node(name, tuple(arguments), apply)

    def atom(self) -> Node:
        kind, text = self.kind, self.next
        if kind == "number":
            self.take()
            if self.next in ("\\overline", "\\dot", "\\bar"):
                raise Unreadable("a recurring decimal inside of an expression")
            return values.constant((text or "").replace(",", ""))
        if kind == "symbol":
            self.take()
            return self.symbol(text or "")
        if kind == "letter":
            return self.letter(self.take())
        if kind == "command":
            return self.command(self.take()[1:])
        if text == "|":
            return self.absolute()
        return self.group()

    def absolute(self) -> Node:
        if self.bars:
            raise Unreadable("bars within bars")
        self.take("|")
        self.bars = True
        self.analytic = False
        node = self.deeper(self.sum)
        self.take("|")
        self.bars = False
        return values.absolute_value(node)

    def command(self, name: str) -> Node:
        if name in FUNCTIONS:
            return self.function(FUNCTIONS[name])
        if name in _SYMBOLS:
            return self.symbol(self.name(_SYMBOLS[name]))
        if name in _ACCENTS:
            accent = "vec" if name == "overrightarrow" else name
            accented = self.raw() if self.next == "{" else self.take()
            return self.symbol(self.name(f"{accent} {accented}"))
        match name:
            case "pi":
                return values.symbol("\\pi")
            case "imath":
                return values.symbol("i")
            case "frac":
                return values.binary("/", self.braced(), self.braced())
            case "binom":
                return values.binomial(self.braced(), self.braced())
            case "sqrt":
                degree = self.group() if self.next == "[" else values.constant("2")
                return values.root(self.braced(), degree)
            case "sum" | "prod":
                return self.series(name)
            case "lfloor" | "lceil":
                self.at -= 1
                self.analytic = False
                inside = self.group()
                return values.round_whole(inside, down=name == "lfloor")
        raise Unreadable(f"\\{name} is not known")

    def function(self, name: str) -> Node:
        r"""A function and its argument: `\sin^2 x`, `\sin^{-1} x`, `\log_2 8`, `\sin 2x`, `\ln|x|`.

        An argument without brackets ends at a sign or a function.
        """
        base = None
        exponent = None
        for _ in range(2):
            if self.next == "_" and name == "log" and base is None:
                self.take()
                base = self.braced()
            elif self.next == "^" and exponent is None:
                self.take()
                if self.next_is("{", "-", "1", "}") and name in _TRIGONOMETRIC:
                    self.at += 4
                    name = "a" + name
                else:
                    exponent = self.exponent()
        if name == "log" and base is None:
            self.bare_log = True
        angle = self.angle
        self.angle = name in _TRIGONOMETRIC
        argument = self.argument()
        self.angle = angle
        node = values.log(argument, base) if name == "log" else values.function(name, argument)
        return node if exponent is None else values.power(node, exponent)

    def next_is(self, *tokens: str) -> bool:
        return self.texts(self.at, self.at + len(tokens)) == list(tokens)

    def argument(self) -> Node:
        if self.next in ("(", "[", "{"):
            return self.group()
        if self.next == "|" and not self.bars:
            return self.absolute()
        node = self.deeper(self.power)
        while self.continues_argument():
            node = values.binary("*", node, self.deeper(self.power))
        return node

    def continues_argument(self) -> bool:
        """Whether the next token belongs to a bare argument: a letter, a symbol, a fraction or a root."""
        if self.kind == "command":
            return (self.next or "")[1:] in {*_SYMBOLS, "pi", "frac", "sqrt"}
        return self.kind in ("letter", "symbol")

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
        return values.series(name, index, first, last, term)
