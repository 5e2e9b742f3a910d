"""Keep what sweeps have measured as small JSON, and write the table of it, beside the paper's numbers, into a page.

    elle sweep table-2 --only data=cifar10 eps=8/255 method=elle-a --out runs/short
    python benchmarks/results_table.py runs/short                  # results/short.json
    python benchmarks/results_table.py --into README.md            # between <!-- results --> and <!-- /results -->
    python benchmarks/results_table.py --into README.md --check    # exit code 1 where the page is not up to date

    python benchmarks/results_table.py runs/other --file results/other.json --into docs/speed.md

Runs may be gathered in several goes, from several folders and machines: one that was trained again, with the same seed
and settings, replaces the one in the file, whatever it was evaluated with.
Those with other settings than their method's own have a line of their own, which names them.
The paper's AutoAttack accuracies are those of recipes/table-2.toml.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elle.config import Config, format_radius
from elle.errors import InputError
from elle.experiments.collected import measured
from elle.experiments.recipe import load_recipe, run_id
from elle.experiments.rundir import open_run
from elle.files import write_json, write_text

FILE = Path(__file__).parents[1] / "results" / "short.json"
KEYS = ("data", "model", "method", "seed", "schedule", "epochs")
NUMBERS = ("clean", "pgd-20", "autoattack", "seconds", "seconds per epoch")
ASIDE = {"root", "out", "device", "workers", "track", "eval_every", "probe_every", "final"}
"""Keys that say nothing of the network that comes out, nor of how it was computed."""
Run = dict[str, Any]


def gathered(folders: Sequence[Path]) -> list[Run]:
    """Every finished run in these folders, or one folder below."""
    runs = []
    for file in [
        file for folder in folders for file in sorted([*folder.glob("config.toml"), *folder.glob("*/config.toml")])
    ]:
        run = open_run(file.parent)
        if run.result is None:
            continue
        config, found = run.config, measured(run)
        own = {key: value for key, value in config.model_dump().items() if key in KEYS}
        numbers = {name: round(found[name], 3) for name in NUMBERS if name in found}
        said = {key: run.result.get(key) for key in ("device", "torch", "precision")}
        collapsed = run.collapse_step() is not None
        other = other_settings(config)
        runs.append({"id": run_id(config), "eps": format_radius(config.eps or 0), **own,
                     **({"settings": other} if other else {}), **numbers, **said, "collapsed": collapsed})  # fmt: skip
    if not runs:
        raise InputError(f"no finished run in {', '.join(map(str, folders))}")
    return runs


def trained_as(run: Run) -> tuple[Any, ...]:
    """What two runs share whose networks were trained alike: not the id, which also tells how they were evaluated."""
    return tuple(run.get(key) for key in (*KEYS, "eps", "settings"))


def other_settings(config: Config) -> str:
    """What was set beside the method, as words of `elle train`."""
    usual = Config(eps=config.eps, **{key: getattr(config, key) for key in KEYS}).resolved()
    changed = [key for key in Config.model_fields if getattr(config, key) != getattr(usual, key)]
    changed.sort(key=lambda key: key == "options")  # the method's own fields come last
    return " ".join(config.spelled(key) for key in changed if key not in ASIDE)


def table(runs: Sequence[Run]) -> str:
    """A line for each dataset, eps and method: ours, mean and std over seeds, and the paper's AutoAttack."""
    paper = load_recipe("table-2")
    order = [*dict.fromkeys(str(run.method) for run in paper.runs(1))]
    settings: dict[tuple[str, str, str, str], list[Run]] = {}
    for run in runs:
        settings.setdefault((run["data"], run["eps"], run["method"], run.get("settings", "")), []).append(run)

    def place(setting: tuple[str, str, str, str]) -> tuple[str, float, int, str]:
        data, eps, method, other = setting
        return data, float(eps.partition("/")[0]), order.index(method) if method in order else -1, other

    lines = ["| data | eps | method | clean | PGD-20 | AutoAttack | paper | difference | seeds |", "|" + "---|" * 9]
    for data, eps, method, other in sorted(settings, key=place):
        mine = settings[data, eps, method, other]
        where = {"data": data, "eps": eps, "method": method}
        theirs = [one for one in paper.expected if one.metric == "autoattack" and where.items() <= one.where.items()]
        ours = [run["autoattack"] for run in mine if "autoattack" in run]
        said = f"{theirs[0].value:.2f} ± {theirs[0].std:.2f}{'†' * theirs[0].collapsed}" if theirs else ""
        difference = f"{statistics.fmean(ours) - theirs[0].value:+.2f}" if ours and theirs else ""
        numbers = [_over_seeds(mine, name) for name in ("clean", "pgd-20", "autoattack")]
        cells = [data, eps, f"`{method} {other}`".replace(" `", "`"), *numbers, said, difference, str(len(mine))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "† at least one of the runs collapsed."])


def _over_seeds(runs: Sequence[Run], name: str) -> str:
    values = [run[name] for run in runs if name in run]
    if not values:
        return ""
    std = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    some = f" ({len(values)} of {len(runs)} seeds)" if len(values) < len(runs) else ""
    return f"{statistics.fmean(values):.2f}{std}{'†' * any(run['collapsed'] for run in runs)}{some}"


def placed(page: str, text: str, name: str, mark: str = "results") -> str:
    """The page with the table between its two marks."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise InputError(f"{name} needs the lines {begin} and {end} where the table goes, once each")
    return f"{page.partition(begin)[0]}{begin}\n{text}\n{end}{page.partition(end)[2]}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="runs, or folders of runs")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--into", type=Path, metavar="PAGE", help="a Markdown file with the two marks")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 where the page is old")
    args = parser.parse_args(words)
    runs = json.loads(args.file.read_text())["runs"] if args.file.exists() else []
    if args.folders:
        runs = [*{trained_as(run): run for run in [*runs, *gathered(args.folders)]}.values()]
        write_json(
            args.file, {"runs": sorted(runs, key=lambda run: (run["data"], run["eps"], run["method"], run["seed"]))}
        )
    if not runs:
        raise InputError(f"{args.file} has no runs; name the folders of some")
    if args.into is None:
        print(table(runs))
        return 0
    before = args.into.read_text(encoding="utf-8")
    after = placed(before, table(runs), args.into.name)
    if not args.check:
        write_text(args.into, after)
    return int(args.check and after != before)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as problem:
        print(f"results_table: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)
