"""New weights from the learner into the engines.

Lives here: `WeightSource`, what carries them; the push into a vLLM of the same process; one copy for
several ranks.
In: groups of full tensors in Hugging Face names. Out: an engine that samples with them, its caches empty.
May import: vLLM in `in_process` only; `trainer.checkpoint` and below.
"""
