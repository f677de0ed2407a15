"""Where a recipe runs: one class per platform, with all that is known of it.

Lives here: a file per platform (what it can do, which options it obeys, the task files that it takes), the
clouds of SkyPilot and dstack as rows of data, the shell that all tasks share.
In: a recipe. Out: task files, the same to the byte for the same recipe (recipes/generated is a set of them).
May import: `recipes.presets`, `recipes.records` and below; what a plan knows of prices is handed in.
"""
