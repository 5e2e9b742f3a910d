"""The four attacks of the standard AutoAttack, in its order, behind one function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from elle.core.attacks.checks import check_radius
from elle.core.precision import Precision
from elle.errors import InputError, nearest
from elle.evaluation.autoattack.apgd import APGD
from elle.evaluation.autoattack.fab import FAB
from elle.evaluation.autoattack.norms import Norm
from elle.evaluation.autoattack.objectives import DLR_CLASSES
from elle.evaluation.autoattack.oracle import Oracle, constant
from elle.evaluation.autoattack.slots import Attack, broken_points
from elle.evaluation.autoattack.square import Square

ORDER = ("apgd-ce", "apgd-t", "fab-t", "square")
_WITHOUT_GRADIENT = 4
"""So many more images at a time when only answers are asked for: no activations are kept."""


@dataclass(frozen=True)
class Budget:
    """How long the attacks search; the defaults are the standard AutoAttack's."""

    steps: int = 100
    """Of APGD and FAB."""
    queries: int = 5000
    """Of Square."""
    restarts: int | None = None
    """Of APGD-CE: 1, for l1 5."""
    targets: int | None = None
    """Of APGD-T and FAB-T: 9, for l1 APGD-T 5; never more than the other classes there are."""

    def restarts_of(self, norm: Norm) -> int:
        return self.restarts or (5 if norm == "l1" else 1)

    def targets_of(self, name: str, norm: Norm, classes: int) -> int:
        return min(self.targets or (5 if norm == "l1" and name == "apgd-t" else 9), classes - 1)


STANDARD = Budget()


def search(
    name: str,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: float,
    *,
    norm: Norm = "linf",
    classes: int,
    seed: int,
    precision: Precision = "fp32",
    batch: int = 500,
    graph: bool = False,
    compile: bool = False,
    budget: Budget = STANDARD,
) -> Tensor:
    """x_adv [N, ...] for correctly classified x [N, ...] in [0, 1] with labels y [N], on the model's device.

    Where the attack breaks a point, x_adv is a point within eps and [0, 1] that float32 misclassifies; elsewhere it
    is x. The search itself runs in `precision`, `batch` items at a time, if asked with the network compiled
    for full batches, and on CUDA captured in a graph.
    """
    check_search(name, x, y, eps, norm)
    x, y = x.detach().float(), y.long()
    if len(x) == 0:
        return x.clone()
    slots = batch * (_WITHOUT_GRADIENT if name == "square" else 1)
    oracle = Oracle(model, x.device, precision, slots if compile else None)
    with constant(model), torch.no_grad():
        attack = make_attack(name, oracle, x, y, eps, norm, classes, seed, budget)
        return broken_points(attack, oracle, x, eps, norm, slots, graph)


def check_search(name: str, x: Tensor, y: Tensor, eps: float, norm: Norm) -> None:
    """InputError for what no search can be about: another name would be taken for another attack, or ball."""
    for kind, value, allowed in (("attack", name, ORDER), ("norm", norm, get_args(Norm))):
        if value not in allowed:
            raise InputError(f"{kind} {value!r} does not exist{nearest(value, allowed)}; use {', '.join(allowed)}")
    try:
        check_radius(eps, norm, allow_zero=True)
    except ValueError as problem:
        raise InputError(str(problem)) from None
    if len(x) != len(y):
        raise InputError(f"{len(x)} images and {len(y)} labels cannot be attacked; there must be one label an image")
    if not bool(((x >= 0) & (x <= 1)).all()):
        raise InputError(f"images lie in {float(x.min()):.3g} to {float(x.max()):.3g}; they must lie in [0, 1]")


def make_attack(
    name: str, oracle: Oracle, x: Tensor, y: Tensor, eps: float, norm: Norm, classes: int, seed: int, budget: Budget
) -> Attack:
    """The attack, ready to be run on these points."""
    targets = budget.targets_of(name, norm, classes)
    if name == "apgd-ce":
        return APGD(oracle, x, y, eps, norm, seed=seed, steps=budget.steps, restarts=budget.restarts_of(norm))
    if name == "apgd-t":
        return APGD(oracle, x, y, eps, norm, seed=seed, steps=budget.steps, restarts=1, targets=targets)
    if name == "fab-t":
        return FAB(oracle, x, y, eps, norm, steps=budget.steps, targets=targets)
    return Square(oracle, x, y, eps, norm, seed=seed, queries=budget.queries)


def adaptations(name: str, classes: int, norm: Norm = "linf") -> list[str]:
    """In plain words, what of the standard attack does not apply to a network with so few classes."""
    notes = []
    standard, count = (STANDARD.targets_of(name, norm, number) for number in (1000, classes))
    if name in ("apgd-t", "fab-t") and count < standard:
        plural = "s" if count > 1 else ""
        notes.append(f"{name}: {count} target{plural} instead of {standard}, one for each other class")
    if name == "apgd-t" and classes < DLR_CLASSES:
        notes.append("apgd-t: the margin between two logits instead of the targeted DLR loss, which needs four")
    return notes
