"""APGD's plan, one row a question to the network: when it starts afresh, checks its step, and in which ball it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from elle.evaluation.autoattack.norms import Norm

_L1_CHECK = 0.04


@dataclass(frozen=True)
class Plan:
    """Tensors [Q + 1], the last row for slots that are through."""

    fresh: Tensor
    """The first question of a phase: its answer is not compared with an earlier one."""
    window: Tensor
    """At a check, the steps since the last one; otherwise 0."""
    radius: Tensor
    """In units of eps."""
    final: Tensor
    """Whether a success at this question counts, that is, lies in the ball of eps."""
    ends: Tensor
    """The last question of a phase."""

    @property
    def questions(self) -> int:
        return len(self.fresh) - 1


def check_intervals(steps: int) -> tuple[int, int, int]:
    """Steps before the first check, the fewest between two, and by how many an interval is shorter than the last."""
    first, fewest, shortened_by = (max(int(share * steps), 1) for share in (0.22, 0.06, 0.03))
    return first, fewest, shortened_by


def checkpoints(steps: int) -> dict[int, int]:
    """Step -> steps since the last check: p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06) (arXiv 2003.01690, 3.1)."""
    interval, fewest, shortened_by = check_intervals(steps)
    found: dict[int, int] = {}
    step = interval
    while step <= steps:
        found[step] = interval
        interval = max(interval - shortened_by, fewest)
        step += interval
    return found


def plan(steps: int, norm: Norm, device: torch.device) -> Plan:
    """One phase for linf and l2; for l1 three, in balls of 3, 2 and 1 eps, for 30, 30 and 40 % of the steps.

    A phase of n steps asks n + 1 questions: one at its start.
    """
    if norm == "l1":
        early = math.ceil(0.3 * steps)
        phases = [(3.0, early), (2.0, early), (1.0, max(steps - 2 * early, 0))]
    else:
        phases = [(1.0, steps)]
    rows: list[tuple[bool, int, float, bool, bool]] = []
    for radius, length in phases:
        if norm == "l1":
            interval = max(int(_L1_CHECK * length), 1)
            checks = dict.fromkeys(range(interval, length + 1, interval), interval)
        else:
            checks = checkpoints(length)
        rows += [(step == 0, checks.get(step, 0), radius, radius == 1.0, step == length) for step in range(length + 1)]
    rows.append((False, 0, 1.0, False, False))
    return Plan(*(torch.tensor(column, device=device) for column in zip(*rows, strict=True)))
