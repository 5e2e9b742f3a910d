"""What the README shows works, and what it claims was measured."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest
import torch

import elle
from elle import cli
from elle.config import load_config
from elle.methods import METHODS
from elle.models.registry import MODELS
from elle.models.residual import PreActResNet

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
    model = PreActResNet((3, 2, 2), 10, torch.nn.ReLU, blocks=[1], widths=[8], stem_width=8)
    x, y = torch.rand(4, 3, 2, 2), torch.randint(10, (4,))
    names = {"model": model, "loader": [(x, y)] * 4, "device": "cpu"}
    for text in blocks:
        before = model.linear.weight.detach().clone()
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        exec(compile(text, "docs/plugin.md", "exec"), names)
        assert torch.equal(model.linear.weight, before) == ("for " not in text)
    assert names["Classifier"](model).training_step((x, y), 0).isfinite()
    assert len(blocks) == 6


@pytest.mark.parametrize("batches", [1, 2, 6])
def test_the_loop_of_the_page_on_collapse_looks_in_every_epoch(batches):
    (text,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/collapse.md").read_text(), re.MULTILINE | re.DOTALL)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    x, y = torch.rand(4, 3, 2, 2), torch.randint(10, (4,))
    names = {"elle": elle, "model": model, "x_probe": x, "y_probe": y, "epochs": 2, "loader": [(x, y)] * batches}
    exec(compile(text, "docs/collapse.md", "exec"), names)
    assert len(names["monitor"].readings) == 2 * min(batches, 2)


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
    images = measured["training_images"]
    steady = sum(phase["epochs"] * images / phase["images_per_second"] for phase in measured["phases"])
    assert f"training would take {steady:.0f} s. It took {measured['train_seconds']:.0f}," in page


def test_the_results_table_is_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert import_module("results_table").main(["--into", str(ROOT / "README.md"), "--check"]) == 0


def test_the_first_figures_of_the_readme_are_those_of_its_table():
    runs = json.loads((ROOT / "results/short.json").read_text())["runs"]
    plain, ours = (
        fmean(run["pgd-20"] for run in runs if (run["method"], run["eps"]) == (method, "8/255"))
        for method in ("fgsm", "elle-a")
    )
    told = f"plain FGSM ends with an accuracy of {plain:.1f} % under PGD-20 (20 attack steps), ELLE-A with {ours:.1f} %"
    assert told in words_of("README.md")


def test_gradalign_trained_again_learned_its_own_attack_and_then_nothing():
    curve = json.loads((ROOT / "results/gradalign-16-again.json").read_text())["curve"]
    assert "learned to fool its own attack in the second epoch and ended near 10 %" in words_of("README.md")
    assert curve[1]["epoch"] == 2
    assert curve[1]["accuracy"] > 0.4  # at the points of its own attack
    assert curve[1]["pgd-10"] < 0.02
    assert curve[-1]["clean"] < 0.13


def test_the_table_of_steps_is_what_was_measured():
    measured = json.loads((ROOT / "benchmarks/results/bench-preact-resnet18-nvidia-h200-torch2.11.0.json").read_text())
    page = (ROOT / "docs" / "speed.md").read_text()
    for row in measured["rows"]:
        epoch = row["ms"] * 382 / 1000  # steps of 128 in the 49,000 images that are trained on
        numbers = [f"{row['ms']:.2f}", f"{epoch:.2f}", f"{row['tflops']:.0f}", f"{row['peak_mib']:.0f}"]
        assert f"| `{row['method']}` | {row['passes']} | {' | '.join(numbers)} | {row['ratio']:.2f} |" in page


def of_h200(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}-nvidia-h200-torch2.11.0.json").read_text())
    return found


def words_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def times(name: str) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in of_h200(f"bench-{name}")["rows"]}


def test_epochs_in_the_readme_are_those_of_the_table_of_steps():
    steps = {name: row["ms"] for name, row in times("preact-resnet18").items()}
    seconds = {name: f"{ms * 382 / 1000:.2f} s" for name, ms in steps.items()}
    assert seconds["fgsm"] == seconds["n-fgsm"]
    text = words_of("README.md")
    assert f"take {seconds['fgsm']} with `fgsm` or `n-fgsm` and {seconds['elle-a']} with `elle-a` (" in text
    assert f"a step of `elle-a` takes {steps['elle-a'] / steps['fgsm']:.1f} times one of `fgsm`" in text
    timed = [run for run in kept_runs() if "seconds" in run]
    whole = {(run["method"], run["eps"], run["seed"]): f"{run['seconds']:.0f}" for run in timed}
    elle_a = f"{whole['elle-a', '8/255', 0]} and {whole['elle-a', '8/255', 2]} s"
    assert f"took {whole['fgsm', '16/255', 0]} s (`fgsm` at 16/255) and {elle_a} (`elle-a` at 8/255)" in text


def test_parts_of_a_step_took_what_the_page_on_speed_says():
    text, parts = words_of("docs/speed.md"), of_h200("step-parts")
    (fgsm,), (elle,) = (parts["small_work"][-1][name] for name in ("fgsm", "elle"))
    told = f"on another one the same kernels took {fgsm:.2f} ms for FGSM and {elle:.2f} for ELLE"
    assert told in text
    fgsm, elle = ([row[name] for row in parts["kernels"]] for name in ("fgsm", "elle"))
    rows = ("all", "without the first convolution's", "without the update's", "without the sums at forks")
    for name, *ms in zip(rows, fgsm, elle, strict=True):
        assert f"| {name} | {ms[0]:.2f} | {ms[1]:.2f} |" in text
    beside = {row["part"]: row for row in parts["streams"]}
    gradients, penalty = (beside[name] for name in ("weight gradients beside", "penalty's passes beside"))
    assert f"FGSM takes {beside['both']['fgsm']:.2f} ms instead of {penalty['fgsm']:.2f}" in text
    assert f"ELLE takes {penalty['elle']:.2f} ms, and {gradients['elle']:.2f} with concurrent" in text
    start = parts["start_s"]
    assert f"max_steps=5`): {start['again'][0]:.0f} s, or {start['empty cache']} s the first time" in text


def test_other_steps_took_what_the_page_on_speed_says():
    text, plain = words_of("docs/speed.md"), times("preact-resnet18")
    ms = times("preact-resnet18-measured")["elle-a"]["ms"]
    assert f"`elle-a` takes {ms:.2f} ms, {ms * 0.382:.2f} s per epoch, while its penalty is [only measured]" in text
    wide, large = times("wide-resnet-28-10"), times("resnet50")
    told = [f"`{name}` {wide[name]['ms']:.1f} ms ({wide[name]['tflops']:.0f}" for name in ("fgsm", "elle")]
    assert f"{told[0]} TFLOP/s) and {told[1]})" in text
    told = [
        f"`{name}` {row['ms']:.1f} ms ({row['images_per_second']:,} images/s, {row['tflops']:.0f}"
        for name, row in large.items()
    ]
    assert f"{told[0]} TFLOP/s) and {told[1]})" in text
    steps = {(row["method"], row["setting"]): row["ms"] for row in of_h200("normalisation")["steps"]}
    fused, off = ([steps[name, f"fused={way}"] for name in ("fgsm", "elle")] for way in ("auto", "off"))
    assert f"took {fused[0]:.2f} ms instead of {off[0]:.2f}, ELLE {fused[1]:.2f} instead of {off[1]:.2f} (" in text
    before = times("preact-resnet18-fused-off")["cure"]["ms"]
    cure = f"{plain['cure']['ms']:.1f} ms with them on an H200, and took {before:.1f} before they existed"
    assert f"a CURE step takes {cure} (" in text


def test_the_settings_tried_for_the_speedrun_did_what_the_page_on_speed_says():
    text, measured = words_of("docs/speed.md"), of_h200("speedrun-settings")
    for row in measured["settings"]["rows"]:
        cells = " | ".join(f"{100 * row[name]:.2f}" for name in ("clean", "pgd-20", "margin"))
        assert re.search(rf"\| [^|]*{re.escape(named_alone(row['setting']))}[^|]* \| {cells} \|", text)
    runs = measured["timed"]["runs"]
    seconds, loading, first = ([run[key] for run in runs] for key in ("seconds", "loading", "warm_up"))
    assert f"took {fmean(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f}, five seeds)" in text
    assert f"of which loading took {fmean(loading):.1f} and the first four steps {fmean(first):.1f}" in text
    small, whole = (fmean(median(run["epoch_seconds"][part]) for run in runs) for part in (slice(1, 12), slice(13, 24)))
    change = fmean(run["epoch_seconds"][12] for run in runs) - whole
    assert f"takes {small:.2f} s instead of {whole:.2f}, and the change of size {change:.0f} s" in text


def test_shorter_settings_did_what_the_page_on_speed_says():
    text, measured = words_of("docs/speed.md"), of_h200("speedrun-settings")
    for row in measured["lengths"]["rows"]:
        cells = " | ".join(f"{100 * row[name]:.2f}" for name in ("clean", "margin", "apgd-t"))
        assert f"| `{row['setting']}` | {row['peak']} | {cells} |" in text
    by_tries = {row["tried"]: row for row in measured["first_step"]["rows"]}
    all_ten, three, none = (by_tries[tried] for tried in (10, 3, 0))
    saved, slower = all_ten["first_s"] - none["first_s"], (none["left_out_ms"] - all_ten["left_out_ms"]) / 1000
    told = f"takes {saved:.1f} s less, but a later one {none['left_out_ms']:.2f} ms instead of"
    assert f"{told} {all_ten['left_out_ms']:.2f}, which costs as much in 20 epochs" in text
    assert slower * 20 * 191 == pytest.approx(saved, rel=0.1)
    assert f"three kernels instead of ten saves {all_ten['first_s'] - three['first_s']:.1f} s" in text


def test_the_speedrun_took_and_reached_what_the_pages_say():
    text, runs = words_of("docs/speed.md"), [run for run in of_h200("speedrun")["runs"] if run["setting"] == ""]
    seconds, loading, first = ([run[key] for run in runs] for key in ("seconds", "loading", "warm_up"))
    assert f"takes **{fmean(seconds):.1f} s** on an NVIDIA H200 ({min(seconds):.1f} to {max(seconds):.1f}, five" in text
    assert f"of which loading takes {fmean(loading):.1f} and the first four steps {fmean(first):.1f}, and" in text
    left = [100 * run["accuracy"]["autoattack"] for run in runs]
    assert len(runs) == 5
    assert all(run["images"] == 10_000 for run in runs)
    told = f"AutoAttack leaves **{over_seeds(left)} %** of all 10,000 test images ({min(left):.2f} to {max(left):.2f})"
    assert told in text
    header = " ".join(line.removeprefix("#") for line in (ROOT / "recipes/speedrun.toml").read_text().splitlines())
    told = f"training take {fmean(seconds):.1f} s, and AutoAttack leaves {over_seeds(left, '+-')} % (five seeds)"
    assert told in " ".join(header.split())
    told = f"reach {over_seeds(left)} % under AutoAttack (five seeds) in {fmean(seconds):.0f} s of loading and training"
    assert told in words_of("README.md")
    told = f"reaches {fmean(left):.1f} % under AutoAttack in {fmean(seconds):.0f} s on one NVIDIA H200"
    assert told in words_of("README.md")


def test_the_speedrun_s_curve_is_what_was_measured():
    text = words_of("docs/speed.md")
    for row in of_h200("speedrun")["settings"]:

        def cell(score: dict[str, float | None] | None, factor: float, digits: int) -> str:
            if score is None:
                return "-"
            std = "" if score["std"] is None else f" ± {factor * score['std']:.{digits}f}"
            return f"{factor * score['mean']:.{digits}f}{std}"

        cells = [cell(row["accuracy"].get(name), 100, 2) for name in ("clean", "pgd-20", "autoattack")]
        told = [str(row["epochs"]), cell(row["seconds"], 1, 1), *cells, str(row["seeds"])]
        assert f"| {' | '.join(told)} |" in text


def test_what_leaving_out_every_second_penalty_and_the_kernels_costs_is_what_was_measured():
    runs, text = of_h200("shortcuts")["runs"], words_of("docs/speed.md")
    default = {
        eps: [run for run in kept_runs() if (run["method"], run["eps"]) == ("elle-a", eps)]
        for eps in ("8/255", "16/255")
    }
    cells = [over_seeds([run[name] for run in default["8/255"]]) for name in ("clean", "pgd-20", "autoattack")]
    step = times("preact-resnet18")["elle-a"]["ms"]
    assert f"| the default | {step * 0.382:.2f} | {' | '.join(cells)} |" in text
    assert len(default["8/255"]) == 3
    for setting in ("fused=off", "method.weight.every=2"):
        mine = [run for run in runs if (run["settings"], run["eps"]) == (setting, "8/255")]
        seconds = fmean(run["seconds_per_epoch"] for run in mine)
        cells = [over_seeds([run[name] / 100 for run in mine]) for name in ("clean", "pgd-20", "apgd-t")]
        assert [run["seed"] for run in mine] == [0, 1, 2]
        assert f"| `{setting}` | {seconds:.2f} | {' | '.join(cells)} |" in text
    assert f"an epoch takes {seconds:.2f} s" in words_of("README.md")
    (large,), (usual,) = [run for run in runs if run["eps"] == "16/255"], default["16/255"]
    told = f"ended at {large['clean'] / 100:.2f} % clean and {large['pgd-20'] / 100:.2f} % under PGD-20, without"
    assert told in text
    assert f"default ended at {usual['clean']:.2f} and {usual['pgd-20']:.2f} (one seed each)" in text
    lower = f"{usual['pgd-20'] - large['pgd-20'] / 100:.1f} points lower under PGD-20"
    assert f"at 16/255 one run ended {lower}" in words_of("README.md")


def test_whole_epochs_took_what_the_page_on_speed_says():
    text, rows = words_of("docs/speed.md"), of_h200("epochs")["rows"]
    seconds = {" ".join([row["method"], *row["settings"]]): row["seconds_per_epoch"] for row in rows}
    names = ["fgsm", "fgsm probe_every=0", "n-fgsm", "elle", "gradalign", "pgd-10"]
    assert sorted(seconds) == sorted(names)
    assert f"| | {' | '.join(f'`{name}`' for name in names)} |" in text
    assert f"| s per epoch | {' | '.join(f'{seconds[name]:.2f}' for name in names)} |" in text
    assert f"a whole epoch of `fgsm`, on another H200, {seconds['fgsm']:.2f} s" in words_of("README.md")
    (step, _) = of_h200("step-parts")["no_gain"]["rows"][0]["fgsm"]
    assert f"on another H200, whose step of FGSM takes {step:.2f} ms" in text


def test_what_did_not_pay_is_what_was_measured():
    text, parts = words_of("docs/speed.md"), of_h200("step-parts")
    usual, chain, penalty, *_ = parts["no_gain"]["rows"]
    told = f"(FGSM {chain['fgsm'][-1]:.2f} ms instead of {usual['fgsm'][-1]:.2f}, ELLE {penalty['elle'][0]:.2f} or "
    assert f"{told}{chain['elle'][0]:.2f} instead of {usual['elle'][-1]:.2f})" in text
    ten, every = (row["fgsm"] for row in parts["all_kernels_tried"]["rows"])
    told = f"an epoch of FGSM then takes {every['epoch']:.3f} s instead of {ten['epoch']:.3f}, but the first one "
    assert f"{told}{every['first_epoch'] - ten['first_epoch']:.1f} s longer" in text


def over_seeds(values: list[float], sign: str = "±") -> str:
    return f"{fmean(values):.2f} {sign} {stdev(values):.2f}"


def kept_runs() -> list[dict[str, Any]]:
    return json.loads((ROOT / "results" / "short.json").read_text())["runs"]


def named_alone(setting: str) -> str:
    """The words of a setting without the label smoothing, which the page's table tells by the row."""
    return " ".join(word for word in setting.split() if len(setting.split()) == 1 or "smoothing" not in word)


def test_low_memory_and_larger_batches_took_what_the_page_on_speed_says():
    text, low = words_of("docs/speed.md"), times("preact-resnet18-low")
    rows = {(row["batch"], row["method"]): row for row in of_h200("batches")["rows"]}
    (fgsm, elle), plain = (low[name] for name in ("fgsm", "elle")), rows[128, "elle"]
    times_fgsm, times_plain = elle["peak_mib"] / fgsm["peak_mib"], elle["ms"] / plain["ms"]
    told = f"ELLE takes {elle['peak_mib']:.0f} MiB, {times_fgsm:.2f} times the {fgsm['peak_mib']:.0f} of FGSM, and "
    told += f"{elle['ms']:.2f} ms per step, {times_plain:.2f} times the {plain['ms']:.2f} of plain ELLE, "
    assert f"{told}which takes {plain['peak_mib']:.0f} MiB" in text
    for batch in (128, 256, 512):
        cells = [
            f"{row['ms']:.2f} ms | {row['images_per_second']:,} | {row['tflops']:.0f} | {row['peak_mib']:.0f}"
            for row in (rows[batch, "n-fgsm"], rows[batch, "n-fgsm+elle-a"])
        ]
        assert f"| {batch} | {' | '.join(cells)} |" in text


def test_the_limits_of_resnet50_are_those_of_its_kernels():
    kernels = of_h200("bench-resnet50")["rows"][0]["kernels"]
    ours = ("add_gradients", "write_gradient", "write_normalised", "add_statistics")
    norm = sum(one["ms"] for one in kernels if one["kernel"] in ours)
    products = sum(one["ms"] for one in kernels if re.match(r"sm90_xmma|nvjet|void cutlass", one["kernel"]))
    speed = 5 * MODELS["resnet50"].gflop * 128 / products
    claim = f"convolutions and products take {products:.1f} ({speed:.0f} TFLOP/s) and BatchNorm with ReLU {norm:.1f} ("
    assert claim in words_of("docs/speed.md")


def test_the_times_of_networks_and_loading_are_what_was_measured():
    rows = {(row["model"], row["batch"]): row for row in of_h200("networks")["rows"]}
    text = words_of("docs/networks.md")
    for name, verb in (("preact-resnet18", " takes"), ("wide-resnet-28-10", "")):
        row = rows[name, 128]
        told = f"{row['forward_backward_ms']:.1f} ms ({row['forward_backward_tflops']:.0f} TFLOP/s)"
        assert f"of `{name}`{verb} {told}" in text
    batch = of_h200("augmentation")
    assert f"takes {batch['batch_ms']:.2f} ms, {100 * batch['share']:.1f} % of an FGSM step" in text
    of_batches = [f"{rows['preact-resnet18', batch]['forward_backward_ms']:.2f}" for batch in (128, 512, 1024)]
    assert f"({of_batches[0]}, {of_batches[1]} and {of_batches[2]} ms for" in words_of("docs/scaling.md")
    assert f"in {of_h200('loading')['median_seconds']:.2f} s once cached" in words_of("docs/data.md")


def test_the_result_to_check_is_the_one_that_is_kept():
    attacks = json.loads((ROOT / "results/digits-n-fgsm+elle-a/evaluation.json").read_text())["attacks"]
    clean, attacked = (f"{100 * attacks[name]['accuracy']:.1f} %" for name in ("clean", "pgd-20"))
    assert f"{clean} clean and {attacked} under PGD-20" in words_of("docs/sweeps.md")


def test_the_times_of_both_engines_are_what_was_measured():
    (alone,) = (run for run in of_h200("autoattack")["runs"] if run["of"] == 2500)
    text, seconds = words_of("docs/autoattack.md"), {}
    for name, parts in alone["found"]["engines"].items():
        seconds[name] = sum(part["seconds"] for part in parts.values())
        cells = [f"{part['seconds']:.1f}" for part in parts.values()]
        assert f"| `{name}` | {' | '.join(cells)} |" in text
        assert f"both {parts['square']['standing'] / 25:.2f} %" in text
    ours, theirs = seconds["fast"], seconds["reference"]
    assert f"**{ours:.1f} s and {theirs:.1f} s, {theirs / ours:.1f} times faster**" in text


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
