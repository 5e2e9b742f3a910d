"""METHODS: a method = attack x loss x regulariser x weight rule, one frozen row each. Rows hold no state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elle.core.attacks import SignStep
from elle.core.controller import Constant, OnOff
from elle.core.linearity import Linearity, triplet_error
from elle.core.losses import adversarial_cross_entropy
from elle.errors import InputError, nearest

Loss = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Cost:
    """Passes through the network for each image and step; each costs about one forward."""

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
    loss: Loss = adversarial_cross_entropy
    regulariser: Linearity | None = None
    weight: Constant | OnOff | None = None

    @property
    def penalty(self) -> str | None:
        """Which of the two penalties it carries: "elle", "elle-a" or none."""
        return None if self.weight is None else "elle-a" if isinstance(self.weight, OnOff) else "elle"

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

_ROWS = [
    Method("standard", "-", None, Cost(1, 1, 1)),
    _FGSM,
    Method("rs-fgsm", "2001.03994", SignStep(alpha=1.25, noise=1, clip=True), Cost(2, 2, 1)),
    _N_FGSM,
    Method("pgd-10", "1706.06083", SignStep(alpha=1 / 5, steps=10, clip=True), Cost(11, 11, 1)),
    # The paper's own names for FGSM with the penalty.
    dataclasses.replace(_FGSM.with_penalty("elle"), name="elle"),
    dataclasses.replace(_FGSM.with_penalty("elle-a"), name="elle-a"),
    _N_FGSM.with_penalty("elle"),
    _N_FGSM.with_penalty("elle-a"),
]
METHODS: dict[str, Method] = {row.name: row for row in _ROWS}


def find_method(name: str) -> Method:
    """The row called `name`; any row without a penalty also takes `+elle` or `+elle-a`."""
    if name in METHODS:
        return METHODS[name]
    base, plus, penalty = name.rpartition("+")
    if plus and penalty in PENALTIES and base in METHODS and METHODS[base].penalty is None:
        return METHODS[base].with_penalty(penalty)
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
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Method:
    """The row `name` with the penalty's weight, the norm, clipping to [0, 1], and its own fields replaced."""
    method = find_method(name)
    changes: dict[str, dict[str, Any]] = {slot: dict(fields) for slot, fields in (options or {}).items()}
    if weight is not None and method.weight is not None:
        changes["weight"] = {"value": weight} | changes.get("weight", {})
    ball: dict[str, Any] = ({"norm": norm} if norm != "linf" else {}) | ({"clip": True} if clip else {})
    for slot in ("attack", "regulariser"):
        if ball and getattr(method, slot) is not None:
            changes[slot] = ball | changes.get(slot, {})
    for slot, fields in changes.items():
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
    slots = [name for name in ("attack", "regulariser", "weight") if getattr(method, name) is not None]
    if slot not in slots:
        raise InputError(f"method {method.name} has no part {slot!r}; it has {', '.join(slots) or 'none'}")
    part = getattr(method, slot)
    known = {field.name: field.type for field in dataclasses.fields(part)}
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
