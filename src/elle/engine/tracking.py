"""What is tracked of a network in training: accuracies under attack, E_lin, and whether the records show a collapse."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from elle.config import given
from elle.core.attacks import Norm
from elle.core.precision import autocast
from elle.engine.monitor import Monitor
from elle.engine.records import Record, number
from elle.errors import InputError, nearest
from elle.evaluation.evaluate import surviving
from elle.evaluation.metrics import METRICS, linearity_metrics, mean_error
from elle.evaluation.mode import evaluation_mode
from elle.evaluation.names import EvaluationAttack, parse_tracked

if TYPE_CHECKING:
    from elle.engine.loop import Run


def parse_track(track: str, norm: Norm) -> tuple[list[EvaluationAttack], list[str]]:
    """`clean,pgd-10,misalignment` -> the attacks and the names of the metrics; one of the two may be none."""
    names = [name.strip() for name in track.split(",") if name.strip()]
    metrics = [name for name in names if name in METRICS]
    attacks = ",".join(name for name in names if name not in METRICS)
    if metrics and not attacks:
        return [], metrics
    try:
        return parse_tracked(attacks, norm), metrics
    except InputError as problem:
        likely = next((hint for name in attacks.split(",") if (hint := nearest(name, METRICS))), "")
        raise InputError(f"track: {problem}; or a metric of `elle metrics`{likely}") from None


class Tracking:
    """The attacks and metrics that a run's `track` names, on its tracking images."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.attacks, self.metrics = parse_track(run.config.track, run.config.norm)
        self._monitor, self._judged = Monitor(per_epoch=1), 0

    def record(self) -> Record:
        """Measure the tracked attacks and metrics; the first rank does it for all."""
        with self.run.step.trained():
            return self.run.ranks.from_first(self._record)

    def _record(self) -> Record:
        """Measured in the precision of training, and without touching its random state."""
        started = time.perf_counter()
        run, config, model = self.run, self.run.config, self.run.step.model
        (x, y), eps = run.tracking_images, given(config.eps)
        record: Record = {}
        with evaluation_mode(model, config.seed, run.device), autocast(run.device, run.precision):
            for one in self.attacks:
                record[one.name] = float(surviving(model, x, y, one, eps, run.evaluation_batch(1024)).float().mean())
            record["tracked_error"] = number(
                mean_error(model, x, y, eps, norm=config.norm, batch=run.evaluation_batch(500))
            )
        if self.metrics:
            found = linearity_metrics(
                model,
                x,
                y,
                eps,
                metric=",".join(self.metrics),
                norm=config.norm,
                batch=run.evaluation_batch(500),
                seed=config.seed,
            )
            for name, summary in found.items():
                record[f"tracked_{name}"] = number(summary.pop("mean", math.nan))
                record |= {f"tracked_{name}_{key}": number(value) for key, value in summary.items() if key != "count"}
        record["eval_seconds"] = round(time.perf_counter() - started, 3)
        return record

    def judged(self) -> Monitor:
        """A monitor that has judged the records instead of looks, for a run in which no monitor looks."""
        self._monitor.attacked = self.run.method.adversarial
        steps = {one.name: one.attack.steps for one in self.attacks if one.attack is not None and one.attack.steps > 1}
        strongest = max(steps, key=steps.__getitem__, default=None)
        # Each record once: all of them anew at every epoch would take minutes of a run of a thousand.
        new, self._judged = self.run.history[self._judged :], len(self.run.history)
        for record in new:
            if strongest in record and self.run.guard.can_judge(record["step"]):
                self._monitor.observe(
                    {
                        "step": record["step"],
                        "clean": record.get("clean", 1.0),  # untracked: no attacked images are answered better
                        "single": record.get("fgsm", record[strongest]),
                        "multi": record[strongest],
                        "error": record["tracked_error"],
                        "chance": 1 / len(self.run.images.classes),
                        "loss": record["loss"],
                        "accuracy": record["accuracy"],
                        "rate": None,
                    }
                )
        return self._monitor
