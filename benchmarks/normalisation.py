"""Time BatchNorm, ReLU and sums as GPU kernels of our own: by kernel and tile, and by step beside torch's operations.

    python benchmarks/normalisation.py [--models preact-resnet18,wide-resnet-28-10] [--batch 128] [--steps] [--save]

Every shape of a BatchNorm of the networks, at the batch and at three times it (ELLE's triplets), fp16 and channels
last: microseconds and TB/s of each kernel with the tiles that src/elle/models/batch_norm_launches.py gives it,
and, for the first network, with the best of several tiles. Each is a CUDA graph of 20 repeats over inputs that
together do not fit a cache, timed by CUDA events. Last the sums over all BatchNorms of each network, and the best tiles
for STATISTICS, SUMS and WRITING of that file.

With --steps whole steps besides: FGSM, and of the first network ELLE, with fused=off and fused=auto; GradAlign with the
kernels of BatchNorm's second derivative (TRITON of src/elle/core/second_order/normalisation.py) and without.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from results import result_file
from timing import REPEATS, timed
from torch import Tensor, nn

from elle.core.second_order import normalisation as second_order
from elle.engine.bench import Setting, step_milliseconds
from elle.engine.runtime import pick_device, prepare_device
from elle.files import write_json
from elle.models.registry import MODELS

try:
    from elle.models import batch_norm_launches as kernels
    from elle.models.batch_norm_launches import Adding, Writing
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: this benchmark times kernels written in Triton; run it where Triton is installed")

BEYOND_CACHE = 2**27
ADDING = (
    Adding(32, 4, 8, 256),
    Adding(32, 8, 16, 128),
    Adding(32, 4, 4, 512),
    Adding(32, 4, 8, 512),
    Adding(16, 4, 8, 256),
    Adding(64, 4, 16, 128),
    Adding(64, 8, 8, 256),
    Adding(16, 8, 16, 1),
)
CANDIDATES: dict[str, tuple[Any, ...]] = {
    "STATISTICS": ADDING,
    "SUMS": ADDING,
    "WRITING": (Writing(32, 128, 4), Writing(32, 64, 4), Writing(16, 128, 4), Writing(32, 256, 8), Writing(64, 64, 8)),
}
Shape = tuple[int, int, int]
Row = dict[str, Any]


class Kernel(NamedTuple):
    passes: int
    """Over the activations, read or written."""
    tiles: str
    """The name of its tiles."""
    tried: bool
    """Whether the choice of tiles looks at it."""


KERNELS = {
    "statistics": Kernel(1, "STATISTICS", True),
    "statistics, sum": Kernel(3, "STATISTICS", False),
    "normalised": Kernel(2, "WRITING", True),
    "sums": Kernel(2, "SUMS", True),
    "sums, fork": Kernel(4, "SUMS", False),
    "gradient": Kernel(3, "WRITING", True),
    "gradient, sum": Kernel(4, "WRITING", False),
    "evaluated": Kernel(2, "WRITING", False),
    "evaluated, sum": Kernel(4, "WRITING", False),
    "evaluated gradient": Kernel(3, "WRITING", False),
}
TRAINING = ("statistics", "normalised", "sums", "gradient")
EVALUATION = ("evaluated", "evaluated gradient")


def layers(name: str) -> Counter[Shape]:
    """The shapes that the BatchNorms of a network see, with their numbers."""
    row, found = MODELS[name], Counter[Shape]()
    with torch.device("meta"):
        model = row.build(row.shape, row.classes, nn.ReLU).eval()
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.register_forward_pre_hook(lambda _, given: found.update([tuple(given[0].shape[1:])]))
        model(torch.zeros(1, *row.shape))
    return found


class Layer:
    """One BatchNorm with its inputs."""

    def __init__(self, shape: Shape, batch: int, device: torch.device) -> None:
        channels = shape[0]
        self.norm = norm = nn.BatchNorm2d(channels, device=device)
        self.counters = kernels.arrivals(channels, device)
        self.running = kernels.Running(norm.running_mean, norm.running_var, norm.num_batches_tracked, 0.1)
        self.bytes = 2 * batch * channels * shape[1] * shape[2]
        sets = max(1, min(REPEATS, -(-BEYOND_CACHE // (4 * self.bytes))))
        drawn = (torch.randn(4, batch, *shape, device=device).half().unbind() for _ in range(sets))
        inputs = [[one.contiguous(memory_format=torch.channels_last) for one in four] for four in drawn]
        self.inputs: Iterator[list[Tensor]] = itertools.cycle(inputs)

    @torch.no_grad()
    def run(self, name: str, tiles: Any) -> object:
        """One launch of a kernel."""
        x, addend, g, for_total = next(self.inputs)
        norm = self.norm
        weights = (norm.weight, norm.bias)
        layer = (*weights, norm.running_mean, norm.running_var)  # as good as the batch's own, for the time it takes
        match name:
            case "statistics" | "statistics, sum":
                before = addend if "sum" in name else None
                return kernels.statistics(x, self.running, 1e-5, self.counters, before=before, tiles=tiles)
            case "normalised":
                return kernels.normalised(x, *layer, relu=True, tiles=tiles)
            case "sums" | "sums, fork":
                also = addend if "fork" in name else None
                return kernels.sums(g, x, *layer, self.counters, relu=True, also=also, tiles=tiles)
            case "gradient" | "gradient, sum":
                more = for_total if "sum" in name else None
                return kernels.gradient(g, x, *layer, *weights, relu=True, for_total=more, tiles=tiles)
            case "evaluated" | "evaluated, sum":
                before = addend if "sum" in name else None
                return kernels.evaluated(x, *layer, 1e-5, relu=True, before=before, keep_sum=True, tiles=tiles)
            case _:
                return kernels.evaluated_gradients(g, norm.weight, norm.running_var, 1e-5, y=x, tiles=tiles)


def called(tiles: Any) -> str:
    return "default" if tiles is None else " ".join(f"{value} {name}" for name, value in vars(tiles).items())


def compare_layer(shape: Shape, batch: int, candidates: bool, device: torch.device) -> list[Row]:
    layer, rows = Layer(shape, batch, device), []
    known = {"shape": list(shape), "batch": batch, "rows": batch * shape[1] * shape[2]}
    for name, kernel in KERNELS.items():
        tries = [None, *(CANDIDATES[kernel.tiles] if candidates and kernel.tried else ())]
        for tiles in tries:
            us = timed(lambda name=name, tiles=tiles: layer.run(name, tiles), device)
            speed = kernel.passes * layer.bytes / us / 1e6
            rows.append(known | {"kernel": name, "tiles": called(tiles), "us": us, "tb_s": speed})
    words = " x ".join(map(str, (batch, *shape)))
    for name in dict.fromkeys(row["kernel"] for row in rows):
        same = [row for row in rows if row["kernel"] == name]
        shown = [same[0], *([min(same[1:], key=lambda row: row["us"])] if same[1:] else [])]
        for row in shown:
            print(f"{words:20} {name:18} {row['us']:9.1f} us {row['tb_s']:5.2f} TB/s   {row['tiles']}", flush=True)
    return rows


def summarise(rows: list[Row], counts: dict[str, Counter[Shape]]) -> None:
    """What all BatchNorms of a network take, and which tiles are best."""
    for name, shapes in counts.items():
        for batch in sorted({row["batch"] for row in rows}):
            sums: dict[str, float] = defaultdict(float)
            for row in rows:
                if row["batch"] == batch and row["tiles"] == "default":
                    sums[row["kernel"]] += shapes[tuple(row["shape"])] * row["us"]
            print(f"\n{name}, batch {batch}: all BatchNorms with ReLU, forward and backward, microseconds")
            for mode, parts in (("training", TRAINING), ("evaluation", EVALUATION)):
                by_kernel = ", ".join(f"{part} {sums[part]:.0f}" for part in parts)
                print(f"{mode:12} {sum(sums[part] for part in parts):8.0f}   {by_kernel}")
    for table in CANDIDATES:
        sums = defaultdict(float)
        for row in rows:
            if row["tiles"] != "default" and KERNELS[row["kernel"]].tiles == table:
                sums[row["tiles"]] += row["us"] * sum(shapes[tuple(row["shape"])] for shapes in counts.values())
        print(f"\n{table}: microseconds of all BatchNorms, best first")
        for tiles, us in sorted(sums.items(), key=lambda item: item[1]):
            print(f"{us:10.0f}   {tiles}")


def compare_steps(model: str, more: bool, batch: int, device: torch.device) -> list[Row]:
    rows = []
    plain = Setting(device, "fp16" if device.type == "cuda" else "fp32", model, batch)

    def add(method: str, words: str, setting: Setting) -> None:
        ms = step_milliseconds(method, setting, seconds=0.5)
        rows.append({"model": model, "method": method, "setting": words, "ms": round(ms, 3)})
        print(f"{model:18} {method:10} {words:14} {ms:8.3f} ms", flush=True)

    for method in ("fgsm", "elle") if more else ("fgsm",):
        for fused in ("off", "auto"):
            add(method, f"fused={fused}", dataclasses.replace(plain, fused=fused))
    if more:
        before = second_order.TRITON
        for on in (False, True):
            second_order.TRITON = on
            add("gradalign", f"TRITON={on}", plain)
        second_order.TRITON = before
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="preact-resnet18,wide-resnet-28-10")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args(words)
    device = pick_device(args.device)
    prepare_device(device, "fp16")
    models = args.models.split(",")
    counts = {name: layers(name) for name in models}
    rows = []
    for shape in sorted(set().union(*counts.values()), key=lambda one: (one[0], -one[1])):
        for times in (1, 3):
            rows += compare_layer(shape, times * args.batch, shape in counts[models[0]], device)
    summarise(rows, counts)
    steps = []
    if args.steps:
        print()
        steps = [row for model in models for row in compare_steps(model, model == models[0], args.batch, device)]
    if args.save:
        path = result_file("normalisation")
        for row in rows:
            row |= {key: round(row[key], 3) for key in ("us", "tb_s")}
        write_json(path, {"torch": torch.__version__, "batch": args.batch, "steps": steps, "layers": rows})
        print(path)


if __name__ == "__main__":
    main()
