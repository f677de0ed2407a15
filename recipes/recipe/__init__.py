"""What a recipe is.

Lives here: `spec` (a run's configuration with machines, data, storage and budget), its second group of
machines, `resolved` (a recipe as it runs on one target), recipes in files.
In: fields and `section.key=value`. Out: a `Recipe`, or ConfigError with the change to make.
May import: the trainer's configuration and hardware tables; every other room of recipes imports this one.
"""
