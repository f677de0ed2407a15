"""Where a recipe runs: one module per platform, each a pure function from a recipe to text.

Lives here: a renderer per platform, the shell that all of them share, retry rules, which target obeys which
option.
In: a recipe. Out: task files, the same to the byte for the same recipe (recipes/generated is a set of
them).
May import: `recipes.plan`, `recipes.presets`, `recipes.capabilities` and below; starts nothing.
"""
