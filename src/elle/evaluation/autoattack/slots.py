"""The search's work: items (point, variant) in a fixed number of slots, each left the moment its point is broken."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from elle.evaluation.autoattack.norms import Norm, per_image, settled
from elle.evaluation.autoattack.objectives import violation
from elle.evaluation.autoattack.oracle import Oracle
from elle.evaluation.capture import Captured

_POOLS = 2
"""In which the slots are on a GPU; see `_Pool`."""
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
        self.x_found.copy_(torch.where(per_image(better, self.x), self.x_adv, self.x_found))
        self.excess.copy_(torch.where(better, excess, self.excess))

    def note_last(self, x_best: Tensor) -> None:
        """Have a finished item's last point looked at exactly, if the search did not ask about it itself."""
        last = (self.left <= 0) & (self.excess == float("-inf"))
        self.x_found.copy_(torch.where(per_image(last, self.x), x_best, self.x_found))
        self.excess.masked_fill_(last, 0.0)

    def _fields(self) -> Iterator[tuple[str, Tensor]]:
        return ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))


def blank(x: Tensor, y: Tensor, x_adv: Tensor, questions: int) -> dict[str, Any]:
    """The common fields of fresh rows."""
    left = torch.full_like(y, questions)
    excess = torch.full((len(x),), float("-inf"), device=x.device)
    return {"x": x, "y": y, "x_adv": x_adv, "left": left, "x_found": x.clone(), "excess": excess}


class Attack(Protocol):
    """What `broken_points` needs of an attack."""

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
    """x_adv [N, ...]: a point of ball and box that float32 misclassifies where one was found, else x."""
    search = _Search(attack, oracle, x, eps, norm, graph)
    pools = search.pools(batch)
    for pool in pools:
        pool.go_on()
    while pools:
        for pool in pools:
            search.look_at(pool)
            if pool.busy.any():
                pool.go_on()
        pools = [pool for pool in pools if pool.busy.any()]
    return search.x_adv


class _Pool:
    """Slots that step and are looked at together.

    On a GPU a pool has a stream of its own: while the host looks at one, the device works on another.
    """

    def __init__(self, attack: Attack, items: list[tuple[int, int]], device: torch.device, graph: bool, number: int):
        self.attack, self.device, self.graph = attack, device, graph
        self.stream = _stream(device, number) if graph else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        with self.current():
            self.points, self.rows = _fresh(attack, items, device)
            self._prepare()
        self.busy = np.ones(len(items), dtype=bool)
        self.questions = min(attack.interval, attack.questions)
        """To ask before the next look."""

    def current(self) -> contextlib.AbstractContextManager[object]:
        """Around all work of the pool."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _prepare(self) -> None:
        rows = self.rows

        def step() -> None:
            self.attack.step(rows)

        self.step = Captured(step, self.device) if self.graph else step

    def go_on(self) -> None:
        """Without waiting for the device."""
        with self.current():
            for _ in range(self.questions):
                self.step()

    def state(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Each slot's `left` and `excess`; waits for the pool's own stream."""
        left, excess = torch.stack((self.rows.left.double(), self.rows.excess.double())).cpu().numpy()
        return left, excess

    def refill(self, left: np.ndarray[Any, Any], queue: Iterator[tuple[int, int]]) -> None:
        """Give the free slots the next items of points that still stand, and drop slots where none are left."""
        free = np.flatnonzero(~self.busy)
        items = list(itertools.islice(queue, len(free)))
        if items:
            free = free[: len(items)]
            new_points, new_rows = _fresh(self.attack, items, self.device)
            self.rows.put(torch.from_numpy(free).to(self.device), new_rows)
            self.points[free], self.busy[free], left[free] = new_points, True, self.attack.questions
        if _worth_shrinking(self.busy, self.graph):
            keep = np.flatnonzero(self.busy)
            self.rows = self.rows.rows(torch.from_numpy(keep).to(self.device))
            self.points, left, self.busy = self.points[keep], left[keep], self.busy[keep]
            self._prepare()
        if self.busy.any():
            self.questions = int(min(self.attack.interval, np.quantile(left[self.busy], _WORTH_A_LOOK)))


class _Search:
    """What the pools of one search share: the items still to come, and what has been found."""

    def __init__(self, attack: Attack, oracle: Oracle, x: Tensor, eps: float, norm: Norm, graph: bool) -> None:
        self.attack, self.oracle, self.eps, self.norm = attack, oracle, eps, norm
        self.graph = graph and x.device.type == "cuda"
        self.x_adv = x.clone()
        self.broken = np.zeros(len(x), dtype=bool)
        self.queue = self._items()

    def _items(self) -> Iterator[tuple[int, int]]:
        """All points with their first variant come first: what breaks early spares its other items."""
        points = range(len(self.broken))
        return (
            (point, variant) for variant in range(self.attack.variants) for point in points if not self.broken[point]
        )

    def pools(self, batch: int) -> list[_Pool]:
        """`batch` slots in all, fewer where that makes the rounds equally full, in pools of the same size."""
        items = len(self.broken) * self.attack.variants
        if items == 0:
            return []
        count = pool_count(batch, self.graph)
        rounds = math.ceil(items / batch)
        # A network that was compiled was so for full pools.
        size = batch // count if self.oracle.compiled_for else math.ceil(items / (rounds * count))
        parts = [list(itertools.islice(self.queue, size)) for _ in range(count)]
        device = self.x_adv.device
        return [_Pool(self.attack, part, device, self.graph, number) for number, part in enumerate(parts) if part]

    def look_at(self, pool: _Pool) -> None:
        """Verify what the pool found since the last look, and give its free slots new items."""
        with pool.current():
            left, excess = pool.state()  # waits for the device
            seen = np.flatnonzero(pool.busy & (excess > float("-inf")) & ~self.broken[pool.points])
            if len(seen):
                self._verify(pool, seen)
            pool.busy &= (left > 0) & ~self.broken[pool.points]
            pool.refill(left, self.queue)
        if pool.stream is not None and not pool.busy.any():
            torch.cuda.current_stream(self.x_adv.device).wait_stream(pool.stream)

    def _verify(self, pool: _Pool, seen: np.ndarray[Any, Any]) -> None:
        """Count those of the slots seen beyond the boundary whose points float32 misclassifies."""
        rows, device = pool.rows, self.x_adv.device
        slot = torch.from_numpy(seen).to(device)
        found = settled(rows.x_found[slot], rows.x[slot], self.eps, self.norm)
        sure = self.oracle.misclassified(found, rows.y[slot]).cpu().numpy()  # waits
        rows.excess[slot] = float("-inf")
        # Of several slots that broke one point the first counts: the choice must not be the device's.
        new, first = np.unique(pool.points[seen[sure]], return_index=True)
        chosen = torch.from_numpy(np.flatnonzero(sure)[first]).to(device)
        self.x_adv[torch.from_numpy(new).to(device)] = found[chosen]
        self.broken[new] = True


def pool_count(batch: int, graph: bool) -> int:
    """In how many pools so many slots are, on a GPU in graphs or not."""
    return min(_POOLS, batch) if graph else 1


@functools.cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """The same for every search: memory that one has done with stays with its stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _fresh(attack: Attack, items: list[tuple[int, int]], device: torch.device) -> tuple[np.ndarray[Any, Any], Any]:
    points, variants = np.array(items, dtype=np.int64).T
    return points.copy(), attack.start(torch.tensor(points, device=device), torch.tensor(variants, device=device))


def _worth_shrinking(busy: np.ndarray[Any, Any], graph: bool) -> bool:
    """Without a graph always; a new graph costs a few steps, so only when most slots are idle."""
    if not busy.any():
        return False
    return int(busy.sum()) * (_GRAPH_SHRINKS_BY if graph else 1) <= len(busy) and not busy.all()
