"""What a training loop uses, opened and closed together.

Lives here: `Session`, which makes and closes all of it in stages; rows, grading, the step's line, when state
is saved, whether engine and policy agree, the export.
In: a RunConfig. Out: the methods that a loop calls, in the order of a step.
May import: everything below the loops.
"""
