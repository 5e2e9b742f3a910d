"""Half-precision copies of a network's weights, made all together once a step.

Autocast makes such copies as well, but one layer at a time, and so do the gradients on their way back: two launches a
layer, most of which take longer to start than to run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from elle.models import first_convolution
from elle.models.layout import layout_of
from elle.models.weight_gradients import Beside, suits

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Autocast computes these in half precision. No class derived from them: it may do something else with its weights."""


class _Copies(torch.autograd.Function):
    """Copies of `weights` for each of `chains` chains of passes, the first `lowered` of them in float16.

    Their gradients come back in the type that the weights want, added up over the chains.
    """

    @staticmethod
    def forward(ctx: Any, beside: Beside, chains: int, lowered: int, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.beside, ctx.chains, ctx.lowered = beside, chains, lowered
        ctx.wanted = [one.grad_dtype for one in weights[:lowered]]
        copies = [*_converted(weights[:lowered], torch.float16), *weights[lowered:]]
        ctx.places = [one.data_ptr() for one in copies]
        return tuple(one.data for _ in range(chains) for one in copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(gradients) // ctx.chains
        of_chains = [gradients[start : start + count] for start in range(0, len(gradients), count)]
        found = ctx.beside.finish()
        if found:
            of_chains.append(tuple(found.get(place) for place in ctx.places))
        half = _added([chain[: ctx.lowered] for chain in of_chains])
        converted = [k for k, one in enumerate(half) if one is not None and one.dtype is not ctx.wanted[k]]
        for k, wide in zip(converted, _converted([half[k] for k in converted], torch.float32), strict=True):
            half[k] = wide
        whole = _added([chain[ctx.lowered :] for chain in of_chains])
        return None, None, None, *half, *whole


def _added(chains: list[tuple[Tensor | None, ...]]) -> list[Tensor | None]:
    """The sums of what the chains have, by one launch a chain beyond the first; a chain may lack some."""
    total = list(chains[0])
    for chain in chains[1:]:
        both = [(one, other) for one, other in zip(total, chain, strict=True) if one is not None and other is not None]
        sums = iter(torch._foreach_add(*map(list, zip(*both, strict=True))) if both else ())
        total = [
            next(sums) if one is not None and other is not None else (other if one is None else one)
            for one, other in zip(total, chain, strict=True)
        ]
    return total


def _converted(tensors: Any, dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(one, dtype=dtype) for one in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


def _parameters(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    layers = list(model.modules())
    return [(layer, name, one) for layer in layers for name, one in layer._parameters.items() if one is not None]


def takes_copies(layer: nn.Module) -> bool:
    """Whether a layer only does with its parameters what its class does: nobody has put something else in its place.

    What normalises or prunes a layer's weights makes them of others before each forward, as `weight_norm` does.
    """
    plain = not {"weight", "bias", "forward", "_conv_forward"} & vars(layer).keys()
    return type(layer) in LAYERS and layer._parameters.keys() == {"weight", "bias"} and plain


def _lowered(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [one for one in _parameters(model) if takes_copies(one[0]) and one[2].dtype is torch.float32]


def lowered_weights(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that get copies."""
    return [parameter for _, _, parameter in _lowered(model)]


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether torch.compile holds code for parts of it: written for their own weights, it is not to see copies."""
    return any(
        "_orig_mod" in part._modules
        or part._compiled_call_impl is not None
        or hasattr(part.forward, "_torchdynamo_orig_callable")
        for part in model.modules()
    )


@contextlib.contextmanager
def half_weights(
    model: nn.Module, chains: int = 1, kernels: bool = True, beside: bool = True
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within it convolutions and linear layers see copies of their weights in float16.

    The parameters stay what they are, and gradients reach them: attributes of the layers' own hide them, but not where
    a network turns autocast off and computes in float32. The backward is to be within it, too: until then the copies
    stay where they are, which streams beside each other read, and layers that are computed anew see the same again.

    Of two chains of passes whose backwards run beside each other, the second is to run within what this yields, and has
    copies of its own of all parameters: adding up one gradient after the other would have the chains wait for each
    other. Weight gradients on a stream of their own are for one chain alone; a third beside two keeps both waiting.
    `kernels`: whether kernels of our own may compute the first convolution and the head. `beside`: whether there may be
    such a stream, which keeps what it reads longer; without it, all convolutions but the first stay torch's.
    """
    kernels = kernels and layout_of(model) is torch.channels_last  # which is how they lay out what they compute
    hidden = _lowered(model)
    lowered = len(hidden)
    if chains > 1:
        known = {parameter for _, _, parameter in hidden}
        hidden += [one for one in _parameters(model) if one[2] not in known]
    if not hidden:
        yield contextlib.nullcontext
        return
    side = Beside(hidden[0][2].device, wanted=beside and chains == 1, kernels=kernels)
    weights = [parameter for _, _, parameter in hidden]
    copies = _Copies.apply(side, chains, lowered, *weights)  # type: ignore[no-untyped-call]

    def show(chain: int) -> None:
        for k, (layer, name, _) in enumerate(hidden):
            layer.__dict__[name] = copies[chain * len(hidden) + k]

    @contextlib.contextmanager
    def second() -> Iterator[None]:
        show(1)
        try:
            yield
        finally:
            show(0)

    show(0)
    layers = {layer for layer, _, _ in hidden[:lowered]}
    for layer in layers:
        layer.__dict__["forward"] = functools.partial(_forward, layer, dict(layer._parameters))
        # Computed anew for its input alone, a layer stops before torch's convolution, but behind a function of ours.
        if suits(layer) and (beside or first_convolution.suits(layer)):
            layer.__dict__["_conv_forward"] = side.convolution(layer)
        if kernels and type(layer) is nn.Linear:
            layer.__dict__["of_mean"] = side.of_mean(layer)
    try:
        yield second if chains > 1 else contextlib.nullcontext
    finally:
        for layer in layers:
            for name in ("forward", "_conv_forward", "of_mean"):
                layer.__dict__.pop(name, None)
        for layer, name, _ in hidden:
            del layer.__dict__[name]


def _forward(layer: Any, own: dict[str, nn.Parameter | None], input: Tensor) -> Tensor:  # a name that callers may give
    """The forward of the layer's class, on the copies of its parameters.

    Without the copies where the layer has other parameters now, as within `functional_call`, and where autocast is off.
    """
    in_half = input.dtype is torch.float16 or torch.is_autocast_enabled(input.device.type)
    shown = in_half and all(layer._parameters[name] is one for name, one in own.items())
    names = () if shown else (*own, "_conv_forward")
    hidden = {name: layer.__dict__.pop(name) for name in names if name in vars(layer)}
    try:
        y: Tensor = type(layer).forward(layer, input)
    finally:
        layer.__dict__.update(hidden)
    return y
