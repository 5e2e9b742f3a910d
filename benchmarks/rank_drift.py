"""How far two ranks come from one process in 20 steps, in float32 and in float64, over random settings.

    python benchmarks/rank_drift.py            # 40 settings, four minutes on two cores

Two ranks add up in another order than one process. Where float64 stays equal and float32 does not, rounding is why.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from elle.config import Config, load_config
from elle.engine import checkpoint
from elle.engine.loop import train
from elle.engine.step import RECORDED
from elle.models.registry import build_model

METHODS = ("fgsm", "elle-a", "n-fgsm+elle-a", "gradalign", "free")
STEPS, EACH = 20, 8
WORDS = (
    *("data=digits", "model=small-cnn", "device=cpu", "epochs=1", "batch=48", f"max_steps={STEPS}", "sync_bn=true"),
    *("validation=97", "crop=1", "flip=true", "eval_every=0", "final=clean"),
)
# The weight jumps and decays within the first few steps.
RULE = ("weight=20", "method.weight.sensitivity=-0.5", "method.weight.decay=0.5")


class InDouble(nn.Module):
    """The same network, computing in float64."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.network = build_model("small-cnn", (1, 8, 8), num_classes).double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x.double())
        return logits


NETWORKS = {"float32": (), "float64": ("model=rank_drift:InDouble",)}


def settings() -> list[tuple[str, ...]]:
    """Method, eps, rate and seed of each run."""
    stream = random.Random(0)
    return [
        (
            f"method={method}",
            f"eps={stream.choice([0.05, 0.1, 0.2, 0.3])}",
            f"lr={stream.choice([0.02, 0.05, 0.1, 0.2])}",
            f"seed={stream.randint(0, 999)}",
        )
        for method in METHODS
        for _ in range(EACH)
    ]


def configuration(folder: Path, number: int, kind: str) -> Config:
    words = settings()[number]
    rule = RULE if "elle" in words[0] else ()
    return load_config([*WORDS, *words, *rule, *NETWORKS[kind], f"out={folder / f'{kind}-{number}'}"])


def train_all(folder: Path) -> None:
    torch.set_num_threads(1)
    for kind in NETWORKS:
        for number in range(len(settings())):
            train(configuration(folder, number, kind))


def rank(number: int, folder: Path) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-point", rank=number, world_size=2)
    train_all(folder / "two")
    dist.destroy_process_group()


def losses(run: Path) -> Tensor:
    tensors, _ = checkpoint.load_checkpoint(checkpoint.checkpoints(run)[-1])
    return tensors["records"][:STEPS, RECORDED.index("loss")]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mp.spawn(rank, (folder,), nprocs=2)
        train_all(folder / "one")
        apart: dict[str, list[float]] = {kind: [] for kind in NETWORKS}
        for number, words in enumerate(settings()):
            for kind, found in apart.items():
                one, two = (losses(folder / part / f"{kind}-{number}") for part in ("one", "two"))
                found.append(float((one - two).abs().max()))
            print(" ".join(words), *(f"{kind} {found[-1]:.1e}" for kind, found in apart.items()), sep="  ")
        for kind, found in apart.items():
            print(f"{kind}: {sum(one <= 1e-6 for one in found)} of {len(found)} within 1e-6, at most {max(found):.1e}")


if __name__ == "__main__":
    main()
