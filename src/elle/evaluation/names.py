"""What an attack's name means: `clean,fgsm,pgd-20,pgd-50-10,apgd-ce,apgd-t,fab-t,square,autoattack`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from elle.core.attacks import SignStep
from elle.errors import InputError, nearest
from elle.evaluation.autoattack import ORDER, Norm

NORMS: tuple[Norm, ...] = get_args(Norm)
ENSEMBLE = "autoattack"
_KNOWN = ("clean", "fgsm", "pgd-20", "pgd-50-10", *ORDER, ENSEMBLE)
_PGD = re.compile(r"pgd-([1-9]\d{0,4})(?:-([1-9]\d{0,3}))?")  # steps, restarts


@dataclass(frozen=True)
class EvaluationAttack:
    """`attack` for gradient steps, `parts` for AutoAttack's searches in their order, neither for clean images."""

    name: str
    attack: SignStep | None
    restarts: int = 1
    parts: tuple[str, ...] = ()

    @property
    def chain(self) -> tuple[str, ...]:
        """The names of what is run one after the other, each on what the one before has left."""
        return self.parts or (() if self.attack is None else (self.name,))


def parse_attacks(names: str, norm: Norm = "linf") -> list[EvaluationAttack]:
    """The attacks named. PGD-K steps eps/8 at K=20 (2.5 eps/K); PGD-K-R steps eps/4."""
    if not isinstance(names, str):
        raise InputError(f"attack is a {type(names).__name__}; write the names in one string: 'clean,pgd-20'")
    if norm not in NORMS:
        raise InputError(f"norm {norm!r} does not exist{nearest(norm, NORMS)}; use linf, l2 or l1")
    attacks = {one: _parse_attack(one, norm) for name in names.split(",") if (one := name.strip())}
    if not attacks:
        raise InputError("no attack given; for example clean,pgd-20")
    return list(attacks.values())


def parse_tracked(names: str, norm: Norm = "linf") -> list[EvaluationAttack]:
    """The attacks that may run while training, or be drawn: AutoAttack's take too long."""
    attacks = parse_attacks(names, norm)
    for one in attacks:
        if one.parts:
            raise InputError(
                f"{one.name} takes too long here; use clean, fgsm, pgd-STEPS or pgd-STEPS-RESTARTS "
                f"(in training, name it in `final` instead of `track`)"
            )
    return attacks


def _parse_attack(name: str, norm: Norm) -> EvaluationAttack:
    if name == "clean":
        return EvaluationAttack(name, None)
    if name in ORDER:
        return EvaluationAttack(name, None, parts=(name,))
    if name == ENSEMBLE:
        return EvaluationAttack(name, None, parts=ORDER)
    match = _PGD.fullmatch(name)
    if name != "fgsm" and not match:
        meant = re.sub("^[^-]*", "pgd", name)  # pdg-5 means pgd-5, not one of the usual numbers of steps
        known = (*_KNOWN, meant) if _PGD.fullmatch(meant) else _KNOWN
        raise InputError(
            f"attack {name!r} does not exist{nearest(name, known)}; "
            f"use clean, fgsm, pgd-STEPS, pgd-STEPS-RESTARTS, {', '.join(ORDER)} or {ENSEMBLE}"
        )
    if norm == "l1":
        raise InputError(f"attack {name} has no l1 form; in l1 use {', '.join(ORDER)} or {ENSEMBLE}")
    if not match:
        return EvaluationAttack(name, SignStep(clip=True, norm=norm))
    steps, restarts = int(match[1]), int(match[2] or 1)
    alpha = 1 / 4 if match[2] else min(2.5 / steps, 1)
    return EvaluationAttack(name, SignStep(alpha, steps, noise=1, clip=True, norm=norm), restarts)
