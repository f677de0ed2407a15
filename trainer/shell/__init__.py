"""What the shell of a node calls before there is an environment.

Lives here: `task.sh` (the frame of every rendered task), `setup.sh` (makes an environment from hashes),
`driver.sh`, `bucket.sh`, `counted.sh` (a start that failed counts), and `installed.py` (whether an
environment is whole).
In: arguments and SPOTRL_* variables. Out: one of the project's exit codes and a line that says why.
May import: `installed.py` the standard library alone. Rendered task files call these by path.
"""
