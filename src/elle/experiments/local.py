"""A sweep's runs as processes of this machine, each on one GPU where there are any."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence

from elle.data.cores import usable_cores
from elle.experiments.sweep import Item
from elle.experiments.training import is_finished, is_running, outcome, start_training


class LocalExecutor:
    """`slots` processes at a time; the GPUs are dealt out in turn, so several may share one."""

    def __init__(self, slots: int, gpus: Sequence[int] = ()) -> None:
        self.slots = slots
        self.places: list[int | None] = [gpus[k % len(gpus)] if gpus else None for k in range(slots)]
        self.running: list[tuple[Item, int | None, subprocess.Popen[bytes]]] = []
        self.held: list[tuple[Item, int | None]] = []
        """Runs that a process of an earlier sweep has not let go of yet."""

    def start(self, item: Item) -> None:
        place = self.places[0]
        if is_running(item.path):
            self.held.append((item, place))
        else:
            self._launch(item, place)
        item.state = "running"
        self.places.pop(0)  # not before: a run that cannot be started takes no place

    def _launch(self, item: Item, place: int | None) -> None:
        environment = {} if place is None else {"CUDA_VISIBLE_DEVICES": _visible_name(place)}
        if self.slots > 1 and "OMP_NUM_THREADS" not in os.environ:
            # Each process would otherwise use every core, and all of them wait for each other.
            environment["OMP_NUM_THREADS"] = str(max(1, usable_cores() // self.slots))
        self.running.append((item, place, start_training(item.config, item.path, environment)))

    def ended(self) -> list[tuple[Item, str | None]]:
        ends: list[tuple[Item, str | None]] = []
        for one in list(self.held):
            item, place = one
            if is_running(item.path):
                continue
            self.held.remove(one)
            if is_finished(item.path):
                self.places.append(place)
                ends.append((item, None))
            else:
                self._launch(item, place)
        for entry in list(self.running):
            item, place, process = entry
            code = process.poll()
            if code is not None:
                self.running.remove(entry)
                self.places.append(place)
                ends.append((item, outcome(item.path, code)))
        return ends

    def stop(self) -> None:
        """Each run ends its step and writes a checkpoint; a second Ctrl-C does not wait for that."""
        processes = [process for _, _, process in self.running]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        try:
            for process in processes:
                process.wait()
        except KeyboardInterrupt:
            for process in processes:
                process.kill()


def _visible_name(gpu: int) -> str:
    """What the driver calls the GPU that is number `gpu` to torch: a scheduler may have given us some of them only."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[gpu].strip() if given else str(gpu)
