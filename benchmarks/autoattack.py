"""The original AutoAttack and ours on the same images, in one process: accuracy, time, and where they disagree.

    python benchmarks/autoattack.py RUN [--root DATA] [--images 1000] [--eps 8/255] [--norm linf] [--save]

RUN is a run directory, or the model.safetensors in it. Both engines attack the points that the attacks before
left standing, in the order of the standard ensemble. The original runs in fp32 or, with --reference tf32, in the
precision that torch gives it on recent GPUs; with --quick its network is laid out for the GPU as ours is: for the
answers of many images, not for its time. `--save` keeps the result as JSON after every --part images, and goes on
where an interrupted comparison of the same network and settings was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from results import result_file
from torch import Tensor

from elle.engine.runtime import pick_device, pick_precision, prepare_device
from elle.engine.trained import Trained, load_run
from elle.evaluation.autoattack import ORDER, Budget, reference, search
from elle.evaluation.units import BATCH
from elle.files import file_digest, write_json

Search = Callable[[str, Tensor, Tensor], Tensor]
Found = dict[str, Any]


def seconds_now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def ensemble(attack: Search, x: Tensor, y: Tensor, right: Tensor) -> tuple[Tensor, Found]:
    """Which points withstand all attacks [N], and for each attack how many still stand after it and its seconds."""
    standing = right.clone()
    rows: Found = {}
    for name in ORDER:
        index = standing.nonzero().squeeze(1)
        started = seconds_now(x.device)
        x_adv = attack(name, x[index], y[index])
        seconds = seconds_now(x.device) - started
        standing[index[(x_adv != x[index]).flatten(1).any(1)]] = False
        rows[name] = {"standing": int(standing.sum()), "seconds": round(seconds, 2)}
        print(f"  {name:8} {rows[name]['standing']:6} {seconds:9.2f} s", flush=True)
    return standing, rows


def engines_of(args: argparse.Namespace, trained: Trained, precision: Any) -> dict[str, Search]:
    """Both, by name, as functions of an attack, images and labels."""
    model, eps = trained.model, float(Fraction(args.eps))
    budget = Budget(queries=args.queries)
    common: Found = {"norm": args.norm, "classes": len(trained.classes), "seed": args.seed, "budget": budget}

    def fast(name: str, x: Tensor, y: Tensor) -> Tensor:
        options: Found = {"precision": precision, "batch": args.batch, "graph": x.is_cuda, "compile": args.compile}
        return search(name, model, x, y, eps, **options, **common)

    def original(name: str, x: Tensor, y: Tensor) -> Tensor:
        options: Found = {"precision": args.reference, "batch": 500, "channels_last": args.quick}
        return reference.search(name, model, x, y, eps, **options, **common)

    return {"fast": fast, "reference": original}


def compared(engines: dict[str, Search], model: torch.nn.Module, x: Tensor, y: Tensor, first: int) -> Found:
    """What both engines find on these images, the first of which has this place in the test set."""
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in x.split(500)]) == y
    standing, rows = {}, {}
    for label, attack in engines.items():
        print(f"{label}: images {first} to {first + len(x) - 1}, {int(right.sum())} right without an attack")
        standing[label], rows[label] = ensemble(attack, x, y, right)

    def alone(one: str, other: str) -> list[int]:
        """Points that only the first engine breaks."""
        return [first + place for place in (standing[other] & ~standing[one]).nonzero().squeeze(1).tolist()]

    return {
        "images": len(x),
        "right": int(right.sum()),
        "engines": rows,
        "broken_by_fast_alone": alone("fast", "reference"),
        "broken_by_reference_alone": alone("reference", "fast"),
    }


def joined(one: Any, other: Any) -> Any:
    """The sums of both results, and the lists one after the other."""
    if isinstance(one, dict):
        return {key: joined(one[key], other[key]) for key in one}
    return round(one + other, 2) if isinstance(one, float) else one + other


def told(found: Found) -> str:
    """A result in a few lines."""
    images, engines = found["images"], found["engines"]
    accuracy = {label: 100 * rows[ORDER[-1]]["standing"] / images for label, rows in engines.items()}
    seconds = {label: sum(row["seconds"] for row in rows.values()) for label, rows in engines.items()}
    lines = [f"{images} images, {100 * found['right'] / images:.2f} % right without an attack"]
    lines += [f"{label}: {accuracy[label]:.2f} %, {seconds[label]:.1f} s" for label in engines]
    for key in ("broken_by_fast_alone", "broken_by_reference_alone"):
        lines.append(f"{key.replace('_', ' ')}: {', '.join(map(str, found[key])) or 'none'}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--root", help="where the data are, if not where the run found them")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--part", type=int, default=2500, help="images that both engines attack before the next ones")
    parser.add_argument("--eps", default="8/255")
    parser.add_argument("--norm", default="linf", choices=("linf", "l2", "l1"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--queries", type=int, default=Budget.queries, help="of square")
    parser.add_argument("--batch", type=int, default=BATCH, help="of ours; the original's is 500")
    parser.add_argument("--precision", default="auto", help="of our search")
    parser.add_argument("--compile", action="store_true", help="the network, for our search")
    parser.add_argument("--reference", default="fp32", choices=("fp32", "tf32"))
    parser.add_argument("--quick", action="store_true", help="lay the original's network out for the GPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args(words)
    device = pick_device(args.device)
    precision = pick_precision(args.precision, device)
    prepare_device(device, "fp32")
    trained = load_run(args.run.parent if args.run.is_file() else args.run, device)
    x, y = trained.test_images(args.root, args.images)
    chosen = ("eps", "norm", "seed", "queries", "batch", "part", "compile", "quick")
    what = {
        "run": trained.weights.parent.name,
        "weights": file_digest(trained.weights),
        "of": len(x),
    }
    what |= {key: getattr(args, key) for key in chosen} | {
        "precision": {"fast": precision, "reference": args.reference}
    }
    path = result_file("autoattack")
    runs = json.loads(path.read_text())["runs"] if args.save and path.exists() else []
    found = next((run["found"] for run in runs if what.items() <= run.items()), None)
    others = [run for run in runs if not what.items() <= run.items()]
    engines = engines_of(args, trained, precision)
    for first in range(found["images"] if found else 0, len(x), args.part):
        part = slice(first, first + args.part)
        new = compared(engines, trained.model, x[part], y[part], first)
        found = joined(found, new) if found else new
        if args.save:
            write_json(path, {"torch": torch.__version__, "runs": [*others, {**what, "found": found}]})
    assert found is not None
    print(told(found))


if __name__ == "__main__":
    main()
