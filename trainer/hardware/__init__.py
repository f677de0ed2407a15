"""Shapes of models, the table of GPUs, and the arithmetic of memory and FLOPs.

Lives here: tables, and functions of them.
In: a model's name or config.json, a GPU's name. Out: parameters, bytes, FLOPs, limits of this machine.
May import: the standard library and `trainer.system`; `recipes` plans with this room.
"""
