"""Rollout workers on machines of their own (docs/fleet.md).

Lives here: the head, which is one more `Sampler` of the trainer, and the worker's program; they meet in the
bucket alone.
In: the trainer's weights as patches, prompts as units. Out: samples that were verified before they train.
May import: `trainer.sampling`, `trainer.node` and what stands below them.

What always holds, with where it is held; `tests/fleet` shows each:

- One writer for each key (`objects`): keys hold the attempt, the rank or the worker's name. Only the
  head's thread writes what the head says (`head_thread`); an older attempt writes nothing more
  (`dispatch`, `weight_publisher`).
- What decides what is trained is signed, or its sha256 stands in what is (`objects`, `fleet_records`,
  `sample_intake`). What is not is refused by name and ends nothing; no worker trains before its probe
  (`fleet_sampler`).
- No clock decides a bit: a unit is all that its samples depend on (`fleet_records`), it has one result
  whoever samples it (`scheduler`), answers are looked at in one order by one thread (`roster`,
  `sample_intake`). A version is announced once every rank's patch is in the bucket, and is named by its
  content and the one before.
- Anybody may go at any moment: others sample what a worker had not sent (`scheduler`), a store that is
  away makes nobody lost, and the run's end ends every worker and its machine (`run_follower`, `machine`).
- The trainer's thread waits for no store (`dispatch`, `head_thread`); a rank learns on while its patch is
  sent (`weight_publisher`), a worker samples while its last unit is (`worker`).
"""
