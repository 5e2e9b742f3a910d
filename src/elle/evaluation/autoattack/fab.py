"""FAB, targeted (Croce and Hein, arXiv 1907.02044): the nearest point on the other side of the decision boundary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from elle.evaluation.autoattack.hyperplane import shortest_way
from elle.evaluation.autoattack.norms import Norm, length
from elle.evaluation.autoattack.objectives import difference, runners_up, violation
from elle.evaluation.autoattack.oracle import Oracle
from elle.evaluation.autoattack.slots import Slots, blank, replace_rows

_OVERSHOOT, _BACK, _MOST_TO_X = 1.05, 0.9, 0.1
_BEYOND = 0.5
"""Of what rounding may hide; nothing in float32."""


@dataclass
class FABSlots(Slots):
    target: Tensor


class FAB:
    """One item a target."""

    interval = 5

    def __init__(
        self, oracle: Oracle, x: Tensor, y: Tensor, eps: float, norm: Norm, *, steps: int, targets: int
    ) -> None:
        self.oracle, self.x, self.y, self.eps, self.norm = oracle, x, y, eps, norm
        self.variants = targets
        self.targets = runners_up(oracle.exact(x), y, targets)
        self.questions = steps

    def start(self, point: Tensor, variant: Tensor) -> FABSlots:
        x = self.x[point]
        return FABSlots(**blank(x, self.y[point], x.clone(), self.questions), target=self.targets[point, variant])

    def step(self, slots: FABSlots) -> None:
        """Move to the linearised boundary; from beyond the true one, come back a tenth of the way to x."""
        answer = self.oracle.ascend(slots.x_adv, lambda logits: difference(logits, slots.y, slots.target))
        # Rounding hides a boundary that is too near: the search would stand still before it. Aim a little beyond.
        aim = answer.value - _BEYOND * self.oracle.doubt(answer.logits)
        slots.x_adv.copy_(self._moved(slots, aim, answer.gradient))
        logits = self.oracle.logits(slots.x_adv)
        slots.note(logits, length(slots.x_adv - slots.x, self.norm) <= self.eps, self.oracle.doubt(logits))
        back = slots.x + _BACK * (slots.x_adv - slots.x)
        replace_rows(slots.x_adv, violation(logits, slots.y) > 0, back)
        slots.left.sub_(1).clamp_(min=0)

    def _moved(self, slots: FABSlots, value: Tensor, gradient: Tensor) -> Tensor:
        """(1 - a) (x_adv + 1.05 d) + a (x + 1.05 d_x), d and d_x the ways to the linearised boundary from x_adv and x.

        a = min(|d| / (|d| + |d_x|), 0.1) draws the iterate towards x.
        """
        x_adv, x, slope = slots.x_adv.flatten(1), slots.x.flatten(1), gradient.flatten(1)
        value_at_x = value + (slope * (x - x_adv)).sum(1)
        ways = shortest_way(torch.cat((x_adv, x)), torch.cat((slope, slope)), torch.cat((value, value_at_x)), self.norm)
        here, there = length(ways, self.norm).clamp(min=1e-8).unsqueeze(1).chunk(2)
        share = (here / (here + there)).clamp(max=_MOST_TO_X)
        way, way_of_x = ways.chunk(2)
        moved = (1 - share) * (x_adv + _OVERSHOOT * way) + share * (x + _OVERSHOOT * way_of_x)
        return moved.clamp(0, 1).view_as(slots.x)
