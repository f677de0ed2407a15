"""Pictures from outside: of rows, tools, environments and servers.

Lives here: the only decoder, and the bounds of what can be shown.
In: encoded bytes, or an image that a tool made. Out: upright RGB images on white, or a reason.
May import: `trainer.config` and what stands below it.
"""
