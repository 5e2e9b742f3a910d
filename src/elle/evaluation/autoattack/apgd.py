"""APGD (arXiv 2003.01690; for l1 2103.01208): projected gradient steps that choose their own length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from elle.core.linearity import cross_entropy
from elle.evaluation.autoattack import noise
from elle.evaluation.autoattack.norms import Norm, inside, per_image, unit
from elle.evaluation.autoattack.objectives import runners_up, targeted_dlr
from elle.evaluation.autoattack.oracle import Oracle
from elle.evaluation.autoattack.schedule import Plan, plan
from elle.evaluation.autoattack.slots import Slots, blank, replace_rows

_MOMENTUM = 0.75
_ENOUGH_RISES = 0.75
"""The step is halved when the objective rose in at most this share of the steps since the last check."""
_L1_SPARSITY, _L1_SHORTER, _L1_SHORTEST = 1.5, 1.5, 10.0


@dataclass
class APGDSlots(Slots):
    target: Tensor
    question: Tensor
    """Index of the plan's row [S]."""
    x_best: Tensor
    gradient_best: Tensor
    value_best: Tensor
    alpha: Tensor


@dataclass
class MomentumSlots(APGDSlots):
    """linf and l2."""

    x_before: Tensor
    value_before: Tensor
    rises: Tensor
    value_at_check: Tensor
    halved: Tensor
    """Whether the last check halved the step."""


@dataclass
class SparseSlots(APGDSlots):
    """l1."""

    support: Tensor
    """Nonzero entries of the best perturbation at the last check [S]."""
    share: Tensor
    """Share of the entries that the next step moves [S]."""


class APGD:
    """`variants` items a point: untargeted restarts on the cross-entropy, or one item a target on the targeted DLR."""

    interval = 5

    def __init__(
        self,
        oracle: Oracle,
        x: Tensor,
        y: Tensor,
        eps: float,
        norm: Norm,
        *,
        seed: int,
        steps: int,
        restarts: int,
        targets: int = 0,
    ) -> None:
        self.oracle, self.x, self.y, self.eps, self.norm, self.seed = oracle, x, y, eps, norm, seed
        self.restarts = restarts
        self.variants = restarts * max(targets, 1)
        self.targets = runners_up(oracle.exact(x), y, targets) if targets else None
        self.plan: Plan = plan(steps, norm, x.device)
        self.questions = self.plan.questions

    def start(self, point: Tensor, variant: Tensor) -> APGDSlots:
        x, y = self.x[point], self.y[point]
        key = noise.keys(self.seed, 0, point + (variant << 32))
        x_adv = self._random_start(x, key)
        value = torch.zeros(len(x), device=x.device)
        common = blank(x, y, x_adv, self.questions) | {
            "target": y if self.targets is None else self.targets[point, variant // self.restarts],
            "question": torch.zeros_like(point),
            "x_best": x_adv.clone(),
            "gradient_best": torch.zeros_like(x),
            "value_best": value.clone(),
            "alpha": value.clone(),
        }
        if self.norm == "l1":
            return SparseSlots(**common, support=value.clone(), share=value.clone())
        return MomentumSlots(
            **common,
            x_before=x_adv.clone(),
            value_before=value.clone(),
            rises=value.clone(),
            value_at_check=value.clone(),
            halved=torch.zeros_like(value, dtype=torch.bool),
        )

    def _random_start(self, x: Tensor, key: Tensor) -> Tensor:
        shape = tuple(x.shape[1:])
        if self.norm == "linf":
            return (x + self.eps * unit(2 * noise.uniform(key, shape) - 1, "linf")).clamp(0, 1)
        step = noise.normal(key, shape)
        if self.norm == "l2":
            return (x + self.eps * unit(step, "l2")).clamp(0, 1)
        radius = self.plan.radius[0] * self.eps
        return inside(x + step, x, per_image(radius.expand(len(x)), x), "l1")

    def _objective(self, slots: APGDSlots) -> Callable[[Tensor], Tensor]:
        if self.targets is None:
            return lambda logits: cross_entropy(logits, slots.y)
        return lambda logits: targeted_dlr(logits, slots.y, slots.target)

    def step(self, slots: APGDSlots) -> None:
        question = slots.question
        fresh, window, ends = self.plan.fresh[question], self.plan.window[question], self.plan.ends[question]
        radius = self.plan.radius[question] * self.eps
        answer = self.oracle.ascend(slots.x_adv, self._objective(slots))
        slots.note(answer.logits, self.plan.final[question], self.oracle.doubt(answer.logits))

        better = fresh | (answer.value > slots.value_best)
        replace_rows(slots.x_best, better, slots.x_adv)
        replace_rows(slots.gradient_best, better, answer.gradient)
        replace_rows(slots.value_best, better, answer.value)

        if isinstance(slots, MomentumSlots):
            back = self._checked(slots, answer.value, fresh, window)
        else:
            assert isinstance(slots, SparseSlots)
            back = self._checked_l1(slots, fresh, window, radius)
        x_adv = torch.where(per_image(back, slots.x), slots.x_best, slots.x_adv)
        gradient = torch.where(per_image(back, slots.x), slots.gradient_best, answer.gradient)
        if isinstance(slots, MomentumSlots):
            moved = self._moved(slots, x_adv, gradient, fresh, radius)
        else:
            moved = self._moved_l1(slots, x_adv, gradient, radius)
            # The next phase starts at this one's best point, brought into its smaller ball.
            smaller = per_image(self.plan.radius[(question + 1).clamp(max=self.questions)] * self.eps, slots.x)
            moved = torch.where(per_image(ends, moved), inside(slots.x_best, slots.x, smaller, "l1"), moved)
        slots.x_adv.copy_(moved)
        question.add_(1).clamp_(max=self.questions)
        slots.left.copy_(self.questions - question)

    def _checked(self, slots: MomentumSlots, value: Tensor, fresh: Tensor, window: Tensor) -> Tensor:
        """Halve the step of those that rise too seldom or stand still, and send them back to their best point."""
        slots.alpha.masked_fill_(fresh, 2 * self.eps)
        slots.halved.masked_fill_(fresh, True)
        replace_rows(slots.value_at_check, fresh, value)
        # As in the original, the first step's value is compared with 0 and not with the start's.
        slots.rises.add_(value > slots.value_before).masked_fill_(fresh, 0)
        slots.value_before.copy_(value.masked_fill(fresh, 0.0))
        check = window > 0
        seldom = slots.rises <= _ENOUGH_RISES * window
        still = ~slots.halved & (slots.value_at_check >= slots.value_best)
        back = check & (seldom | still)
        replace_rows(slots.halved, check, back)
        replace_rows(slots.value_at_check, check, slots.value_best)
        slots.rises.masked_fill_(check, 0)
        slots.alpha.copy_(torch.where(back, slots.alpha / 2, slots.alpha))
        return back

    def _moved(self, slots: MomentumSlots, x_adv: Tensor, gradient: Tensor, fresh: Tensor, radius: Tensor) -> Tensor:
        """x + a (P(x + alpha g) - x) + (1 - a) (x - x_before), a = 0.75, and a = 1 at the start (eqs. 3 and 4)."""
        replace_rows(slots.x_before, fresh, x_adv)
        limit, alpha = per_image(radius, x_adv), per_image(slots.alpha, x_adv)
        share = per_image(torch.where(fresh, 1.0, _MOMENTUM), x_adv)
        direction = gradient.sign() if self.norm == "linf" else unit(gradient, "l2")
        ahead = inside(x_adv + alpha * direction, slots.x, limit, self.norm)
        moved = x_adv + share * (ahead - x_adv) + (1 - share) * (x_adv - slots.x_before)
        slots.x_before.copy_(x_adv)
        return inside(moved, slots.x, limit, self.norm)

    def _checked_l1(self, slots: SparseSlots, fresh: Tensor, window: Tensor, radius: Tensor) -> Tensor:
        """Follow the sparsity of the best perturbation; where it falls, restart there with the full step."""
        pixels = slots.x[0].numel()
        support = (slots.x_best != slots.x).flatten(1).sum(1).to(torch.float32)
        check = (window > 0) | fresh
        back = check & ~fresh & (support < 0.95 * slots.support)
        shorter = torch.maximum(slots.alpha / _L1_SHORTER, radius / _L1_SHORTEST)
        slots.alpha.copy_(torch.where(back | fresh, radius, torch.where(check, shorter, slots.alpha)))
        replace_rows(slots.share, check, support / pixels / _L1_SPARSITY)
        replace_rows(slots.support, check, support)
        return back

    def _moved_l1(self, slots: SparseSlots, x_adv: Tensor, gradient: Tensor, radius: Tensor) -> Tensor:
        """A step of length alpha, equal in all entries among the `share` with the largest derivatives."""
        size = gradient.abs().flatten(1)
        pixels = size.shape[1]
        rank = ((1 - slots.share) * pixels).clamp(0, pixels - 1).long()
        least = size.sort(1).values.gather(1, rank.unsqueeze(1))
        direction = gradient.sign() * (size >= least).view_as(gradient)
        count = per_image(direction.abs().flatten(1).sum(1) + 1e-10, x_adv)
        return inside(
            x_adv + per_image(slots.alpha, x_adv) * direction / count, slots.x, per_image(radius, x_adv), "l1"
        )
