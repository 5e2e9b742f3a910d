"""What a training step of a method takes: time forward and backward, memory, and its most expensive kernels."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from elle.core.precision import Precision
from elle.data.resident import Resident
from elle.data.sources import Split
from elle.engine.footprint import PeakBytes
from elle.engine.runtime import GraphedStep
from elle.engine.step import Penalty, Step
from elle.methods import Method, configured
from elle.models.registry import MODELS, build_model

Row = dict[str, Any]
WARM_UP = 10
MOST_STEPS = 1000
"""More than are ever timed of one method: for each there is a record."""


@dataclass(frozen=True)
class Setting:
    """The settings that all compared steps share."""

    device: torch.device
    precision: Precision
    model: str = "preact-resnet18"
    batch: int | None = None
    """Images a step; None is 128 on a GPU and 8 on a CPU."""
    memory: Literal["auto", "low"] = "auto"
    penalty: Penalty = "trained"
    fused: Literal["auto", "off"] = "auto"

    @property
    def images(self) -> int:
        return self.batch or (128 if self.device.type == "cuda" else 8)


class _Forward(Step):
    """A step that ends where its backward would begin."""

    def _backward(self, total: Tensor, keep: bool = False) -> None:
        pass

    def _update(self) -> None:
        pass


def measure(method: str, setting: Setting, profile: bool = False) -> Row:
    """One method's step: `forward_ms` is batch, attack, loss and penalty, `backward_ms` the rest of `ms`."""
    gc.collect()  # what the method before has captured
    row = configured(method)
    step = _step(row, setting)
    peak = _peak_bytes(step, setting)
    run = _runnable(step, setting)
    total = _median_ms(run, setting)
    found: Row = {"method": method, "passes": _passes(row, setting.penalty)}
    if profile:
        found["kernels"] = _kernels(run, setting)
    del run, step
    forward = min(_median_ms(_runnable(_step(row, setting, _Forward), setting), setting), total)
    network = MODELS[setting.model]
    return found | {
        "forward_ms": round(forward, 3),
        "backward_ms": round(total - forward, 3),
        "ms": round(total, 3),
        "images_per_second": round(setting.images / total * 1000),
        # GFLOP an image and pass, over milliseconds.
        "tflops": round(found["passes"] * network.gflop * setting.images / total, 3),
        "peak_mib": round(peak / 2**20, 1),
    }


def step_milliseconds(method: str, setting: Setting, seconds: float) -> float:
    """The time of one method's step without the rest of `measure`; a GPU is measured for `seconds`."""
    gc.collect()
    return _median_ms(_runnable(_step(configured(method), setting), setting), setting, seconds)


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows with `ratio`, their time over FGSM's; None where FGSM was not measured."""
    base = next((row["ms"] for row in rows if row["method"] == "fgsm"), None)
    return [row | {"ratio": None if base is None else round(row["ms"] / base, 3)} for row in rows]


def _passes(method: Method, penalty: Penalty) -> int:
    """Forwards, input gradients and weight gradients of an image, as the method declares them."""
    spared = {"trained": 0, "measured": 6, "left out": 9}[penalty]  # of three points: three forwards, six gradients
    return method.cost.total - (spared if method.regulariser is not None else 0)


def _step(method: Method, setting: Setting, kind: type[Step] = Step) -> Step:
    torch.manual_seed(0)
    network, stream = MODELS[setting.model], np.random.default_rng(0)
    images = Split(
        stream.integers(0, 256, (setting.images, *network.shape), dtype=np.uint8),
        stream.integers(0, network.classes, setting.images, dtype=np.int64),
    )
    model = build_model(setting.model, network.shape, network.classes)
    model = model.to(setting.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    step = kind(
        model.train(),
        method,
        Resident(images, setting.device, crop=4, flip=True),
        eps=8 / 255,
        momentum=0.9,
        weight_decay=5e-4,
        precision=setting.precision,
        steps_per_epoch=MOST_STEPS,
        total_steps=MOST_STEPS,
        memory=setting.memory,
        fused=setting.fused,
    )
    step.prepare(setting.images, network.shape)
    step.lr.fill_(0.01)
    return step


def _runnable(step: Step, setting: Setting) -> Callable[[], None]:
    index = torch.arange(setting.images, device=setting.device)
    run: Callable[[Tensor], None] = partial(step, penalty=setting.penalty)
    if setting.device.type == "cuda":
        run = GraphedStep(run, setting.images, setting.device)
    return lambda: run(index)


def _peak_bytes(step: Step, setting: Setting) -> int:
    """The most memory a step needs beyond network, momentum and images, without a CUDA graph."""
    index = torch.arange(setting.images, device=setting.device)
    step(index, penalty=setting.penalty)
    step.optimizer.zero_grad()
    if setting.device.type == "cuda":
        before = torch.cuda.memory_allocated(setting.device)
        torch.cuda.reset_peak_memory_stats(setting.device)
        step(index, penalty=setting.penalty)
        return int(torch.cuda.max_memory_allocated(setting.device) - before)
    footprint = PeakBytes(*step.state().values())
    with footprint:
        step(index, penalty=setting.penalty)
    return footprint.peak


def _median_ms(run: Callable[[], None], setting: Setting, seconds: float = 3.0) -> float:
    cuda = setting.device.type == "cuda"
    for _ in range(WARM_UP if cuda else 1):
        run()
    once = milliseconds(run, 1, 1, setting.device)
    # Ten rounds on a GPU that take `seconds` at most, three of one step each on a CPU.
    repeats = max(1, min(30, round(100 * seconds / once))) if cuda else 1
    return milliseconds(run, 10 if cuda else 3, repeats, setting.device)


def milliseconds(run: Callable[[], None], rounds: int, repeats: int, device: torch.device) -> float:
    """The time of one `run()`: the median over rounds of the mean over repeats, by CUDA events on a GPU."""
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / repeats)
        else:
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            times.append((time.perf_counter() - started) * 1000 / repeats)
    return statistics.median(times)


_PROFILED = 3
"""Steps that are profiled."""
_NAME = 120
"""So much of a kernel's name is kept: templates of C++ go on for a thousand characters."""


def _kernels(run: Callable[[], None], setting: Setting) -> list[Row]:
    """The kernels, the one that takes longest first, with their share of all kernels' time."""
    from torch.profiler import ProfilerActivity, profile

    cuda = setting.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(_PROFILED):
            run()
        if cuda:
            torch.cuda.synchronize(setting.device)
    events = profiler.key_averages()
    times = {
        event.key: (event.self_device_time_total if cuda else event.self_cpu_time_total, event.count)
        for event in events
    }
    total = sum(spent for spent, _ in times.values()) or 1.0
    longest = sorted(times.items(), key=lambda item: -item[1][0])
    return [
        {
            "kernel": name[:_NAME],
            "ms": round(spent / 1000 / _PROFILED, 4),
            "calls": round(count / _PROFILED, 1),
            "share": round(spent / total, 4),
        }
        for name, (spent, count) in longest
    ]
