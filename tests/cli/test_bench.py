"""`elle bench`: its numbers belong together, its files can be read, and what it cannot do is refused in one line."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from elle.charts.stacked_bars import StackedBars, draw_stacked_bars
from elle.cli.bench import _write
from elle.engine.bench import Setting, _Forward, _peak_bytes, _step, measure, with_ratios
from elle.methods import METHODS, configured
from elle.models.registry import MODELS

CPU = Setting(torch.device("cpu"), "fp32", model="small-cnn", batch=4)
QUICK = ("bench", "--model", "small-cnn", "--batch", 4, "--device", "cpu")


def test_the_command_prints_a_row_a_method_and_writes_numbers_and_figure(elle, tmp_path):
    outcome = elle(*QUICK, "--methods", "fgsm,elle-a", "--profile", "--json", "--out", tmp_path)
    assert outcome.code == 0
    result = json.loads(outcome.out)
    assert [row["method"] for row in result["rows"]] == ["fgsm", "elle-a"]
    assert (result["model"], result["batch"], result["device"]) == ("small-cnn", 4, "cpu")
    numbers, figure = sorted(tmp_path.iterdir())
    assert numbers.name.startswith("bench-small-cnn-batch4-cpu-torch")
    assert json.loads(numbers.read_text()) == result
    assert "elle-a" in ElementTree.fromstring(figure.read_text()).find("{*}desc").text
    for row in result["rows"]:
        assert row["forward_ms"] + row["backward_ms"] == pytest.approx(row["ms"], abs=0.002)
        assert row["passes"] == METHODS[row["method"]].cost.total
        assert row["tflops"] == pytest.approx(
            row["passes"] * MODELS["small-cnn"].gflop * 4 / row["ms"], rel=0.2, abs=0.001
        )
        assert sum(one["share"] for one in row["kernels"]) == pytest.approx(1, abs=0.01)  # each is rounded
        assert any("conv" in one["kernel"] for one in row["kernels"])
    assert result["rows"][0]["ratio"] == 1


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, "bench-small-cnn-cpu-torch2.11.0"),
        ({"batch": 512}, "bench-small-cnn-batch512-cpu-torch2.11.0"),
        ({"precision": "bf16", "fused": "off"}, "bench-small-cnn-bf16-fused-off-cpu-torch2.11.0"),
        ({"memory": "low", "penalty": "left out"}, "bench-small-cnn-low-left-out-cpu-torch2.11.0"),
    ],
)
def test_numbers_of_other_settings_have_a_file_of_their_own(tmp_path, changed, name):
    usual = {"batch": 8, "precision": "fp32", "memory": "auto", "penalty": "trained", "fused": "auto"}
    row = {"method": "fgsm", "forward_ms": 1.0, "backward_ms": 2.0}
    files = _write(
        tmp_path, usual | changed | {"model": "small-cnn", "device": "cpu", "torch": "2.11.0+cu", "rows": [row]}, usual
    )
    assert [file.name for file in files] == [f"{name}.json", f"{name}.svg"]


def test_what_does_not_fit_into_memory_costs_no_other_row(elle, tmp_path, monkeypatch):
    def too_small(method, setting, profile):
        if method == "gradalign":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return measure(method, setting, profile)

    monkeypatch.setattr("elle.engine.bench.measure", too_small)
    outcome = elle(*QUICK, "--methods", "fgsm,gradalign,n-fgsm", "--json", "--out", tmp_path)
    assert outcome.code == 1
    assert "memory is too small for gradalign at batch 4" in outcome.err
    assert [row["method"] for row in json.loads(outcome.out)["rows"]] == ["fgsm", "n-fgsm"]
    assert json.loads(next(tmp_path.glob("*.json")).read_text()) == json.loads(outcome.out)


def test_an_interruption_loses_the_method_that_is_being_measured_alone(elle, tmp_path, monkeypatch):
    def interrupted(method, setting, profile):
        if method == "n-fgsm":
            raise KeyboardInterrupt
        return measure(method, setting, profile)

    monkeypatch.setattr("elle.engine.bench.measure", interrupted)
    assert elle(*QUICK, "--methods", "fgsm,n-fgsm", "--out", tmp_path).code == 130
    assert [row["method"] for row in json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]] == ["fgsm"]


def test_without_json_it_prints_a_table(elle):
    outcome = elle(*QUICK, "--methods", "n-fgsm")
    assert outcome.code == 0
    assert "small-cnn, batch 4, fp32, cpu" in outcome.out
    assert "n-fgsm" in outcome.out
    assert "TFLOP/s" in outcome.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--methods", "fgms"), "method 'fgms' does not exist"),
        (("--model", "small-cn"), "--model small-cn does not exist, did you mean"),
        (("--precision", "fp8"), "--precision fp8 does not exist, did you mean 'fp32'?; choose from auto"),
        (("--memory", "high"), "--memory high does not exist; choose from auto, low"),
        (("--fused", "on"), "--fused on does not exist; choose from auto, off"),
        (("--penalty", "half"), "--penalty half does not exist; choose from trained"),
        (("--out", __file__), "test_bench.py is no folder"),
        (("--memory", "low", "--methods", "elle"), "memory=low computes a network anew block by block"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(elle, words, message):
    outcome = elle(*QUICK, *words)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_the_forward_alone_changes_no_parameter():
    step = _step(configured("elle"), CPU, _Forward)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step(torch.arange(4))
    torch.testing.assert_close(list(step.model.parameters()), before, rtol=0, atol=0)
    assert int(step.done) == 1


def test_the_triplets_take_memory_only_where_they_have_a_backward():
    peak = {}
    for method, penalty in (("fgsm", "trained"), ("elle", "trained"), ("elle", "measured"), ("elle", "left out")):
        setting = Setting(CPU.device, "fp32", "small-cnn", 64, penalty=penalty)
        peak[method, penalty] = _peak_bytes(_step(configured(method), setting), setting)
    assert peak["elle", "trained"] > 2 * peak["fgsm", "trained"]
    assert peak["elle", "measured"] < 0.7 * peak["elle", "trained"]
    assert peak["elle", "left out"] == peak["fgsm", "trained"]


@pytest.mark.parametrize(("penalty", "passes"), [("trained", 14), ("measured", 8), ("left out", 5)])
def test_a_penalty_that_is_left_out_is_no_useful_work(penalty, passes):
    assert measure("elle", Setting(CPU.device, "fp32", "small-cnn", 2, penalty=penalty))["passes"] == passes


def test_there_is_no_ratio_without_fgsm():
    assert with_ratios([{"method": "elle", "ms": 3.0}]) == [{"method": "elle", "ms": 3.0, "ratio": None}]
    rows = with_ratios([{"method": "elle", "ms": 3.0}, {"method": "fgsm", "ms": 2.0}])
    assert [row["ratio"] for row in rows] == [1.5, 1.0]


def test_bars_are_as_long_as_their_values():
    svg = ElementTree.fromstring(
        draw_stacked_bars(StackedBars("t", "ms", ("forward", "backward"), ("a", "b<"), ((1, 2), (2, 4))))
    )
    widths = [float(one.get("width")) for one in svg.findall(".//{*}rect") if one.find("{*}title") is not None]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert widths[2:] == pytest.approx([2 * width for width in widths[:2]], abs=0.2)
    assert [one.text for one in svg.findall(".//{*}text") if one.text in ("3", "6")] != []
