"""BatchNorm with what stands beside it, a sum and a ReLU: torch's operations, or on a GPU kernels that fuse them.

The kernels (`batch_norm_kernels`) are for train mode, channels last, and first derivatives. Wherever they do not apply,
wherever hooks watch a layer, and unless `use_fused` has asked for them, the modules are called one after another.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import has_torch_function

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d that may use the kernels, alone or by way of the functions below."""

    arrivals: Tensor | None
    """The kernels' counters, where they are to be used; not part of the saved state."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("arrivals", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return _fused(self, x, relu=False)[0] if _fusible(self, x) else super().forward(x)


def use_fused(model: nn.Module, wanted: bool = True) -> None:
    """Have the BatchNorms of this network, where it is now, use the kernels wherever those apply; or never."""
    kernels = _kernels() if wanted else None
    for layer in model.modules():
        if isinstance(layer, BatchNorm):
            device = layer.weight.device
            layer.arrivals = None if kernels is None else kernels.arrivals(layer.num_features, device)


def norm_act(norm: nn.Module, activation: nn.Module, x: Tensor, addend: Tensor | None = None) -> Tensor:
    """activation(norm(x) + addend)."""
    if _activates(norm, activation, x, addend):
        return _fused(norm, x, after=addend)[0]
    x = norm(x)
    return activation(x if addend is None else x + addend)  # type: ignore[no-any-return]


def sum_norm_act(
    norm: nn.Module, activation: nn.Module, x: Tensor, addend: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """activation(norm(s)) and s = x + addend."""
    if _activates(norm, activation, x, addend):
        return _fused(norm, x, before=addend)
    x = x if addend is None else x + addend
    return activation(norm(x)), x


def called_plainly(module: nn.Module) -> bool:
    """Whether calling it is running the forward of its class: no hook looks on, and nobody has put another in place."""
    watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not watched and "forward" not in vars(module) and not _has_any_global_hook()  # type: ignore[no-untyped-call]


def _activates(norm: nn.Module, activation: nn.Module, x: Tensor, addend: Tensor | None) -> bool:
    """Whether the kernels can take the activation along."""
    if not _fusible(norm, x) or type(activation) is not nn.ReLU:
        return False
    alike = addend is None or (addend.dtype == x.dtype and addend.shape == x.shape and _channels_last(addend))
    return alike and called_plainly(activation) and called_plainly(norm)


def _fusible(norm: nn.Module, x: Tensor) -> bool:
    """Whether the kernels give what the layer is asked for; the gradient of a gradient they do not."""
    return (
        isinstance(norm, BatchNorm)
        and norm.arrivals is not None
        and norm.training
        and _on_gpu(x)
        and _channels_last(x)
        and x.dtype in _DTYPES
        and norm.weight.dtype is torch.float32
        and norm.momentum is not None
        and norm.num_features < x.numel() < 2**31
        # Whoever replaces torch's functions, as `twice_differentiable` does, is to see them.
        and not has_torch_function((x,))
    )


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


@functools.cache
def _kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from elle.models import batch_norm_kernels

    return batch_norm_kernels


def _fused(
    norm: Any, x: Tensor, *, relu: bool = True, before: Tensor | None = None, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """activation(norm(s) + after) and s = x + before."""
    found: tuple[Tensor, Tensor] = _Fused.apply(x, before, after, norm.weight, norm.bias, norm, relu)  # type: ignore[no-untyped-call]
    return found[0], x if before is None else found[1]


class _Fused(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        before: Tensor | None,
        after: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        norm: BatchNorm,
        relu: bool,
    ) -> tuple[Tensor, Tensor | None]:
        kernels: Any = _kernels()
        running = kernels.Running(norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum)
        y, total, mean, rstd = kernels.normalised(
            x, weight, bias, running, norm.eps, norm.arrivals, relu=relu, before=before, after=after
        )
        # With an addend behind, y's sign is the ReLU's mask; otherwise x tells it, and y need not be kept.
        ctx.save_for_backward(total, weight, bias, mean, rstd, None if after is None else y)
        ctx.arrivals, ctx.relu = norm.arrivals, relu
        ctx.set_materialize_grads(False)
        return y, None if before is None else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_y: Tensor | None, for_total: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd, y = ctx.saved_tensors
        if for_y is None:
            return for_total, for_total, None, None, None, None, None
        for_y = for_y.contiguous(memory_format=torch.channels_last)
        if for_total is not None:
            for_total = for_total.contiguous(memory_format=torch.channels_last)
        kernels: Any = _kernels()
        for_x, for_weight, for_bias, for_after = kernels.gradients(
            for_y, x, weight, bias, mean, rstd, ctx.arrivals, relu=ctx.relu, y=y, for_total=for_total
        )
        needed = ctx.needs_input_grad
        return (
            for_x,
            for_x if needed[1] else None,
            for_after if needed[2] else None,
            for_weight if needed[3] else None,
            for_bias if needed[4] else None,
            None,
            None,
        )
