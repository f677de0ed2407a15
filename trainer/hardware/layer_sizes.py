"""Sizes of layers that not all models have: gated delta-net layers, and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts in the place of every decoder layer's MLP. A router chooses some of them for each token.

    In all methods `together` is the width of those that compute a token, with the shared one.
    """

    count: int
    """Experts of a layer that the router chooses from."""
    active: int
    """Those of them that compute a token."""
    shared: int = 0
    """Width of one expert more that computes every token, with a gate of its own; 0: there is none."""

    @classmethod
    def of(cls, text: dict[str, Any]) -> Experts:
        """Those of a text model's config.json, which names their number in two ways."""
        return cls(
            count=text.get("num_experts") or text["num_local_experts"],
            active=text["num_experts_per_tok"],
            shared=text.get("shared_expert_intermediate_size") or 0,
        )

    def width(self, together: int) -> int:
        """Width of an expert that the router chooses."""
        return (together - self.shared) // self.active

    def routers(self, hidden: int) -> int:
        """Weights that decide: the router's, and those of the shared expert's gate."""
        return hidden * (self.count + bool(self.shared))

    def sizes(self, hidden: int, together: int) -> list[int]:
        """Elements of each parameter: the router, gate and up of all experts, down of all experts; matrices
        and gate of the shared expert."""
        matrix = self.count * hidden * self.width(together)
        shared = [hidden * self.shared] * 3 + [hidden] if self.shared else []
        return [self.count * hidden, 2 * matrix, matrix, *shared]

    def idle(self, hidden: int, together: int) -> int:
        """Weights of a layer that a token is not multiplied with."""
        return 3 * hidden * self.width(together) * (self.count - self.active)

    def met_by_others(self, tokens: float) -> float:
        """Share of the experts that are idle for one of so many tokens and are chosen for another of them, if
        all are as likely."""
        return 1.0 - (1.0 - self.active / self.count) ** max(tokens - 1.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """The gated delta-net layers of a model (arXiv 2412.06464). Each keeps a state of one size for a
    sequence, where attention keeps keys and values of every token."""

    layers: int
    """How many of the model's layers they are."""
    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    kernel: int = 4
    """Tokens that the convolution over queries, keys and values sees."""
    fused: bool = False
    """One matrix for queries, keys, values and the output's gate, and one for the state's two gates."""

    @classmethod
    def of(cls, text: dict[str, Any], fused: bool) -> GatedDelta:
        """Those of a text model's config.json."""
        every = text.get("full_attention_interval", 4)
        kinds = text.get("layer_types") or []
        layers = text["num_hidden_layers"]
        return cls(
            layers=kinds.count("linear_attention") if kinds else layers - layers // every,
            key_heads=text.get("linear_num_key_heads", 16),
            value_heads=text.get("linear_num_value_heads", 32),
            key_dim=text.get("linear_key_head_dim", 128),
            value_dim=text.get("linear_value_head_dim", 128),
            kernel=text.get("linear_conv_kernel_dim", 4),
            fused=fused,
        )

    @property
    def keys(self) -> int:
        """Width of all heads' keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all heads' values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.keys + self.values

    def linears(self, hidden: int) -> list[tuple[int, int]]:
        """(inputs, outputs) of a layer's matrices: queries, keys and values, the output's gate, the two gates
        of the state, the output."""
        heads = self.value_heads
        if self.fused:
            return [(hidden, self.channels + self.values), (hidden, 2 * heads), (self.values, hidden)]
        return [
            (hidden, self.channels),
            (hidden, self.values),
            (hidden, heads),
            (hidden, heads),
            (self.values, hidden),
        ]

    def sizes(self, hidden: int) -> list[int]:
        """Elements of each parameter: matrices, convolution, two numbers per head, the output's norm."""
        matrices = [a * b for a, b in self.linears(hidden)]
        return [*matrices, self.channels * self.kernel, self.value_heads, self.value_heads, self.value_dim]

    def state_bytes(self, bytes_per_value: int = 2) -> int:
        """What the engine keeps of a sequence in one layer: the state in fp32, the convolution's inputs in
        the model's type."""
        state = self.value_heads * self.key_dim * self.value_dim
        return 4 * state + bytes_per_value * self.channels * (self.kernel - 1)
