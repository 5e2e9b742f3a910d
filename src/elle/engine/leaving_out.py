"""Steps that leave out what their penalty does not need: its backward, or all of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from elle.core.controller import OnOff
from elle.engine.step import Penalty, Step

Run = Callable[[Tensor], None]
"""A step as a function of the images' index, perhaps captured in a CUDA graph."""


def leaves_out(step: Step) -> bool:
    """Whether some steps of the method need no penalty, or no backward of it: `every` above 1, or `negligible`."""
    rule = step.method.weight
    return rule is not None and (rule.every > 1 or (isinstance(rule, OnOff) and rule.negligible > 0))


class LeavingOut:
    """Runs each step in the cheapest form that its rule allows; `prepare` makes a form ready, when first wanted.

    Which one is a function of the training's state alone, so an interrupted run takes the same steps. The weight of a
    step is known when the last step before it that sees an error has ended: it is copied to the host behind that one,
    and the host, with the next batch already at hand, waits for this copy alone. Between the two are, with `every`
    above 1, steps without a penalty, which the device has yet to do: it is not idle meanwhile.
    """

    def __init__(self, step: Step, prepare: Callable[[Run], Run]) -> None:
        self.step, self.prepare = step, prepare
        self.forms: dict[Penalty, Run] = {}
        self.done: int | None = None
        self.on_host = torch.zeros((), pin_memory=step.device.type == "cuda")
        self.copied = torch.cuda.Event() if step.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, index: Tensor) -> None:
        if self.done is None:
            # Read at the first step, not before: a run may be restored from a checkpoint until then.
            self.done = int(self.step.done)
            self._copy()
        form = self._form(self.done)
        if form not in self.forms:
            self.forms[form] = self.prepare(partial(self.step, penalty=form))
        self.forms[form](index)
        self.done += 1
        if form != "left out":
            self._copy()

    def _form(self, done: int) -> Penalty:
        rule = self.step.method.weight
        assert rule is not None
        if done % rule.every:
            return "left out"
        if not isinstance(rule, OnOff) or not rule.negligible:
            return "trained"
        return "measured" if self._weight() < rule.negligible * rule.value else "trained"

    def _copy(self) -> None:
        self.on_host.copy_(self.step.rule["weight"], non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def _weight(self) -> float:
        if self.copied is not None:
            self.copied.synchronize()
        return float(self.on_host)
