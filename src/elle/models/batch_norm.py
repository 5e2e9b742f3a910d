"""BatchNorm with what stands beside it, a sum and a ReLU: torch's operations, or on a GPU kernels that fuse them.

The kernels (`batch_norm_kernels`) are for channels last and first derivatives. Wherever they do not apply, wherever
hooks watch a layer, and unless `use_fused` has asked for them, the modules are called one after another.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack

from elle.core.second_order.convolution import asked_for

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_Found = tuple[Tensor, Tensor | None, Tensor | None]


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
            layer.arrivals = kernels.arrivals(layer.num_features, device) if kernels and launchable(device) else None


@contextlib.contextmanager
def fusing(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """`use_fused`, and afterwards as it was."""
    layers = [layer for layer in model.modules() if isinstance(layer, BatchNorm)]
    before = [layer.arrivals for layer in layers]
    use_fused(model, wanted)
    try:
        yield
    finally:
        for layer, arrivals in zip(layers, before, strict=True):
            layer.arrivals = arrivals


def norm_act(
    norm: nn.Module, activation: nn.Module, x: Tensor, addend: Tensor | None = None, *, before: Tensor | None = None
) -> Tensor:
    """activation(norm(x + before) + addend)."""
    if _activates(norm, activation, x, addend, before):
        return _fused(norm, x, before=before, after=addend)[0]
    x = norm(x if before is None else x + before)
    return activation(x if addend is None else x + addend)  # type: ignore[no-any-return]


def forked_norm_act(
    norm: nn.Module, activation: nn.Module, x: Tensor, addend: Tensor | None = None, *, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`norm_act` twice, for a network that forks behind it: the kernels add up the gradients of both."""
    if _activates(norm, activation, x, addend, before):
        y, _, again = _fused(norm, x, before=before, after=addend, fork=True)
        return y, again  # type: ignore[return-value]
    y = norm_act(norm, activation, x, addend, before=before)
    return y, y


def sum_norm_act(
    norm: nn.Module, activation: nn.Module, x: Tensor, addend: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """activation(norm(s)) and s = x + addend."""
    if _activates(norm, activation, x, addend):
        # Without an addend it is x, by way of the kernels: their backward adds up the gradients of both.
        return _fused(norm, x, before=addend, keep_sum=True)[:2]  # type: ignore[return-value]
    x = x if addend is None else x + addend
    return activation(norm(x)), x


def called_plainly(module: nn.Module) -> bool:
    """Whether calling it is running the forward of its class: no hook looks on, and nobody has put another in place."""
    return not watched(module) and "forward" not in vars(module)


def watched(module: nn.Module) -> bool:
    """Whether a hook looks on."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or _has_any_global_hook()  # type: ignore[no-untyped-call]


def _activates(norm: nn.Module, activation: nn.Module, x: Tensor, *addends: Tensor | None) -> bool:
    """Whether the kernels can take the activation along."""
    if not _fusible(norm, x) or type(activation) is not nn.ReLU:
        return False
    given = [one for one in addends if one is not None]
    alike = all(one.dtype == x.dtype and one.shape == x.shape and _channels_last(one) for one in given)
    return alike and called_plainly(activation) and called_plainly(norm)


def _fusible(norm: nn.Module, x: Tensor) -> bool:
    """Whether the kernels give what the layer is asked for; the gradient of a gradient they do not."""
    return (
        isinstance(norm, BatchNorm)
        and norm.arrivals is not None
        and norm.running_mean is not None
        # A compiler fuses by itself, and what is exported must run without the kernels.
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        # torch.func (vmap, grad, jvp) does not see through functions of our own.
        and torch._C._functorch.maybe_current_level() is None
        and _on_gpu(x)
        and _channels_last(x)
        and x.dtype in _DTYPES
        and norm.weight.dtype is torch.float32
        and (not norm.training or (norm.momentum is not None and norm.num_features < x.numel()))
        and 0 < x.numel() < 2**31
        and type(x) is Tensor
        and not replacing_layers()
    )


def replacing_layers() -> list[Any]:
    """Who replaces torch's functions now, as `twice_differentiable` does, and is to see them."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in modes if not getattr(mode, "leaves_layers_alone", False)]


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


@functools.cache
def _kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from elle.models import batch_norm_launches

    return batch_norm_launches


@functools.cache
def launchable(device: torch.device) -> bool:
    """Whether Triton's kernels run there: it may be missing, or lack the C compiler that it needs to launch one."""
    kernels: Any = _kernels()
    if kernels is None or device.type != "cuda":
        return kernels is not None  # marked all the same; a GPU's tensors alone are given to the kernels
    x, channel = torch.zeros(1, 16, 1, 1, device=device), torch.ones(16, device=device)
    try:
        with torch.cuda.device(device):
            kernels.evaluated(x, channel, channel, channel, channel, 1e-5, relu=True)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        warnings.warn(f"the work is left to torch: Triton is installed but cannot be used ({reason})", stacklevel=2)
        return False
    return True


def _fused(
    norm: Any,
    x: Tensor,
    *,
    relu: bool = True,
    before: Tensor | None = None,
    after: Tensor | None = None,
    keep_sum: bool = False,
    fork: bool = False,
) -> _Found:
    """activation(norm(s) + after), s = x + before where that is to be kept, and the first once more at a fork."""
    function = _Trained if norm.training else _Evaluated
    given = (x, norm.weight, norm.bias, before, after, norm, relu, keep_sum, fork)
    # Triton launches where the host is, not where its arguments are.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        found: _Found = function.apply(*given)  # type: ignore[no-untyped-call]
    return found


def _outputs(y: Tensor, total: Tensor | None, fork: bool) -> _Found:
    """At a fork y is there a second time, in the same memory: autograd then keeps the gradients of both apart."""
    return y, total, y.detach() if fork else None


class _Trained(Function):
    """In train mode, by the statistics of the batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        before: Tensor | None,
        after: Tensor | None,
        norm: BatchNorm,
        relu: bool,
        keep_sum: bool,
        fork: bool,
    ) -> _Found:
        kernels: Any = _kernels()
        running = kernels.Running(norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum)
        total, mean, rstd = kernels.statistics(x, running, norm.eps, norm.arrivals, before=before)
        y = kernels.normalised(total, weight, bias, mean, rstd, relu=relu, after=after, ready=before is None)
        # With an addend behind, y's sign is the ReLU's mask; otherwise x tells it, and y need not be kept.
        ctx.save_for_backward(total, weight, bias, mean, rstd, None if after is None else y)
        ctx.arrivals, ctx.relu = norm.arrivals, relu
        ctx.set_materialize_grads(False)
        return _outputs(y, total if keep_sum else None, fork)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, for_y: Tensor | None, for_total: Tensor | None, also: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd, y = ctx.saved_tensors
        for_y, also = (also, None) if for_y is None else (for_y, also)
        if for_y is None:
            return _gradients(ctx, for_total)
        for_y, also, for_total = _laid_out(for_y), _laid_out(also), _laid_out(for_total)
        kernels: Any = _kernels()
        layer = (weight, bias, mean, rstd)
        for_weight, for_bias, masked = kernels.sums(for_y, x, *layer, ctx.arrivals, relu=ctx.relu, y=y, also=also)
        # With an addend behind or a fork, the mask's result was written.
        ready = masked is for_y
        for_x = kernels.gradient(
            masked, x, *layer, for_weight, for_bias, relu=ctx.relu and ready, for_total=for_total, ready=ready
        )
        return _gradients(ctx, for_x, masked, for_weight, for_bias)


class _Evaluated(Function):
    """In eval mode, by the running statistics: a scale and a shift."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        before: Tensor | None,
        after: Tensor | None,
        norm: BatchNorm,
        relu: bool,
        keep_sum: bool,
        fork: bool,
    ) -> _Found:
        kernels: Any = _kernels()
        trainable = any(ctx.needs_input_grad[1:3])
        layer = (weight, bias, norm.running_mean, norm.running_var)
        keep = keep_sum or trainable
        y, total = kernels.evaluated(x, *layer, norm.eps, relu=relu, before=before, after=after, keep_sum=keep)
        # y's sign is the ReLU's mask; the gradients of weight and bias need x besides.
        ctx.save_for_backward(total if trainable else None, *layer, y if relu else None)
        ctx.arrivals, ctx.eps = norm.arrivals, norm.eps
        ctx.set_materialize_grads(False)
        return _outputs(y, total if keep_sum else None, fork)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, for_y: Tensor | None, for_total: Tensor | None, also: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance, y = ctx.saved_tensors
        for_y, also = (also, None) if for_y is None else (for_y, also)
        if for_y is None:
            return _gradients(ctx, for_total)
        for_y, also, for_total = _laid_out(for_y), _laid_out(also), _laid_out(for_total)
        kernels: Any = _kernels()
        for_weight = for_bias = None
        if asked_for(ctx, 1) or asked_for(ctx, 2):
            layer = (weight, bias, mean, (variance + ctx.eps).rsqrt())
            for_weight, for_bias, for_y = kernels.sums(for_y, x, *layer, ctx.arrivals, relu=False, y=y, also=also)
            y = also = None  # what was written has passed the mask
        for_x, masked = kernels.evaluated_gradients(
            for_y, weight, variance, ctx.eps, y=y, also=also, for_total=for_total, keep_masked=ctx.needs_input_grad[4]
        )
        return _gradients(ctx, for_x, masked, for_weight, for_bias)


def _laid_out(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.contiguous(memory_format=torch.channels_last)


def _gradients(
    ctx: Any,
    for_x: Tensor | None,
    for_after: Tensor | None = None,
    for_weight: Tensor | None = None,
    for_bias: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """In the order of the functions' arguments; `before` has the gradient of x."""
    found = (for_x, for_weight, for_bias, for_x, for_after)
    wanted = zip(found, ctx.needs_input_grad[:5], strict=True)
    return (*(one if needed else None for one, needed in wanted), None, None, None, None)
