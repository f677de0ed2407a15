"""What a run says about itself: metrics, samples, live display, report, comparison.

Lives here: writers in the trainer, readers without it, the push to the bucket and the mirror that brings it
to the desk.
In: records of steps, samples of nodes. Out: JSON lines in the run's folder, pages of HTML, text on a
terminal.
May import: `trainer.data` and below; display and report run without the training stack.
"""
