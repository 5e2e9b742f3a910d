"""The original AutoAttack, as the package pyautoattack keeps it, behind the same function as our own attacks."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elle.errors import InputError, WorkError, first_line
from elle.evaluation.autoattack.norms import Norm, per_image
from elle.evaluation.autoattack.objectives import DLR_CLASSES
from elle.evaluation.autoattack.oracle import Oracle, constant
from elle.evaluation.autoattack.registry import STANDARD, Budget, check_search
from elle.evaluation.autoattack.schedule import check_intervals
from elle.evaluation.mode import tf32

_NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}


class _Floats(nn.Module):
    """float32 in, float32 logits out, whatever autocast the caller is in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            logits: Tensor = self.model(x.float())
        return logits.float()


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
    precision: Literal["fp32", "tf32"] = "fp32",
    batch: int = 500,
    budget: Budget = STANDARD,
    channels_last: bool = False,
) -> Tensor:
    """x_adv [N, ...] of one attack of the original, seeded; x where the attack does not succeed.

    With `channels_last` the network is laid out and fused for the GPU as for our own attacks, which is faster.
    Points that TF32 misclassifies and float32 does not are attacked once more, in float32: the original lets them be.
    Random state, trace function, eval mode and TF32 are the caller's again afterwards.
    """
    check_search(name, x, y, eps, norm)
    x, y = x.detach().float(), y.long()
    if not len(x):  # which the original cannot take
        return x
    attack = _original(name, _Floats(model), x.device, eps, norm, classes, seed, budget)
    with constant(model, channels_last), _undisturbed(x.device):
        try:
            with tf32(precision == "tf32"):
                x_adv, labels = attack.run_standard_evaluation(x, y, batch_size=batch)
            broken = Oracle(model, x.device, "fp32").misclassified(x_adv, y)
            doubtful = (labels != y) & ~broken
            if precision == "tf32" and doubtful.any():
                with tf32(False):
                    x_adv[doubtful] = attack.run_standard_evaluation(x[doubtful], y[doubtful], batch_size=batch)[0]
                broken = Oracle(model, x.device, "fp32").misclassified(x_adv, y)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:  # the original asks every network for a gradient
            raise WorkError(
                f"the original {name} cannot attack this network ({first_line(problem)}); use engine=fast"
            ) from problem
    return torch.where(per_image(broken, x), x_adv, x)


def available(name: str, classes: int) -> Any:
    """The original's class; InputError where it is not installed, or cannot attack a network of so few classes."""
    try:
        from pyautoattack import AutoAttack
    except ImportError:
        raise InputError(
            "engine=reference needs the package pyautoattack; install it with `pip install 'elle-at[autoattack]'`"
        ) from None
    if name == "apgd-t" and classes < DLR_CLASSES:
        raise InputError(f"the original apgd-t needs {DLR_CLASSES} classes, here are {classes}; use engine=fast")
    return AutoAttack


def _original(
    name: str, model: nn.Module, device: torch.device, eps: float, norm: Norm, classes: int, seed: int, budget: Budget
) -> Any:
    original = available(name, classes)
    # Its warnings go to the caller's logging if there is any, not to a user's terminal.
    logging.getLogger("auto-attack").addHandler(logging.NullHandler())
    attack = original(model, norm=_NORMS[norm], eps=eps, seed=seed, device=device, version="standard")
    attack.attacks_to_run = [name]
    attack.apgd.n_restarts = budget.restarts_of(norm)
    attack.apgd_targeted.n_target_classes = budget.targets_of("apgd-t", norm, classes)
    attack.fab.n_target_classes = budget.targets_of("fab-t", norm, classes)
    for part in (attack.apgd, attack.apgd_targeted):
        part.n_iter = part.n_iter_orig = budget.steps
        part.n_iter_2, part.n_iter_min, part.size_decr = check_intervals(budget.steps)
    attack.fab.n_iter = budget.steps
    attack.square.n_queries = budget.queries
    return attack


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """The package seeds torch's generators and switches tracing off, which would end coverage and debuggers."""
    trace = sys.gettrace()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        sys.settrace(trace)
