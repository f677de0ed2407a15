"""Prepared datasets, and what engine and policy read of a row.

Lives here: the one row format, Parquet shards, images, the model's processor, lengths, the prompts of each
step.
In: rows that `data_prep` wrote, here or in a bucket. Out: prompts, encoded for vLLM and for the policy.
May import: `trainer.storage`, `trainer.algorithm` and what stands below them; `data_prep` imports this
room.
"""
