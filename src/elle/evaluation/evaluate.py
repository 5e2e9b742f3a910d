"""Accuracy without and under attack: eval mode, float32, one result for each attack."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elle.core.attacks.checks import one_radius
from elle.core.attacks.network import unwrapped
from elle.core.precision import Precision
from elle.errors import InputError
from elle.evaluation.autoattack import ORDER, Norm, adaptations
from elle.evaluation.checks import check
from elle.evaluation.mode import device_of, in_batches, is_wrong
from elle.evaluation.names import EvaluationAttack, parse_attacks
from elle.evaluation.results import SCHEMA, collected, entries, packed
from elle.evaluation.units import (
    BATCH,
    Engine,
    Images,
    Memory,
    Settings,
    Store,
    count_chunks,
    default_chunk,
    plan,
    points_digest,
)
from elle.evaluation.worker import Worker
from elle.version import __version__


def evaluate(
    model: nn.Module,
    x: Images,
    y: Images,
    attack: str = "clean,pgd-20",
    eps: float = 8 / 255,
    *,
    norm: Norm = "linf",
    batch: int = BATCH,
    seed: int = 0,
    engine: Engine = "fast",
    precision: Precision | None = None,
    chunk: int | None = None,
    compile: bool = False,
    part: tuple[int, int] = (0, 1),
    exchange: Callable[[Any], list[Any]] = lambda own: [own],
    store: Store | None = None,
) -> dict[str, dict[str, Any]]:
    """Accuracy of `model` on images x [N, C, H, W] with labels y [N], for each attack named.

    x is uint8, or floats in [0, 1]; a tensor or an array, on any device or memory-mapped: it is moved to the model's
    device a chunk at a time. `result["pgd-20"]` holds accuracy, correct, total, interval (95 %) and seconds. The model
    is put into eval mode and back; randomness comes from `seed` alone and the caller's is left as it was.
    Process k of n gives `part=(k, n)` and an `exchange` that returns what all of them pass to it: each attacks its
    chunks, and the result, the same on all, is that of one process. What `store` holds already is not done again; it
    must be of this network, these points and these settings.
    """
    device = _device(model, x, y)
    how, chunk = precision or search_precision(device), chunk or default_chunk(device, math.prod(x.shape[2:]))
    settings = Settings(_radius(eps, norm), norm, seed, engine, how, batch, chunk, compile)
    own, everyones = Memory() if store is None else store, Memory()
    chunks = range(part[0], count_chunks(len(y), chunk), part[1])
    attacks = _run(model, x, y, attack, settings, device, own, chunks)
    for outcomes in exchange({unit: own.load(unit) for number in chunks for unit in plan(attacks, number)}):
        everyones.outcomes |= outcomes
    plain = ("accuracy", "correct", "total", "interval", "seconds", "parts")
    found = entries(everyones, attacks, len(y), settings)
    return {name: {key: one[key] for key in plain if key in one} for name, one in found.items()}


def assess(
    model: nn.Module,
    x: Images,
    y: Images,
    attack: str = "clean,fgsm,pgd-20",
    eps: float = 8 / 255,
    *,
    norm: Norm = "linf",
    batch: int = BATCH,
    seed: int = 0,
    engine: Engine = "fast",
    precision: Precision | None = None,
    chunk: int | None = None,
    compile: bool = False,
) -> dict[str, Any]:
    """As `evaluate`, but returns the whole record to publish: self-checks, outcomes by point, settings, versions."""
    device = _device(model, x, y)
    how, chunk = precision or search_precision(device), chunk or default_chunk(device, math.prod(x.shape[2:]))
    settings = Settings(_radius(eps, norm), norm, seed, engine, how, batch, chunk, compile)
    store = Memory()
    attacks = _run(model, x, y, attack, settings, device, store, range(count_chunks(len(y), chunk)), probe=True)
    about = {"data": {"name": None, "count": len(y), "sha256": points_digest(x, y)}}
    return record_of(store, attacks, settings, len(y), devices=[device_name(device)], about=about)


def _radius(eps: float, norm: Norm) -> float:
    """eps as a plain number, which JSON holds, if it can be meant."""
    try:
        return one_radius(eps, norm, allow_zero=True)
    except ValueError as problem:
        raise InputError(str(problem)) from None


def _device(model: nn.Module, x: Images, y: Images) -> torch.device:
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}; give a torch.nn.Module, images in and logits out")
    for name, values in (("x", x), ("y", y)):
        if not isinstance(values, Tensor | np.ndarray):
            raise InputError(f"{name} is a {type(values).__name__}; give a tensor or an array")
    return device_of(model, x.device if isinstance(x, Tensor) else torch.device("cpu"))


def _run(
    model: nn.Module,
    x: Images,
    y: Images,
    attack: str,
    settings: Settings,
    device: torch.device,
    store: Store,
    chunks: range,
    probe: bool = False,
) -> list[EvaluationAttack]:
    attacks = parse_attacks(attack, settings.norm)
    if len(x) == 0 or len(x) != len(y):
        raise InputError(f"{len(x)} images and {len(y)} labels cannot be evaluated; there must be one label an image")
    if y.ndim != 1:
        raise InputError(f"the labels have shape {tuple(y.shape)}; give the number of the class of each image, [N]")
    Worker(unwrapped(model), x, y, attacks, settings, device, probe=probe).run(store, chunks)
    return attacks


def search_precision(device: torch.device) -> Precision:
    """fp16 for searching on a GPU, where each success is verified in float32; float32 on a CPU."""
    return "fp16" if device.type == "cuda" else "fp32"


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Linux knows the processor by this file alone: Python's own answer there is empty, or x86_64.
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "cpu"


def record_of(
    store: Store,
    attacks: list[EvaluationAttack],
    settings: Settings,
    total: int,
    *,
    devices: Sequence[str],
    about: dict[str, Any],
) -> dict[str, Any]:
    """The published record (docs/evaluation.md): plain values only, so that JSON holds it."""
    found = entries(store, attacks, total, settings)
    facts = collected(store, (), total, settings.chunk).facts
    for one in attacks:
        found[one.name]["survived"] = packed(found[one.name]["survived"])
        if one.parts:
            notes = [adaptations(name, facts["classes"], settings.norm) for name in one.parts]
            found[one.name]["adaptations"] = [words for note in notes for words in note]
    record = {
        "schema": SCHEMA,
        "version": __version__,
        **asdict(settings),
        "classes": facts["classes"],
        "attacks": found,
        "checks": check(found, facts, total),
        "versions": versions(settings.engine, attacks),
        "devices": list(devices),
    }
    if any(one.parts == ORDER for one in attacks):
        record["order"] = list(ORDER)
    return record | about


def versions(engine: Engine, attacks: list[EvaluationAttack]) -> dict[str, str | None]:
    """The versions of all software that took part."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
    }
    if engine == "reference" and any(one.parts for one in attacks):
        found["pyautoattack"] = importlib.metadata.version("pyautoattack")
    return found


def surviving(model: nn.Module, x: Tensor, y: Tensor, one: EvaluationAttack, eps: float, batch: int) -> Tensor:
    """Which images [N] the last points of gradient steps leave correct, in the caller's mode and precision."""
    everything = torch.arange(len(x), device=x.device)
    alive = torch.cat([_correct(model, x[part], y[part]) for part in torch.split(everything, batch)])
    if one.attack is None:
        return alive
    for _ in range(one.restarts):
        # Only what is left, in full batches again: broken images cost nothing more.
        for part in in_batches(everything[alive], batch):
            alive[part] = _correct(model, one.attack(model, x[part], y[part], eps), y[part])
    return alive


def _correct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return ~is_wrong(model(x), y)
