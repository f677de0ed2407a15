"""Episodes of several turns: what answers a reply, so that the model goes on with another.

Lives here: what an environment is, the built-in ones and their tools, and environments of people's, which
run in processes of their own.
In: a row's situation and the replies so far. Out: the observation that comes back, and what an episode
earned, or the name of what failed.
May import: `trainer.images`, `trainer.algorithm` and what stands below them.
"""
