"""What a recipe needs and costs: memory, disk, time, dollars. Pure arithmetic, no framework.

Lives here: bytes by phase, seconds by phase, prices, offers, simulated runs; each constant with its source.
In: a recipe and a GPU. Out: a memory plan, offers in order of dollars, what would make the run cheaper.
May import: `recipes.platforms`, `recipes.records`, `recipes.recipe`, and the trainer's tables and
schedule of passes.
"""
