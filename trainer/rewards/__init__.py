"""Grading, in processes that can be killed.

Lives here: the scorer, its pool of processes, users' reward functions, the clients of a judge model and of a
reward server.
In: completions and reference answers. Out: an `Outcome` each: correct, wrong, no_answer, timeout or error.
May import: `trainer.data` and below; `grading` imports neither stack nor store.
"""
