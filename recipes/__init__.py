"""What to run and where, from a person's desk.

Lives here: what a recipe is (`recipe`), the recipes (`presets`), their cost (`plan`), their files
(`targets`), driving the platforms (`drivers`), what is shown (`screens`) and kept (`records`), and the
command line (`commands`).
In: a recipe's name and `--set section.key=value`. Out: task files, rented machines, a screen.
May import: of the trainer its configuration, hardware tables and exit codes; never torch, Ray, vLLM or
DeepSpeed.
"""
