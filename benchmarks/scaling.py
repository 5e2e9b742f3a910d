"""Derive time per epoch and efficiency on 1 to 64 GPUs from measured step times: the tables of docs/scaling.md.

    python benchmarks/scaling.py

Nothing is measured here. Step times come from benchmarks/results; what the network between GPUs does is assumed, and
stated below.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
GPUS = (1, 2, 4, 8, 16, 32, 64)
NVLINK = 350e9
"""Bytes a second of an all-reduce inside a machine of 8 (bus bandwidth); 450e9 is the link's own."""
RAILS = 320e9
"""Between machines with a 400 Gb/s port for each GPU."""
ONE_PORT = 45e9
"""Between machines with one such port for all."""
MEMORY = 4.3e12
"""Bytes a second of a copy, as measured on an H200."""
RANDOM = 2e12
"""Bytes a second of uniform random numbers, assumed."""


@dataclass(frozen=True)
class Case:
    name: str
    step: float
    """Seconds on one GPU."""
    share: int
    """Images of a GPU."""
    images: int
    """Of an epoch."""
    pixels: int
    """Numbers an image."""
    parameters: int
    draws: int
    """Random tensors of the size of the batch that a step draws."""
    messages: int
    """Collectives of a step: the gradients, and the error of ELLE-A."""


def latency(gpus: int) -> float:
    """Seconds of a message of no size: 15 us, and 10 us more for each doubling between machines."""
    return 15e-6 + 10e-6 * max(0, (gpus // 8).bit_length() - 1)


def all_reduce(parameters: int, gpus: int, between: float) -> float:
    """A ring moves 2 (N - 1) / N of the gradients through the slowest link; flattening copies them twice, both ways."""
    if gpus == 1:
        return 0.0
    size = 4 * parameters
    return 2 * (gpus - 1) / gpus * size / (NVLINK if gpus <= 8 else between) + 4 * size / MEMORY


def step_seconds(case: Case, gpus: int, between: float) -> float:
    drawn = case.draws * (gpus - 1) * case.share * case.pixels * 4 / RANDOM
    messages = case.messages * latency(gpus) if gpus > 1 else 0.0
    return case.step + all_reduce(case.parameters, gpus, between) + drawn + messages


def cases() -> list[Case]:
    runs = json.loads((RESULTS / "cifar10-short-nvidia-h200-torch2.11.0.json").read_text())["runs"]
    alone = [run for run in runs if run["eps"] == 8 / 255 and "seconds_per_epoch" in run]
    epochs = {run["method"]: run["seconds_per_epoch"] for run in alone}
    cifar = [
        Case(f"CIFAR-10, {name}", epochs[name] / 382, 128, 48_976, 3 * 32 * 32, 11_172_170, draws, messages)
        for name, draws, messages in (("fgsm", 0, 1), ("elle-a", 2, 2))
    ]
    rows = json.loads((RESULTS / "bench-resnet50-fused-off-nvidia-h200-torch2.11.0.json").read_text())["rows"]
    steps = {row["method"]: row["ms"] / 1000 for row in rows}
    imagenet = [
        Case(f"ImageNet, {name}", steps[name], 128, 1_281_167, 3 * 224 * 224, 25_557_032, draws, messages)
        for name, draws, messages in (("fgsm", 0, 1), ("elle-a", 2, 2))
    ]
    return cifar + imagenet


def main() -> None:
    for case in cases():
        print(f"\n{case.name}: {case.share} images a GPU, {1000 * case.step:.2f} ms a step on one\n")
        print("| GPUs | batch | s / epoch | efficiency | s / epoch, one port | efficiency |\n|---|---|---|---|---|---|")
        for gpus in GPUS:
            cells = []
            for between in (RAILS, ONE_PORT):
                seconds = step_seconds(case, gpus, between)
                epoch = case.images // (case.share * gpus) * seconds
                cells += [f"{epoch:.3g}", f"{case.step / seconds:.0%}"]
            shown = [*cells[:2], "", ""] if gpus <= 8 else cells
            print(f"| {gpus} | {case.share * gpus} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
