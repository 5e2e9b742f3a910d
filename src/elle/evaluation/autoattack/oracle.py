"""The attacked network: quick answers in the search's precision, and exact ones that count."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from elle.core.attacks.network import begun
from elle.core.precision import Precision, autocast
from elle.evaluation.mode import exact_float32, is_wrong, repeatable, tf32
from elle.models.batch_norm import fusing
from elle.models.half_weights import half_weights, has_compiled_parts
from elle.models.layout import layout_of

_ROUNDING = {"fp32": 0.0, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7}
"""Relative distance of neighbouring numbers; 0 for float32, whose word is taken."""

FUSED_SEARCH = True
"""Whether a search has small work done by kernels of our own where the network and the device know how."""

BLIND = "the logits have no gradient by the image, so that attacks which follow it find nothing; trust square alone"

_EXACT_BATCH = 512
"""Images that are answered exactly at a time."""

# Logits' derivatives are sent back with this as their largest entry: well inside half precision on both sides.
_SCALE = 64.0


class Answer(NamedTuple):
    logits: Tensor
    """[B, K], float32."""
    value: Tensor
    """The objective [B]."""
    gradient: Tensor
    """d value / d x [B, ...], divided for each image by the largest derivative of its value by a logit."""


class Oracle:
    """Answers about a network in eval mode whose parameters are constants; see `constant`."""

    def __init__(
        self, model: nn.Module, device: torch.device, precision: Precision, compiled_for: int | None = None
    ) -> None:
        self.model = model
        self.device = device
        self.precision = precision
        self.compiled_for = compiled_for
        self._compiled: Callable[[Tensor], Tensor] = torch.compile(model, dynamic=False) if compiled_for else model
        self._lowers = precision == "fp16" and compiled_for is None and not has_compiled_parts(model)

    def _network(self, x: Tensor) -> Tensor:
        """Compiled for batches of one size; the others are too short-lived to be worth it."""
        return self._compiled(x) if len(x) == self.compiled_for else self.model(x)

    def _weights(self) -> contextlib.AbstractContextManager[object]:
        """Around a pass and its backward: the weights that it sees, in half precision all at once.

        Only there: an exact answer is to see the weights themselves.
        """
        return half_weights(self.model, kernels=FUSED_SEARCH) if self._lowers else contextlib.nullcontext()

    def logits(self, x: Tensor) -> Tensor:
        """[B, K] in the search's precision, as float32."""
        with torch.no_grad(), tf32(self.precision == "tf32"), autocast(self.device, self.precision), self._weights():
            outputs = self._network(self._laid_out(x))
        return outputs.float()

    def ascend(self, x: Tensor, objective: Callable[[Tensor], Tensor]) -> Answer:
        """Value and gradient of an objective of the logits, in the search's precision.

        The derivatives by the logits are taken in float32 and scaled for each image before they go back through
        the network: a confident image's cross-entropy would otherwise have the gradient 0 in half precision.
        """
        with torch.enable_grad(), tf32(self.precision == "tf32"), self._weights():
            x = self._laid_out(x).detach().requires_grad_()
            with autocast(self.device, self.precision):
                outputs = self._network(x)
            logits = outputs.detach().float().requires_grad_()
            value = objective(logits)
            (slope,) = torch.autograd.grad(value.sum(), logits)
            slope = slope / slope.abs().amax(1, keepdim=True).clamp(min=1e-38)
            gradient = _pulled_back(outputs, x, (slope * _SCALE).to(outputs.dtype))
        gradient = gradient.float().contiguous().nan_to_num(nan=0.0) / _SCALE
        return Answer(logits.detach(), value.detach(), gradient)

    def doubt(self, logits: Tensor) -> Tensor:
        """How far logits may be off by rounding [B]: a success that near the boundary must be looked at exactly."""
        # Infinite ones, of classes that are masked, are not rounded; 0 times infinity is no number to compare with.
        finite = logits.abs().nan_to_num(nan=0.0, posinf=0.0)
        return 2 * _ROUNDING[self.precision] * finite.amax(1)

    def exact(self, x: Tensor) -> Tensor:
        """Logits in float32 proper [N, K], by torch's own operations."""
        parts = []
        with fusing(self.model, False), torch.no_grad(), exact_float32(self.device):
            for part in torch.split(x, _EXACT_BATCH):
                # Padded to a power of two, so that a GPU meets few shapes.
                padded = min(_EXACT_BATCH, max(16, 1 << (len(part) - 1).bit_length()))
                missing = padded - len(part) if self.device.type == "cuda" else 0
                filled = torch.cat([part, part[:1].expand(missing, *part.shape[1:])])
                parts.append(self.model(self._laid_out(filled)).float()[: len(part)])
        return torch.cat(parts)

    def misclassified(self, x: Tensor, y: Tensor) -> Tensor:
        """Whether each image's likeliest class in float32 is not y [N]."""
        return is_wrong(self.exact(x), y)

    def _laid_out(self, x: Tensor) -> Tensor:
        if self.device.type == "cuda" and x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return x


def _pulled_back(outputs: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """The gradient of <slope, outputs> by x; 0 for a network that has none, which is told."""
    if not outputs.requires_grad:
        warnings.warn(BLIND, stacklevel=2)
        return torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(begun(outputs, slope), x, materialize_grads=True)
    return gradient


@contextlib.contextmanager
def constant(model: nn.Module, channels_last: bool = True) -> Iterator[None]:
    """Eval mode, parameters without gradient, repeatable kernels; everything is put back afterwards.

    On a GPU convolutions' weights are laid out as the images are, channels last, and layers are fused; unless that is
    not wanted, or the network does not take it.
    """
    channels_last = channels_last and layout_of(model) is torch.channels_last
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    filters = [(p, p.data) for p in model.parameters() if channels_last and p.is_cuda and p.dim() == 4]
    for parameter, _ in wanted:
        parameter.requires_grad_(False)
    for parameter, weights in filters:
        parameter.data = weights.contiguous(memory_format=torch.channels_last)
    try:
        with repeatable(model), fusing(model, FUSED_SEARCH and channels_last):
            yield
    finally:
        for parameter, weights in filters:
            parameter.data = weights
        for parameter, grad in wanted:
            parameter.requires_grad_(grad)
