"""DeepSpeed's ZeRO as this trainer uses it.

Lives here: set-up, pretrained weights into shards, where states lie in the optimizer, and their way to host
memory and back.
In: a model and the optimizer's options. Out: a sharded model, its states by parameter name.
May import: DeepSpeed, which only `trainer.learning.policy` imports besides.
"""
