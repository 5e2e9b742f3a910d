"""An evaluation in a directory: written down unit by unit, shared out over devices, resumed, and made one record."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elle.config import format_value
from elle.engine.checkpoint import RunLock
from elle.engine.runtime import pick_device, stopped_at_once
from elle.engine.subject import Source, Subject, load_subject
from elle.errors import InputError, WorkError
from elle.evaluation.evaluate import device_name, record_of
from elle.evaluation.names import EvaluationAttack, parse_attacks
from elle.evaluation.units import Files, Settings, count_chunks, plan
from elle.evaluation.worker import Worker
from elle.files import read_object, write_atomically, write_json
from elle.signals import handling

PARTS = "evaluation.parts"
RESULT = "evaluation.json"
SAVED = "adversarial"


@dataclass(frozen=True)
class Job:
    """An evaluation in plain values, which another process can read."""

    source: Source
    attack: str
    settings: Settings
    count: int
    keep: bool

    @property
    def attacks(self) -> list[EvaluationAttack]:
        return parse_attacks(self.attack, self.settings.norm)

    @property
    def chunks(self) -> range:
        return range(count_chunks(self.count, self.settings.chunk))


def assess_run(
    job: Job,
    subject: Subject,
    out: Path,
    devices: list[str],
    *,
    resume: bool = False,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Run what is left of the job, on every device given, and write and return its record."""
    attacks, identity = job.attacks, _identity(job, subject)
    with RunLock(out):
        if resume and (finished := _finished(out, identity, attacks)) is not None:
            return finished
        fresh = _claim(out, identity, resume)
        started = time.perf_counter()
        total = len(job.chunks) * len(plan(attacks, 0))
        try:
            with _stoppable(out / PARTS, total):
                _run(job, out / PARTS, subject, devices, watch, total)
        except InputError:
            if fresh:
                shutil.rmtree(out / PARTS)  # a mistake, not an interruption: there is nothing to continue
            raise
        about = _about(job, subject) | {"seconds": round(time.perf_counter() - started, 3), "identity": identity}
        names = [device_name(pick_device(name)) for name in devices]
        record = record_of(Files(out / PARTS), attacks, job.settings, job.count, devices=names, about=about)
        _set_aside(out, record)
        if job.keep:
            _keep_examples(out, job, subject)
        write_json(out / RESULT, record)
        shutil.rmtree(out / PARTS)
    return record


def _identity(job: Job, subject: Subject) -> dict[str, Any]:
    """All that two evaluations must have in common to share their units: everything except attacks and devices."""
    points = {"data": subject.data, "count": job.count, "points": subject.points_digest()}
    # The same weights are another network in another function.
    network = {"model": subject.model_name, "weights": subject.digest()}
    return asdict(job.settings) | points | network | {"save": job.keep}


def _finished(out: Path, identity: dict[str, Any], attacks: list[EvaluationAttack]) -> dict[str, Any] | None:
    """The record that is there already, if it is this very evaluation and nothing newer was begun."""
    record = read_object(out / RESULT)
    if not record or (out / PARTS).exists():
        return None
    same = record.get("identity") == identity and list(record["attacks"]) == [one.name for one in attacks]
    return record if same else None


def _claim(out: Path, identity: dict[str, Any], resume: bool) -> bool:
    """Begin in an empty folder of parts (True), or go on in one that belongs to this evaluation (False)."""
    parts = out / PARTS
    if not (parts / "identity.json").exists():
        shutil.rmtree(parts, ignore_errors=True)
        write_json(parts / "identity.json", identity)
        return True
    if not resume:
        count = len(list(parts.glob("*.npz")))
        raise InputError(
            f"{out} holds an unfinished evaluation ({count} units done); continue it with --resume, "
            f"choose another --out, or delete {parts}"
        )
    begun = read_object(parts / "identity.json")
    if not begun:
        raise InputError(f"{parts / 'identity.json'} is damaged; delete {parts} and evaluate again without --resume")
    differing = [key for key in identity if begun.get(key) != identity[key]]
    if differing:
        words = ", ".join(_spelled(key, begun.get(key)) for key in differing)
        raise InputError(
            f"the unfinished evaluation in {parts} has {words}; give the same, choose another --out, or delete it"
        )
    return False


def _spelled(key: str, value: Any) -> str:
    return f"other {key}" if key in ("weights", "points") else f"{key}={format_value(key, value)}"


@contextlib.contextmanager
def _stoppable(parts: Path, total: int) -> Iterator[None]:
    """A signal or a full memory ends the work in one line that tells what is saved: all but the unit at work."""

    def saved() -> str:
        count = len(list(parts.glob("*.npz")))
        return f"; {count} of {total} units are saved; the same command with --resume goes on"

    try:
        with stopped_at_once(saved):
            yield
    except torch.OutOfMemoryError:
        raise WorkError(
            "the device's memory is full; what is done is saved; go on with --resume and a smaller --batch"
        ) from None


def _run(
    job: Job, parts: Path, subject: Subject, devices: list[str], watch: Callable[[int, int], None], total: int
) -> None:
    def done() -> None:
        watch(len(list(parts.glob("*.npz"))), total)

    done()
    if len(devices) == 1:
        _worker(job, subject, pick_device(devices[0])).run(Files(parts), job.chunks, done)
        return
    # One process a device. A unit depends on nothing but its name, so the chunks are dealt out and nobody talks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(devices), mp_context=context) as pool:
        try:
            # They are born ignoring Ctrl-C, which reaches a whole group of processes: the parent decides.
            with handling(signal.SIG_IGN, signal.SIGINT):
                running = {
                    pool.submit(_share, job, parts, name, list(job.chunks[k :: len(devices)]), os.getpid())
                    for k, name in enumerate(devices)
                }
            while running:
                ready, running = wait(running, timeout=1, return_when=FIRST_EXCEPTION)
                done()
                for future in ready:
                    future.result()
        except BrokenProcessPool:
            raise WorkError(
                "a worker process ended; what is done is saved; the same command with --resume goes on"
            ) from None
        except BaseException:
            for process in list(pool._processes.values()):
                process.kill()  # at once: units are atomic
            raise


def _share(job: Job, parts: Path, device: str, chunks: list[int], parent: int) -> None:
    """The work of one process: attack its share of the chunks, and end with the process that started it."""
    subject = load_subject(job.source, pick_device(device), job.count)

    def orphaned() -> None:
        if os.getppid() != parent:
            os._exit(1)

    _worker(job, subject, pick_device(device)).run(Files(parts), chunks, orphaned)


def _worker(job: Job, subject: Subject, device: torch.device) -> Worker:
    x, y = subject.test.x, subject.test.y
    return Worker(subject.model, x, y, job.attacks, job.settings, device, probe=True, keep=job.keep)


def _about(job: Job, subject: Subject) -> dict[str, Any]:
    """The description of the network and the points in a record."""
    return {
        "model": {
            "name": subject.model_name,
            "weights": str(subject.weights),
            "sha256": subject.digest(),
            "config": None if subject.config is None else subject.config.model_dump(),
        },
        "data": {"name": subject.data, "count": job.count, "sha256": subject.points_digest()},
        # Of all test images, however few were attacked: `elle report` tells by it whether they are the run's own.
        "test_points": subject.test_points,
        "class_names": list(subject.classes),
    }


def _keep_examples(out: Path, job: Job, subject: Subject) -> None:
    """adversarial/ATTACK.CHUNK.npz: index and x_adv of the points each attack broke."""
    shutil.rmtree(out / SAVED, ignore_errors=True)
    (out / SAVED).mkdir()
    store = Files(out / PARTS)
    for chunk in job.chunks:
        for unit in plan(job.attacks, chunk)[1:]:
            arrays, content = store.examples(unit), io.BytesIO()
            arrays["index"] = subject.numbers[arrays["index"] + chunk * job.settings.chunk]
            np.savez_compressed(content, **arrays)
            write_atomically(out / SAVED / f"{unit.name}.npz", content.getvalue())


def _set_aside(out: Path, record: dict[str, Any]) -> None:
    """A record that says something the new one does not is kept under the next free number, with its images."""
    old = read_object(out / RESULT)
    repeated = old.get("identity") == record["identity"] and set(old["attacks"]) <= set(record["attacks"])
    if not (out / RESULT).exists() or repeated:
        return
    number = 1
    while (out / f"evaluation.{number}.json").exists() or (out / f"{SAVED}.{number}").exists():
        number += 1
    if (out / SAVED).exists():
        (out / SAVED).rename(out / f"{SAVED}.{number}")
    (out / RESULT).rename(out / f"evaluation.{number}.json")
