"""What every process of a run shares, whatever it computes.

Lives here: errors and exit codes, how often a failed call is made again, requests to servers, processes,
network interfaces, last words.
In: what the operating system and servers say. Out: an error that names the change to make, a code that
platforms act on.
May import: the standard library alone; every other room imports this one.
"""
