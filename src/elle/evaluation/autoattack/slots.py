"""The search's work: items (point, variant) in a fixed number of slots, each left the moment its point is broken."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from elle.evaluation.autoattack.norms import Norm, per_image, settled
from elle.evaluation.autoattack.objectives import violation
from elle.evaluation.autoattack.oracle import Oracle
from elle.evaluation.capture import Captured

_GRAPH_SHRINKS_BY = 4
_WORTH_A_LOOK = 0.25
"""Share of the slots that must be through for a look before its time; until then a finished slot idles."""


@dataclass
class Slots:
    """One row for each item under way; an attack's own state is added by a subclass, a tensor a field."""

    x: Tensor
    y: Tensor
    x_adv: Tensor
    """The points to ask the network about next."""
    left: Tensor
    """At least so many questions remain [S]; 0 when the item is through."""
    x_found: Tensor
    excess: Tensor
    """How far beyond the boundary the search saw x_found [S], in doubt below 0; -inf where nothing was found."""

    def rows(self, index: Tensor) -> Self:
        return type(self)(**{field: value[index] for field, value in self._fields()})

    def put(self, index: Tensor, rows: Self) -> None:
        for field, value in self._fields():
            value[index] = getattr(rows, field)

    def note(self, logits: Tensor, allowed: Tensor, doubt: Tensor) -> None:
        """Remember x_adv where it is allowed, misclassified as far as can be seen, and further beyond than x_found."""
        # No number is no answer: as near as can be seen, and looked at exactly if nothing better is found.
        excess = torch.where(logits.isnan().any(1), 0.0, violation(logits, self.y))
        better = allowed & (self.left > 0) & (excess >= -doubt) & (excess > self.excess)
        replace_rows(self.x_found, better, self.x_adv)
        replace_rows(self.excess, better, excess)

    def _fields(self) -> Iterator[tuple[str, Tensor]]:
        return ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))


def replace_rows(field: Tensor, where: Tensor, values: Tensor) -> None:
    """Write the rows of `values` that are chosen into `field`, in place."""
    field.copy_(torch.where(per_image(where, field), values, field))


def blank(x: Tensor, y: Tensor, x_adv: Tensor, questions: int) -> dict[str, Any]:
    """The common fields of fresh rows."""
    left = torch.full_like(y, questions)
    excess = torch.full((len(x),), float("-inf"), device=x.device)
    return {"x": x, "y": y, "x_adv": x_adv, "left": left, "x_found": x.clone(), "excess": excess}


class Attack(Protocol):
    """An attack as `broken_points` runs it."""

    variants: int
    """Items a point: targets times restarts."""
    questions: int
    """An item asks the network at least so often."""
    interval: int
    """Questions between two looks at the slots; only a look makes the host wait for the device."""

    def start(self, point: Tensor, variant: Tensor) -> Any:
        """Fresh rows for these items."""

    def step(self, slots: Any) -> None:
        """One question to the network for every row and the move it leads to, in place, without waiting."""


def broken_points(attack: Attack, oracle: Oracle, x: Tensor, eps: float, norm: Norm, batch: int, graph: bool) -> Tensor:
    """x_adv [N, ...], N > 0: a point of ball and box that float32 misclassifies where one was found, else x."""
    x_adv = x.clone()
    broken = np.zeros(len(x), dtype=bool)
    items = len(x) * attack.variants
    # As many slots as make the rounds equally full, unless the network was compiled for full ones.
    count = batch if oracle.compiled_for else math.ceil(items / math.ceil(items / batch))
    # All points with their first variant come first: what breaks early spares its other items.
    queue = ((point, variant) for variant in range(attack.variants) for point in range(len(x)) if not broken[point])
    points, rows = _fresh(attack, list(itertools.islice(queue, count)), x.device)
    busy = np.ones(len(points), dtype=bool)
    step = _stepper(attack, rows, graph)
    questions = min(attack.interval, attack.questions)
    while busy.any():
        for _ in range(questions):
            step()
        left, excess = torch.stack((rows.left.double(), rows.excess.double())).cpu().numpy()  # waits for the device
        seen = np.flatnonzero(busy & (excess > float("-inf")) & ~broken[points])
        if len(seen):
            slot = _index(seen, x)
            found = settled(rows.x_found[slot], rows.x[slot], eps, norm)
            sure = oracle.misclassified(found, rows.y[slot]).cpu().numpy()  # waits
            rows.excess[slot] = float("-inf")
            # Of several slots that broke one point the first counts: the choice must not be the device's.
            new, first = np.unique(points[seen[sure]], return_index=True)
            x_adv[_index(new, x)] = found[_index(np.flatnonzero(sure)[first], x)]
            broken[new] = True
        busy &= (left > 0) & ~broken[points]
        _refill(attack, rows, points, busy, left, queue)
        if _worth_shrinking(busy, graph):
            keep = np.flatnonzero(busy)
            rows = rows.rows(_index(keep, x))
            points, left, busy = points[keep], left[keep], busy[keep]
            step = _stepper(attack, rows, graph)
        if busy.any():
            questions = int(min(attack.interval, np.quantile(left[busy], _WORTH_A_LOOK)))
    return x_adv


def _index(numbers: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    """The numbers of rows where these are to be looked up."""
    return torch.from_numpy(numbers).to(like.device)


def _fresh(attack: Attack, items: list[tuple[int, int]], device: torch.device) -> tuple[np.ndarray[Any, Any], Any]:
    points, variants = np.array(items, dtype=np.int64).T
    return points.copy(), attack.start(torch.tensor(points, device=device), torch.tensor(variants, device=device))


def _refill(
    attack: Attack,
    rows: Any,
    points: np.ndarray[Any, Any],
    busy: np.ndarray[Any, Any],
    left: np.ndarray[Any, Any],
    queue: Iterator[tuple[int, int]],
) -> None:
    """Give the free slots the next items of points that still stand, in place."""
    free = np.flatnonzero(~busy)
    items = list(itertools.islice(queue, len(free)))
    if not items:
        return
    free = free[: len(items)]
    new_points, new_rows = _fresh(attack, items, rows.x.device)
    rows.put(_index(free, rows.x), new_rows)
    points[free], busy[free], left[free] = new_points, True, attack.questions


def _worth_shrinking(busy: np.ndarray[Any, Any], graph: bool) -> bool:
    """Without a graph always; a new graph costs a few steps, so only when most slots are idle."""
    if not busy.any():
        return False
    return int(busy.sum()) * (_GRAPH_SHRINKS_BY if graph else 1) <= len(busy) and not busy.all()


def _stepper(attack: Attack, rows: Any, graph: bool) -> Callable[[], None]:
    def step() -> None:
        attack.step(rows)

    return Captured(step, rows.x.device) if graph and rows.x.device.type == "cuda" else step
