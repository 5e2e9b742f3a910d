"""Time one augmented batch of CIFAR-10's size against the FGSM step it is part of: at most 3 % on an H200.

    python benchmarks/augmentation.py [--save]

Batch 128 of 50,000 images (8 of 512 on a CPU), 3 x 32 x 32, cropped by 4, flipped, converted to float32. On a GPU
ten batches are captured in one CUDA graph, so that the host's launch does not count, and timed with CUDA events
after warm-up; the step is that of `elle bench` in the same process. `--save` keeps the numbers as JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from results import result_file
from torch import Tensor

from elle.data.resident import Resident
from elle.data.sources import Split
from elle.engine.bench import Setting, measure, milliseconds
from elle.engine.runtime import GraphedStep, pick_device, pick_precision, prepare_device
from elle.files import write_json

CAPTURED = 10
LIMIT = 0.03


def batch_ms(device: torch.device) -> float:
    cuda = device.type == "cuda"
    count, batch = (50_000, 128) if cuda else (512, 8)
    stream = np.random.default_rng(0)
    images = Split(stream.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), stream.integers(0, 10, count))
    data = Resident(images, device, crop=4, flip=True)

    def batches(index: Tensor) -> None:
        for _ in range(CAPTURED):
            data.batch(index)

    run = GraphedStep(batches, batch, device) if cuda else batches
    index = data.order(seed=0, epoch=0)[:batch]
    for _ in range(10):
        run(index)
    return milliseconds(lambda: run(index), rounds=10, repeats=20, device=device) / CAPTURED


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args(words)
    device = pick_device(args.device)
    precision = pick_precision(args.precision, device)
    prepare_device(device, precision)
    batch, step = batch_ms(device), float(measure("fgsm", Setting(device, precision))["ms"])
    print(f"augmented batch {batch:.4f} ms, FGSM step {step:.3f} ms: {batch / step:.2%} (limit {LIMIT:.0%})")
    if args.save:
        path = result_file("augmentation")
        row = {"batch_ms": round(batch, 5), "step_ms": step, "share": round(batch / step, 5), "limit": LIMIT}
        write_json(path, {"torch": torch.__version__, "precision": precision} | row)
        print(path)


if __name__ == "__main__":
    main()
