"""Stochastic gradient descent with momentum: torch's fused update, one launch for all parameters of a group.

`torch.optim.SGD` computes the same, but its first use imports torch's compiler, which takes as long as all of torch.
On a GPU the weights of convolutions and linear layers may have gradients in float16, as a step in half precision finds
them, and a kernel of our own: that saves converting them and checking, reading and writing the converted ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from elle.engine.loss_scale import LossScale

CHUNK = 2048
"""Elements of a tensor that one program of the kernel updates."""
WARPS = 8
_MOST = 256
"""Tensors that the kernel takes; their addresses are arguments of the launch."""


Places = tuple[tuple[int, int, int], ...]
"""Of each tensor: the addresses of its weights and of its momentum, and how many elements it has."""


class SGD:
    """SGD with momentum and weight decay; it divides gradients by the loss scale, where there is one."""

    def __init__(self, groups: Sequence[dict[str, Any]], lr: Tensor, momentum: float) -> None:
        self.param_groups = [group for group in groups if group["params"]]
        """Of each its `params` and `weight_decay`."""
        self.lr, self.momentum = lr, momentum
        # From the start, so that a first step left out for an overflow leaves no uninitialised buffer.
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {
            one: {"momentum_buffer": torch.zeros_like(one)}
            for group in self.param_groups
            for one in group["params"]
            if momentum
        }
        self.chunks: dict[Places, Tensor] = {}
        """Kept, as a captured step cannot copy them to the GPU, and reads them whenever it is run."""

    def expect_half(self, weights: Iterable[nn.Parameter]) -> None:
        """Let the weights among these that the kernel can update have gradients in float16, and no others."""
        self.zero_grad()  # a gradient of another type would not let its own change
        wanted = {one for one in weights if _suits(one)}
        for group in self.param_groups:
            for parameter in group["params"]:
                half = parameter in wanted and len(wanted) <= _MOST
                parameter.grad_dtype = torch.float16 if half else parameter.dtype

    def zero_grad(self) -> None:
        """Leave the parameters without gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, scale: LossScale | None = None) -> None:
        """Move the parameters that have a gradient, unless one of these overflows."""
        groups = [(self._moved(group["params"]), group["weight_decay"]) for group in self.param_groups]
        if scale is not None:
            scale.overflow.zero_()
            for (by_torch, by_kernel), _ in groups:
                _find_overflow([one.grad for one in by_torch if one.grad is not None], scale)
                if by_kernel:
                    self._launch("find_overflow", by_kernel, scale.overflow)
        for (by_torch, by_kernel), weight_decay in groups:
            self._update_by_torch(by_torch, weight_decay, scale)
            if by_kernel and scale is not None:
                state = (self.lr, scale.value, scale.overflow, weight_decay, self.momentum)
                self._launch("update_weights", by_kernel, *state, has_momentum=bool(self.momentum))

    def _moved(self, parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters with a gradient in their own type, and those with one in float16."""
        moved = [(one, one.grad.dtype is one.dtype) for one in parameters if one.grad is not None]
        return [one for one, own in moved if own], [one for one, own in moved if not own]

    def _speed(self, parameter: nn.Parameter) -> Tensor | None:
        return self.state.get(parameter, {}).get("momentum_buffer")

    def _update_by_torch(self, moved: list[nn.Parameter], weight_decay: float, scale: LossScale | None) -> None:
        sgd(
            list(moved),
            [one.grad for one in moved if one.grad is not None],
            [self._speed(one) for one in moved],
            fused=True,
            grad_scale=None if scale is None else scale.value,
            found_inf=None if scale is None else scale.overflow,
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=self.lr,  # type: ignore[arg-type]  # a tensor as well, so that a captured step reads its value
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def _launch(self, name: str, moved: list[nn.Parameter], *state: Tensor | float, **constants: bool) -> None:
        """Run a kernel over all chunks of these parameters."""
        from elle.engine import sgd_kernels

        speeds = [self._speed(one) for one in moved]
        places = tuple(
            (one.data_ptr(), one.data_ptr() if speed is None else speed.data_ptr(), one.numel())
            for one, speed in zip(moved, speeds, strict=True)
        )
        if places not in self.chunks:
            self.chunks[places] = _chunks(places, moved[0].device)
        chunks = self.chunks[places]
        # Triton launches where the host is, not where its arguments are.
        with torch.cuda.device_of(moved[0]):  # type: ignore[no-untyped-call]
            getattr(sgd_kernels, name)[(len(chunks),)](
                tuple(one.grad for one in moved), chunks, *state, **constants, block=CHUNK, num_warps=WARPS
            )


def _find_overflow(gradients: list[Tensor], scale: LossScale) -> None:
    if gradients:  # this would also unscale them, which the update does
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, scale.overflow, scale.one)


def _suits(weight: Tensor) -> bool:
    """Whether the kernel can update it: float32, dense, in multiples of 16 bytes."""
    whole = weight.numel() % 8 == 0 and weight.data_ptr() % 16 == 0
    return whole and weight.dtype is torch.float32 and torch.ops.aten.is_non_overlapping_and_dense(weight)


def _chunks(places: Places, device: torch.device) -> Tensor:
    """A row for each chunk: tensor, first element, number of elements, addresses of weights and momentum."""
    rows = [
        (number, first, min(count - first, CHUNK), weights + 4 * first, speed + 4 * first)
        for number, (weights, speed, count) in enumerate(places)
        for first in range(0, count, CHUNK)
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)
