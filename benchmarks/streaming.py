"""Images/s of the streaming loader, against the floor of decoding the same JPEG files and doing nothing with them.

    python benchmarks/streaming.py [--images 2000] [--workers N] [--size 224] [--batch 128] [--rounds 3] [--save]

The floor is Pillow decoding every file, at its full size, in as many processes. The loader is timed after its first
epoch, which decodes files whole to find damage; that one (mixed with later ones if the set is small) and one from a
full cache are given beside. Rounds alternate, so that both meet the same machine; the medians are printed, as JSON, and
the share of each round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from results import result_file

from elle.data.folder import FolderSplit
from elle.data.phases import Phase, Timetable
from elle.data.streaming import Streaming
from elle.data.workers import usable_workers
from elle.engine.runtime import hardware_name, pick_device
from elle.files import write_json


def write_photographs(folder: Path, count: int) -> FolderSplit:
    """JPEG files around 500 x 375, quality 90, with the detail (and so the bytes) of photographs."""
    draw = np.random.default_rng(0)
    paths = []
    for number in range(count):
        width, height = 500 + int(draw.integers(-60, 61)), 375 + int(draw.integers(-60, 61))
        coarse = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize((width, height))
        grain = draw.normal(0, 9, (height, width, 1))
        path = folder / f"{number:05d}.jpg"
        Image.fromarray((np.asarray(coarse) + grain).clip(0, 255).astype(np.uint8)).save(path, quality=90)
        paths.append(path)
    return FolderSplit(paths, np.arange(count) % 10)


def decode_only(paths: list[Path]) -> int:
    for path in paths:
        with Image.open(path, formats=("JPEG",)) as image:
            image.load()
    return len(paths)


def floor(split: FolderSplit, workers: int) -> float:
    # Few files a job: while the last ones are decoded, some processes have none.
    jobs = [split.paths[k : k + 8] for k in range(0, len(split), 8)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        pool.map(decode_only, jobs[: 4 * workers], chunksize=1)  # the workers are up
        started = time.perf_counter()
        done = sum(pool.imap_unordered(decode_only, jobs))
        return done / (time.perf_counter() - started)


def loader(split: FolderSplit, args: argparse.Namespace, epoch: int = 1, cache: Path | None = None) -> float:
    """Images/s from `epoch` on, once every worker has batches under way and as long as all have more to do."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps, under_way = len(split) // args.batch, 2 * args.workers
    counted = max(2 * steps, 8 * args.workers)
    epochs = epoch + 1 + (2 * under_way + counted) // steps
    timetable = Timetable((Phase(epochs, args.size, args.batch),), len(split))
    stream = Streaming(split, device, timetable, seed=0, workers=args.workers, cache=cache)
    started = 0.0
    for number in range(under_way + counted):
        if number == under_way:
            started = time.perf_counter()
        stream.stage(epoch + number // steps, number % steps)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    stream.close()
    return counted * args.batch / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=usable_workers(None))
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        split = write_photographs(Path(folder), args.images)
        size_kb = sum(path.stat().st_size for path in split.paths) / len(split) / 1000
        floors, rates = [], []
        for _ in range(args.rounds):
            floors.append(floor(split, args.workers))
            rates.append(loader(split, args))
        first = loader(split, args, epoch=0)
        loader(split, args, cache=Path(folder) / "cache")
        cached = loader(split, args, cache=Path(folder) / "cache")
    lowest, rate = statistics.median(floors), statistics.median(rates)
    shares = [r / f for r, f in zip(rates, floors, strict=True)]
    result = {
        "images": args.images,
        "kb_per_image": round(size_kb, 1),
        "size": args.size,
        "batch": args.batch,
        "workers": args.workers,
        "cores": len(os.sched_getaffinity(0)),
        "device": hardware_name(pick_device("auto")),
        "floor_images_per_second": round(lowest),
        "loader_images_per_second": round(rate),
        "share_of_floor": round(statistics.median(shares), 3),
        "shares_of_rounds": [round(share, 3) for share in shares],
        "first_epoch_images_per_second": round(first),
        "cached_images_per_second": round(cached),
    }
    if args.save:
        write_json(result_file("streaming"), result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
