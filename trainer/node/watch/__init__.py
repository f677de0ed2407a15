"""What a node watches while the job runs.

Lives here: the watchdog of hangs, preemption notices, signals, the run's lock, the right to write of this
attempt.
In: the run's progress file, the cloud's metadata, signals. Out: notices, stacks of a hang, records of
attempts.
May import: `trainer.checkpoint`, `trainer.observe` and below.
"""
