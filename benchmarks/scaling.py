"""Derive time per epoch and efficiency on 1 to 64 GPUs from measured step times: the table of docs/scaling.md.

    python benchmarks/scaling.py

Nothing is measured here. Step times come from benchmarks/results; what the network between GPUs does is assumed, and
stated below.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

from results import FOLDER, H200

GPUS = (2, 4, 8, 16, 32, 64)
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
    size = 4 * parameters
    return 2 * (gpus - 1) / gpus * size / (NVLINK if gpus <= 8 else between) + 4 * size / MEMORY


def step_seconds(case: Case, gpus: int, between: float) -> float:
    drawn = case.draws * (gpus - 1) * case.share * case.pixels * 4 / RANDOM
    messages = case.messages * latency(gpus)
    return case.step + all_reduce(case.parameters, gpus, between) + drawn + messages


def cases() -> list[Case]:
    small = partial(Case, share=128, images=48_976, pixels=3 * 32 * 32, parameters=11_172_170)
    large = partial(Case, share=128, images=1_281_167, pixels=3 * 224 * 224, parameters=25_557_032)
    return [
        case(f"{data} {name}", measured(model, method), draws=draws, messages=messages)
        for data, model, case in (("CIFAR-10", "preact-resnet18", small), ("ImageNet", "resnet50", large))
        for name, method, draws, messages in (("FGSM", "fgsm", 0, 1), ("ELLE-A", "elle-a", 2, 2))
    ]


def measured(model: str, method: str) -> float:
    """Seconds of a step on one GPU, of `elle bench`."""
    rows = json.loads((FOLDER / f"bench-{model}-{H200}.json").read_text())["rows"]
    (milliseconds,) = (row["ms"] for row in rows if row["method"] == method)
    return float(milliseconds) / 1000


def table() -> str:
    lines = [f"| | step on 1 | {' | '.join(map(str, GPUS))} | {GPUS[-1]}, one port |", "|---" * (len(GPUS) + 3) + "|"]
    for case in cases():
        seconds = [(gpus, step_seconds(case, gpus, RAILS)) for gpus in GPUS]
        seconds.append((GPUS[-1], step_seconds(case, GPUS[-1], ONE_PORT)))
        epochs = [f"{case.images // (case.share * gpus) * step:.3g}" for gpus, step in seconds]
        efficiencies = [f"{case.step / step:.0%}".replace("%", " %") for _, step in seconds]
        lines.append(f"| {case.name}: s / epoch | {1000 * case.step:.3g} ms | {' | '.join(epochs)} |")
        lines.append(f"| efficiency | | {' | '.join(efficiencies)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
