"""The command line of launch.py.

Lives here: `cli` (one command, one exit code), the commands by panels of `--help`, and what each command does
that is no other room's: `plan`, and how a request becomes a launch.
In: arguments. Out: an exit code; one line for what a person can change.
May import: every room of recipes; nothing imports this one.
"""
