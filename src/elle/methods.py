"""METHODS: a method = attack x loss x regulariser x weight rule, one frozen row each. Rows hold no state."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elle.core.attacks import SignStep
from elle.core.controller import Constant, OnOff
from elle.core.linearity import (
    Linearity,
    gradient_misalignment,
    taylor_gap,
    triplet_error,
)
from elle.core.losses import CrossEntropy, Penalised, Trades
from elle.errors import InputError, nearest

Published = Callable[[str, float], dict[str, dict[str, Any]]]
"""(dataset, eps) -> the fields of a row's parts that its authors chose there"""
_CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class Cost:
    """Passes through the network for each image and step; each costs about one forward.

    Double backpropagation's second pass counts once, as the gradient it is part of, and takes longer than one.
    """

    forwards: int
    input_gradients: int
    weight_gradients: int

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
    """Its arXiv number."""
    attack: SignStep | None
    cost: Cost
    loss: CrossEntropy | Penalised | Trades = _CROSS_ENTROPY
    regulariser: Linearity | None = None
    weight: Constant | OnOff | None = None
    published: Published | None = None

    @property
    def penalty(self) -> str | None:
        """Which of the two penalties it carries: "elle", "elle-a" or none."""
        return None if self.weight is None else "elle-a" if isinstance(self.weight, OnOff) else "elle"

    @property
    def double_backpropagation(self) -> bool:
        """Whether it differentiates a gradient: slower than its cost says."""
        return isinstance(self.loss, Penalised)

    def with_penalty(self, penalty: str) -> Method:
        """This method with ELLE or ELLE-A added to its loss."""
        rules: dict[str, Constant | OnOff] = {"elle": Constant(1_000), "elle-a": OnOff(4_000)}
        return dataclasses.replace(
            self,
            name=f"{self.name}+{penalty}",
            paper="2401.11618",
            cost=self.cost + _TRIPLET_COST,
            regulariser=triplet_error,
            weight=rules[penalty],
        )


PENALTIES = ("elle", "elle-a")
_TRIPLET_COST = Cost(3, 3, 3)
_FGSM = Method("fgsm", "1412.6572", SignStep(), Cost(2, 2, 1))
_N_FGSM = Method("n-fgsm", "2202.01181", SignStep(noise=2, project=False), Cost(2, 2, 1))
_TRADES = SignStep(noise=0.001, start="normal", objective="kl", eval_mode=True, clip=True)


def _gradalign_weight(data: str, eps: float) -> dict[str, dict[str, Any]]:
    """The authors' fits (levels = 255 eps): 0.2 at 8 and 2 from 16 on for CIFAR-10, 2.5 at 8 for SVHN."""
    levels = min(255 * eps, 16)
    if data == "svhn":
        return {"loss": {"weight": 6.25 / 4 * 1.6 ** (levels / 8)}}
    return {"loss": {"weight": 0.02 * 10 ** (levels / 8)}}


def _llr_weight(data: str, eps: float) -> dict[str, dict[str, Any]]:
    table = {8: 200, 12: 500, 14: 1_000, 16: 500, 18: 1_000, 20: 500, 22: 2_000, 24: 5_000}
    levels = round(255 * eps, 3)
    return {"loss": {"weight": next((weight for upto, weight in table.items() if levels <= upto), 2_000)}}


def _zerograd_share(data: str, eps: float) -> dict[str, dict[str, Any]]:
    return {"attack": {"zero": {"cifar100": 0.45, "svhn": 0.7}.get(data, 0.35)}}


_ROWS = [
    Method("standard", "-", None, Cost(1, 1, 1)),
    _FGSM,
    Method("r-fgsm", "1705.07204", SignStep(alpha=0.5, noise=0.5, start="sign"), Cost(2, 2, 1)),
    Method("rs-fgsm", "2001.03994", SignStep(alpha=1.25, noise=1, clip=True), Cost(2, 2, 1)),
    _N_FGSM,
    Method(
        "zerograd",
        "2103.15476",
        SignStep(alpha=2, noise=1, clip=True, zero=0.35),
        Cost(2, 2, 1),
        published=_zerograd_share,
    ),
    Method("multigrad", "2103.15476", SignStep(alpha=2, noise=1, clip=True, agree=3), Cost(4, 4, 1)),
    Method(
        "gradalign",
        "2007.02617",
        SignStep(clip=True),
        Cost(4, 5, 2),
        Penalised(gradient_misalignment, 0.2),
        published=_gradalign_weight,
    ),
    Method("llr", "1907.02610", SignStep(), Cost(5, 6, 4), Penalised(taylor_gap, 200), published=_llr_weight),
    Method("trades-single", "1901.08573", _TRADES, Cost(4, 3, 2), Trades()),
    Method(
        "trades",
        "1901.08573",
        dataclasses.replace(_TRADES, steps=10, alpha=0.007 / (8 / 255)),
        Cost(13, 12, 2),
        Trades(),
    ),
    Method("pgd-10", "1706.06083", SignStep(alpha=1 / 5, steps=10, clip=True), Cost(11, 11, 1)),
    # The paper's own names for FGSM with the penalty.
    dataclasses.replace(_FGSM.with_penalty("elle"), name="elle"),
    dataclasses.replace(_FGSM.with_penalty("elle-a"), name="elle-a"),
    _N_FGSM.with_penalty("elle"),
    _N_FGSM.with_penalty("elle-a"),
]
METHODS: dict[str, Method] = {row.name: row for row in _ROWS}


def find_method(name: str) -> Method:
    """The row called `name`; pgd-K for any K; any row without a penalty also takes `+elle` or `+elle-a`."""
    if name in METHODS:
        return METHODS[name]
    base, plus, penalty = name.rpartition("+")
    if plus and penalty in PENALTIES:
        method = find_method(base)
        if method.penalty is None:
            return method.with_penalty(penalty)
    if match := re.fullmatch(r"pgd-([1-9]\d{0,2})", name):
        steps = int(match[1])
        # Steps of 2 eps / K, as for the ten of pgd-10.
        attack = dataclasses.replace(METHODS["pgd-10"].attack or SignStep(), steps=steps, alpha=min(2 / steps, 1))
        return dataclasses.replace(METHODS["pgd-10"], name=name, attack=attack, cost=Cost(steps + 1, steps + 1, 1))
    raise InputError(
        f"method {name!r} does not exist{nearest(name, METHODS)}; "
        f"choose from {', '.join(METHODS)}, or add +elle or +elle-a to one without it"
    )


def configured(
    name: str,
    *,
    weight: float | None = None,
    norm: str = "linf",
    clip: bool = False,
    data: str = "",
    eps: float = 8 / 255,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Method:
    """The row `name` as a run uses it.

    What its authors chose for this dataset and eps, then the ELLE penalty's weight, the norm and clipping to [0, 1],
    then the user's own fields: the later wins.
    """
    method = find_method(name)
    layers: list[Mapping[str, Mapping[str, Any]]] = [method.published(data, eps)] if method.published else []
    if weight is not None and method.weight is not None:
        layers.append({"weight": {"value": weight}})
    ball: dict[str, Any] = ({"norm": norm} if norm != "linf" else {}) | ({"clip": True} if clip else {})
    layers.append({slot: ball for slot in ("attack", "regulariser") if ball and getattr(method, slot) is not None})
    for layer in [*layers, options or {}]:
        for slot, fields in layer.items():
            method = _with_fields(method, slot, fields)
    return method


_KINDS: dict[str, tuple[type, ...]] = {
    "float": (int, float),
    "int": (int,),
    "int | None": (int,),
    "bool": (bool,),
    "Norm": (str,),
}
"""What a field may hold, by its annotation."""


def _with_fields(method: Method, slot: str, fields: Mapping[str, Any]) -> Method:
    parts = {name: getattr(method, name) for name in ("attack", "loss", "regulariser", "weight")}
    slots = [name for name, part in parts.items() if part is not None and dataclasses.fields(part)]
    if slot not in slots:
        raise InputError(f"method {method.name} has no part {slot!r}; it has {', '.join(slots) or 'none'}")
    part = getattr(method, slot)
    known = {field.name: field.type for field in dataclasses.fields(part) if not callable(getattr(part, field.name))}
    for name, value in fields.items():
        if name not in known:
            raise InputError(
                f"method.{slot}.{name} is not an option of {method.name}{nearest(name, known)}; "
                f"method.{slot} has {', '.join(known)}"
            )
        kinds = _KINDS.get(str(known[name]), (str, int, float))
        if isinstance(value, bool) != (kinds == (bool,)) or not isinstance(value, kinds):
            raise InputError(f"method.{slot}.{name}={value!r} should be like its default, {getattr(part, name)!r}")
    try:
        return dataclasses.replace(method, **{slot: dataclasses.replace(part, **fields)})
    except (TypeError, ValueError) as problem:
        raise InputError(f"method.{slot} of {method.name}: {problem}") from None
