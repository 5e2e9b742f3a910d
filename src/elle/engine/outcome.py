"""How a run ends: its network, the accuracies on the test set, and result.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from elle.config import given
from elle.engine.run_files import FINAL
from elle.engine.runtime import hardware_name, stopped_at_once
from elle.evaluation.evaluate import evaluate, search_precision
from elle.evaluation.units import Files, Memory, Settings, Store, default_chunk, points_digest
from elle.files import file_digest
from elle.version import __version__

if TYPE_CHECKING:
    from elle.engine.loop import Run


_SAVED = " in the final evaluation; what is done is saved; the same command with --resume goes on"


def conclude(run: Run) -> dict[str, Any]:
    """Write the weights, evaluate on the test set, all ranks together, and write the result."""
    with run.step.trained(), stopped_at_once(lambda: _SAVED):
        final = _final(run)
    config = run.config
    # Of those that trained: what is left of a run, or its evaluation alone, may be done by another number.
    ranks = run.rank_counts or [run.ranks.count]
    epoch_seconds = [record["seconds"] for record in run.history]
    # Not of an epoch that max_steps cuts short.
    whole = [record["seconds"] for record in run.history if run.timetable.place(record["step"])[1] == 0]
    result = {
        "version": __version__,
        "torch": torch.__version__,
        "device": hardware_name(run.device),
        "precision": run.precision,
        "ranks": ranks[0] if len(ranks) == 1 else ranks,
        "batchnorm": "all ranks" if config.sync_bn and max(ranks) > 1 else "each rank",
        "config": config.model_dump(),
        "classes": list(run.images.classes),
        "steps": run.done,
        "collapse_epoch": _collapse_epoch(run),
        "verdicts": run.guard.verdicts(),
        "rollbacks": run.guard.rollbacks,
        "seconds_per_epoch": round(median(whole), 4) if whole else None,
        "train_seconds": round(sum(epoch_seconds), 3),
        "test": final,
        "test_points": points_digest(run.images.test.x, run.images.test.y),
    }
    run.files.conclude(result)
    run.files.event("finish", step=run.done)
    return result


def _collapse_epoch(run: Run) -> int | None:
    """The epoch in which the present collapse began: by the monitor, or by the records where it does not look."""
    since = None if run.guard.monitor is None else run.guard.monitor.collapsed_since
    if since is None and not run.guard.every:
        since = run.tracking.judged().collapsed_since
    return None if since is None else run.timetable.place(since - 1)[0] + 1


def _final(run: Run) -> dict[str, Any]:
    """Write the network as it is now, and evaluate it on the test set."""
    config, model, ranks, test = run.config, run.step.model, run.ranks, run.images.test
    # A user's own layer may remember its rank's images: all evaluate the network that is written.
    ranks.copy_from_first(list(model.state_dict().values()))
    run.files.write_network(model.state_dict(), run.model_header())
    run.watcher.said(f"evaluating {config.final} on {len(test)} test images")
    settings = Settings(
        given(config.eps),
        config.norm,
        config.seed,
        precision=search_precision(run.device),
        batch=run.evaluation_batch(500),
        chunk=default_chunk(run.device, test.x[0, 0].size),
    )
    return evaluate(
        model,
        test.x,  # moved to the device a chunk at a time
        test.y,
        config.final,
        **asdict(settings),
        part=(ranks.rank, ranks.count),
        exchange=ranks.exchanged,
        store=_store(run, settings),
    )


def _store(run: Run, settings: Settings) -> Store:
    """A folder for units of the final evaluation, named by all that they depend on: another network's are not found."""
    test = run.images.test

    def identity() -> str:
        weights, points = file_digest(run.directory / "model.safetensors"), points_digest(test.x, test.y)
        content = json.dumps([asdict(settings), weights, points])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    folder = run.directory / FINAL / run.ranks.from_first(identity)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Memory()  # another machine, which has no place for it
    return Files(folder)
