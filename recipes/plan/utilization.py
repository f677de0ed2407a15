"""What share of the GPUs' peak an update reaches (MFU) in a mixture of experts, where gathering all experts
weighs against computing few of them."""

from __future__ import annotations

from recipes.plan import cost, passes
from recipes.plan.memory import with_rows
from recipes.recipe.resolved import MemoryPlan
from recipes.recipe.spec import Recipe
from trainer.hardware.flops import CompletedSequence, image_grids, logprob_flops, train_flops, utilisation
from trainer.hardware.gpus import gpu_named

IMAGE = 1
"""A token id that stands for an image's, to lay out its patches."""


GROUPED = ("H100", "H200", "B200")
"""GPUs on which torch computes all experts of a layer as one product."""
LOOP = (
    "; on this GPU torch computes one expert after another and waits for the host, which is not counted here"
)
UNLIMITED_GBIT_S = 1e6


def of_update(recipe: Recipe, need: MemoryPlan, network_gbit_s: float) -> tuple[float, float]:
    """MFU of a step's updates with the log-probabilities before them, as `perf/mfu_train` counts it, and the
    same FLOPs over the whole step."""
    recipe = with_rows(recipe)
    config, shape = recipe.config, need.shape
    step = passes.of_step(recipe, shape)
    time = cost.step_time(recipe, need.gpu, network_gbit_s, need)
    samples = []
    for length in step.lengths:
        grids = image_grids([IMAGE] * length.image_tokens, IMAGE) if length.image_tokens else ()
        samples.append(CompletedSequence(length.prompt_tokens, length.completion_tokens, grids))
    learned = train_flops(
        shape,
        samples,
        config.model.gradient_checkpointing,
        not config.tower_trained,
        bool(config.lora.rank),
    )
    flops = config.algorithm.epochs * learned.model + step.models * logprob_flops(shape, samples)
    peak = gpu_named(need.gpu).bf16_tflops * 1e12
    shares = []
    for seconds in (time.update + time.logprobs, time.total):
        shares.append(utilisation(flops, seconds, config.placement.world_size, peak) or 0.0)
    return shares[0], shares[1]


def utilization_remark(recipe: Recipe, need: MemoryPlan, network_gbit_s: float) -> str:
    """What the plan says of it; "" for models without experts, and for what is not trained by GRPO."""
    if recipe.kind != "train" or recipe.config.method != "grpo" or need.shape.experts is None:
        return ""
    updates, whole = of_update(recipe, need, network_gbit_s)
    shape = need.shape
    loop = "" if need.gpu in GROUPED else LOOP
    between = f" at {network_gbit_s:g} Gb/s between nodes" if recipe.cluster.nodes > 1 else ""
    return (
        f"updates reach {updates:.1%} of the {need.gpu}s' peak (MFU){between}, {whole:.1%} over the whole"
        f" step: {shape.matmul_parameters / 1e9:.1f} of {shape.parameters / 1e9:.1f} billion weights compute"
        f" a token, and all are gathered in every pass{loop}\n\n"
    )


def waiting_remark(recipe: Recipe, need: MemoryPlan, network_gbit_s: float) -> str:
    """What the network between nodes costs an update; "" where that is less than half of it."""
    if recipe.cluster.nodes < 2 or recipe.kind != "train":
        return ""
    here = cost.step_time(recipe, need.gpu, network_gbit_s, need).update
    alone = cost.step_time(recipe, need.gpu, UNLIMITED_GBIT_S, need).update
    if here < 2 * alone:
        return ""
    return (
        f"an update takes {here:.0f} s at {network_gbit_s:g} Gb/s between nodes, and {alone:.0f} s if nothing"
        " waits for the network: take machines with GPUDirect (RDMA, EFA, TCPX) between them\n\n"
    )
