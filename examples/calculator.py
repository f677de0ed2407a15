"""A tool for arithmetic: Python's parser, and a walk over its tree that knows numbers, operators and a few
functions. Nothing of a reply is evaluated as code. See docs/turns.md.

    --set turns.environment=examples/calculator.py:Calculator
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from trainer.turns.calls import BadCallError, offered
from trainer.turns.episode import Situation

LONGEST = 200
"""Characters of an expression; it bounds the time and the depth of the tree."""
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,
}
SIGNS: dict[type, Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "log": math.log,
    "log10": math.log10,
    "exp": math.exp,
    "radians": math.radians,
    "degrees": math.degrees,
}
CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator:
    """Numbers are floating-point, so no result takes long or much memory."""

    tools: Sequence[dict[str, Any]] = (
        offered(
            "calculator",
            "Computes an arithmetic expression of numbers, + - * / // % **, parentheses, pi, e"
            f" and the functions {', '.join(FUNCTIONS)}; angles are in radians.",
            {
                "type": "object",
                "properties": {
                    "expression": {"type": "string", "description": "For example: 3 * (2 + sqrt(5))"}
                },
                "required": ["expression"],
            },
        ),
    )

    def answer(self, situation: Situation, replies: Sequence[str]) -> str | None:
        """The value that the last reply asks for, to 15 digits."""
        call = situation.call(replies[-1])
        if call is None:
            return None
        if call.name != "calculator":
            raise BadCallError(f"there is no tool {call.name[:80]!r}, only calculator")
        expression = call.arguments.get("expression")
        if not isinstance(expression, str):
            raise BadCallError('"expression" is not a text')
        return f"{computed(expression):.15g}"


def computed(expression: str) -> float:
    """The value of an expression. Raises BadCallError."""
    if len(expression) > LONGEST:
        raise BadCallError(f"the expression is longer than {LONGEST} characters")
    try:
        with warnings.catch_warnings(action="ignore"):  # of Python, about code such as "1or 2"
            tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise BadCallError("the expression cannot be read") from None
    except ZeroDivisionError:
        raise BadCallError("division by zero") from None
    except OverflowError:
        raise BadCallError("the result is too large") from None
    except ValueError:  # math's word for the root of -1, and the parser's for a zero byte
        raise BadCallError("the expression has no real value") from None
    if not math.isfinite(value):
        raise BadCallError("the result is too large")
    return value


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in SIGNS:
            return SIGNS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](_value(argument))
    raise BadCallError("the expression has something else than numbers, operators and known functions")
