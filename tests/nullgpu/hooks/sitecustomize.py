"""What Python does differently on the device, in every process that starts there: checks are off that need
computed values, who looks for libcudart gets the device, and ranks name their phases. All of it is below."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable


def without_cudnn(torch) -> None:
    """cuDNN's graphs are asked for sizes that no stub knows; torch has convolutions of its own. They launch a
    kernel for each patch of an image, where cuDNN launches one: so does a product."""
    torch.backends.cudnn.enabled = False
    convolution = torch.nn.functional.conv3d

    def at_once(patches, weight, *others, **more):
        if patches.shape[1:] != weight.shape[1:]:
            return convolution(patches, weight, *others, **more)
        bias = others[0] if others else more.get("bias")
        product = torch.nn.functional.linear(patches.flatten(1), weight.flatten(1), bias)
        return product[:, :, None, None, None]

    torch.nn.functional.conv3d = at_once


def with_masks(torch) -> None:
    """Masks of token ids, and where they hold, are computed on the host: ids are copied to the device as they
    are, the sizes of tensors depend on them, and a kernel that does nothing would leave any number. Not where
    copies are left out."""
    import ctypes

    def here(tensor):
        size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        if not tensor.numel():
            return tensor.to("cpu")
        memory = (ctypes.c_byte * (size * tensor.element_size())).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def put(values, device):
        out = torch.empty(values.shape, dtype=values.dtype, device=device)
        if values.numel():
            here(out).copy_(values)
        return out

    def equal(tensor, other):
        return put(here(tensor) == other, tensor.device)

    def greater(tensor, other):
        # Of two whole numbers, such as lengths of what ranks tell each other. Others are left to the kernel.
        alike = tensor.dtype == other.dtype == torch.int64 and tensor.device == other.device
        if alike and tensor.numel() == other.numel() == 1:
            return put(here(tensor) > here(other), tensor.device)
        shape = torch.broadcast_shapes(tensor.shape, other.shape)
        out = torch.empty(shape, dtype=torch.bool, device=tensor.device if tensor.is_cuda else other.device)
        return torch.ops.aten.gt.Tensor_out(tensor, other, out=out)

    def total(tensor, *, dtype=None):
        # Of a few whole numbers, such as lengths of what a rank tells all.
        if tensor.dtype == torch.int64 and tensor.numel() < 1024:
            return put(here(tensor).sum(dtype=dtype), tensor.device)
        return torch.ops.aten.sum.dim_IntList(tensor, [], False, dtype=dtype)

    def differences(tensor, n=1, dim=-1, prepend=None, append=None):
        # Lengths of sequences from their bounds: vLLM's convolution makes a list as long as they are.
        if tensor.dtype in (torch.int32, torch.int64) and tensor.numel() < 1024 and tensor.is_cuda:
            before, after = (end if end is None else here(end) for end in (prepend, append))
            return put(here(tensor).diff(n, dim, before, after), tensor.device)
        joined = torch.cat([part for part in (prepend, tensor, append) if part is not None], dim)
        last = joined.size(dim) - 1
        return joined.narrow(dim, 1, last) - joined.narrow(dim, 0, last)

    def contained(tensor, others, *, assume_unique=False, invert=False):
        # Of many positions it sorts, and takes sizes from what the sort would have left.
        return put(torch.isin(here(tensor), here(others), invert=invert), tensor.device)

    def nonzero(tensor):
        torch.cuda.current_stream(tensor.device).synchronize()  # as torch waits for the count
        return put(here(tensor).nonzero(), tensor.device)

    library = torch.library.Library("aten", "IMPL")
    library.impl("eq.Scalar", equal, "CUDA")
    library.impl("diff", differences, "CUDA")
    library.impl("sum", total, "CUDA")
    library.impl("gt.Tensor", greater, "CUDA")
    library.impl("nonzero", nonzero, "CUDA")
    library.impl("isin.Tensor_Tensor", contained, "CUDA")
    torch._nullgpu = library  # it counts for as long as it lives


def of_torch(torch) -> None:
    without_cudnn(torch)
    if "NULLGPU_COPY" not in os.environ:
        with_masks(torch)


def without_token_check(module) -> None:
    """Image tokens are compared with features by numbers that were computed on the device."""
    module.torch_compilable_check = lambda *arguments, **keywords: None


def with_this_runtime(module) -> None:
    """torch opens the wheel's libcudart by its path, and vLLM's sleep mode would copy by that one."""
    module.find_loaded_library = lambda name: os.environ["NULLGPU"]


def with_tokens(module) -> None:
    """What the sampler writes is not a token: each becomes one that the vocabulary has. With NULLGPU_REPLY
    every reply is that text, ended as the chat template ends it."""
    trace = module.Engine._trace
    text = os.environ.get("NULLGPU_REPLY")

    def of_tokens(self, group, index, output, *more):
        (completion,) = output.outputs
        ids = [50] * len(completion.token_ids)
        if text:
            tokenizer = self._reply_text.__self__.tokenizer
            ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], self.eos_token_id]
            completion.finish_reason = "stop"
        completion.token_ids = ids
        completion.logprobs.logprobs[:] = [-1.0] * len(ids)
        return trace(self, group, index, output, *more)

    module.Engine._trace = of_tokens


def with_numbers(module) -> None:
    """vLLM's runner counts on the device how many tokens a request got: one."""
    output = module.AsyncOutput.get_output

    def of_one_each(self):
        self.num_sampled_tokens_np[:] = 1
        self.sampled_token_ids[:] = 50
        return output(self)

    module.AsyncOutput.get_output = of_one_each


def with_chunks(module) -> None:
    """vLLM warms a kernel up with as many chunks as it counts on the device: here on the host."""
    counted = module.prepare_chunk_indices

    def on_host(lengths, size):
        return counted(lengths.cpu(), size).to(lengths.device)  # the host waits for them either way

    module.prepare_chunk_indices = on_host


def with_phases(module) -> None:
    """What a rank is called for is the phase of what it does on the device."""
    call = module.RankProcess.call

    def in_phase(self, method, *arguments):
        import ctypes  # Ray pickles this class by value, and ctypes' types cannot be pickled

        ctypes.CDLL(os.environ["NULLGPU"]).nullgpu_phase(method.__qualname__.encode())
        return call(self, method, *arguments)

    module.RankProcess.call = in_phase


def without_verdict_on_norm(module) -> None:
    """A gradient's norm that is no number skips the step, on each rank by what its memory held before."""
    invalid = module.is_invalid_grad_norm

    def compared(norm):
        invalid(norm)  # the host waits for it
        return False

    module.is_invalid_grad_norm = compared


def without_verdict_on_sync(module) -> None:
    """Engine and policy are compared, and their difference says nothing."""
    module.SYNC_TOLERANCE = dict.fromkeys(module.SYNC_TOLERANCE, 1e9)


def without_verdict_on_experts(module) -> None:
    """The grouped products and the loop beside them are called, with gradients; their difference says
    nothing."""
    fault = module.grouped_product_fault

    def compared(*arguments):
        fault(*arguments)
        return ""

    module.grouped_product_fault = compared


def with_patches(module) -> None:
    """What changed between two versions of the weights is arithmetic on the device: here the host does it, by
    the same code on the same bytes."""
    encode = module.encode_patch

    def on_host(old, new):
        return encode([piece.cpu() for piece in old], [piece.cpu() for piece in new])

    module.encode_patch = on_host


def without_verdict_on_recurrence(module) -> None:
    """The kernel and PyTorch's recurrence are called, with gradients; their differences say nothing."""
    assert module.first_excess
    module.first_excess = lambda off: ""


AFTER_IMPORT: dict[str, Callable] = {
    "deepspeed.runtime.zero.stage3": without_verdict_on_norm,
    "torch": of_torch,
    "trainer.config.schema": without_verdict_on_sync,
    "trainer.fleet.patch": with_patches,
    "trainer.learning.gated_delta_kernel": without_verdict_on_recurrence,
    "trainer.learning.experts": without_verdict_on_experts,
    "trainer.ranks.process": with_phases,
    "trainer.sampling.vllm_engine": with_tokens,
    "vllm.v1.worker.gpu.async_utils": with_numbers,
    "vllm.third_party.flash_linear_attention.ops.index": with_chunks,
    "vllm.distributed.device_communicators.cuda_wrapper": with_this_runtime,
    "transformers.models.qwen2_vl.modeling_qwen2_vl": without_token_check,
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl": without_token_check,
    "transformers.models.qwen3_vl.modeling_qwen3_vl": without_token_check,
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe": without_token_check,
    "transformers.models.qwen3_5.modeling_qwen3_5": without_token_check,
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe": without_token_check,
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules above as everybody does, and has their loader call the function."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in AFTER_IMPORT:
            return None
        change = AFTER_IMPORT.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        loaded = spec.loader.exec_module

        def load(module):
            loaded(module)
            change(module)

        spec.loader.exec_module = load
        return spec


sys.meta_path.insert(0, Finder())
