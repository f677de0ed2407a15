"""Rollout workers on machines of their own (docs/fleet.md).

Lives here: the head, which is one more `Sampler` of the trainer, and the worker's program; they meet in the
bucket alone.
In: the trainer's weights as patches, prompts as units. Out: samples that were verified before they train.
May import: `trainer.sampling`, `trainer.node` and what stands below them.
"""
