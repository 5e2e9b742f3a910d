"""Half-precision copies of a network's weights, made all together once a step.

Autocast makes such copies as well, but one layer at a time, and so do the gradients on their way back: two launches a
layer, most of which take longer to start than to run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from elle.engine.weight_gradients import Beside, suits

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Autocast computes these in half precision. No class derived from them: it may do something else with its weights."""


class _Copies(torch.autograd.Function):
    """Copies of `weights` in float16; their gradients come back in float32."""

    @staticmethod
    def forward(ctx: Any, beside: Beside, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.beside = beside
        return tuple(_converted(weights, torch.float16))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.beside.finish()
        found = [gradient for gradient in gradients if gradient is not None]
        wide = iter(_converted(found, torch.float32))
        return None, *(None if gradient is None else next(wide) for gradient in gradients)


def _converted(tensors: Any, dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(one, dtype=dtype) for one in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


@contextlib.contextmanager
def half_weights(model: nn.Module) -> Iterator[None]:
    """Within it convolutions and linear layers see copies of their weights in float16.

    The parameters stay what they are, and gradients reach them: attributes of the layers' own hide them.
    """
    hidden = [
        (layer, name, parameter)
        for layer in model.modules()
        if type(layer) in LAYERS
        for name, parameter in layer._parameters.items()
        if parameter is not None and parameter.dtype is torch.float32
    ]
    if not hidden:
        yield
        return
    beside = Beside(hidden[0][2].device)
    copies = _Copies.apply(beside, *(parameter for _, _, parameter in hidden))  # type: ignore[no-untyped-call]
    shown: list[tuple[nn.Module, str, Any]]
    shown = [(layer, name, copy) for (layer, name, _), copy in zip(hidden, copies, strict=True)]
    shown += [(layer, "_conv_forward", beside.convolution(layer)) for layer, _, _ in hidden if suits(layer)]
    for layer, name, value in shown:
        layer.__dict__[name] = value
    try:
        yield
    finally:
        for layer, name, _ in shown:
            del layer.__dict__[name]
