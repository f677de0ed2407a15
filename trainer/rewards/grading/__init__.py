"""Whether an answer is the reference answer: pure functions of strings.

Lives here: finding the answer in a completion, and comparing numbers, units, choices, sets, relations and
expressions.
In: two strings. Out: a verdict and the rule that decided.
May import: the standard library and mpmath.
"""

RULES = 4
"""Number of the rules by which answers are graded, which checkpoints keep: it rises when verdicts change."""
