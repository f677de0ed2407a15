"""What every process of a run shares, whatever it computes.

Lives here: errors and exit codes, how often a failed call is made again, processes, network interfaces,
last words.
In: what the operating system says. Out: an error that names the change to make, a code that platforms act
on.
May import: the standard library alone; every other room imports this one.
"""
