"""The mathematics of a step: advantages, losses, batches and their schedule, seeds.

Lives here: pure functions of tensors and plain data, tested with numbers computed by hand; and the records
`Prompt`, `Trace` and `Outcome` that flow through a run.
In: traces and outcomes of a step. Out: advantages, weights of tokens, packed rows, which rank computes
which.
May import: torch and NumPy, `trainer.config`; no Ray, vLLM, DeepSpeed or transformers.
"""
