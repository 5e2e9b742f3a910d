"""Gradient-step attacks on many points: one leaves the batch the moment it is broken, and the next takes its place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elle.core.attacks import SignStep, logits_and_gradient
from elle.evaluation.mode import Precision, exact_float32, is_wrong, reduced


class Pool:
    """A batch of slots, each with a point and a restart of its own; a point is broken if any iterate breaks it.

    The search runs in `precision` (None: as the caller has set it) and what it finds counts once the network
    is wrong there in float32 too. With `graph` the batch has a fixed size and a step is one CUDA graph, kept from one
    call to the next.
    """

    WARM_UP = 3

    def __init__(
        self,
        model: nn.Module,
        attack: SignStep,
        eps: float,
        *,
        batch: int = 512,
        precision: Precision | None = None,
        graph: bool = False,
    ) -> None:
        self.model, self.attack, self.eps = model, attack, eps
        self.batch, self.precision, self.graphed = batch, precision, graph
        self.graph: torch.cuda.CUDAGraph | None = None
        self.x = self.x_adv = self.x_found = self.y = self.found = torch.empty(0)

    def __call__(self, x: Tensor, y: Tensor, restarts: int = 1) -> Tensor:
        """For each of the points x [N, ...], which are classified correctly: an adversarial point, or x itself."""
        result, broken = x.clone(), torch.zeros(len(x), dtype=torch.bool)
        # Restart by restart, so that most points that are easily broken never see their second one.
        queue = torch.arange(len(x) * restarts)
        starts = _Starts(self.attack, x, self.eps)
        self._make_slots(x, y)
        # Kept on the host, where they cost no synchronisation: whose slot it is (-1: nobody's) and its steps so far.
        point = torch.full((len(self.x),), -1)
        age = torch.zeros_like(point)
        look = self._steps_between_looks()
        while True:
            free = (point < 0).nonzero().squeeze(1)
            queue = queue[~broken[queue % len(x)]]
            taken, queue = queue[: len(free)], queue[len(free) :]
            slots = free[: len(taken)]
            for restart in sorted(set((taken // len(x)).tolist())):
                chosen = taken // len(x) == restart
                rows = (taken[chosen] % len(x)).to(x.device)
                self._fill(slots[chosen].to(x.device), x[rows], y[rows], starts[restart][rows])
            point[slots], age[slots] = taken % len(x), 0
            if not self.graphed:
                point, age = self._compacted(point, age)
            if not bool((point >= 0).any()):
                return result
            for _ in range(look):
                self._advance()
            age += look
            self._harvest(point, age, result, broken)
            done = (point >= 0) & ((age >= self.attack.steps) | broken[point.clamp(min=0)])
            point[done] = -1

    def _steps_between_looks(self) -> int:
        """Each look waits for the device; on a CPU that costs nothing."""
        if not self.graphed:
            return 1
        return max(k for k in range(1, 6) if self.attack.steps % k == 0)

    def _make_slots(self, x: Tensor, y: Tensor) -> None:
        size = self.batch if self.graphed else min(self.batch, len(x))
        if self.graph is not None and self.x.shape == (size, *x.shape[1:]):
            return
        self.x = torch.zeros(size, *x.shape[1:], dtype=x.dtype, device=x.device).contiguous(memory_format=layout(x))
        self.x_adv, self.x_found = self.x.clone(), self.x.clone()
        self.y = torch.zeros(size, dtype=y.dtype, device=y.device)
        self.found = torch.zeros(size, dtype=torch.bool, device=y.device)
        if self.graphed:
            self._capture()

    def _fill(self, slots: Tensor, x: Tensor, y: Tensor, start: Tensor) -> None:
        self.x[slots], self.y[slots], self.found[slots], self.x_adv[slots] = x, y, False, start

    def _compacted(self, point: Tensor, age: Tensor) -> tuple[Tensor, Tensor]:
        kept = point >= 0
        if not bool(kept.all()):
            rows = kept.to(self.x.device)
            self.x, self.x_adv, self.x_found = self.x[rows], self.x_adv[rows], self.x_found[rows]
            self.y, self.found = self.y[rows], self.found[rows]
        return point[kept], age[kept]

    def _advance(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()

    def _step(self) -> None:
        """Look whether the points are adversarial already, remember the first that is, and step on; in place."""
        with reduced(self.x.device, self.precision):
            logits, gradient = logits_and_gradient(self.model, self.x_adv, self.y)
        fresh = is_wrong(logits, self.y) & ~self.found
        self.x_found.copy_(torch.where(_as(fresh, self.x), self.x_adv, self.x_found))
        self.found.logical_or_(fresh)
        self.x_adv.copy_(self.attack.next_point(self.x_adv, gradient, self.x, self.eps))

    def _capture(self) -> None:
        """Warm up on another stream, as capture wants, and record one step; a network that cannot be stays eager."""
        stream = torch.cuda.Stream(self.x.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.x.device))
        with torch.cuda.device(self.x.device), torch.cuda.stream(stream):
            for _ in range(self.WARM_UP):
                self._step()
        torch.cuda.current_stream(self.x.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.x.device), torch.cuda.graph(graph, stream=stream):
                self._step()
            self.graph = graph
        except RuntimeError:  # the network waits for the device or branches on values
            torch.cuda.synchronize(self.x.device)
            self.graphed = False

    def _harvest(self, point: Tensor, age: Tensor, result: Tensor, broken: Tensor) -> None:
        """Take out what was found on the way, and what the last step of a restart has reached."""
        device = self.x.device
        finished = (point >= 0) & (age >= self.attack.steps)
        found = self.found.cpu() & (point >= 0)  # waits for the device
        self._keep(found, self.x_found, point, result, broken)
        self.found[found.to(device)] = False
        last = (finished & ~broken[point.clamp(min=0)]).nonzero().squeeze(1)
        if len(last):
            rows = last.to(device)
            with reduced(device, self.precision):
                wrong = _wrong(self.model, self.x_adv[rows], self.y[rows])
            hit = torch.zeros_like(finished)
            hit[last] = wrong.cpu()
            self._keep(hit, self.x_adv, point, result, broken)

    def _keep(self, hit: Tensor, points: Tensor, point: Tensor, result: Tensor, broken: Tensor) -> None:
        slots = hit.nonzero().squeeze(1)
        if len(slots) == 0:
            return
        rows = slots.to(points.device)
        if self.precision not in (None, "fp32"):
            with exact_float32(points.device):
                slots = slots[_wrong(self.model, points[rows], self.y[rows]).cpu()]
        # Two restarts may break a point at the same look: the first slot's is kept.
        owner = {int(point[slot]): int(slot) for slot in reversed(slots.tolist())}
        if owner:
            targets, sources = torch.tensor(list(owner)), torch.tensor(list(owner.values()))
            result[targets.to(result.device)] = points[sources.to(points.device)]
            broken[targets] = True


class _Starts:
    """Where each restart begins, drawn for all points at once: slots, batches and further restarts change nothing."""

    def __init__(self, attack: SignStep, x: Tensor, eps: float) -> None:
        self.attack, self.x, self.eps = attack, x, eps
        self.drawn, self.points = -1, x

    def __getitem__(self, restart: int) -> Tensor:
        while self.drawn < restart:
            self.points = self.attack.first_point(self.x, self.eps)
            self.drawn += 1
        return self.points


def surviving(
    model: nn.Module, x: Tensor, y: Tensor, attack: SignStep | None, eps: float, *, restarts: int = 1, batch: int = 500
) -> Tensor:
    """Which images [N] stay correctly classified, in the mode and precision the caller has set."""
    alive = ~torch.cat(
        [_wrong(model, *pair) for pair in zip(torch.split(x, batch), torch.split(y, batch), strict=True)]
    )
    if attack is not None and bool(alive.any()):
        points = Pool(model, attack, eps, batch=batch)(x[alive], y[alive], restarts)
        moved = (points != x[alive]).flatten(1).any(1)
        alive[alive.clone()] = ~moved
    return alive


def _wrong(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return is_wrong(model(x).float(), y)


def _as(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (x.dim() - 1))


def layout(x: Tensor) -> torch.memory_format:
    """Channels last on a GPU, where its convolutions are fastest."""
    return torch.channels_last if x.dim() == 4 and x.is_cuda else torch.contiguous_format
