"""What the README shows works, and what it claims was measured."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from elle import cli
from elle.config import load_config
from elle.methods import METHODS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for language, text in BLOCKS if not language for line in text.splitlines()]
PYTHON = [text for language, text in BLOCKS if language == "python"]


def test_the_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ran = 0
    for command in COMMANDS:
        if command.startswith("elle ") and not mentions_files_of_the_user(command):
            monkeypatch.setattr(sys, "argv", command.split())
            with pytest.raises(SystemExit) as exit_code:
                cli.main()
            assert exit_code.value.code in (0, None), (command, capsys.readouterr().err)
            ran += 1
    assert ran >= 7


def mentions_files_of_the_user(command: str) -> bool:
    return "DATA" in command or "runs/mine" in command


@pytest.mark.parametrize("command", [c for c in COMMANDS if "root=DATA" in c])
def test_commands_on_the_user_s_own_files_are_spelled_right(command):
    words = [word for word in command.split() if "=" in word]
    config = load_config(words).resolved()
    assert (config.data, config.root, config.model) == ("cifar10", "DATA", "preact-resnet18")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_targets_exist(command):
    assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_loader_s_share_of_the_floor_is_what_was_measured():
    measured = json.loads((ROOT / "benchmarks/results/streaming-cpu-torch2.13.0.json").read_text())
    assert measured["share_of_floor"] >= 0.85
    rate, share, cached = (
        measured[key] for key in ("loader_images_per_second", "share_of_floor", "cached_images_per_second")
    )
    text = " ".join((ROOT / "docs/streaming.md").read_text().split())
    assert (
        f"gives {rate} images/s, {share:.0%} of the floor, and {cached:,} from a full cache".replace("%", " %") in text
    )


def test_the_python_examples_run_as_printed():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    before = model[1].weight.detach().clone()
    x, y = torch.rand(4, 3, 2, 2), torch.randint(10, (4,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "x": x, "y": y, "loader": [(x, y)] * 3, "optimizer": optimizer}
    for text in PYTHON:
        exec(compile(text, "README.md", "exec"), names)
    assert not torch.equal(model[1].weight, before)
    assert 0 <= names["result"]["pgd-20"]["accuracy"] <= 1
    assert len(PYTHON) == 2


def test_every_loop_of_the_plug_in_s_page_trains():
    page = (ROOT / "docs" / "plugin.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    x, y = torch.rand(4, 3, 2, 2), torch.randint(10, (4,))
    names = {"model": model, "loader": [(x, y)] * 4, "device": "cpu"}
    for text in blocks:
        before = model[1].weight.detach().clone()
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        exec(compile(text, "docs/plugin.md", "exec"), names)
        assert torch.equal(model[1].weight, before) == ("for " not in text)
    assert names["Classifier"](model).training_step((x, y), 0).isfinite()
    assert len(blocks) == 5


def test_the_methods_table_lists_every_row_with_its_cost():
    page = (ROOT / "docs" / "methods.md").read_text()
    table = page[: page.index("## Measured")]
    listed = {}
    for line in re.findall(r"^\| (`.*) \|$", table, re.MULTILINE):
        cells = [cell.strip() for cell in line.split("|")]
        names = [name for name in re.findall(r"`([^`]+)`", cells[0]) if name in METHODS]
        costs = [int(cost) for cost in cells[-1].split(",")]
        listed |= dict(zip(names, costs if len(costs) == len(names) else costs * len(names), strict=True))
    assert listed == {name: row.cost.total for name, row in METHODS.items() if "+" not in name}


def test_the_methods_page_reports_every_run_that_was_measured(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = import_module("methods_table")
    assert module.main(["--check"]) == 0
    page = tmp_path / "methods.md"
    page.write_text("before\n<!-- measured -->\n<!-- /measured -->\nafter\n")
    monkeypatch.setattr(module, "PAGE", page)
    assert module.main(["--check"]) == 1
    assert module.main([]) == 0
    assert "| `elle-a` | 80.2 | 48.7 | no |" in page.read_text()
    assert page.read_text().endswith("<!-- /measured -->\nafter\n")


def test_the_scaling_table_is_what_its_script_derives(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert import_module("scaling").table() in (ROOT / "docs" / "scaling.md").read_text()


def test_the_rehearsal_is_what_was_measured():
    measured = json.loads((ROOT / "benchmarks/results/imagenet-nvidia-h200-torch2.11.0.json").read_text())
    page = " ".join((ROOT / "docs" / "imagenet.md").read_text().split())
    first, second, third = (f"{phase['images_per_second']:,.0f}" for phase in measured["phases"])
    assert f"{first}, {second} and {third} images/s" in page
    assert f"after {measured['resumed_at_step']} of {measured['steps']} steps" in page
    clean, attacked = (f"{100 * measured['accuracy'][name]:.1f} %" for name in ("clean", "pgd-50-10"))
    assert f"{clean} of the 16 classes' images right, {attacked} under PGD-50-10" in page


def test_the_results_table_is_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert import_module("results_table").main(["--into", str(ROOT / "README.md"), "--check"]) == 0


def test_the_table_of_steps_is_what_was_measured():
    measured = json.loads((ROOT / "benchmarks/results/bench-preact-resnet18-nvidia-h200-torch2.11.0.json").read_text())
    page = (ROOT / "docs" / "speed.md").read_text()
    for row in measured["rows"]:
        epoch = row["ms"] * 382 / 1000  # steps of 128 in the 49,000 images that are trained on
        numbers = [f"{row['ms']:.2f}", f"{epoch:.2f}", f"{row['tflops']:.0f}", f"{row['peak_mib']:.0f}"]
        assert f"| `{row['method']}` | {row['passes']} | {' | '.join(numbers)} | {row['ratio']:.2f} |" in page


def test_the_table_of_both_engines_is_what_was_measured():
    results = ROOT / "benchmarks" / "results"
    runs = json.loads((results / "autoattack-nvidia-h200-torch2.11.0.json").read_text())["runs"]
    page = (ROOT / "docs" / "autoattack.md").read_text()
    whole = [run for run in runs if run["of"] == 10_000]
    rows = re.findall(r"^\| `([\w-]+)`.*? \| (\d+/255) \| 10,000 \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == len(whole) == 4
    for method, eps, cells in rows:
        (found,) = [run["found"] for run in whole if (run["run"], run["eps"]) == (f"{method}-8", eps)]
        ours, theirs = (found["engines"][name]["square"]["standing"] / 100 for name in ("fast", "reference"))
        alone = [len(found[f"broken_by_{name}_alone"]) for name in ("fast", "reference")]
        assert cells == f"{ours:.2f} % | {theirs:.2f} % | {alone[0]} | {alone[1]}"
        assert abs(ours - theirs) <= 0.1
    pgd = json.loads((results / "pgd-50-10-nvidia-h200-torch2.11.0.json").read_text())
    assert f"**{pgd['seconds']:.1f} s**" in page
    assert f"{100 * pgd['attacks']['pgd-50-10']['accuracy']:.2f} %" in page
