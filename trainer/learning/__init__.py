"""The policy: its forward and backward pass, its update, its weights.

Lives here: `DistributedLearner`, which a loop asks; the ranks' share; log-probabilities, attention, experts,
LoRA, and `zero`.
In: traces with advantages. Out: log-probabilities, updated weights, shards for checkpoints.
May import: torch, transformers, peft, `trainer.ranks`, `trainer.weights` and below; DeepSpeed in `policy`
and `zero` only.
"""
