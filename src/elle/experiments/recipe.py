"""Recipes: a TOML file for each table or figure of the paper -> its runs, and the numbers printed there."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elle.config import KEYS, OWN_IMAGES, Config, dotted, nested, parse_config, parse_radius, parse_words, read_toml
from elle.errors import InputError, nearest

_PACKAGE = Path(__file__).parent.parent
FOLDERS = (_PACKAGE / "recipes", _PACKAGE.parent.parent / "recipes")
"""Where recipes are found by name: in an installed package, and in a checkout."""
MOST_RUNS = 10_000
"""More than anyone waits for: the paper's largest table has 576. All of them are in memory at once."""
_TABLES = {"title", "seeds", "base", "grid", "runs", "expected", "figure"}
_KINDS = ("table", "lines", "curves", "bars", "steps", "pictures")
"""Of figures; a table where none is named."""
_AXES = ("x", "line", "panel", "rows", "columns")
_SEVERAL = ("metric", "curves", "at", "panel")
_FIGURE = {"kind", "baseline", *_SEVERAL, *_AXES}
_FREE = {"root", "out", "device", "compile", "workers", "cache"}
"""Keys that say where and how fast a run is made, not what comes out of it."""
_ELSEWHERE = {
    "seed": "seeds = 3 makes runs with the seeds 0, 1 and 2",
    "out": "`elle sweep --out DIR` says where the runs go",
}
"""Keys of `elle train` that a recipe does not set, and what does."""


@dataclass(frozen=True)
class Expected:
    """A number that the paper prints for the runs with these settings."""

    where: dict[str, Any]
    metric: str
    """An attack of `elle evaluate` (accuracy in percent), or "seconds": of a whole training."""
    value: float
    std: float | None = None
    collapsed: bool = False
    """The paper marks it red: at least one of its runs collapsed."""
    seeds: int = 3
    """Runs of the paper that it is the mean of; three unless it says otherwise (Section 4.4)."""


@dataclass(frozen=True)
class Recipe:
    """A table or figure: what all of its runs share, how they differ, and what the paper reports."""

    name: str
    title: str
    base: dict[str, Any]
    grid: list[dict[str, list[Any]]]
    """Each a product of its axes; config keys, a method's own fields written `method.PART.FIELD`."""
    expected: list[Expected]
    figure: dict[str, Any]
    seeds: int

    def runs(self, seeds: int | None = None, only: Mapping[str, Any] | None = None) -> list[Config]:
        """Every run, for this many seeds (the recipe's own otherwise), `only` those with these settings."""
        wanted = self.seeds if seeds is None else seeds
        count = wanted * sum(math.prod(map(len, axes.values())) for axes in self.grid)
        if count > MOST_RUNS:
            raise InputError(f"recipe {self.name} has {count:,} runs, more than {MOST_RUNS:,}; write several recipes")
        settings = [parse_config(nested(self.base | one), where=f"recipe {self.name}: ") for one in self._products()]
        runs = [config.model_copy(update={"seed": seed}) for config in settings for seed in range(wanted)]
        chosen = [run for run in runs if only is None or matches(run, only)]
        if not chosen:
            words = " ".join(f"{key}={value}" for key, value in (only or {}).items())
            if only and only.keys() == {"method"}:
                words += nearest(str(only["method"]), {config.method for config in self.runs(1)})
            if only and only.keys() == {"eps"}:
                levels = {"eps": _radius(only["eps"]) / 255}
                words += f", did you mean eps={only['eps']}/255?" * any(matches(run, levels) for run in runs)
            axes = {key for axes in self.grid for key in axes} | ({"seed"} if wanted > 1 else set())
            raise InputError(f"no run of recipe {self.name} has {words}; its runs differ in {', '.join(sorted(axes))}")
        return chosen

    @property
    def kind(self) -> str:
        """The kind of the figure."""
        return str(self.figure.get("kind", _KINDS[0]))

    def asked(self, key: str) -> list[str]:
        """The words under a key of the figure."""
        return [str(word) for word in _words(self.figure, key)]

    def _products(self) -> Iterator[dict[str, Any]]:
        for axes in self.grid:
            for values in itertools.product(*axes.values()):
                yield dotted(dict(zip(axes, values, strict=True)))


def matches(config: Config, where: Mapping[str, Any]) -> bool:
    """Whether a run has these settings, its dataset's defaults counted."""
    return _has(config.resolved(), where)


def _has(whole: Config, where: Mapping[str, Any]) -> bool:
    for key, value in where.items():
        if key.startswith("method."):
            part, _, name = key.removeprefix("method.").partition(".")
            found = whole.options.get(part, {}).get(name)
        elif key in KEYS:
            found = getattr(whole, key)
        else:
            raise InputError(f"unknown key {key!r}{nearest(key, KEYS)}; `elle train --help` lists the keys")
        if found != (_radius(value) if key == "eps" else value):
            return False
    return True


def _radius(value: Any) -> float:
    try:
        return parse_radius(value)
    except ValueError as problem:
        raise InputError(f"eps={value}: {problem}") from None


def run_id(config: Config) -> str:
    """Twelve digits that two runs share if, and only if, they train and are evaluated alike.

    Keys at their default do not count, so that a key added later changes no identity.
    """
    values = config.resolved().model_dump(exclude=_FREE, exclude_defaults=True)
    if config.data in OWN_IMAGES and config.root:
        values["root"] = Path(config.root).name
    for own in values.get("options", {}).values():  # a method's field may be written 1 or 1.0
        own |= {name: int(value) for name, value in own.items() if isinstance(value, float) and value.is_integer()}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def recipe_files() -> dict[str, Path]:
    """The recipes that come with elle, by name, in the order of their numbers."""
    found = {file.stem: file for folder in FOLDERS for file in folder.glob("*.toml")}
    return dict(sorted(found.items(), key=lambda one: [part.zfill(4) for part in re.split(r"(\d+)", one[0])]))


def load_recipe(path_or_name: str | Path) -> Recipe:
    """The recipe in a file, or the one of that name which comes with elle; every run of it is checked."""
    known = recipe_files()
    file = known.get(str(path_or_name), Path(path_or_name))
    if file.suffix != ".toml" and not file.exists():
        raise InputError(
            f"no recipe {str(path_or_name)!r}{nearest(str(path_or_name), known)}; "
            f"`elle recipes` lists them, and a path ends in .toml"
        )
    values = read_toml(file)
    try:
        recipe = _recipe(file.stem, values)
        runs = [config.resolved() for config in recipe.runs(1)]
        _check_identities(runs)
        _check_drawn(recipe.figure, runs)
        for one in recipe.expected:
            if not any(_has(whole, one.where) for whole in runs):
                words = " ".join(f"{key}={value}" for key, value in one.where.items())
                raise InputError(f"expected {one.metric} {one.value:g}: no run has {words}")
    except InputError as problem:
        raise InputError(f"{file}: {str(problem).removeprefix(f'recipe {file.stem}: ')}") from None
    return recipe


def _check_identities(runs: Sequence[Config]) -> None:
    """Refuse runs that differ in a key of `_FREE` alone: only the first of them would be made."""
    seen: dict[str, Config] = {}
    for run in runs:
        other = seen.setdefault(run_id(run), run)
        for key in sorted(_FREE):
            if getattr(other, key) != getattr(run, key):
                values = f"{other.spelled(key)}, {run.spelled(key)}"
                raise InputError(
                    f"runs that differ in {key} alone ({values}) count as the same run; write a recipe for each"
                )


def _recipe(name: str, values: dict[str, Any]) -> Recipe:
    for key in values:
        if key not in _TABLES:
            raise InputError(f"unknown key {key!r}{nearest(key, _TABLES)}; a recipe has {', '.join(sorted(_TABLES))}")
    title, seeds = values.get("title"), values.get("seeds", 3)
    if not isinstance(title, str) or not title:
        raise InputError('no title; write title = "Table 2: ..."')
    _count(seeds)
    tables = {key: _of_kind(values.get(key, {}), dict, key) for key in ("base", "grid", "figure")}
    _check_figure(tables["figure"])
    base = dotted(tables["base"])
    runs = _of_kind(values.get("runs", [{}]), list, "runs")
    grid = [_axes(dotted(tables["grid"]) | dotted(_of_kind(own, dict, "runs"))) for own in runs]
    for key in [key for key in _ELSEWHERE if any(key in table for table in (base, *grid))]:
        raise InputError(f"leave {key} out: {_ELSEWHERE[key]}")
    if not any(grid):
        raise InputError("the grid is empty; give [grid] at least one axis, for example method = ['elle-a']")
    rows = _of_kind(values.get("expected", []), list, "expected")
    expected = [one for row in rows for one in _expected(_of_kind(row, dict, "expected"))]
    return Recipe(name, title, base, grid, expected, tables["figure"], seeds)


def _check_figure(figure: dict[str, Any]) -> None:
    for key in figure:
        if key not in _FIGURE:
            raise InputError(
                f"[figure]: unknown key {key!r}{nearest(key, _FIGURE)}; it has {', '.join(sorted(_FIGURE))}"
            )
        words = _words(figure, key) if key in _SEVERAL else [figure[key]]
        if not all(isinstance(word, (str, int, float) if key == "at" else str) for word in words):
            kind = "names, one or a list of them" if key in _SEVERAL else "one name"
            raise InputError(f"[figure]: {key} = {figure[key]!r}; write {kind}")
    kind = figure.get("kind", _KINDS[0])
    if kind not in _KINDS:
        raise InputError(f"[figure]: kind = {kind!r}{nearest(str(kind), _KINDS)}; it is one of {', '.join(_KINDS)}")
    for name in [name for axis in _AXES for name in _words(figure, axis)]:
        if name in _ELSEWHERE:
            raise InputError(f"[figure]: {name} is no axis: a setting is shown as the mean over its seeds")
        if name not in KEYS and not name.startswith("method.") and name != "metric":
            raise InputError(f"[figure]: unknown key {name!r}{nearest(name, KEYS)}; `elle train --help` lists the keys")


def _words(figure: dict[str, Any], key: str) -> list[Any]:
    value = figure.get(key, [])
    return value if isinstance(value, list) else [value]


def _check_drawn(figure: dict[str, Any], runs: Sequence[Config]) -> None:
    """Refuse axes and values that no run has: the report would leave them out without a word."""
    known = {f"method.{part}.{name}" for whole in runs for part, own in whole.options.items() for name in own}
    for name in [name for axis in _AXES for name in _words(figure, axis)]:
        if name.startswith("method.") and name not in known:
            raise InputError(f"[figure]: no run sets {name}{nearest(name, known)}")
    across = figure.get("columns", figure.get("x", "eps"))
    for value in _words(figure, "at") if across != "metric" else []:
        if not any(_has(whole, {across: worded(across, str(value))}) for whole in runs):
            raise InputError(f"[figure]: at = {value!r}: no run has {across}={value}")
    if "baseline" in figure and figure.get("rows", figure.get("line", "method")) == "method":
        method, methods = figure["baseline"].split(",")[0], {whole.method for whole in runs}  # its options may follow
        if method not in methods:
            near = nearest(method, methods)
            raise InputError(f"[figure]: baseline = {figure['baseline']!r}: no run has method={method}{near}")


def _of_kind(value: Any, kind: type, key: str) -> Any:
    if not isinstance(value, kind):
        raise InputError(f"{key} must be a {'table' if kind is dict else 'list of tables'}, not {value!r}")
    return value


def _count(seeds: Any) -> int:
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise InputError(f"seeds = {seeds!r} must be a whole number of 1 or more")
    return seeds


def _axes(table: dict[str, Any]) -> dict[str, list[Any]]:
    """Axes as lists; a single value is an axis of one."""
    axes = {key: value if isinstance(value, list) else [value] for key, value in table.items()}
    for key, values in axes.items():
        if not values:
            raise InputError(f"the grid's {key} is empty; give it at least one value")
    return axes


_CELL = re.compile(r"\s*(?P<value>\d+(\.\d+)?)\s*(\+-\s*(?P<std>\d+(\.\d+)?))?\s*(?P<collapsed>collapsed)?\s*")
_ROW_KEYS = {"where", "metric", "rows", "columns", "table"}
_EXPECTED_KEYS = _ROW_KEYS | {"value", "seeds"}


def _expected(row: dict[str, Any]) -> Iterator[Expected]:
    """`value = "44.32 +- 0.04"`, or a `table` whose first line names `columns`, and first column `rows`."""
    for key in row:
        if key not in _EXPECTED_KEYS:
            raise InputError(f"[[expected]]: unknown key {key!r}{nearest(key, _EXPECTED_KEYS)}")
    where, metric = dotted(_of_kind(row.get("where", {}), dict, "where")), row.get("metric")
    seeds = _count(row.get("seeds", Expected.seeds))
    form = set(row) - {"where", "metric", "seeds"}
    if form == {"value"}:
        yield _number(where, metric, row["value"], seeds)
        return
    if form != {"rows", "columns", "table"}:
        raise InputError(f"an expected table needs {', '.join(sorted(_ROW_KEYS))}; it has {', '.join(sorted(row))}")
    rows, columns = str(row["rows"]), str(row["columns"])
    written = [[cell.strip() for cell in line.split("|")] for line in str(row["table"]).strip().splitlines()]
    if len(written) < 2:
        raise InputError(f"an expected table has a line that names its {columns}, and lines of numbers below")
    (_, *heads), *lines = written
    for head, *cells in lines:
        if len(cells) != len(heads):
            raise InputError(f"the expected line {head!r} has {len(cells)} numbers for {len(heads)} columns")
        for column, cell in zip(heads, cells, strict=True):
            if cell == "-":
                continue
            here = where | {rows: worded(rows, head)}
            if columns == "metric":
                yield _number(here, column, cell, seeds)
            else:
                yield _number(here | {columns: worded(columns, column)}, metric, cell, seeds)


def worded(key: str, text: str) -> Any:
    """The value that `key=text` gives a key, method.PART.FIELD included."""
    value: Any = parse_words([f"{key}={text}"])
    for part in key.split("."):
        value = value[part]
    return value


def _number(where: dict[str, Any], metric: Any, cell: Any, seeds: int) -> Expected:
    found = _CELL.fullmatch(str(cell))
    if not found or not isinstance(metric, str):
        raise InputError(f"expected {metric} {cell!r}: write a metric and '44.32 +- 0.04', with 'collapsed' if it was")
    std = None if found["std"] is None else float(found["std"])
    if std is not None and seeds == 1:
        raise InputError(f"expected {metric} {cell!r}: seeds = 1, and one run has no +-; leave one of the two out")
    return Expected(where, metric, float(found["value"]), std, bool(found["collapsed"]), seeds)
