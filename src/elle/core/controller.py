"""The weight of the regulariser (lambda in the paper): state in, state out, all tensors, no host synchronisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

State = dict[str, Tensor]


def _check_weight(value: float, every: int) -> None:
    if not (isinstance(value, Real) and 0 <= value < float("inf")):
        raise ValueError(f"weight is {value!r}; it must be a finite number, 0 or more")
    if every < 1:
        raise ValueError(f"every is {every}; it must be at least 1")


@dataclass(frozen=True)
class Constant:
    """The same weight at every step: ELLE."""

    value: float
    every: int = 1
    """The penalty is part of every so-many-th step only, with this weight there."""

    def __post_init__(self) -> None:
        _check_weight(self.value, self.every)

    def start(self, device: torch.device | str = "cpu") -> State:
        """The state before the first step."""
        return {
            "weight": torch.tensor(float(self.value), device=device),
            "threshold": torch.tensor(float("inf"), device=device),
        }

    def update(self, state: State, error: Tensor) -> State:
        """The state after seeing this step's error: of a rule that was saved with another value, this one's."""
        return state | {"weight": torch.full_like(state["weight"], self.value)}

    def acting(self, before: State, after: State) -> Tensor:
        """The weight of a step, from the states before and after it saw the step's error."""
        return after["weight"]


@dataclass(frozen=True)
class OnOff:
    """ELLE-A (Algorithm 1): jump to the maximum when the error leaves its history, decay otherwise.

    weight <- maximum if error > mean(history) + sensitivity * std(history), else decay * weight.
    The first errors only fill the history: a jump needs more than two of them.
    """

    value: float
    """The weight it jumps to (lambda_max)."""
    decay: float = 0.99
    sensitivity: float = 2.0
    history: int | None = None
    """How many past errors to compare with; None is all of them."""
    next_step: bool = False
    """A step's error sets the weight of the next step instead of its own, as in the authors' code for CIFAR."""
    negligible: float = 0.0
    """A weight below this share of `value` acts as 0, and the backward through the error is left out; 0: never.

    What a step loses is a gradient shorter than negligible * value * |gradient of the error|. Needs `next_step`: what
    to leave out has to be known before the step.
    """
    every: int = 1
    """The error is measured at every so-many-th step; those between have no penalty and leave the weight as it is."""
    ramp: int = 0
    """Steps over which the weight it jumps to rises from 0, anew in each phase (the ImageNet scripts: 2,500)."""

    def __post_init__(self) -> None:
        _check_weight(self.value, self.every)
        if not (isinstance(self.decay, Real) and 0 <= self.decay <= 1):
            raise ValueError(f"decay is {self.decay!r}; it must be a number from 0 to 1")
        if not (isinstance(self.sensitivity, Real) and math.isfinite(self.sensitivity)):
            raise ValueError(f"sensitivity is {self.sensitivity!r}; it must be a finite number")
        if self.history is not None and not (isinstance(self.history, int) and self.history >= 3):
            raise ValueError(
                f"history is {self.history!r}; it is a whole number of past errors, at least 3; left out, all"
            )
        if not 0 <= self.negligible <= 1:
            raise ValueError(f"negligible is {self.negligible}; it must be from 0 to 1")
        if self.negligible and not self.next_step:
            raise ValueError("negligible needs next_step=true: a step must know its weight before it begins")
        if self.ramp < 0:
            raise ValueError(f"ramp is {self.ramp}; it is a number of steps, 0 or more")

    def start(self, device: torch.device | str = "cpu") -> State:
        """The state before the first step."""
        state = Constant(0).start(device)
        state["count"] = torch.zeros((), device=device)
        if self.ramp:
            state["since"] = torch.zeros((), device=device)
        if self.history is None:
            # Welford's running mean and sum of squared deviations: the whole history in two numbers.
            return state | {"mean": torch.zeros((), device=device), "spread": torch.zeros((), device=device)}
        return state | {"recent": torch.zeros(self.history, device=device)}

    def update(self, state: State, error: Tensor) -> State:
        """The state after seeing this step's error."""
        error = error.float()
        mean, deviation = self._statistics(state)
        enough = state["count"] > 2
        threshold = torch.where(enough, mean + self.sensitivity * deviation, torch.inf)
        since, highest = self._ramped(state)
        weight = torch.where(error > threshold, highest, self.decay * state["weight"])
        # An overflow in half precision may trigger the jump but must not spoil the statistics for good.
        remembered = self._remember(state, error)
        finite = error.isfinite()
        kept = {name: torch.where(finite, value, state[name]) for name, value in remembered.items()}
        return kept | since | {"weight": weight, "threshold": threshold}

    def _ramped(self, state: State) -> tuple[State, Tensor | float]:
        """The steps of this phase with the one at hand, and the weight that it may jump to."""
        if not self.ramp:
            return {}, self.value
        since = state["since"] + self.every  # the steps without an error pass as well
        return {"since": since}, self.value * (since / self.ramp).clamp(max=1)

    def begin_phase(self, state: State) -> None:
        """Have the ramp start anew, in place."""
        if self.ramp:
            state["since"].zero_()

    def acting(self, before: State, after: State) -> Tensor:
        """The weight of a step, from the states before and after it saw the step's error."""
        return before["weight"] if self.next_step else after["weight"]

    def _statistics(self, state: State) -> tuple[Tensor, Tensor]:
        count = state["count"]
        if self.history is None:
            return state["mean"], (state["spread"] / count.clamp(min=1)).sqrt()
        filled = (torch.arange(self.history, device=count.device) < count).float()
        total = filled.sum().clamp(min=1)
        mean = (state["recent"] * filled).sum() / total
        return mean, ((state["recent"] - mean).square() * filled).sum().div(total).sqrt()

    def _remember(self, state: State, error: Tensor) -> State:
        count = state["count"] + 1
        if self.history is None:
            before = error - state["mean"]
            mean = state["mean"] + before / count
            return {"count": count, "mean": mean, "spread": state["spread"] + before * (error - mean)}
        slot = torch.arange(self.history, device=count.device) == state["count"] % self.history
        return {"count": count, "recent": torch.where(slot, error, state["recent"])}
