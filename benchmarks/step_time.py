"""Time one training step of each method: PreActResNet18, 3 x 32 x 32 images, batch 128 on a GPU (8 on a CPU).

    python benchmarks/step_time.py [--methods fgsm,elle-a] [--precision fp16] [--save]

On a GPU the step is captured in a CUDA graph and timed with CUDA events after warm-up; the median of several
rounds is printed. `cost` is what the method declares, in forwards; `--save` keeps the table as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from results import result_file

from elle.data.resident import Resident
from elle.data.sources import Split
from elle.engine.runtime import GraphedStep, pick_device, pick_precision, prepare_device
from elle.engine.step import Step
from elle.methods import METHODS, configured
from elle.models.registry import build_model


def milliseconds(run: Callable[[], None], rounds: int, repeats: int, device: torch.device) -> float:
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / repeats)
        else:
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            times.append((time.perf_counter() - started) * 1000 / repeats)
    return statistics.median(times)


def measure(method: str, device: torch.device, precision: str) -> dict[str, float | str]:
    cuda = device.type == "cuda"
    batch = 128 if cuda else 8
    generator = np.random.default_rng(0)
    images = Split(
        generator.integers(0, 256, (1024, 3, 32, 32), dtype=np.uint8), generator.integers(0, 10, 1024, dtype=np.int64)
    )
    model = build_model("preact-resnet18", (3, 32, 32), 10).to(device, memory_format=torch.channels_last)
    rounds, repeats = (10, 30) if cuda else (3, 1)
    step = Step(
        model.train(),
        configured(method),
        Resident(images, device, crop=4, flip=True),
        eps=8 / 255,
        momentum=0.9,
        weight_decay=5e-4,
        precision=precision,
        steps_per_epoch=rounds * repeats + 20,
        total_steps=rounds * repeats + 20,
    )
    step.prepare(batch, (3, 32, 32))
    step.lr.fill_(0.01)
    run = GraphedStep(step, batch, device) if cuda else step
    index = torch.arange(batch, device=device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(10 if cuda else 1):
        run(index)
    time_ms = milliseconds(lambda: run(index), rounds, repeats, device)
    memory = torch.cuda.max_memory_allocated() / 2**20 if cuda else float("nan")
    return {
        "method": method,
        "cost": METHODS[method].cost.total,
        "ms": round(time_ms, 3),
        "images_per_second": round(batch / time_ms * 1000),
        "peak_mib": round(memory) if cuda else float("nan"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    device = pick_device(args.device)
    precision = pick_precision(args.precision, device)
    prepare_device(device, precision)
    print(f"{'method':16} {'cost':>5} {'ms a step':>10} {'images/s':>9} {'peak MiB':>9}")
    rows = []
    for method in args.methods.split(","):
        torch.manual_seed(0)
        row = measure(method, device, precision)
        rows.append(row)
        print(f"{method:16} {row['cost']:5} {row['ms']:10.2f} {row['images_per_second']:9} {row['peak_mib']:9}")
    if args.save:
        path = result_file("step-time")
        path.write_text(json.dumps({"torch": torch.__version__, "precision": precision, "rows": rows}, indent=2) + "\n")
        print(path)


if __name__ == "__main__":
    main()
