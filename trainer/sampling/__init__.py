"""Rollouts: completions of prompts by vLLM.

Lives here: `Sampler`, what a loop asks of engines; the engine, engines in the policy's own ranks, and the
server of a model.
In: a `SamplingRequest` and weights. Out: `SampledGroups` of traces with the engine's log-probabilities.
May import: vLLM in `vllm_engine` only; of `trainer.learning` only where both share a process.
"""
