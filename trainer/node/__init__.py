"""One process per node, without the training stack: `python -m trainer.node --config run.yaml`.

Lives here: `launch` (head, node workers, Ray), `watch` (watchdog, preemption, locks), `preflight` (checks
before a run).
In: the configuration, the platform's variables. Out: the job's exit code, the same on every node.
May import: `trainer.checkpoint`, `trainer.observe` and below; never torch, vLLM or DeepSpeed; Ray in two
programs only.
"""
