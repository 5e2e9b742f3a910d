"""Compare BatchNorm, ReLU and sums as GPU kernels of our own with torch's operations: by layer, and by training step.

    python benchmarks/normalisation.py [--models preact-resnet18,wide-resnet-28-10] [--batch 128] [--save]

Whole steps first: FGSM, and of the first network ELLE, with fused=off and fused=auto; GradAlign with the kernels of
BatchNorm's second derivative (TRITON of src/elle/core/second_order/normalisation.py) and without.
Then every shape of a BatchNorm of the networks, at the batch and at three times it (ELLE's triplets), forward and
backward in microseconds, fp16 and channels last: torch's, ours by the table TILES and, for the first network, with the
best of several tiles, and the least that the bytes moved take at 4.3 TB/s. Each is a CUDA graph of 20 repeats over
inputs that together do not fit a cache, timed by CUDA events. Last the sums over all BatchNorms of each network, and
the best tiles for few and for many rows: those belong into TILES, in src/elle/models/batch_norm_kernels.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from results import result_file
from torch import Tensor, nn

from elle.core.second_order import normalisation as second_order
from elle.engine.bench import Setting, milliseconds, step_milliseconds
from elle.engine.checkpoint import write_json
from elle.engine.runtime import GraphedStep, pick_device, prepare_device
from elle.models import batch_norm_kernels as kernels
from elle.models.batch_norm_kernels import Tiles
from elle.models.registry import MODELS

REPEATS = 20
BANDWIDTH = 4.3e12
"""Bytes a second that a copy moves on an H200."""
BEYOND_CACHE = 2**27
PASSES = {"relu": (3, 5), "sum, relu": (5, 6)}
"""Over the activations, read or written, forward and backward; a sum comes with the skip's gradient."""
CANDIDATES = (
    Tiles(128, 64, 8, 256),
    Tiles(128, 64, 8, 256, last_merges=False),
    Tiles(64, 64, 4, 256),
    Tiles(64, 64, 8, 512),
    Tiles(32, 64, 4, 512),
    Tiles(64, 32, 4, 512),
)
MANY_ROWS = kernels.TILES[0][0]
Shape = tuple[int, int, int]
Work = Callable[[], object]


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


def timed(work: Work, device: torch.device) -> float:
    """Microseconds of `work`, repeated within a CUDA graph."""
    if device.type == "cpu":  # only to try this program
        return 1000 * milliseconds(lambda: work() and None, 1, 1, device)
    graphed = GraphedStep(lambda index: [work() for _ in range(REPEATS)] and None, 1, device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(GraphedStep.WARM_UP + 2):
        graphed(index)
    return 1000 * milliseconds(lambda: graphed(index), rounds=3, repeats=2, device=device) / REPEATS


class Layer:
    """One BatchNorm with its inputs: `forward` and `both` as functions of nothing, by torch or by tiles."""

    def __init__(self, shape: Shape, batch: int, kind: str, device: torch.device) -> None:
        channels = shape[0]
        self.norm = nn.BatchNorm2d(channels, device=device)
        self.counters = kernels.arrivals(channels, device)
        self.running = kernels.Running(
            self.norm.running_mean, self.norm.running_var, self.norm.num_batches_tracked, 0.1
        )  # fmt: skip
        self.summed = kind == "sum, relu"
        bytes_each = 2 * batch * channels * shape[1] * shape[2]
        self.least = [1e6 * passes * bytes_each / BANDWIDTH for passes in PASSES[kind]]
        images = (batch, *shape)
        drawn = [
            torch.randn(4, *images, device=device).half().unbind()
            for _ in range(max(1, min(REPEATS, -(-BEYOND_CACHE // (4 * bytes_each)))))
        ]
        inputs = [[one.contiguous(memory_format=torch.channels_last) for one in four] for four in drawn]
        for x, addend, _, _ in inputs:
            x.requires_grad_()
            addend.requires_grad_()
        self.inputs: Iterator[list[Tensor]] = itertools.cycle(inputs)

    def torch_forward(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        given = next(self.inputs)
        s = given[0] + given[1] if self.summed else given[0]
        return F.relu(self.norm(s)), s, given

    def torch_both(self) -> object:
        y, s, (x, addend, g, for_s) = self.torch_forward()
        weights = [self.norm.weight, self.norm.bias]
        if self.summed:
            return torch.autograd.grad([y, s], [x, addend, *weights], [g, for_s])
        return torch.autograd.grad(y, [x, *weights], g)

    def our_forward(self, tiles: Tiles | None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        given = next(self.inputs)
        weights = (self.norm.weight, self.norm.bias)
        before = given[1] if self.summed else None
        with torch.no_grad():
            return kernels.normalised(
                given[0], *weights, self.running, 1e-5, self.counters, relu=True, before=before, tiles=tiles
            ), given  # fmt: skip

    def our_both(self, tiles: Tiles | None) -> object:
        (_, s, mean, rstd), (_, _, g, for_s) = self.our_forward(tiles)
        weights = (self.norm.weight, self.norm.bias)
        for_total = for_s if self.summed else None
        with torch.no_grad():
            return kernels.gradients(
                g, s, *weights, mean, rstd, self.counters, relu=True, for_total=for_total, tiles=tiles
            )

    def measured(self, tiles: Tiles | None, ours: bool, device: torch.device) -> list[float]:
        """Forward and backward, in microseconds."""
        works: tuple[Work, Work] = (self.torch_forward, self.torch_both)
        if ours:
            works = (lambda: self.our_forward(tiles)), (lambda: self.our_both(tiles))
        forward, both = (timed(work, device) for work in works)
        return [forward, max(both - forward, 0.0)]


def called(tiles: Tiles) -> str:
    merged = "" if tiles.last_merges else " merged apart"
    return f"{tiles.rows}x{tiles.columns} {tiles.warps} warps {tiles.programs} programs{merged}"


def compare_layer(shape: Shape, batch: int, candidates: Sequence[Tiles], device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for kind in PASSES:
        layer = Layer(shape, batch, kind, device)
        tries: list[tuple[str, bool, Tiles | None]] = [("torch", False, None), ("TILES", True, None)]
        if kind == "relu":
            tries += [(called(tiles), True, tiles) for tiles in candidates]
        known = {"shape": list(shape), "batch": batch, "rows": batch * shape[1] * shape[2], "kind": kind}
        rows.append(known | {"by": "least", "forward": layer.least[0], "backward": layer.least[1]})
        for name, ours, tiles in tries:
            forward, backward = layer.measured(tiles, ours, device)
            rows.append(known | {"by": name, "forward": forward, "backward": backward})
    always = ("least", "torch", "TILES")
    best = min((row for row in rows if row["by"] not in always), key=total, default=None)
    words = " x ".join(map(str, (batch, *shape)))
    for row in rows:
        if row["by"] in always or row is best:
            times = f"{row['forward']:9.1f} {row['backward']:9.1f} {total(row):9.1f}"
            print(f"{words:20} {row['kind']:10} {times}   {row['by']}", flush=True)
    return rows


def total(row: dict[str, Any]) -> float:
    return float(row["forward"] + row["backward"])


def summarise(rows: list[dict[str, Any]], counts: dict[str, Counter[Shape]]) -> None:
    """What all BatchNorms of a network take, and which tiles are best for few and for many rows."""
    for name, shapes in counts.items():
        for batch in sorted({row["batch"] for row in rows}):
            sums: dict[str, float] = defaultdict(float)
            for row in rows:
                if row["batch"] == batch and row["kind"] == "relu" and tuple(row["shape"]) in shapes:
                    sums[row["by"]] += shapes[tuple(row["shape"])] * total(row)
            print(f"\n{name}, batch {batch}: forward and backward of all BatchNorms with ReLU, microseconds")
            for by, value in sorted(sums.items(), key=lambda item: item[1]):
                print(f"{value:10.0f}   {by}")
    for words, chosen in (("fewer than", False), ("at least", True)):
        sums = defaultdict(float)
        for row in rows:
            if row["kind"] == "relu" and (row["rows"] >= MANY_ROWS) == chosen and " warps " in row["by"]:
                sums[row["by"]] += total(row) * sum(shapes[tuple(row["shape"])] for shapes in counts.values())
        if sums:
            print(f"\nbest with {words} {MANY_ROWS} rows: {min(sums, key=lambda by: sums[by])}")


def compare_steps(model: str, more: bool, batch: int, device: torch.device) -> list[dict[str, Any]]:
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
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args(words)
    device = pick_device(args.device)
    prepare_device(device, "fp16")
    models = args.models.split(",")
    steps = [row for model in models for row in compare_steps(model, model == models[0], args.batch, device)]
    print(f"\n{'batch x shape':20} {'':10} {'forward':>9} {'backward':>9} {'both us':>9}")
    counts = {name: layers(name) for name in models}
    rows = []
    for shape in sorted(set().union(*counts.values()), key=lambda one: (one[0], -one[1])):
        for times in (1, 3):
            candidates = CANDIDATES if shape in counts[models[0]] else ()
            rows += compare_layer(shape, times * args.batch, candidates, device)
    summarise(rows, counts)
    if args.save:
        path = result_file("normalisation")
        for row in rows:
            row |= {key: round(row[key], 2) for key in ("forward", "backward")}
        write_json(path, {"torch": torch.__version__, "batch": args.batch, "steps": steps, "layers": rows})
        print(path)


if __name__ == "__main__":
    main()
