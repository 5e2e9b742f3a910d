"""Time a network's first convolution by GPU kernels of our own, and by torch's: the convolution and its gradients.

    python benchmarks/first_convolution.py [--batch 128] [--outputs 64] [--size 32] [--device cuda]

Images [batch, 3, size, size] in float32, channels last, as a step has them; all else in fp16, channels last. torch's
times hold what autocast does besides: the image is converted, and so is its gradient. Each is a CUDA graph of 20 calls,
the median of 5 rounds by CUDA events; the activations of one call fit an H200's cache, as they do in a step. The tiles
of src/elle/models/first_convolution.py are marked.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from timing import timed
from torch import Tensor

from elle.engine.runtime import pick_device, prepare_device
from elle.models.first_convolution import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Tiles,
    convolved,
    input_gradient,
    weight_gradient,
)

TILES = (Tiles(64, 4), Tiles(128, 4), Tiles(128, 8), Tiles(256, 4), Tiles(256, 8), Tiles(512, 8))


def torch_convolved(x: Tensor, weight: Tensor) -> Tensor:
    return torch.conv2d(x.half(), weight, padding=1)


def torch_gradients(g: Tensor, x_half: Tensor, weight: Tensor, of: int) -> Tensor:
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [of == 0, of == 1, False])
    found: Tensor = torch.ops.aten.convolution_backward(g, x_half, weight, None, *settings)[of]
    return found.float() if of == 0 else found


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--outputs", type=int, default=64)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(words)
    device = pick_device(args.device)
    prepare_device(device, "fp16")
    shapes = ((args.batch, 3), (args.batch, args.outputs))
    x, g = (torch.randn(*shape, args.size, args.size, device=device) for shape in shapes)
    weight = torch.randn(args.outputs, 3, 3, 3, device=device) / 5
    x, g, weight = (one.contiguous(memory_format=torch.channels_last) for one in (x, g.half(), weight.half()))
    x_half = x.half()
    print(f"{'pixels':>8} {'warps':>6} {'forward':>10}  {'of images':>10}  {'of weights':>10}   microseconds")
    theirs = (
        lambda: torch_convolved(x, weight),
        lambda: torch_gradients(g, x_half, weight, 0),
        lambda: torch_gradients(g, x.half(), weight, 1),
    )
    print(f"{'torch':>15} " + "  ".join(f"{timed(work, device):10.1f}" for work in theirs), flush=True)
    for tiles in TILES:
        ours = (
            (FORWARD, lambda tiles=tiles: convolved(x, weight, tiles)),
            (BACKWARD, lambda tiles=tiles: input_gradient(g, x, weight, tiles)),
            (WEIGHTS, lambda tiles=tiles: weight_gradient(g, x, weight, tiles)),
        )
        columns = [f"{timed(work, device):10.1f}{'*' if tiles == used else ' '}" for used, work in ours]
        print(f"{tiles.pixels:8} {tiles.warps:6} {' '.join(columns)}", flush=True)


if __name__ == "__main__":
    main()
