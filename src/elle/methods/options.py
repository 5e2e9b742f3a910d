"""A row of METHODS as a run uses it: with its authors' values, the run's norm and weight, and the user's own fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elle.core.attacks import Replay
from elle.core.losses import Penalised, VertexMix, WorstGap
from elle.errors import InputError, nearest
from elle.methods.rows import OWN_POINTS, Method, find_method
from elle.published import table_radius


def configured(
    name: str,
    *,
    weight: float | None = None,
    norm: str = "linf",
    clip: bool = False,
    data: str = "",
    eps: float = 8 / 255,
    model: str = "",
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Method:
    """The row `name` as a run uses it.

    What its authors chose for this dataset and eps, then the ELLE penalty's weight, the norm and clipping to [0, 1],
    then the user's own fields: the later wins.
    """
    method = find_method(name)
    if norm != "linf" and isinstance(method.loss, (*OWN_POINTS, WorstGap)):
        raise InputError(f"method {name} is defined for norm=linf only")
    layers: list[Mapping[str, Mapping[str, Any]]] = []
    if method.published:
        layers.append(method.published(data, table_radius(eps, norm), model))
    if weight is not None and method.weight is not None:
        layers.append({"weight": {"value": weight}})
    ball: dict[str, Any] = ({"norm": norm} if norm != "linf" else {}) | ({"clip": True} if clip else {})
    layers.append({slot: ball for slot in ("attack", "regulariser") if ball and getattr(method, slot) is not None})
    if norm != "linf" and isinstance(method.loss, Penalised):
        layers.append({"loss": {"norm": norm}})
    for layer in [*layers, options or {}]:
        for slot, fields in layer.items():
            method = _with_fields(method, slot, fields)
    _check(method, name, norm)
    return method


def _check(method: Method, name: str, norm: str) -> None:
    """Refuse fields that do not fit together."""
    if method.attack is not None and method.attack.norm != norm:
        own = method.attack.norm
        raise InputError(f"method.attack.norm={own}: eps, and the evaluation, are in norm={norm}; write norm={own}")
    if method.regulariser is not None and method.regulariser.form == "2p":
        if method.attack is None or isinstance(method.loss, VertexMix):
            raise InputError(f"method.regulariser.form=2p needs the attack's points, where {name} does not train")
        if isinstance(method.attack, Replay):
            raise InputError(
                f"method.regulariser.form=2p is not for {name}: its perturbation would go up the penalty too"
            )


_KINDS: dict[str, tuple[type, ...]] = {
    "float": (int, float),
    "int": (int,),
    "int | None": (int,),
    "bool": (bool,),
    "Norm": (str,),
    "str": (str,),
}
"""What a field may hold, by its annotation."""


def _with_fields(method: Method, slot: str, fields: Mapping[str, Any]) -> Method:
    parts = {name: getattr(method, name) for name in ("attack", "loss", "regulariser", "weight", "subspace")}
    slots = [name for name, part in parts.items() if part is not None and dataclasses.fields(part)]
    if slot not in slots:
        raise InputError(f"method {method.name} has no part {slot!r}; it has {', '.join(slots)}")
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
            default = getattr(part, name)
            words = {bool: "true or false", type(None): "a whole number"}
            wanted = words.get(type(default), f"like its default, {default!r}")
            raise InputError(f"method.{slot}.{name}={value!r} should be {wanted}")
    try:
        return dataclasses.replace(method, **{slot: dataclasses.replace(part, **fields)})
    except (TypeError, ValueError) as problem:
        raise InputError(f"method.{slot} of {method.name}: {problem}") from None
