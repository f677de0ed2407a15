"""What a training loop uses, opened and closed together.

Lives here: `Session` (rows, learner, sampler, grading, metrics), when state is saved, whether engine and
policy agree.
In: a RunConfig. Out: the methods that a loop calls, in the order of a step.
May import: everything below the loops.
"""
