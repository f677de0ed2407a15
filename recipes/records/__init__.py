"""What this desk keeps of launches.

Lives here: the record of a run, the manifest that it can be made from again, known images, `reproduce`.
In: a launch, or a manifest. Out: JSON under runs/, and in the run's bucket.
May import: `recipes.recipe` and the trainer's configuration; nodes run `recipes.records.manifest`.
"""
