"""The original AutoAttack and ours on the same images, in one process: accuracy, time, and where they disagree.

    python benchmarks/autoattack.py RUN [--root DATA] [--images 1000] [--eps 8/255] [--norm linf] [--save]

RUN is a run directory, or the model.safetensors in it. Both engines attack the points that the attacks before
left standing, in the order of the standard ensemble. The original runs in fp32 or, with --reference tf32, in the
precision that torch gives it on recent GPUs; with --quick its network is laid out for the GPU as ours is: for the
answers of many images, not for its time. `--save` keeps the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from results import result_file
from torch import Tensor

from elle.engine.checkpoint import write_json
from elle.engine.runtime import pick_device, pick_precision, prepare_device
from elle.engine.trained import Trained, load_run
from elle.evaluation.autoattack import ORDER, Budget, reference, search

Search = Callable[[str, Tensor, Tensor], Tensor]


def seconds_now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def ensemble(attack: Search, x: Tensor, y: Tensor, right: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Which points withstand all attacks [N], and for each attack the accuracy after it and its seconds."""
    standing = right.clone()
    rows: dict[str, Any] = {}
    for name in ORDER:
        index = standing.nonzero().squeeze(1)
        started = seconds_now(x.device)
        x_adv = attack(name, x[index], y[index])
        seconds = seconds_now(x.device) - started
        standing[index[(x_adv != x[index]).flatten(1).any(1)]] = False
        rows[name] = {"accuracy": float(standing.double().mean()), "seconds": round(seconds, 2)}
        print(f"  {name:8} {100 * rows[name]['accuracy']:6.2f} % {seconds:9.2f} s", flush=True)
    return standing, rows


def compared(args: argparse.Namespace, trained: Trained) -> dict[str, Any]:
    device = pick_device(args.device)
    precision = pick_precision(args.precision, device)
    prepare_device(device, "fp32")
    model, classes = trained.model.to(device), len(trained.classes)
    x, y = trained.test_images(args.root, args.images)
    eps, budget = float(Fraction(args.eps)), Budget(queries=args.queries)
    common: dict[str, Any] = {"norm": args.norm, "classes": classes, "seed": args.seed, "budget": budget}
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in x.split(500)]) == y

    def fast(name: str, x: Tensor, y: Tensor) -> Tensor:
        graph = device.type == "cuda"
        options = {"precision": precision, "batch": args.batch, "graph": graph, "compile": args.compile}
        return search(name, model, x, y, eps, **options, **common)

    def original(name: str, x: Tensor, y: Tensor) -> Tensor:
        options = {"precision": args.reference, "batch": 500, "channels_last": args.quick}
        return reference.search(name, model, x, y, eps, **options, **common)

    standing, engines = {}, {}
    for label, attack in (("fast", fast), ("reference", original)):
        print(f"{label}: {len(x)} images, {100 * float(right.double().mean()):.2f} % clean")
        standing[label], engines[label] = ensemble(attack, x, y, right)
    seconds = {label: sum(row["seconds"] for row in rows.values()) for label, rows in engines.items()}
    return {
        "images": len(x),
        "eps": args.eps,
        "norm": args.norm,
        "compile": args.compile,
        "precision": {"fast": precision, "reference": args.reference},
        "clean": float(right.double().mean()),
        "engines": engines,
        "seconds": seconds,
        "times_faster": None if args.quick else round(seconds["reference"] / seconds["fast"], 2),
        "broken_by_fast_alone": (standing["reference"] & ~standing["fast"]).nonzero().squeeze(1).tolist(),
        "broken_by_reference_alone": (standing["fast"] & ~standing["reference"]).nonzero().squeeze(1).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--root", help="where the data are, if not where the run found them")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--eps", default="8/255")
    parser.add_argument("--norm", default="linf", choices=("linf", "l2", "l1"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--queries", type=int, default=Budget.queries, help="of square")
    parser.add_argument("--batch", type=int, default=512, help="of ours; the original's is 500")
    parser.add_argument("--precision", default="auto", help="of our search")
    parser.add_argument("--compile", action="store_true", help="the network, for our search")
    parser.add_argument("--reference", default="fp32", choices=("fp32", "tf32"))
    parser.add_argument("--quick", action="store_true", help="lay the original's network out for the GPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    directory = args.run.parent if args.run.is_file() else args.run
    result = compared(args, load_run(directory, pick_device(args.device)))
    print(json.dumps({key: value for key, value in result.items() if key != "engines"}, indent=2))
    if args.save:
        path = result_file("autoattack")
        old = json.loads(path.read_text())["runs"] if path.exists() else []
        write_json(path, {"torch": torch.__version__, "runs": [*old, {"run": directory.name, **result}]})
        print(path)


if __name__ == "__main__":
    main()
