"""The programs that train and evaluate, each on one screen: `python -m trainer.loops.grpo --config run.yaml`.

Lives here: GRPO, supervised fine-tuning, pass rates, evaluation; when a step is sampled; a loop's process
and exit code.
In: a RunConfig. Out: a trained run, or an exit code that platforms act on.
May import: everything below, mostly `trainer.run`; nothing imports this room.
"""
