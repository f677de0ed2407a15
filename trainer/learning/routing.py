"""Routing replay (R3, arXiv 2510.11370): each token of the policy's pass goes through the experts that the
engine chose for it.

A hook behind each of the library's routers puts the given experts in the place of its own choice. Their
shares are the softmax of the router's own logits, normalized over these experts as the library does it, so
the router gets its gradient as ever.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

Routed = tuple[Tensor, Tensor, Tensor]
"""What a router of the library gives: logits [T, E], shares [T, k], experts [T, k]."""


class Replay:
    """The routers of a model, which has any number of them, and what they shall choose."""

    def __init__(self, model: Any) -> None:
        routers = [module.gate for module in model.modules() if hasattr(module, "experts")]
        self._given: Tensor | None = None
        self._differing: list[Tensor | None] = [None] * len(routers)
        for number, router in enumerate(routers):
            router.register_forward_hook(partial(self._replace, number))

    def use(self, routes: Tensor | None) -> None:
        """Experts of the next pass, [layers, T, k], -1 for tokens that the routers choose for; None: for all.

        They stay until the pass after it: a recomputed layer asks for them again.
        """
        self._given = routes
        self._differing = [None] * len(self._differing)

    def differing(self) -> Tensor | float:
        """Share of the tokens with given experts, over all layers of the last pass, for which the router
        would have chosen others; 0 without any."""
        known = [share for share in self._differing if share is not None]
        return torch.stack(known).mean() if known else 0.0

    def _replace(self, number: int, _router: Any, _inputs: Any, routed: Routed) -> Routed | None:
        if self._given is None:
            return None
        logits, shares, own = routed
        given = self._given[number].long()
        known = given[:, :1] >= 0
        chosen = torch.where(known, given, own)

        with torch.no_grad():
            others = (chosen.sort(-1).values != own.sort(-1).values).any(-1)
            self._differing[number] = others.sum() / known.sum().clamp(min=1)
        probabilities = logits.softmax(-1, dtype=torch.float).gather(1, chosen)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return logits, probabilities.to(shares.dtype), chosen
