"""Gradients added up over micro-batches, apart from those that the parameters already have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from elle.core.attacks.network import begun


class Slopes:
    """The sum of the gradients of several losses."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.sums = {parameter: torch.zeros_like(parameter) for parameter in parameters}
        self.reached: set[nn.Parameter] = set()

    def add(self, loss: Tensor, begin: Tensor | None) -> None:
        """Add the gradient of this loss times `begin`, where its backward begins."""
        found = torch.autograd.grad(begun(loss, begin), self.parameters, allow_unused=True)
        added = {one: part for one, part in zip(self.parameters, found, strict=True) if part is not None}
        torch._foreach_add_([self.sums[one] for one in added], list(added.values()))
        self.reached |= added.keys()

    def add_to_gradients(self, factor: Tensor) -> None:
        """Add `factor` times the sum to the gradients of the parameters.

        A parameter that no loss has reached stays without a gradient: weight decay would act on it.
        """
        for parameter in self.reached:
            before = 0 if parameter.grad is None else parameter.grad
            parameter.grad = factor * self.sums[parameter] + before
