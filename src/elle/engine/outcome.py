"""How a run ends: its network, the accuracies on the test set, and result.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from elle.config import given
from elle.evaluation.evaluate import evaluate
from elle.version import __version__

if TYPE_CHECKING:
    from elle.engine.loop import Run


def conclude(run: Run) -> dict[str, Any]:
    """Write the weights, evaluate on the test set, all ranks together, and write the result."""
    with run.step.trained():
        final = _final(run)
    config, ranks = run.config, run.ranks
    epoch_seconds = [record["seconds"] for record in run.history]
    result = {
        "version": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "cpu",
        "precision": run.precision,
        "ranks": ranks.count,
        "batchnorm": "all ranks" if config.sync_bn and ranks.count > 1 else "each rank",
        "config": config.model_dump(),
        "classes": list(run.images.classes),
        "steps": run.done,
        "collapse_epoch": _collapse_epoch(run),
        "verdicts": run.guard.verdicts(),
        "rollbacks": run.guard.rollbacks,
        "seconds_per_epoch": sorted(epoch_seconds)[len(epoch_seconds) // 2] if epoch_seconds else None,
        "train_seconds": round(sum(epoch_seconds), 3),
        "test": final,
    }
    run.files.write_json("result.json", result)
    run.files.event("finish", step=run.done)
    return result


def _collapse_epoch(run: Run) -> int | None:
    """The epoch of the collapse that stands: the monitor knows, unlike the records, what was undone or has passed."""
    found = run.tracking.collapse()
    told = [verdict["since"] for verdict in run.guard.verdicts() if verdict["kind"] == "collapse"]
    if not told:
        return found
    if run.guard.condition != "collapse":
        return None
    return run.timetable.place(told[-1] - 1)[0] + 1 if found is None else found


def _final(run: Run) -> dict[str, Any]:
    """Keep the network as it is now, and what it survives of the test set."""
    config, model, ranks = run.config, run.step.model, run.ranks
    run.files.write_tensors("model.safetensors", model.state_dict(), run.model_header())
    run.watcher.said(f"evaluating {config.final} on {len(run.images.test)} test images")
    return evaluate(
        model,
        run.images.test.x,  # moved to the device a chunk at a time
        run.images.test.y,
        config.final,
        given(config.eps),
        norm=config.norm,
        batch=run.fitting(500),
        seed=config.seed,
        part=(ranks.rank, ranks.count),
        exchange=ranks.exchanged,
    )
