"""All that this trainer reads of DeepSpeed's inside, which no release promises. Besides, other files read a
parameter's `ds_shape`, `ds_numel` and `ds_tensor`, its shard.

A name that is gone ends the import, with the release that has it. Where only the trainer's own gathering
(sharded.py) needs it, DeepSpeed gathers instead: exact to the bit, and slower.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from types import CodeType
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.utils import groups, nvtx
from torch import Tensor, nn

RELEASE = "0.19.8"
"""Release of DeepSpeed that has all of these names."""
STAGE_3, PARAMETERS = "runtime.zero.stage3", "runtime.zero.partition_parameters"
OFFLOAD, ENGINE = "runtime.zero.parameter_offload", "runtime.engine"
SUMS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
Names = Mapping[str, str]
NEEDED: Names = {
    STAGE_3: "fp32_partitioned_groups_flat grad_position get_param_id grad_partitions_flat_buffer ipg_buckets"
    " invalidate_secondary_tensor persistent_parameters empty_partition_cache",
    "runtime.zero.stage_1_and_2": "single_partition_of_fp32_groups update_lp_params",
    "utils.mixed_precision_linkage": "_hp_mapping",
    "utils.groups": "_get_zero_param_intra_parallel_group",
    PARAMETERS: "_dist_allgather_fn ds_tensor ds_shape ds_numel",
    ENGINE: "_do_optimizer_sanity_check",
}
"""Names without which nothing is trained, by module: where states lie, what a gather is, which optimizer."""
GATHERING: Names = {
    STAGE_3: f"{SUMS} _grad_acc_hooks _leaf_module_hooks fp16_groups reduce_and_partition_stream"
    " micro_step_id communication_data_type parameter_offload",
    "runtime.base_optimizer": "reenter_backward_if_needed update_hook_state_and_maybe_run_epilogue",
    OFFLOAD: "ZeROOrderedDict _remove_module_hooks forward_hooks backward_hooks partition_all_parameters"
    " persistent_parameters",
    PARAMETERS: "ds_id ds_persist ds_status ds_process_group",
    ENGINE: "module_forward_pre_hook module_forward_post_hook",
}
"""Names that only the trainer's own gathering needs."""


def _used_in(code: CodeType) -> Iterator[str]:
    """Names and attributes that compiled code sets or reads."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _used_in(constant)


def absent(names: Names) -> list[str]:
    """Those of `names` that the installed DeepSpeed does not have where they are looked for."""
    missing = []
    for module, listed in names.items():
        loader: Any = getattr(find_spec(f"deepspeed.{module}"), "loader", None)
        used = set(_used_in(loader.get_code(f"deepspeed.{module}"))) if loader else set()
        missing += [f"{module}.{name}" for name in listed.split() if name not in used]
    return missing


def lacking(needed: Names, gathering: Names) -> list[str]:
    """Names that the trainer's own gathering lacks, after a warning. Raises ImportError for those without
    which nothing is trained."""
    here = f"deepspeed {version('deepspeed')} has no"
    if missing := absent(needed):
        raise ImportError(f"{here} {', '.join(missing)}: install deepspeed=={RELEASE}, which has")
    if missing := absent(gathering):
        warnings.warn(
            f"{here} {', '.join(missing)}, so it gathers and reduces by itself: the same values, and slower;"
            f" deepspeed=={RELEASE} has",
            stacklevel=2,
        )
    return missing


LACKING = lacking(NEEDED, GATHERING)
"""Names that the installed release lacks for the trainer's own gathering."""
RANGES: Any = nvtx
RANGES.enable_nvtx = False  # around each of DeepSpeed's functions, for NVIDIA's profiler alone


def use_one_optimizer() -> None:
    """Lets DeepSpeed wrap ZeRO's optimizer around ours at every stage. For bf16 at stage 1 it would choose
    another one, with other buffers, which also steps on a gradient that is not finite."""
    kind: Any = DeepSpeedEngine
    check = kind._do_optimizer_sanity_check

    def checked(engine: Any, optimizer: Any) -> str:
        return ZERO_OPTIMIZATION if engine.zero_optimization() else check(engine, optimizer)

    kind._do_optimizer_sanity_check = checked


def count_gathers(count: Callable[[Tensor], None]) -> None:
    """Has `count` told of all weights that DeepSpeed gathers in a pass."""
    module: Any = partition_parameters
    inner = module._dist_allgather_fn

    def counted(input_tensor: Tensor, output_tensor: Tensor, group: Any = None) -> Any:
        count(output_tensor)
        return inner(input_tensor, output_tensor, group)

    module._dist_allgather_fn = counted


def node_group() -> Any:
    """The ranks of this node that share hpZ's copy, where an earlier model has made their group."""
    return groups._get_zero_param_intra_parallel_group()


# --- where weights and moments lie


def masters(zero: Any) -> list[Tensor]:
    """fp32 weights of each parameter group on this rank, flat; stage 3."""
    return zero.fp32_partitioned_groups_flat


def place_of(zero: Any, parameter: Any) -> tuple[int, Tensor]:
    """Where this rank's part of a parameter begins in which of the `masters`."""
    group, at, _ = zero.grad_position[zero.get_param_id(parameter)]
    return at, zero.fp32_partitioned_groups_flat[group]


def fragment_of(zero: Any, parameter: Any) -> tuple[int, int, int, Any]:
    """Stages 1 and 2: start and stop of this rank's part of a parameter, and where it begins in the group's
    flat fp32 weights, which come last; None for these where the rank has no part."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return 0, 0, 0, None
    part = mapping.lp_fragment_address
    flat = zero.single_partition_of_fp32_groups[mapping.param_group_index]
    return part.start, part.start + part.numel, mapping.hp_fragment_address.start, flat


def renew_weights(zero: Any, stage: int) -> None:
    """Makes the model's own weights those of changed masters (stages 1 and 2) or shards (stage 3).
    Collective."""
    if stage < 3:
        zero.update_lp_params()
        return
    zero.invalidate_secondary_tensor()  # hpZ's copy within the node is of the weights before
    persistent = zero.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def summed_gradients(zero: Any) -> Tensor:
    """Memory that gradients are summed in, flat; stage 3."""
    return zero.grad_partitions_flat_buffer


def gradient_memory(zero: Any) -> Iterator[Tensor]:
    """All memory of gradients, whose content means nothing between two steps; stage 3."""
    yield zero.grad_partitions_flat_buffer
    for bucket in zero.ipg_buckets.values():
        if bucket.buffer is not None:
            yield bucket.buffer


# --- the trainer's own gathering


def unwatch(engine: Any, roots: Sequence[nn.Module]) -> None:
    """Ends DeepSpeed's search for parameters that a module reads of another one: before and behind a forward
    pass it marks all modules. Below `roots` it does not look at what is read either. No model of `FAMILIES`
    reads so; of one that did, a pass would find nothing in a parameter that is in shards."""
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

    class Unwatched(ZeROOrderedDict):
        __getitem__: Any = OrderedDict.__getitem__

    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    for module in (module for root in roots for module in root.modules()):
        module._parameters = Unwatched(module, module._parameters)


def keep_gathered(module: nn.Module, offload: Any) -> None:
    """Makes every parameter of a model a view of its shard for good, on a rank that has no others to share it
    with. offload: DeepSpeed's hooks on the model, which go: they would gather and release what is whole."""
    offload._remove_module_hooks()
    offload.partition_all_parameters = lambda: None
    parameters: list[Any] = list(module.parameters())
    for parameter in parameters:
        parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
        parameter.ds_status = partition_parameters.ZeroParamStatus.AVAILABLE


def release_hooks(modules: Sequence[nn.Module], offload: Any) -> None:
    """Takes DeepSpeed's hooks off some modules, and off those that hold nothing. Their small parameters are
    cut as the others are: DeepSpeed would keep them whole, and gather them apart after each of its steps."""
    root = offload.module
    bare = [module for module in root.modules() if module is not root and not module._parameters]
    hooks = {id(of) for m in (*modules, *bare) for of in (m._forward_pre_hooks, m._forward_hooks)}
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        if id(handle.hooks_dict_ref()) in hooks:
            handle.remove()
    parameters: list[Any] = [p for module in modules for p in module.parameters()]
    for parameter in parameters:
        if parameter.ds_persist:
            parameter.ds_persist = False
            parameter.partition()
    persistent: list[Any] = offload.persistent_parameters
    persistent[:] = [parameter for parameter in persistent if parameter.ds_persist]


def process_group(parameter: Any) -> Any:
    """The ranks that a parameter is cut over."""
    return parameter.ds_process_group


def sum_of(zero: Any, parameter: Any) -> Tensor:
    """Where this rank's part of a parameter's gradient is summed, flat."""
    return getattr(zero, SUMS)[parameter.ds_id]


def trained_parameters(zero: Any) -> list[Any]:
    """Parameters that the optimizer steps."""
    return [p for group in zero.fp16_groups for p in group if p.requires_grad]


def release_reductions(zero: Any, alone: bool) -> None:
    """Takes off DeepSpeed's hooks that reduce the gradients of blocks. alone: of everything else too, and the
    memory for it."""
    for hook in (*zero._leaf_module_hooks, *(zero._grad_acc_hooks if alone else ())):
        hook.remove()
    for bucket in zero.ipg_buckets.values() if alone else ():
        bucket.buffer = None


def reducing_stream(zero: Any) -> Any:
    """The stream of a GPU that DeepSpeed reduces gradients in; None on a CPU."""
    return zero.reduce_and_partition_stream


def reduced_type(zero: Any) -> torch.dtype:
    """The type that gradients are reduced in."""
    return zero.communication_data_type


def begin_reduction(zero: Any) -> bool:
    """Before a block's gradients are reduced. Returns whether the pass is an update's first: then they take
    the place of what the sums hold."""
    zero.reenter_backward_if_needed()
    return zero.micro_step_id == 0


def end_reduction(zero: Any) -> None:
    """When a block's gradients are summed: DeepSpeed ends the pass behind the last."""
    zero.update_hook_state_and_maybe_run_epilogue(1)
