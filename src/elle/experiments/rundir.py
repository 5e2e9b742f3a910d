"""What a run directory says, finished or not, read without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elle.config import Config, format_radius, run_config
from elle.errors import InputError
from elle.files import read_lines

Record = dict[str, Any]


@dataclass
class RunDirectory:
    """The files of one run; `read` reads again what has grown."""

    path: Path
    config: Config
    records: list[Record] = field(default_factory=list)
    probes: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    result: Record | None = None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def setting(self) -> str:
        """The settings of the run in a few words."""
        config = self.config
        return f"{config.method} on {config.data}, eps {format_radius(config.eps or 0)}, seed {config.seed}"

    def read(self) -> None:
        self.records = _read_whole(self.path / "metrics.jsonl", _is_record)
        self.probes = _read_whole(self.path / "probes.jsonl", _is_probe)
        self.events = _read_whole(self.path / "events.jsonl", _is_event)
        result = self.path / "result.json"
        if result.exists():
            self.result = _read_result(result)

    def steps(self) -> list[Record]:
        """One line an epoch: the number of its first step and a column of values a quantity."""
        return _read_whole(self.path / "steps.jsonl", _is_epoch_of_steps)

    def epoch_of(self, step: int) -> float:
        """How many epochs have passed after a step; those of a run in phases differ in their number of steps."""
        ends = [(0, 0)]
        for record in self.records:  # one that max_steps cuts short ends where the whole epoch would
            whole = ends[-1][0] + record["epoch_steps"] if "epoch_steps" in record else record["step"]
            ends.append((whole, record["epoch"]))
        if len(ends) == 1:
            # Nobody knows the first epoch's length before it is recorded, but all steps so far are within it, and the
            # monitor looks twice an epoch unless it is told otherwise.
            looks = [int(probe["step"]) for probe in self.probes] or [0]
            length = 2 * looks[0] if self.config.probe_every is None else looks[-1]
            return step / max(step, length, 1)
        after = next((k for k, (last, _) in enumerate(ends) if k and step <= last), len(ends) - 1)
        (first, epochs), (last, more) = ends[after - 1], ends[after]
        return float(epochs + (step - first) * (more - epochs) / max(last - first, 1))  # 0: a line that is there twice

    def epochs(self) -> float:
        """How many epochs are recorded, with the part of one that max_steps cuts short."""
        return self.epoch_of(self.records[-1]["step"]) if self.records else 0.0

    def multi_step(self) -> str | None:
        """The strongest tracked multi-step attack: the name of its column."""
        names = [name.strip() for name in self.config.track.split(",") if name.strip().startswith("pgd-")]
        names = [name for name in names if any(name in record for record in self.records)]
        return max(names, key=lambda name: int(name.split("-")[1]), default=None)

    def collapses(self) -> list[tuple[Record, Record | None]]:
        """The events of all collapses, each with the recovery or the rollback that ended it, or None."""
        told: list[tuple[Record, Record | None]] = []
        for event in self.events:
            if event["event"] == "collapse":
                told.append((event, None))
            elif event["event"] in ("recovery", "rollback") and told and told[-1][1] is None:
                told[-1] = told[-1][0], event
            while told and _before(event, told[-1][0]) and (told[-1][1] or {}).get("event") != "rollback":
                told.pop()
        return told

    def collapse_step(self) -> int | None:
        """Where the run collapsed and stayed so: by its monitor, else by its records."""
        for told, ended in self.collapses()[-1:]:
            if ended is None:
                return _begun(told)
        epoch: int | None = (self.result or {}).get("collapse_epoch")
        if epoch is None:
            return None
        return next((int(record["step"]) for record in self.records if record["epoch"] >= epoch), epoch)

    def went_on_with(self) -> str | None:
        """The method that its rollbacks had led to in the end; None for a run that kept its own."""
        if not (self.result or {}).get("rollbacks"):
            return None
        last = next((event for event in reversed(self.events) if event["event"] == "rollback"), {})
        return method_after(last)

    def rollbacks(self) -> int:
        """How often it went on with a stronger method; a run that stops at a collapse goes back too, to end there."""
        return sum(event["event"] == "rollback" and goes_on(event) for event in self.events)

    def stopped(self) -> str | None:
        """Why the run ended before its end; None where it goes on, has finished, or died without a word."""
        last = self._last_end()
        return str(last.get("reason") or last.get("signal", "")) if last["event"] == "stop" else None

    def finished(self) -> bool:
        """Whether the result is that of now, not the one of before a run went on, as with a larger max_steps."""
        return self.result is not None and self._last_end()["event"] not in ("resume", "stop")

    def _last_end(self) -> Record:
        ends = [event for event in self.events if event["event"] in ("stop", "resume", "finish")]
        return ends[-1] if ends else {"event": "start"}

    def first_fall(self) -> int | None:
        """Where the method it was started with collapsed: what a rollback has undone counts, a recovery does not."""
        told: Record | None = None
        for event in self.events:
            if event["event"] == "collapse":
                told = event
            elif event["event"] == "rollback":
                return None if told is None else _begun(told)
            elif _before(event, told):
                told = None
        return self.collapse_step()


def goes_on(rollback: Record) -> bool:
    """Whether the run trained on from where it went back to; it did in records of versions that did not say."""
    return bool(rollback.get("goes_on", True))


def method_after(rollback: Record) -> str:
    """The method with which a run went on."""
    weight = f" at weight {rollback['weight']:g}" if rollback.get("weight") is not None else ""
    return f"{rollback.get('method', 'a stronger method')}{weight}"


def _begun(collapse: Record) -> int:
    """The step from which it shows, where the monitor told; else the one at which it was noticed."""
    return int(collapse["since" if "since" in collapse else "step"])


def _before(event: Record, collapse: Record | None) -> bool:
    """Whether the run was continued from before it told that collapse, which it then has to tell again.

    Not from before it began: a run that is killed, or continued with `--from`, between the two has not told it either.
    """
    return event["event"] == "resume" and collapse is not None and event["step"] < collapse["step"]


def unique_names(runs: Sequence[RunDirectory]) -> list[str]:
    """The folders' names, each with as many of the folders above as tell it from the others."""
    folders = [run.path.resolve().parts for run in runs]
    return [
        next(
            str(Path(*folder[-count:]))
            for count in range(1, len(folder) + 1)
            if not any(other[-count:] == folder[-count:] for other in folders if other != folder)
        )
        for folder in folders
    ]


def tracked_images(runs: Iterable[RunDirectory]) -> str:
    """Which images these runs were looked at with while they trained."""
    kinds = {bool(run.config.validation) for run in runs}
    if len(kinds) > 1:
        return "the held-out training images, or the test images where none were held out"
    return "the held-out training images" if True in kinds else "the test images"


def multi_step_attack(runs: Iterable[RunDirectory]) -> str:
    """Under which multi-step attack, and on which images, these runs were tracked."""
    tracked = [run for run in runs if run.multi_step()]
    attacks = sorted({(run.multi_step() or "").upper() for run in tracked})
    return f"under {' or '.join(attacks)} on {tracked_images(tracked)}"


def open_runs(paths: Sequence[Path]) -> list[RunDirectory]:
    """The runs in these folders, one that is named twice once."""
    return [open_run(path) for path in {path.resolve(): path for path in paths}.values()]


def open_run(path: Path) -> RunDirectory:
    """The run in `path`; InputError where there is none."""
    run = RunDirectory(path, run_config(path))
    run.read()
    return run


def _read_whole(path: Path, is_whole: Callable[[Record], bool]) -> list[Record]:
    """The lines of a file; InputError names the first that is not what elle writes there."""
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        if not is_whole(line):
            raise InputError(
                f"{path} is damaged in line {number}: a name or a number in it is missing or wrong; take that line "
                f"out, then run it again"
            )
    return lines


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_number(value: Any) -> bool:
    """NaN and infinity are: a run may diverge. None is what could not be measured."""
    return value is None or isinstance(value, (int, float))


def _is_probe(line: Any) -> bool:
    return isinstance(line, dict) and _is_count(line.get("step")) and all(map(_is_number, line.values()))


def _is_record(line: Record) -> bool:
    return _is_probe(line) and _is_count(line.get("epoch"))


def _is_epoch_of_steps(line: Record) -> bool:
    columns = [value for key, value in line.items() if key not in ("epoch", "step")]
    whole = all(isinstance(column, list) and all(map(_is_number, column)) for column in columns)
    return whole and _is_count(line.get("step")) and _is_count(line.get("epoch"))


def _is_event(line: Record) -> bool:
    """Former versions wrote less of some events; the step of these two is compared."""
    undone = line.get("probes", [])
    return (
        isinstance(line.get("event"), str)
        and _is_count(line.get("step", None if line["event"] in ("collapse", "resume") else 0))
        and _is_count(line.get("since", 0))
        and _is_number(line.get("weight"))
        and isinstance(undone, list)
        and all(map(_is_probe, undone))
    )


_OF_RESULT = ("collapse_epoch", "rollbacks", "steps", "seconds_per_epoch", "train_seconds")
"""Numbers of a result that are read here and in reports; None where there is none."""


def _read_result(path: Path) -> Record:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as problem:
        raise InputError(f"{path} cannot be read: {problem.strerror}; repair that, or leave that run out") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{path} is damaged: it is not a JSON object; repair it, or leave that run out")
    if wrong := [key for key in _OF_RESULT if not _is_number(value.get(key))]:
        raise InputError(f"{path} is damaged: its {wrong[0]} is not a number; repair it, or leave that run out")
    return value
