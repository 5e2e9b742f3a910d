"""Time a forward, and a forward with its backward, of networks: ms and the TFLOP/s of the work itself.

    python benchmarks/networks.py [--models preact-resnet18,wide-resnet-28-10] [--batches 128,512,1024] [--save]

Train mode, channels last, the precision of training (fp16 on a GPU). On a GPU each is captured in a CUDA graph and
timed with CUDA events after warm-up; the median of several rounds is printed. Operations are counted by torch's
FlopCounterMode (convolutions and matrix products; a multiply-add is two); `--save` keeps the table as JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from results import result_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from elle.core.precision import Precision, autocast
from elle.engine.bench import milliseconds
from elle.engine.runtime import GraphedStep, pick_device, pick_precision, prepare_device
from elle.files import write_json
from elle.models.registry import MODELS, Model


def giga_flops(row: Model, backward: bool) -> float:
    """10^9 operations of one image, counted on the meta device, where nothing is computed."""
    with torch.device("meta"):
        model = row.build(row.shape, row.classes, nn.ReLU)
        # Two images, because BatchNorm in train mode refuses a single value a channel.
        x = torch.zeros(2, *row.shape)
    counter = FlopCounterMode(display=False)
    with counter, torch.set_grad_enabled(backward):
        logits = model(x)
        if backward:
            logits.sum().backward()
    return float(counter.get_total_flops()) / 2e9


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of `work`, on a GPU as a captured graph."""
    if device.type == "cpu":
        work()
        return milliseconds(work, rounds=3, repeats=1, device=device)
    graphed = GraphedStep(lambda index: work(), 1, device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(10):
        graphed(index)
    return milliseconds(lambda: graphed(index), rounds=10, repeats=20, device=device)


def measure(name: str, batch: int, device: torch.device, precision: Precision) -> dict[str, Any]:
    row = MODELS[name]
    model = row.build(row.shape, row.classes, nn.ReLU).to(device, memory_format=torch.channels_last).train()
    x = torch.rand(batch, *row.shape, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(row.classes, (batch,), device=device)

    def forward() -> None:
        with torch.no_grad(), autocast(device, precision):
            model(x)

    def forward_backward() -> None:
        model.zero_grad(set_to_none=True)
        with autocast(device, precision):
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    result: dict[str, Any] = {"model": name, "image": "x".join(map(str, row.shape)), "batch": batch}
    for part, work in (("forward", forward), ("forward_backward", forward_backward)):
        ms = timed(work, device)
        tera_flops = giga_flops(row, backward=work is forward_backward) * batch / ms
        result |= {f"{part}_ms": round(ms, 3), f"{part}_tflops": round(tera_flops, 3)}
    return result


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="preact-resnet18,wide-resnet-28-10", help=", ".join(MODELS))
    parser.add_argument("--batches", default="128,512,1024")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args(words)
    device = pick_device(args.device)
    precision = pick_precision(args.precision, device)
    prepare_device(device, precision)
    print(f"{'network':18} {'batch':>6} {'forward ms':>11} {'TFLOP/s':>8} {'+backward ms':>13} {'TFLOP/s':>8}")
    rows = []
    for name in args.models.split(","):
        for batch in map(int, args.batches.split(",")):
            row = measure(name, batch, device, precision)
            rows.append(row)
            print(
                f"{name:18} {batch:6} {row['forward_ms']:11.3f} {row['forward_tflops']:8.1f} "
                f"{row['forward_backward_ms']:13.3f} {row['forward_backward_tflops']:8.1f}"
            )
    if args.save:
        path = result_file("networks")
        write_json(path, {"torch": torch.__version__, "precision": precision, "rows": rows})
        print(path)


if __name__ == "__main__":
    main()
