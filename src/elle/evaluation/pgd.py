"""FGSM and PGD as searches: a point is judged by the last iterate of each restart, and leaves when one breaks it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elle.core.attacks import SignStep
from elle.core.linearity import cross_entropy
from elle.core.precision import Precision
from elle.evaluation.autoattack.norms import Norm
from elle.evaluation.autoattack.oracle import Oracle, constant
from elle.evaluation.autoattack.slots import Slots, blank, broken_points
from elle.evaluation.units import BATCH


class PGD:
    """Restarts of normalised steps up the cross-entropy, from points drawn by torch's own generator."""

    def __init__(self, oracle: Oracle, attack: SignStep, x: Tensor, y: Tensor, eps: float, restarts: int) -> None:
        self.oracle, self.attack, self.x, self.y, self.eps = oracle, attack, x, y, eps
        # Papers mean the last iterate: there is nothing to look at before it, and one more question is about it.
        self.variants = restarts
        self.questions = self.interval = attack.steps + 1
        self._drawn, self._starts = -1, x

    def start(self, point: Tensor, variant: Tensor) -> Slots:
        """Fresh rows; a restart begins where it was drawn for all points at once, whatever slots and batches are."""
        x, y = self.x[point], self.y[point]
        x_adv = x.clone()
        for restart in sorted(set(variant.tolist())):
            while self._drawn < restart:
                self._starts, self._drawn = self.attack.first_point(self.x, self.eps), self._drawn + 1
            chosen = variant == restart
            x_adv[chosen] = self._starts[point[chosen]]
        return Slots(**blank(x, y, x_adv, self.questions))

    def step(self, slots: Slots) -> None:
        """Step on, or judge the last point."""
        answer = self.oracle.ascend(slots.x_adv, lambda logits: cross_entropy(logits, slots.y))
        slots.note(answer.logits, slots.left == 1, self.oracle.doubt(answer.logits))
        slots.x_adv.copy_(self.attack.next_point(slots.x_adv, answer.gradient, slots.x, self.eps))
        slots.left.sub_(1)


def search(
    attack: SignStep,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: float,
    *,
    norm: Norm,
    restarts: int = 1,
    precision: Precision = "fp32",
    batch: int = BATCH,
    graph: bool = False,
    compile: bool = False,
) -> Tensor:
    """x_adv [N, ...] for correctly classified x: a point of ball and box that float32 misclassifies, else x."""
    if not x.is_cuda and not compile:
        batch = min(batch, len(x))  # a CPU gains nothing from a second restart before the first has ended
    oracle = Oracle(model, x.device, precision, batch if compile else None)
    with constant(model), torch.no_grad():
        return broken_points(PGD(oracle, attack, x, y, eps, restarts), oracle, x, eps, norm, batch, graph)
