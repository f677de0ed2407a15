"""Checkpoints, the rollout log, and who may write them.

Lives here: the format, writing in every rank, commit and retention on the driver, search and reading,
export, attempts.
In: shards of the ranks' states, and graded steps. Out: files with checksums and a manifest, here and in the
store.
May import: `trainer.data` and what stands below it; `layout`, `manifest` and `resumable` need no training
stack.
"""
