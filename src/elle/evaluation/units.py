"""An evaluation in units that can be lost and redone: one attack on one chunk of the points, seeded by its name."""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from elle.core.precision import Precision
from elle.errors import InputError
from elle.evaluation.autoattack import Norm
from elle.evaluation.names import EvaluationAttack
from elle.files import write_atomically

Bools = npt.NDArray[np.bool_]
Images = Tensor | npt.NDArray[Any]
Engine = Literal["fast", "reference"]
BATCH = 1024
_CHUNK_PIXELS = 2**28 // 12
"""Pixels of a unit's points, at most: 256 MiB of colour images, of which an attack holds a handful of copies."""


@dataclass(frozen=True)
class Settings:
    """All that the outcome of a unit depends on, beside the network and the points."""

    eps: float
    norm: Norm = "linf"
    seed: int = 0
    engine: Engine = "fast"
    precision: Precision = "fp32"
    batch: int = BATCH
    chunk: int = 1024
    compile: bool = False
    """Compile the network for full batches of the fast engine: minutes first, then faster."""

    def __post_init__(self) -> None:
        for name, allowed in (("engine", get_args(Engine)), ("precision", get_args(Precision))):
            if (value := getattr(self, name)) not in allowed:
                raise InputError(f"{name} {value!r} does not exist; use {', '.join(allowed)}")
        for name, least in (("batch", 1), ("chunk", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be {least} or more")


@dataclass(frozen=True)
class Unit:
    """`chain` is the attack and what ran before it on the same points; nothing for the clean images."""

    chain: tuple[str, ...]
    chunk: int

    @property
    def name(self) -> str:
        return f"{'+'.join(self.chain) or 'clean'}.{self.chunk:05d}"


@dataclass
class Outcome:
    """The result of a unit: which clean images are wrong, or which of those still right the attack broke."""

    broken: Bools
    seconds: float
    facts: dict[str, int] = field(default_factory=dict)
    """Counts for the self-checks, and what was found but does not count."""
    x_adv: npt.NDArray[np.float32] | None = None
    """The broken points' adversarial images, if they are to be kept."""


class Store(Protocol):
    """Where outcomes are kept."""

    def load(self, unit: Unit) -> Outcome | None: ...
    def save(self, unit: Unit, outcome: Outcome) -> None: ...


class Memory:
    """Outcomes that live as long as the process."""

    def __init__(self) -> None:
        self.outcomes: dict[Unit, Outcome] = {}

    def load(self, unit: Unit) -> Outcome | None:
        return self.outcomes.get(unit)

    def save(self, unit: Unit, outcome: Outcome) -> None:
        self.outcomes[unit] = outcome


class Files:
    """Outcomes as files of a directory, each written atomically."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self, unit: Unit) -> Outcome | None:
        path = self.directory / f"{unit.name}.npz"
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as arrays:
                seconds, facts = json.loads(str(arrays["rest"]))
                return Outcome(arrays["broken"], seconds, facts)  # images stay in the file until they are wanted
        except Exception:  # what is damaged from outside may raise anything, down to zlib's own error
            return None  # done again

    def examples(self, unit: Unit) -> dict[str, Any]:
        """Where in its chunk the broken points are, and their adversarial images."""
        with np.load(self.directory / f"{unit.name}.npz", allow_pickle=False) as arrays:
            return {"index": arrays["broken"].nonzero()[0], "x_adv": arrays["x_adv"]}

    def save(self, unit: Unit, outcome: Outcome) -> None:
        content = io.BytesIO()
        arrays: dict[str, Any] = {"broken": outcome.broken, "rest": json.dumps([outcome.seconds, outcome.facts])}
        if outcome.x_adv is not None:
            arrays["x_adv"] = outcome.x_adv
        np.savez_compressed(content, **arrays)
        write_atomically(self.directory / f"{unit.name}.npz", content.getvalue())


def plan(attacks: Iterable[EvaluationAttack], chunk: int) -> list[Unit]:
    """The units of a chunk in the order they are run: clean first, each chain from its beginning, none twice."""
    chains = [one.chain[: k + 1] for one in attacks for k in range(len(one.chain))]
    return [Unit(chain, chunk) for chain in dict.fromkeys([(), *chains])]


def default_chunk(device: torch.device, pixels: int = 32 * 32) -> int:
    """Points a unit; a GPU wants many at once, as the last of a unit leave it half idle; fewer of large images."""
    return max(1, min(2500 if device.type == "cuda" else 1024, _CHUNK_PIXELS // pixels))


def fitting_batch(batch: int, pixels: int, trained: int = 1) -> int:
    """How many images fit into a batch: fewer than `batch` if they are large, but no fewer than a training step had."""
    return min(batch, max(trained, 1024 * 32 * 32 // pixels))


def count_chunks(total: int, chunk: int) -> int:
    return -(-total // chunk)


FIRST = 64
"""Images that a digest of points takes in."""


def points_digest(x: Images, y: Images) -> str:
    """The SHA-256 of the labels and of the first images: enough to tell two sets of points apart."""
    first, labels = (as_tensor(values).detach().cpu() for values in (x[:FIRST], y))
    digest = hashlib.sha256(labels.numpy().astype("<i8").tobytes())
    digest.update((first.float() if first.is_floating_point() else first).contiguous().numpy().tobytes())
    return digest.hexdigest()


def as_tensor(values: Images) -> Tensor:
    # Copied: a memory-mapped file is read-only, and torch wants arrays that are not.
    return values if isinstance(values, Tensor) else torch.tensor(np.asarray(values))


def unit_seed(seed: int, unit: Unit) -> int:
    """A function of the seed, the attack and the chunk alone, so that neither order nor interruption matters."""
    name = unit.chain[-1] if unit.chain else "clean"
    # PGD's restarts begin at the same points whatever their number: more of them can only break more.
    attack = zlib.crc32(("pgd" if name.startswith("pgd-") else name).encode())
    # A spawn key keeps the triples apart for any seed; sums would not.
    (state,) = np.random.SeedSequence(seed, spawn_key=(attack, unit.chunk)).generate_state(1, np.uint64)
    return int(state) >> 1  # as a plain number: NumPy 1 does not shift an unsigned one
