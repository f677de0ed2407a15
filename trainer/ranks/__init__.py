"""One rank is the process of one GPU; this is how the driver calls all of them.

Lives here: `RankProcess` with its parts, `RayRanks`, and what a rank's process needs of its environment.
In: a method of a part, `ranks.all(LearnerPart.save_status)`. Out: what it returns on every rank.
May import: Ray, torch, `trainer.checkpoint`, `trainer.observe` and below; not the parts themselves.
"""
