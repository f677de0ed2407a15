"""Every check before a run: GPUs, host, network, equal set-ups, tokens.

Lives here: a file for each subject, which measures first and then judges by pure functions; `thresholds`
have their sources.
In: the configuration and the machine. Out: findings that name a node, a figure, a limit and a remedy.
May import: `trainer.checkpoint` and below; torch only in the program `speed`.
"""
