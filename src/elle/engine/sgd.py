"""Stochastic gradient descent with momentum: torch's fused update, one launch for all parameters of a group.

`torch.optim.SGD` computes the same, but its first use imports torch's compiler, which takes as long as all of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd


class SGD:
    """What a step needs of an optimizer; a `GradScaler` takes it for one that undoes the scaling itself."""

    _step_supports_amp_scaling = True
    grad_scale: Tensor
    found_inf: Tensor
    """There while a `GradScaler` calls: what the gradients are multiplied by, and whether to leave the step out."""

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

    def zero_grad(self) -> None:
        """Leave the parameters without gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters that have a gradient."""
        for group in self.param_groups:
            moved = [one for one in group["params"] if one.grad is not None]
            sgd(
                moved,
                [one.grad for one in moved],
                [self.state.get(one, {}).get("momentum_buffer") for one in moved],
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                weight_decay=group["weight_decay"],
                momentum=self.momentum,
                lr=self.lr,  # type: ignore[arg-type]  # a tensor as well, so that a captured step reads its value
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
