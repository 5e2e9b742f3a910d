"""From outcomes to a result: accuracies with their intervals, per-point bits, and two results point by point."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from elle.errors import InputError
from elle.evaluation.names import EvaluationAttack
from elle.evaluation.units import Bools, Outcome, Settings, Store, Unit, count_chunks

SCHEMA = "elle-evaluation/1"
COMPARED = ("eps", "norm", "seed", "engine", "precision")
"""Settings in which two results may differ; a comparison says so."""
Entry = dict[str, Any]


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson, 1927)."""
    z = 1.959963984540054
    share = correct / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total**2)) / (1 + z * z / total)
    # At the ends the two are equal but for rounding, which would write 0 as 8.7e-19.
    return middle - half if correct else 0.0, middle + half if correct < total else 1.0


def collected(store: Store, chain: tuple[str, ...], total: int, chunk: int) -> Outcome:
    """The outcomes of an attack on every chunk, as one."""
    parts = []
    for number in range(count_chunks(total, chunk)):
        outcome = store.load(Unit(chain, number))
        assert outcome is not None
        parts.append(outcome)
    facts: dict[str, int] = {}
    for part in parts:
        for name, count in part.facts.items():
            facts[name] = count if name == "classes" else facts.get(name, 0) + count
    return Outcome(np.concatenate([part.broken for part in parts]), sum(part.seconds for part in parts), facts)


def entries(store: Store, attacks: list[EvaluationAttack], total: int, settings: Settings) -> dict[str, Entry]:
    """For each attack: accuracy, correct, total, interval, seconds, and `survived` [N], which are still correct."""
    results = {}
    for one in attacks:
        chains = [one.chain[:k] for k in range(len(one.chain) + 1)]
        outcomes = [collected(store, chain, total, settings.chunk) for chain in chains]
        survived = ~np.any([outcome.broken for outcome in outcomes], axis=0)
        correct = int(survived.sum())
        entry: Entry = {
            "accuracy": correct / total,
            "correct": correct,
            "total": total,
            "interval": list(wilson_interval(correct, total)),
            "seconds": round(sum(outcome.seconds for outcome in outcomes), 3),
            "survived": survived,
        }
        refused = {key: sum(outcome.facts.get(key, 0) for outcome in outcomes) for key in ("outside", "unverified")}
        if one.chain:
            entry |= refused
        if len(one.chain) > 1:
            left = total - np.cumsum([int(outcome.broken.sum()) for outcome in outcomes])
            entry["parts"] = [
                {"attack": name, "broken": int(outcome.broken.sum()), "correct": int(count)}
                | {"seconds": round(outcome.seconds, 3)}
                for name, outcome, count in zip(one.chain, outcomes[1:], left[1:], strict=True)
            ]
        results[one.name] = entry
    return results


def packed(bits: Bools) -> str:
    """Bits as base64 text, eight to a byte, the first point in the highest bit."""
    return base64.b64encode(np.packbits(bits).tobytes()).decode()


def unpacked(text: str, count: int) -> Bools:
    """The bits of `count` points out of the text that `packed` wrote."""
    raw = np.frombuffer(base64.b64decode(text), np.uint8)
    if len(raw) != -(-count // 8):
        raise ValueError(f"{len(raw)} bytes do not hold {count} points")
    return np.unpackbits(raw, count=count).astype(np.bool_)


def read_record(path: Path) -> dict[str, Any]:
    """An evaluation's record, from its file or the directory it is in."""
    file = path / "evaluation.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{file} does not exist; `elle evaluate` writes it")
    try:
        record = json.loads(file.read_text())
    except ValueError:
        raise InputError(f"{file} is not JSON; `elle evaluate` writes it") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else None
        raise InputError(f"{file} is not a record of the schema {SCHEMA} (its schema is {found!r}); evaluate again")
    if missing := [key for key in (*COMPARED, "data", "attacks") if key not in record]:
        raise InputError(f"{file} is not a whole record: it has no {missing[0]!r}; evaluate again")
    try:
        whole = math.isfinite(record["eps"]) and "name" in record["data"]
        for one in record["attacks"].values():
            survived = unpacked(one["survived"], record["data"]["count"])
            # A comparison shows the accuracy beside what it counts in these points: the two must agree.
            whole &= one["total"] == len(survived) and one["accuracy"] == int(survived.sum()) / len(survived)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError):
        whole = False
    if not whole:
        raise InputError(f"{file} is damaged: a number in it is missing, or not that of its points; evaluate again")
    return record


def compared(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Two results on the same points: for each attack both have, who breaks what the other does not."""
    if a["data"] != b["data"]:
        raise InputError(
            f"the results are not on the same points: {_points(a)} and {_points(b)}; evaluate both on the same ones"
        )
    shared = [name for name in a["attacks"] if name in b["attacks"]]
    if not shared:
        raise InputError(
            f"the results share no attack: A has {', '.join(a['attacks'])}, B has {', '.join(b['attacks'])}"
        )
    differing = [key for key in COMPARED if a[key] != b[key]]
    return {
        "schema": "elle-comparison/1",
        "total": a["data"]["count"],
        "differing": {key: [a[key], b[key]] for key in differing},
        "attacks": {name: _paired(a["attacks"][name], b["attacks"][name], _claim(name, differing)) for name in shared},
    }


def _points(record: Mapping[str, Any]) -> str:
    return f"{record['data']['count']} of {record['data']['name'] or 'unnamed data'}"


def _claim(name: str, differing: list[str]) -> str:
    """The claim that fewer broken points support; where the attacks differ, it says nothing about the network."""
    if name == "clean":
        return "is more accurate"
    return "was attacked otherwise and is broken less" if set(differing) - {"seed"} else "is more robust"


def _paired(a: Entry, b: Entry, claim: str) -> Entry:
    in_a, in_b = (unpacked(one["survived"], one["total"]) for one in (a, b))
    only_a, only_b = (~in_a & in_b).nonzero()[0], (in_a & ~in_b).nonzero()[0]
    p = mcnemar(len(only_a), len(only_b))
    return {
        "accuracy": [a["accuracy"], b["accuracy"]],
        "difference": b["accuracy"] - a["accuracy"],
        "only_a_breaks": only_a.tolist(),
        "only_b_breaks": only_b.tolist(),
        "p": p,
        "statement": _statement(len(only_a), len(only_b), p, claim),
    }


def mcnemar(only_a: int, only_b: int) -> float:
    """The exact two-sided p-value of McNemar's test: a fair coin for each point on which the two disagree."""
    n, k = only_a + only_b, min(only_a, only_b)
    if 2 * k == n:
        return 1.0
    logs = [math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1) - n * math.log(2) for j in range(k + 1)]
    return min(1.0, 2 * sum(math.exp(value) for value in logs))


def _statement(only_a: int, only_b: int, p: float, claim: str) -> str:
    if only_a + only_b == 0:
        return "the same points are broken"
    if p >= 0.05:
        return f"no difference shown: {only_a} against {only_b} points would come by chance (p = {p:.2g})"
    better = "B" if only_a > only_b else "A"
    points = "1 point" if only_a == 1 else f"{only_a} points"
    return f"{better} {claim}: {points} broken in A alone, {only_b} in B alone (p = {p:.2g})"
