"""What `up`, `status`, `logs`, `down` and their like do with each platform.

Lives here: preparing, checking and starting a launch; each platform's commands and state; the view of a run
from the desk.
In: a validated recipe and its rendered files. Out: running machines, the record of the launch, lines for a
person.
May import: `recipes.screens` and what stands below it; runs other programs, and asks only what is not
billed.
"""
