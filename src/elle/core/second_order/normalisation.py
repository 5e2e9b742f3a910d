"""BatchNorm in train mode whose second derivative is one pass over the activations for five sums and one to write.

torch composes the same of some twenty elementwise operations in float32, each as large as the activations.
With xhat = (x - mean) * rstd over the N values of a channel, P u = u - mean(u) - xhat mean(u xhat), and y = w xhat + b,
the gradients for an incoming g are sum(g) for b, sum(g xhat) for w, and w rstd P g for x. For directions v, v_w, v_b in
which those are differentiated, every result is a combination of x, v and g with coefficients of the channel.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Derivatives = tuple[Tensor, Tensor, Tensor]
"""With respect to the incoming gradient, x and the weight."""


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        found = torch.ops.aten.native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
        y: Tensor = found[0]
        ctx.save_for_backward(x, weight, *found[1:])
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(outgoing, *ctx.saved_tensors, ctx.eps), None, None, None, None


class _Gradients(Function):
    """(gradient of y, x, weight) -> gradients of x, weight and bias; mean and rstd are functions of x."""

    @staticmethod
    def forward(
        ctx: Any, outgoing: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(outgoing, x, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        for_x, for_weight, for_bias = torch.ops.aten.native_batch_norm_backward(
            outgoing, x, weight, None, None, mean, rstd, True, eps, [True, True, True]
        )
        return for_x, for_weight, for_bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor | None, v_weight: Tensor | None, v_bias: Tensor | None) -> tuple[Any, ...]:
        outgoing, x, weight, mean, rstd = ctx.saved_tensors
        v = torch.zeros_like(x) if v is None else v
        v_weight = torch.zeros_like(weight) if v_weight is None else v_weight
        v_bias = torch.zeros_like(weight) if v_bias is None else v_bias
        second = (_kernel(x) or second_derivatives)(v, v_weight, v_bias, outgoing, x, weight, mean, rstd)
        return *second, None, None, None


_apply: Callable[..., Tensor] = _BatchNorm.apply
_gradients: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Gradients.apply


def second_derivatives(
    v: Tensor, v_weight: Tensor, v_bias: Tensor, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> Derivatives:
    """Derivatives of <v, grad x> + <v_weight, grad weight> + <v_bias, grad bias> by g, x and the weight."""
    kind = torch.promote_types(x.dtype, torch.float32)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    count = x.numel() // x.shape[1]

    def shaped(values: Tensor) -> Tensor:
        return values.view(-1, *[1] * (x.dim() - 2))

    g_dtype, g, v = g.dtype, g.to(kind), v.to(kind)
    weight, mean, rstd, v_weight, v_bias = (values.to(kind) for values in (weight, mean, rstd, v_weight, v_bias))
    xhat = (x.to(kind) - shaped(mean)) * shaped(rstd)
    sum_v, sum_g, v_xhat, g_xhat, v_g = (value.sum(axes) for value in (v, g, v * xhat, g * xhat, v * g))
    aligned = v_g - (sum_v * sum_g + v_xhat * g_xhat) / count  # <v, P g>
    scale = weight * rstd
    along_v = -scale * rstd * g_xhat / count
    along_g = rstd * v_weight - scale * rstd * v_xhat / count
    along_xhat = -(scale * rstd * aligned + along_v * v_xhat + along_g * g_xhat) / count
    constant = -(along_v * sum_v + along_g * sum_g) / count
    for_x = shaped(along_v) * v + shaped(along_g) * g + shaped(along_xhat) * xhat + shaped(constant)
    for_g = shaped(scale) * v + shaped(v_weight - scale * v_xhat / count) * xhat
    for_g = for_g + shaped(v_bias - scale * sum_v / count)
    return for_g.to(g_dtype), for_x.to(x.dtype), rstd * aligned


@functools.cache
def _triton_kernel() -> Callable[..., Derivatives] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from elle.core.second_order.kernels import second_derivatives

    return second_derivatives


TRITON = True
"""Whether a GPU uses the Triton kernels in place of torch's operations: a GradAlign step of PreActResNet18, batch 128,
takes 13.1 ms with them on an H200 and 19.9 ms without."""


def _kernel(x: Tensor) -> Callable[..., Derivatives] | None:
    """The kernels for these activations, where there are any."""
    return _triton_kernel() if TRITON and x.is_cuda and x.dim() == 4 and x.dtype is not torch.float64 else None


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.batch_norm; its own arguments and, out of train mode or without weights, its own way."""
    if not training or weight is None or bias is None or input.numel() <= input.shape[1]:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return _apply(input, weight, bias, running_mean, running_var, momentum, eps)
