"""The radius of an attack as papers write it: `8/255`, or a decimal."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator

from elle.errors import InputError


def parse_radius(value: Any) -> float:
    """A radius as papers write it, `8/255`, or a decimal such as `0.3`."""
    refusal = ValueError(f"{value!r} is not a radius; write it as 8/255 or 0.03")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise refusal
    try:
        above, slash, below = str(value).partition("/")
        eps = float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError):
        raise refusal from None
    if not math.isfinite(eps):
        raise refusal
    return eps


def format_radius(eps: float) -> str:
    """`8/255` where eps is a whole number of grey levels and no short decimal such as 0.2; otherwise the decimal."""
    levels = round(eps * 255)
    return f"{levels}/255" if levels / 255 == eps and len(repr(eps)) > 5 else repr(eps)


def check_radius(eps: float, norm: str) -> float:
    """Refuse radii that cannot be meant: images lie in [0, 1], so an l-infinity radius is below 1."""
    if not 0 < eps < math.inf:
        raise ValueError(f"eps is {eps:g}; it must be greater than 0")
    if norm == "linf" and eps >= 1:
        # Of what is a fraction already, or no radius over 255 either, nobody knows what was meant.
        is_levels = eps < 255 and "/" not in format_radius(eps)
        meant = f"did you mean eps={eps:g}/255?" if is_levels else "it must be below 1, for example 8/255"
        raise ValueError(f"eps is {eps:g}, but images are in [0, 1]; {meant}")
    return eps


def radius_option(text: str, norm: str) -> float:
    """The radius that a command's --eps gives."""
    try:
        return check_radius(parse_radius(text), norm)
    except ValueError as problem:
        raise InputError(f"--eps {text}: {problem}") from None


Radius = Annotated[float, BeforeValidator(parse_radius)]
