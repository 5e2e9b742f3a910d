"""Runs the units of an evaluation on one device, and believes no success that float32 does not confirm."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elle.core.attacks.checks import check_logits
from elle.core.attacks.network import differentiable
from elle.core.linearity import cross_entropy
from elle.errors import InputError, WorkError, first_line
from elle.evaluation import pgd
from elle.evaluation.autoattack import ORDER, Norm, reference, search
from elle.evaluation.autoattack.norms import length
from elle.evaluation.autoattack.oracle import BLIND, Oracle
from elle.evaluation.mode import are_probabilities, current, evaluation_mode, exact_float32, in_batches, is_wrong
from elle.evaluation.names import EvaluationAttack
from elle.evaluation.units import Images, Outcome, Settings, Store, Unit, as_tensor, plan, unit_seed
from elle.models.layout import give_channels_first, layout_of, takes_channels_last

TOLERANCE = 1e-6
"""How far outside ball and box an adversarial point may lie by rounding; relative for radii above 1."""
_TOGETHER = 64
"""Points whose distances are computed at once."""


class Worker:
    """Runs units on one device; points are converted and moved a chunk at a time."""

    def __init__(
        self,
        model: nn.Module,
        x: Images,
        y: Images,
        attacks: list[EvaluationAttack],
        settings: Settings,
        device: torch.device,
        *,
        probe: bool = False,
        keep: bool = False,
    ) -> None:
        self.model, self.x, self.y, self.device = model, x, y, device
        self.attacks = {one.name: one for one in attacks}
        self.settings, self.probe, self.keep = settings, probe, keep
        self.graph = device.type == "cuda"
        self.takes_layout: bool | None = None
        """Whether the network takes images in the layout that they come in on a GPU; None: not asked yet."""

    def run(self, store: Store, chunks: Iterable[int], done: Callable[[], None] = lambda: None) -> None:
        """Every unit of these chunks that the store does not hold yet."""
        for chunk in chunks:
            units = plan(self.attacks.values(), chunk)
            held = {unit: store.load(unit) for unit in units}
            if all(held.values()):
                continue
            with differentiable(), self._self_checked():
                x, y = self._points(chunk)
                for unit in units:
                    if held[unit] is None:
                        with exact_float32(self.device), current(self.device), self._layout(x):
                            outcome = self._outcome(unit, x, y, store)
                        store.save(unit, outcome)
                        done()

    def _layout(self, x: Tensor) -> contextlib.AbstractContextManager[object]:
        """On a GPU the images come with the channels last; within this not to a network that does not take them so."""
        if self.takes_layout is None:
            settled = self.device.type != "cuda" or x.dim() != 4 or layout_of(self.model) is torch.contiguous_format
            self.takes_layout = settled or takes_channels_last(self.model, x[:2])
        return contextlib.nullcontext() if self.takes_layout else give_channels_first(self.model)

    @contextlib.contextmanager
    def _self_checked(self) -> Iterator[None]:
        """Without the warning that a self-check of the record puts in better words."""
        if not self.probe:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", BLIND)
            yield

    def _points(self, chunk: int) -> tuple[Tensor, Tensor]:
        part = slice(chunk * self.settings.chunk, (chunk + 1) * self.settings.chunk)
        x, labels = as_tensor(self.x[part]), as_tensor(self.y[part])
        y = labels.long()
        if not torch.equal(y.to(labels.dtype), labels):
            raise InputError("the labels are not whole numbers; give the number of the class of each image, from 0")
        if x.dtype == torch.uint8:
            x = x.to(self.device).float() / 255
        elif not x.is_floating_point():
            raise InputError(f"images of type {x.dtype} cannot be evaluated; give uint8, or floats in [0, 1]")
        elif not bool(((x >= 0) & (x <= 1)).all()):
            raise InputError(f"images lie in {float(x.min()):.3g} to {float(x.max()):.3g}; they must lie in [0, 1]")
        # Random points are drawn in the order of memory, which must not be the caller's affair.
        return x.to(self.device, torch.float32).contiguous(), y.to(self.device)

    def _outcome(self, unit: Unit, x: Tensor, y: Tensor, store: Store) -> Outcome:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what was launched before is not counted
        started = time.perf_counter()
        if not unit.chain:
            outcome = self._clean(x, y, unit_seed(self.settings.seed, unit))
        else:
            outcome = self._attacked(unit, x, y, [_held(store, unit, k) for k in range(len(unit.chain))])
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _clean(self, x: Tensor, y: Tensor, seed: int) -> Outcome:
        with evaluation_mode(self.model, seed, self.device), torch.no_grad():
            logits = torch.cat([self._answer(part) for part in torch.split(x, self.settings.batch)]).float()
            if logits.dim() != 2 or logits.shape[1] < 2 or len(logits) != len(x):
                raise InputError(
                    f"the network gives {tuple(logits.shape)} for {len(x)} images; logits are [images, classes]"
                )
            if not bool(((y >= 0) & (y < logits.shape[1])).all()):
                span, classes = f"{int(y.min())} to {int(y.max())}", logits.shape[1]
                raise InputError(f"the labels are {span}; the network has {classes} classes, 0 to {classes - 1}")
            facts = self._facts(x, y, logits) if self.probe else {}
        facts["classes"] = logits.shape[1]
        self._refuse(logits.shape[1], x)
        return Outcome(is_wrong(logits, y).cpu().numpy(), 0.0, facts)

    def _answer(self, x: Tensor) -> Tensor:
        """The network's answer to images, the first asked of it; WorkError or InputError where there is none."""
        # A copy: a network that writes into its images would spoil the caller's.
        shown = x.clone()
        untouched = shown._version
        try:
            answer = self.model(shown)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # the user's code may raise anything
            raise WorkError(f"the network fails on float32 images {tuple(x.shape)}: {first_line(problem)}") from problem
        if shown._version != untouched:
            raise InputError(
                "the network writes into the images it is given, so it cannot be attacked; let its first layer work on "
                "a copy, without inplace=True or names that end in _"
            )
        try:
            return check_logits(answer)
        except ValueError as problem:
            raise InputError(str(problem)) from None

    def _refuse(self, classes: int, x: Tensor) -> None:
        """InputError where an attack that is still to come cannot be run: now, not after those before it."""
        for name in dict.fromkeys(name for one in self.attacks.values() for name in one.parts):
            if name == "square" and x.dim() != 4:
                raise InputError(f"square needs images [N, C, H, W]; these are {list(x.shape)}: name other attacks")
            if self.settings.engine == "reference":
                reference.available(name, classes)

    def _facts(self, x: Tensor, y: Tensor, logits: Tensor) -> dict[str, int]:
        """Counts for the self-checks: a second forward, zero gradients, and how sure and varied the predictions are."""
        # In batches half as large: what an image is taken for must not depend on the others either.
        half = -(-min(self.settings.batch, len(x)) // 2)
        again = torch.cat([self._answer(part) for part in torch.split(x, half)]).float()
        scale = logits.abs().nan_to_num(posinf=0).amax().clamp(min=1e-6)
        right = ~is_wrong(logits, y)
        flat = torch.zeros_like(right)
        oracle = Oracle(self.model, self.device, "fp32")
        for rows in in_batches(right.nonzero().squeeze(1), self.settings.batch):
            answer = oracle.ascend(x[rows], partial(cross_entropy, y=y[rows]))
            flat[rows] = (answer.gradient == 0).flatten(1).all(1)
        predicted = torch.bincount(logits.argmax(1), minlength=logits.shape[1])
        return {
            "differ": int(
                (~torch.isclose(logits, again, rtol=0, atol=float(1e-3 * scale), equal_nan=True)).any(1).sum()
            ),
            "undefined": int(logits.isnan().any(1).sum()),
            "probabilities": int(are_probabilities(logits).sum()),
            "right": int(right.sum()),
            "zero_gradient": int(flat.sum()),
            "saturated": int(((F.softmax(logits, 1).amax(1) == 1) | logits.isposinf().any(1)).sum()),
            **{f"predicted_{k}": int(n) for k, n in enumerate(predicted.tolist()) if n},
            **{f"label_{k}": int(n) for k, n in enumerate(torch.bincount(y).tolist()) if n},
        }

    def _attacked(self, unit: Unit, x: Tensor, y: Tensor, before: list[Outcome]) -> Outcome:
        """Search for adversarial points of what is left by clean images and earlier attacks; count those that are."""
        broken = np.zeros(len(x), dtype=np.bool_)
        alive = ~np.any([outcome.broken for outcome in before], axis=0)
        rows = torch.from_numpy(alive.nonzero()[0]).to(self.device)
        if len(rows) == 0:
            return Outcome(broken, 0.0, {"outside": 0, "unverified": 0}, self._kept(x[rows]))
        points, labels = x[rows], y[rows]
        seed = unit_seed(self.settings.seed, unit)
        with evaluation_mode(self.model, seed, self.device):
            x_adv = self._searched(unit.chain[-1], points, labels, seed, before[0].facts["classes"]).detach()
            moved = (x_adv != points).flatten(1).any(1)
            inside = is_inside(x_adv, points, self.settings.eps, self.settings.norm)
            wrong = self._are_wrong(x_adv, labels, moved) if unit.chain[-1] in ORDER else moved
        counts = moved & inside & wrong
        broken[rows[counts].cpu().numpy()] = True
        facts = {"outside": int((moved & ~inside).sum()), "unverified": int((moved & inside & ~wrong).sum())}
        return Outcome(broken, 0.0, facts, self._kept(x_adv[counts]))

    def _are_wrong(self, x_adv: Tensor, y: Tensor, moved: Tensor) -> Tensor:
        """Which of the points that moved are wrong in float32; PGD has looked itself, a search is not believed."""
        wrong = torch.zeros_like(moved)
        with torch.no_grad():
            for part in in_batches(moved.nonzero().squeeze(1), self.settings.batch):
                wrong[part] = is_wrong(self.model(x_adv[part]).float(), y[part])
        return wrong

    def _searched(self, name: str, x: Tensor, y: Tensor, seed: int, classes: int) -> Tensor:
        try:
            return self._search(name, x, y, seed, classes)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if not self.graph:
                raise
            # The network waits for the device or branches on values: no CUDA graph can hold it.
            self.graph = False
            return self._search(name, x, y, seed, classes)

    def _search(self, name: str, x: Tensor, y: Tensor, seed: int, classes: int) -> Tensor:
        one, settings = self.attacks.get(name), self.settings
        if one is None or one.attack is None:
            return searched(name, self.model, x, y, settings, classes=classes, seed=seed, graph=self.graph)
        torch.manual_seed(seed)
        return pgd.search(
            one.attack,
            self.model,
            x,
            y,
            settings.eps,
            norm=settings.norm,
            restarts=one.restarts,
            precision=settings.precision,
            batch=settings.batch,
            graph=self.graph,
            compile=settings.compile,
        )

    def _kept(self, x_adv: Tensor) -> npt.NDArray[np.float32] | None:
        return x_adv.contiguous().cpu().numpy() if self.keep else None


def searched(
    name: str, model: nn.Module, x: Tensor, y: Tensor, settings: Settings, *, classes: int, seed: int, graph: bool
) -> Tensor:
    """One of AutoAttack's attacks, by elle's own engine or the reference's."""
    common: dict[str, Any] = {"norm": settings.norm, "classes": classes, "seed": seed, "batch": settings.batch}
    if settings.engine == "reference":
        precision: Literal["fp32", "tf32"] = "tf32" if settings.precision == "tf32" else "fp32"
        return reference.search(name, model, x, y, settings.eps, precision=precision, **common)
    own: dict[str, Any] = {"precision": settings.precision, "graph": graph, "compile": settings.compile}
    return search(name, model, x, y, settings.eps, **common, **own)


def is_inside(x_adv: Tensor, x: Tensor, eps: float, norm: Norm) -> Tensor:
    """Which points [N] lie in the ball around x and in [0, 1], up to rounding."""
    # A few at a time: in double precision all of them, if large, would take more memory than the attack.
    pairs = zip(torch.split(x_adv, _TOGETHER), torch.split(x, _TOGETHER), strict=True)
    return torch.cat([_is_inside(points, centres, eps, norm) for points, centres in pairs])


def _is_inside(x_adv: Tensor, x: Tensor, eps: float, norm: Norm) -> Tensor:
    near = length(x_adv.double() - x.double(), norm) <= eps + TOLERANCE * max(1.0, eps)
    values = x_adv.flatten(1)
    return near & (values >= -TOLERANCE).all(1) & (values <= 1 + TOLERANCE).all(1)


def _held(store: Store, unit: Unit, k: int) -> Outcome:
    """The outcome of the first k attacks of the chain on the same chunk."""
    outcome = store.load(Unit(unit.chain[:k], unit.chunk))
    assert outcome is not None  # the plan runs them first
    return outcome
