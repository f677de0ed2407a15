"""What commands show on a terminal: the list of recipes, a plan on one screen or whole, tables of fleets.

Lives here: facts in words (`plan --json` prints the same), and their tables by rich.
In: what `recipes.plan` has computed. Out: text.
May import: `recipes.plan`, `recipes.presets` and below.
"""
