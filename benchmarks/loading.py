"""Time what happens before the first step: a set from its files to the device.

    python benchmarks/loading.py --root DATA [--data cifar10] [--device cuda] [--rounds 5] [--save]

Each round reads all files, checks them, and copies both splits to the device as uint8, padded for the random crops
as in training. The first round, in which the files may come from the disk, is printed apart; the others come from
the page cache, and their median is the figure. The last line is JSON; `--save` keeps it under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from results import result_file

from elle.data.registry import find_dataset, load_dataset
from elle.data.resident import Resident
from elle.engine.runtime import hardware_name, pick_device
from elle.files import write_json


def seconds(name: str, root: str, device: torch.device) -> tuple[float, float]:
    """From the files to arrays, and from the arrays to the device."""
    crop = find_dataset(name).defaults["crop"]
    started = time.perf_counter()
    images = load_dataset(name, root)
    loaded = time.perf_counter()
    resident = [Resident(images.train, device, crop), Resident(images.test, device)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    done = time.perf_counter()
    assert len(resident[0]) == len(images.train)
    return loaded - started, done - loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    device = pick_device(args.device)
    torch.zeros(1, device=device)  # starting the GPU is not loading
    rounds = [seconds(args.data, args.root, device) for _ in range(args.rounds + 1)]
    for number, (read, copied) in enumerate(rounds):
        print(f"round {number}: {read:.2f} s to arrays, {copied:.2f} s to {device}")
    record = {
        "data": args.data,
        "device": hardware_name(device),
        "torch": torch.__version__,
        "first_seconds": round(sum(rounds[0]), 3),
        "median_seconds": round(statistics.median(sum(one) for one in rounds[1:]), 3),
        "rounds": args.rounds,
    }
    print(json.dumps(record))
    if args.save:
        write_json(result_file("loading"), record)


if __name__ == "__main__":
    main()
