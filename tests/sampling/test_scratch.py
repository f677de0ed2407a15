"""What model runner V2 keeps beside the weights is zeroed after a sleep of level 2."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
import vllm

from trainer.sampling.engine_mends import zero_scratch

V2 = Path(vllm.__file__).parent / "v1/worker/gpu"


def test_positions_and_embeddings_are_zeroed():
    rope = SimpleNamespace(positions=torch.full((3, 9), 77))
    encoder = SimpleNamespace(inputs_embeds=torch.full((9, 4), float("nan")))
    state = SimpleNamespace(rope_state=rope, encoder_runner=encoder)
    zero_scratch(SimpleNamespace(model_runner=SimpleNamespace(model_state=state)))
    assert not rope.positions.any() and not encoder.inputs_embeds.any()
    text_only = SimpleNamespace(rope_state=None, inputs_embeds=torch.ones(9, 4))
    zero_scratch(SimpleNamespace(model_runner=SimpleNamespace(model_state=text_only)))
    assert not text_only.inputs_embeds.any()
    zero_scratch(SimpleNamespace(model_runner=SimpleNamespace()))  # the runner on a CPU has no such state


def test_this_vllm_keeps_them_where_they_are_looked_for():
    """A version that moves them must show here, since no test on a CPU meets this runner."""
    assert "self.positions = torch.zeros(" in (V2 / "mm/rope.py").read_text()
    assert "self.inputs_embeds = torch.zeros(" in (V2 / "mm/encoder_runner.py").read_text()
    state = (V2 / "model_states/default.py").read_text()
    assert "self.rope_state = get_rope_state(" in state and "self.encoder_runner" in state
    assert "self.model_state = init_model_state(" in (V2 / "model_runner.py").read_text()
