"""Starting the job on all nodes, and ending it on all of them.

Lives here: the launchers of head and node worker, the rendezvous between them, Ray as a process, the job's
log.
In: this node's place among its peers. Out: a running job; one exit code for all nodes.
May import: `trainer.node.watch`, `trainer.node.preflight`; Ray only in programs of their own.
"""
