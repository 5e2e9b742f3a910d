"""METHODS: a method = attack x loss x regulariser x weight rule, one frozen row each. Rows hold no state."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from elle.core.attacks import Replay, SignStep
from elle.core.attacks.network import in_eval_mode
from elle.core.controller import Constant, OnOff
from elle.core.linearity import (
    Linearity,
    gradient_difference,
    gradient_misalignment,
    gradient_norm,
    input_gradient,
    taylor_gap,
    triplet_error,
)
from elle.core.losses import (
    Bilevel,
    CrossEntropy,
    Guided,
    LatentStep,
    Penalised,
    Trades,
    VertexMix,
    WorstGap,
)
from elle.core.subspace import Subspace
from elle.errors import InputError, nearest
from elle.published import (
    Published,
    cure_weight,
    fast_bat_rate,
    gradalign_weight,
    llr_weight,
    n_fgsm_noise,
    zerograd_share,
)

Loss = CrossEntropy | Penalised | Trades | VertexMix | Guided | LatentStep | Bilevel | WorstGap
OWN_POINTS = (Guided, LatentStep, Bilevel)
"""Losses that find points of their own to train at."""
_CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class Cost:
    """Passes through the network for each image and step; each costs about one forward.

    Double backpropagation's second pass counts once, as the gradient it is part of, and takes longer than one.
    """

    forwards: int
    input_gradients: int
    weight_gradients: int

    def __str__(self) -> str:
        return f"{self.forwards}+{self.input_gradients}+{self.weight_gradients} = {self.total}"

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.forwards + other.forwards,
            self.input_gradients + other.input_gradients,
            self.weight_gradients + other.weight_gradients,
        )

    @property
    def total(self) -> int:
        return self.forwards + self.input_gradients + self.weight_gradients


@dataclass(frozen=True)
class Method:
    name: str
    paper: str
    """Its arXiv number, or where it appeared."""
    attack: SignStep | Replay | None
    cost: Cost
    loss: Loss = _CROSS_ENTROPY
    regulariser: Linearity | None = None
    weight: Constant | OnOff | None = None
    subspace: Subspace | None = None
    shares_gradient: bool = False
    """Whether its penalty needs the gradient at x as a constant: a single step from x goes up the very same."""
    published: Published | None = None
    needs: str = ""
    """What it asks of the network or the device beyond a forward and a backward."""
    collapse: str = "not reported"
    """What the paper reports of its catastrophic overfitting."""

    @property
    def penalty(self) -> str | None:
        """Which of the two penalties it carries: "elle", "elle-a" or none."""
        return None if self.weight is None else "elle-a" if isinstance(self.weight, OnOff) else "elle"

    @property
    def adversarial(self) -> bool:
        """Whether it trains on attacked points, its own or an attack's."""
        return self.attack is not None or isinstance(self.loss, OWN_POINTS)

    @property
    def few_steps(self) -> bool:
        """Whether its points cost one gradient or two, so that a network can learn to fool them: it may collapse."""
        return self.adversarial and not (isinstance(self.attack, SignStep) and self.attack.steps > 2)

    @property
    def double_backpropagation(self) -> bool:
        """Whether it differentiates a gradient: slower than its cost says."""
        return isinstance(self.loss, (Penalised, Bilevel, WorstGap))

    @property
    def replays(self) -> int:
        """How many steps in a row train on one batch."""
        return self.attack.replays if isinstance(self.attack, Replay) else 1

    def attacked(self, model: nn.Module, x: Tensor, y: Tensor, eps: float | Tensor) -> tuple[Tensor, Loss]:
        """The points to train at, and the loss there; not for a perturbation that is replayed."""
        assert not isinstance(self.attack, Replay)
        if self.attack is None:
            return x, self.loss
        if self.shares_gradient and self.attack.at_image:
            assert isinstance(self.loss, Penalised)
            gradient = input_gradient(model, x, y)
            x_adv = self.attack.next_point(x, gradient, x, eps)
            return x_adv, dataclasses.replace(self.loss, penalty=partial(self.loss.penalty, gradient=gradient))
        return self.attack(model, x, y, eps), self.loss

    def check(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        """InputError where it cannot train this network on images of this shape."""
        if isinstance(self.loss, LatentStep):
            try:
                with in_eval_mode(model):
                    self.loss.check(model, torch.zeros(2, *shape))
            except ValueError as problem:
                raise InputError(f"method.loss.layers of {self.name}: {problem}") from None

    def with_penalty(self, penalty: str) -> Method:
        """This method with ELLE or ELLE-A added to its loss."""
        return dataclasses.replace(
            self,
            name=f"{self.name}+{penalty}",
            paper="2401.11618",
            cost=self.cost + _TRIPLET_COST,
            regulariser=triplet_error,
            weight=_PENALTIES[penalty],
            collapse=_REPORTED_WITH_PENALTY.get(f"{self.name}+{penalty}", "not reported"),
        )


_PENALTIES: dict[str, Constant | OnOff] = {"elle": Constant(1_000), "elle-a": OnOff(4_000)}
_REPORTED_WITH_PENALTY = {
    "fgsm+elle": "no, for the weights chosen",
    "fgsm+elle-a": "no",
    "n-fgsm+elle-a": "no",
    "gat+elle-a": "no (CIFAR-10, eps 16 and 26)",
    "advmixup-single+elle-a": "no (CIFAR-10)",
    "trades-single+elle-a": "no (CIFAR-10)",
    "standard+elle": "no attack to overfit",
}
"""What the paper reports of a method with the penalty."""
_TRIPLET_COST = Cost(3, 3, 3)
_STANDARD = Method("standard", "-", None, Cost(1, 1, 1), collapse="no attack to overfit")
_FGSM = Method("fgsm", "1412.6572", SignStep(), Cost(2, 2, 1), collapse="yes, from eps 8/255 on CIFAR-10")
_N_FGSM = Method(
    "n-fgsm",
    "2202.01181",
    SignStep(noise=2, project=False),
    Cost(2, 2, 1),
    published=n_fgsm_noise,
    collapse="for eps above 18/255 (CIFAR-100) or long schedules",
)
_TRADES = SignStep(noise=0.001, start="normal", objective="kl", eval_mode=True, clip=True)
_PGD_10 = SignStep(alpha=1 / 5, steps=10, clip=True)
_DOUBLE = "double backpropagation"
_ROWS = [
    _STANDARD,
    _FGSM,
    Method("r-fgsm", "1705.07204", SignStep(alpha=0.5, noise=0.5, start="sign"), Cost(2, 2, 1)),
    Method("rs-fgsm", "2001.03994", SignStep(alpha=1.25, noise=1, clip=True), Cost(2, 2, 1), collapse="for larger eps"),
    Method("free", "1904.12843", Replay(), Cost(1, 1, 1), collapse="yes", needs="a perturbation kept between steps"),
    _N_FGSM,
    Method(
        "zerograd",
        "2103.15476",
        SignStep(alpha=2, noise=1, clip=True, zero=0.35),
        Cost(2, 2, 1),
        published=zerograd_share,
        collapse="no, but weak for larger eps",
    ),
    Method("multigrad", "2103.15476", SignStep(alpha=2, noise=1, clip=True, agree=3), Cost(4, 4, 1)),
    Method("fw-at", "2012.12368", SignStep(steps=2, frank_wolfe=True), Cost(3, 3, 1)),
    Method("grad-penalty", "1711.09404", None, Cost(2, 3, 2), Penalised(gradient_norm, 1.0), needs=_DOUBLE),
    Method(
        "gradalign",
        "2007.02617",
        SignStep(clip=True),
        Cost(3, 4, 2),
        Penalised(gradient_misalignment, 0.2),
        shares_gradient=True,
        published=gradalign_weight,
        needs=_DOUBLE,
        collapse="in some runs (SVHN and CIFAR-100 from eps 8/255, long schedules); weak above 16/255",
    ),
    Method(
        "cure",
        "1811.09716",
        SignStep(),
        Cost(4, 5, 2),
        Penalised(gradient_difference, 1_000 / 128**2),
        published=cure_weight,
        needs=_DOUBLE,
        collapse="no",
    ),
    Method(
        "llr",
        "1907.02610",
        SignStep(),
        Cost(5, 6, 4),
        Penalised(taylor_gap, 200),
        published=llr_weight,
        needs=_DOUBLE,
        collapse="for small weights and large eps",
    ),
    Method("llr-original", "1907.02610", None, Cost(14, 14, 3), WorstGap(input_gradient), needs=_DOUBLE),
    Method("gat", "2011.14969", None, Cost(4, 3, 2), Guided(in_eval_mode), collapse="yes (CIFAR-10, eps 16 and 26)"),
    Method(
        "gat-original",
        "2011.14969",
        None,
        Cost(4, 3, 2),
        Guided(in_eval_mode, start=0.5, clean=True, alternate=True, late=4.0),
        collapse="for larger eps",
    ),
    Method(
        "nuat",
        "NeurIPS 2021",
        None,
        Cost(4, 3, 2),
        Guided(in_eval_mode, "nuclear", 4.5, start=0.5, clean=True, alternate=True, ramp=True),
        collapse="for larger eps",
    ),
    Method(
        "slat",
        "2104.01575",
        None,
        Cost(2, 2, 1),
        LatentStep(),
        needs="a network with convolutions",
        collapse="from eps 10/255 (CIFAR-10), 4/255 (SVHN)",
    ),
    Method(
        "fast-bat",
        "2112.12376",
        None,
        Cost(3, 5, 2),
        Bilevel(input_gradient),
        published=fast_bat_rate,
        needs=_DOUBLE,
        collapse="for long schedules (CIFAR-10)",
    ),
    Method("trades-single", "1901.08573", _TRADES, Cost(4, 3, 2), Trades(), collapse="yes, above eps 2/255 (CIFAR-10)"),
    Method(
        "trades",
        "1901.08573",
        dataclasses.replace(_TRADES, steps=10, alpha=0.007 / (8 / 255)),
        Cost(13, 12, 2),
        Trades(),
    ),
    Method(
        "advmixup-single",
        "2003.02484",
        SignStep(clip=True),
        Cost(2, 2, 1),
        VertexMix(),
        collapse="yes, above eps 2/255 (CIFAR-10)",
    ),
    Method("advmixup", "2003.02484", _PGD_10, Cost(11, 11, 1), VertexMix()),
    Method(
        "subspace",
        "2111.12229",
        SignStep(),
        Cost(2, 2, 1),
        subspace=Subspace(),
        needs="memory for 40 copies of the weights",
    ),
    Method("pgd-10", "1706.06083", _PGD_10, Cost(11, 11, 1), collapse="no"),
    # The paper's own names for FGSM, and for training without an attack, with the penalty.
    dataclasses.replace(_FGSM.with_penalty("elle"), name="elle"),
    dataclasses.replace(_FGSM.with_penalty("elle-a"), name="elle-a"),
    dataclasses.replace(_STANDARD.with_penalty("elle"), name="no-attack+elle"),
    _N_FGSM.with_penalty("elle"),
    _N_FGSM.with_penalty("elle-a"),
]
METHODS: dict[str, Method] = {row.name: row for row in _ROWS}


def find_method(name: str) -> Method:
    """The row called `name`; pgd-K for any K; any row without a penalty also takes `+elle` or `+elle-a`."""
    if name in METHODS:
        return METHODS[name]
    base, plus, penalty = name.rpartition("+")
    if plus and penalty in _PENALTIES:
        method = find_method("standard" if base == "no-attack" else base)
        if method.penalty is None:
            return method.with_penalty(penalty)
    if match := re.fullmatch(r"pgd-([1-9]\d{0,2})", name):
        steps = int(match[1])
        # Steps of 2 eps / K, as for the ten of pgd-10.
        attack = dataclasses.replace(_PGD_10, steps=steps, alpha=min(2 / steps, 1))
        return dataclasses.replace(METHODS["pgd-10"], name=name, attack=attack, cost=Cost(steps + 1, steps + 1, 1))
    raise InputError(
        f"method {name!r} does not exist{nearest(name, METHODS)}; "
        f"choose from {', '.join(METHODS)}, or add +elle or +elle-a to one without it"
    )
