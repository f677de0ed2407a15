"""A parameter that should learn and gets no gradient is named in a run's first update."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer.algorithm.batching import Layout, MicroBatch
from trainer.learning.first_gradients import FirstGradients


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of this process."""
    meet = tmp_path_factory.mktemp("meet") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Small(nn.Module):
    """Layers named as those of a vision-language model with an adapter are."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(3, 3)
        self.layer = nn.Linear(3, 3)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: torch.Tensor, picture: torch.Tensor | None, packed: bool = False) -> torch.Tensor:
        x = x if picture is None else x + self.visual(picture)
        hidden = self.layer(x)
        hidden = hidden.detach() if packed else hidden
        return (x + hidden + self.lora_B["default"](self.lora_A["default"](x))).square().sum()


IMAGE = 9


def row(*groups: tuple[bool, float]) -> tuple[MicroBatch, torch.Tensor]:
    """A packed row of groups, each of a prompt of four tokens and two completions of two, with an image or
    without, and what its first completion's tokens have as their advantage; the second has none."""
    ids: list[int] = []
    places: list[int] = []
    logits_at: list[int] = []
    advantages: list[float] = []
    for pictured, advantage in groups:
        start = len(ids)
        ids += [1, IMAGE if pictured else 2, IMAGE if pictured else 2, 3, 4, 5, 4, 5]
        places += [0, 1, 1, 3, 4, 5, 4, 5]
        logits_at += [start + 3, start + 4, start + 3, start + 6]
        advantages += [advantage, advantage, 0.0, 0.0]
    batch = MicroBatch(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([[places]] * 3),
        logits_at=torch.tensor(logits_at),
        targets=torch.zeros(len(logits_at), dtype=torch.long),
        layout=Layout((), (), torch.zeros(1), torch.zeros(1), None),
    )
    return batch, torch.tensor(advantages)


def missing(model: Small, *passes: tuple, factor: float = 1.0) -> list[str]:
    names = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    watch = FirstGradients(names, torch.device("cpu"), IMAGE)
    for x, picture, packed in passes:
        if picture is not None:
            watch.look(*row((True, 1.0)))
        (factor * model(x, picture, packed)).backward()
    return watch.missing()


X = torch.arange(3.0)[None] + 1


def test_a_layer_without_a_backward_pass_is_named(alone):
    assert missing(Small(), (X, X, False)) == []
    assert missing(Small(), (X, X, True)) == ["model.layer.weight", "model.layer.bias"]
    assert missing(Small(), (X, X, True), (X, X, False)) == [], "one pass with a gradient is enough"


def test_what_has_nothing_to_learn_in_the_step_is_not(alone):
    assert missing(Small(), (X, None, False)) == [], "no image: the tower had nothing to see"
    blind = Small()
    blind.visual.register_forward_hook(lambda module, given, output: output.detach())
    assert missing(blind, (X, X, False)) == ["model.visual.weight", "model.visual.bias"]
    assert missing(Small(), (X, X, False), factor=0.0) == [], "every advantage was 0"


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ([(True, 0.0)], False),
        ([(True, 0.0), (False, 1.0)], False),
        ([(False, 1.0), (True, 0.0), (False, -1.0)], False),
        ([(True, 0.5)], True),
        ([(True, 0.0), (False, 1.0), (True, -0.5)], True),
    ],
)
def test_a_tower_is_named_only_where_a_sample_with_an_image_had_something_to_teach(alone, groups, named):
    blind = Small()
    blind.visual.register_forward_hook(lambda module, given, output: output.detach())
    names = {f"model.{name}": parameter for name, parameter in blind.named_parameters()}
    watch = FirstGradients(names, torch.device("cpu"), IMAGE)
    watch.look(*row(*groups))
    blind(X, X).backward()
    assert watch.missing() == (["model.visual.weight", "model.visual.bias"] if named else [])


def test_a_run_says_so_in_its_first_update(run_ranks, small_config):
    """By the learner of a run, with a layer whose kernel has no backward pass: the loss falls all the
    same."""
    config = replace(small_config, placement=replace(small_config.placement, workers_per_node=1))
    (result,) = run_ranks("silenced_layers", config)
    whole, broken = result["whole"], result["broken"]
    assert whole["counts"] == [None, None] and whole["said"] == ""
    assert broken["counts"] == [4.0, None], "the layer's three matrices and the norm before it"
    assert broken["losses"][1] < broken["losses"][0]
    assert "warning: the gradient of model.language_model.layers.1." in broken["said"]
    assert " and 1 more was exactly 0 in the first update" in broken["said"]
    assert broken["said"].count("warning") == 1
