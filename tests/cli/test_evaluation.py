"""`elle evaluate`, `compare`, `show` and `metrics` as a user meets them, for networks trained here and elsewhere."""

import json
import os
import pickle
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from elle.data.registry import DATASETS, Dataset
from elle.data.sources import ImageSet, Split
from elle.engine.trained import load_run
from elle.evaluation.metrics import METRICS, linearity_metrics
from elle.evaluation.units import Files

from ..conftest import assert_one_line


def linear(num_classes):
    """A network that was not trained here."""
    return nn.Sequential(nn.Flatten(), nn.Linear(48, num_classes))


def bent(num_classes):
    """Another network, which the same weights fit."""
    return nn.Sequential(nn.Flatten(), nn.Linear(48, num_classes), nn.Tanh())


HERE = f"{__name__}:linear"


@pytest.fixture
def tiny(monkeypatch):
    """tiny(K) registers images of K classes, 3 x 4 x 4, and writes a network that knows most of them."""

    def make(classes, file="weights.safetensors"):
        random = np.random.default_rng(classes)
        count = 6
        x = random.integers(0, 256, (count, 3, 4, 4)).astype(np.uint8)
        y = np.arange(count) % classes
        split = Split(x, y)
        images = ImageSet(split, split, tuple(f"class {k}" for k in range(classes)))
        row = Dataset("tiny", "", lambda: images, {"eps": 8 / 255}, {}, needs_root=False)
        monkeypatch.setitem(DATASETS, "tiny", row)
        model = linear(classes)
        with torch.no_grad():
            flat = torch.from_numpy(x).flatten(1).float() / 255 - 0.5
            model[1].weight.mul_(0.01)
            model[1].bias.zero_()
            model[1].weight[:count] += torch.stack(
                [flat[y == k].mean(0) if (y == k).any() else flat[0] * 0 for k in range(min(count, classes))]
            )
        if file.endswith(".safetensors"):
            save_file(model.state_dict(), file)
        else:
            torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, file)
        return ["evaluate", "--model", HERE, "--weights", file, "--data", "tiny", "--device", "cpu"]

    return make


@pytest.mark.parametrize("classes", [2, 3, 10, 1000])
def test_any_number_of_classes_is_evaluated(elle, tiny, classes):
    names = "clean,fgsm,pgd-5,autoattack"
    outcome = elle(*tiny(classes), "--attack", names, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    record = json.loads(outcome.out)
    assert record["classes"] == classes
    assert record["attacks"]["clean"]["correct"] >= 3
    assert record["attacks"]["autoattack"]["correct"] <= record["attacks"]["fgsm"]["correct"]
    assert record["order"] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    said = record["attacks"]["autoattack"]["adaptations"]
    assert bool(said) == (classes < 10)
    assert (record["model"]["name"], record["model"]["config"]) == (HERE, None)


def test_a_state_dict_file_is_read_as_well(elle, tiny):
    records = [
        json.loads(elle(*tiny(3, file), "--attack", "clean,fgsm", "--json").out) for file in ("w.safetensors", "w.pt")
    ]
    assert records[0]["attacks"]["fgsm"]["survived"] == records[1]["attacks"]["fgsm"]["survived"]
    assert records[0]["eps"] == 8 / 255


def test_the_reference_engine_is_the_original(elle, tiny):
    record = json.loads(elle(*tiny(10), "--attack", "clean,apgd-ce", "--engine", "reference", "--json").out)
    assert record["engine"] == "reference"
    assert record["versions"]["pyautoattack"]
    assert record["attacks"]["apgd-ce"]["correct"] < record["attacks"]["clean"]["correct"]


def test_a_missing_package_is_one_line_and_exit_code_2(elle, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    outcome = elle(*tiny(10), "--attack", "apgd-ce", "--engine", "reference")
    assert_one_line(outcome, 2)
    assert "pip install 'elle-at[autoattack]'" in outcome.err
    assert not list(Path().rglob("evaluation.parts")), "a mistake leaves nothing to continue"


def test_too_few_classes_for_the_reference_are_refused_before_any_attack_is_run(elle, tiny, monkeypatch):
    monkeypatch.setattr("elle.evaluation.worker.pgd.search", lambda *_, **__: pytest.fail("an attack was run first"))
    outcome = elle(*tiny(3), "--attack", "pgd-5,autoattack", "--engine", "reference")
    assert_one_line(outcome, 2)
    assert "the original apgd-t needs 4 classes, here are 3; use engine=fast" in outcome.err


def test_what_few_classes_change_is_said_for_the_norm_that_was_used(elle, tiny):
    outcome = elle(*tiny(6), "--attack", "autoattack", "--norm", "l1", "--eps", "40", "--json")
    said = json.loads(outcome.out)["attacks"]["autoattack"]["adaptations"]
    assert said == ["fab-t: 5 targets instead of 9, one for each other class"]  # in l1 apgd-t has five anyway


def test_a_checkpoint_is_evaluated(elle, run_copy):
    checkpoint = sorted((run_copy / "checkpoints").iterdir())[-1]
    outcome = elle("evaluate", checkpoint, "--attack", "clean", "--limit", 20)
    assert outcome.code == 0
    assert f"evaluations/{checkpoint.stem}/evaluation.json" in outcome.out
    assert not (run_copy / "evaluation.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there may be such a device")
def test_a_device_that_is_not_there_is_one_line_and_exit_code_2(elle, run_copy):
    outcome = elle("evaluate", run_copy, "--devices", "0,9")
    assert_one_line(outcome, 2)
    assert "cuda:0" in outcome.err


def test_failed_checks_are_printed(elle, tiny):
    words = tiny(2)
    save_file({"1.weight": torch.zeros(2, 48), "1.bias": torch.tensor([9.0, 0.0])}, "weights.safetensors")
    outcome = elle(*words, "--attack", "clean")
    assert "check classifier: the network answers class 0 on 6 of 6 images" in outcome.out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--attack", "pgd"], "attack 'pgd' does not exist"),
        (["--attack", "pgd-0"], "attack 'pgd-0' does not exist"),
        (["--attack", "cleen"], "did you mean 'clean'?"),
        (["--attack", "autoatack"], "did you mean 'autoattack'?"),
        (["--attack", ""], "no attack given"),
        (["--attack", "fgsm", "--norm", "l1", "--eps", "12"], "fgsm has no l1 form"),
        (["--norm", "l3"], "--norm l3 does not exist"),
        (["--norm", "l2"], "--norm l2 needs --eps"),
        (["--engine", "quick"], "--engine quick does not exist"),
        (["--precision", "fp8"], "--precision fp8 does not exist"),
        (["--devices", ","], "--devices names none"),
        (["--devices", ""], "--devices names none"),
        (["--model", "small-cnn"], "--model goes with --weights"),
        (["--eps", "8"], "did you mean eps=8/255?"),
        (["--eps", "300/255"], "it must be below 1"),
        (["--eps", "0"], "must be greater than 0"),
        (["--eps", "eight"], "write it as 8/255"),
        (["--device", "gpu"], "device=gpu is not a device"),
        (
            ["--data", "mnist5k"],
            "mnist5k has images 1x28x28 in 10 classes, and the network was trained on 1x8x8",
        ),
        (["--root", "x", "--data", "cifer10"], "did you mean 'cifar10'?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(elle, run_copy, words, hint):
    outcome = elle("evaluate", run_copy, *words)
    assert_one_line(outcome, 2)
    assert hint in outcome.err
    assert not (run_copy / "evaluation.parts").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["show", "RUN", "--out", "."], "is a folder; name a .png file"),
        (["show", "RUN", "--out", "x.jpg"], "is no .png"),
        (["show", "RUN", "--attack", "autoattack"], "autoattack takes too long here"),
        (["compare", "half.json", "half.json"], "half.json is not a whole record: it has no 'eps'"),
        (["evaluate", "half.json"], "half.json is not in a run directory"),
    ],
)
def test_a_mistake_around_evaluations_is_one_line_and_exit_code_2(elle, run_copy, words, hint):
    Path("half.json").write_text('{"schema": "elle-evaluation/1"}')
    outcome = elle(*(run_copy if word == "RUN" else word for word in words))
    assert_one_line(outcome, 2)
    assert hint in outcome.err


def test_ctrl_c_in_an_evaluation_saves_what_is_done_and_is_exit_code_130(elle, run_copy, monkeypatch):
    words = ("evaluate", run_copy, "--attack", "clean,fgsm", "--limit", 20, "--chunk", 10)
    save = Files.save

    def save_and_interrupt(self, unit, outcome):
        save(self, unit, outcome)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Files, "save", save_and_interrupt)
        outcome = elle(*words)
    assert_one_line(outcome, 130)
    assert "stopped by SIGINT; 1 of 4 units are saved" in outcome.err
    assert elle(*words, "--resume").code == 0


def test_another_network_with_the_same_weights_does_not_continue_an_evaluation(elle, tiny, monkeypatch):
    words = tiny(3)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Files, "save", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        assert elle(*words).code == 130
    outcome = elle(*words, "--model", f"{__name__}:bent", "--resume")
    assert_one_line(outcome, 2)
    assert f"has model={HERE}; give the same" in outcome.err
    assert elle(*words, "--resume").code == 0


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (None, "weights.safetensors does not exist"),
        (b"no tensors", "neither safetensors nor a plain state_dict"),
        ({"1.weight": torch.zeros(5, 48), "1.bias": torch.zeros(5)}, "does not fit the network"),
        ({"other": torch.zeros(1)}, "does not fit the network"),
    ],
)
def test_weights_that_cannot_be_used_are_one_line_and_exit_code_2(elle, tiny, tmp_path, content, hint):
    words = tiny(3)
    file = tmp_path / "weights.safetensors"
    file.unlink()
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        save_file(content, file)
    outcome = elle(*words)
    assert_one_line(outcome, 2)
    assert hint in outcome.err


def test_weights_of_a_run_are_used_as_the_run_uses_them(elle, tmp_path):
    """Its activation and its normalising layer are in the file, not in the network's name."""
    run = tmp_path / "run"
    words = ("activation=silu", "normalise=dataset", "average=0.9", "max_steps=4", "final=clean", "device=cpu")
    assert elle("train", "data=digits", "method=standard", "--out", run, *words).code == 0
    as_run = json.loads(elle("evaluate", run, "--attack", "clean,fgsm", "--json").out)
    checkpoint = next((run / "checkpoints").iterdir())
    for file in (run / "model.safetensors", checkpoint):
        foreign = ("evaluate", "--weights", file, "--data", "digits", "--attack", "clean,fgsm", "--out", "x", "--json")
        record = json.loads(elle(*foreign, "--model", "small-cnn").out)
        assert record["attacks"]["fgsm"]["survived"] == as_run["attacks"]["fgsm"]["survived"]
    outcome = elle(*foreign, "--model", "resnet18")
    assert_one_line(outcome, 2)
    assert "does not fit the network resnet18" in outcome.err


def test_metrics_are_those_of_the_run_s_images_at_once_wherever_its_network_comes_from(elle, finished_run):
    trained = load_run(finished_run)
    expected = linearity_metrics(trained.model, *trained.test_images(limit=120), 0.3, metric="error,cure,loss_ratio")
    weights = finished_run / "model.safetensors"
    last = max((finished_run / "checkpoints").iterdir())
    foreign = ("--weights", weights, "--model", "small-cnn", "--data", "digits")
    for words in ([finished_run], [last], foreign):
        outcome = elle("metrics", *words, "--eps", 0.3, "--limit", 120, "--metric", "error,cure,loss_ratio", "--json")
        assert json.loads(outcome.out)["metrics"] == expected


def test_metrics_are_given_of_a_network_that_was_not_trained_here(elle, tiny):
    _, *words = tiny(3)
    record = json.loads(elle("metrics", *words, "--metric", "error,error_logits", "--json").out)
    assert (record["eps"], record["norm"]) == (8 / 255, "linf")
    assert record["metrics"]["error"]["count"] == 6
    assert record["metrics"]["error_logits"]["q95"] < 1e-6 < record["metrics"]["error"]["mean"] ** 0.5
    assert_one_line(outcome := elle("metrics", *words[:4]), 2)
    assert "--weights needs --model" in outcome.err


def test_on_a_narrow_terminal_no_number_of_a_metric_is_broken(elle, finished_run, monkeypatch):
    """The column that says what each is broke every number in two: 7.63e-0 and 5."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    lines = elle("metrics", finished_run, "--limit", 20).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["metric", "mean", "std", "q05", "q50", "q95"]
    assert [line.split()[0] for line in lines[1:-1]] == list(METRICS)
    assert all(len(list(map(float, line.split()[1:]))) == 5 for line in lines[1:-1])
    assert "docs/metrics.md" in lines[-1]
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    assert "what it is" in elle("metrics", finished_run, "--limit", 20, "--metric", "error").out


def test_undefined_values_of_a_metric_are_counted_in_a_column(elle, finished_run, monkeypatch):
    one = {"mean": 0.1, "std": 0.1, "q05": 0.1, "q50": 0.1, "q95": 0.1, "undefined": 3}
    monkeypatch.setattr("elle.evaluation.metrics.linearity_metrics", lambda *_, **__: {"misalignment": one})
    head, row = elle("metrics", finished_run, "--limit", 20).out.splitlines()[:2]
    assert head.split()[6] == "undefined"
    assert row.split()[6] == "3"


def test_a_pickle_with_code_in_it_is_not_run(elle, tiny, tmp_path):
    class Bad:
        def __reduce__(self):
            return open, (str(tmp_path / "written"), "w")

    words = tiny(3, "w.pt")
    torch.save(Bad(), tmp_path / "w.pt")
    for content in ((tmp_path / "w.pt").read_bytes(), pickle.dumps(Bad(), 5)):  # of the second torch warns too
        (tmp_path / "w.pt").write_bytes(content)
        with warnings.catch_warnings(record=True) as warned:
            outcome = elle(*words)
        assert_one_line(outcome, 2)
        assert "state_dict" in outcome.err
        assert not warned
        assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("words", [[], ["--weights", "w.pt"], ["--weights", "w.pt", "--model", "small-cnn"]])
def test_too_little_said_is_one_line_and_exit_code_2(elle, words):
    assert_one_line(elle("evaluate", *words), 2)


def test_autoattack_is_not_tracked_while_training(elle):
    outcome = elle("train", "data=digits", "track=clean,autoattack", "device=cpu")
    assert_one_line(outcome, 2)
    assert "name it in `final` instead" in outcome.err


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("accuracy", 0.99),
        ("accuracy", None),
        ("accuracy", []),
        ("total", 7),
        ("total", None),
        ("eps", None),
        ("eps", float("nan")),
    ],
)
def test_an_evaluation_whose_numbers_do_not_agree_is_not_compared(elle, run_copy, place, value):
    elle("evaluate", run_copy, "--attack", "clean", "--limit", 20)
    file = run_copy / "evaluation.json"
    record = json.loads(file.read_text())
    assert elle("compare", file, file).code == 0
    (record if place == "eps" else record["attacks"]["clean"])[place] = value
    (run_copy / "other.json").write_text(json.dumps(record))
    outcome = elle("compare", file, run_copy / "other.json")
    assert_one_line(outcome, 2)
    assert "other.json is damaged: a number in it is missing, or not that of its points" in outcome.err


def test_an_evaluation_of_no_point_is_not_compared(elle, run_copy):
    elle("evaluate", run_copy, "--attack", "clean", "--limit", 20)
    file = run_copy / "evaluation.json"
    record = json.loads(file.read_text())
    record["data"]["count"] = 0
    record["attacks"]["clean"] |= {"survived": "", "total": 0}
    file.write_text(json.dumps(record))
    outcome = elle("compare", file, file)
    assert_one_line(outcome, 2)
    assert "evaluation.json is damaged" in outcome.err


def test_two_evaluations_are_compared(elle, run_copy, tmp_path):
    for name, eps in (("a", "8/255"), ("b", "0.4")):
        assert elle("evaluate", run_copy, "--attack", "clean,fgsm", "--eps", eps, "--out", tmp_path / name).code == 0
    table = elle("compare", tmp_path / "a", tmp_path / "b")
    assert table.code == 0
    assert "A was attacked otherwise and is broken less" in table.out
    assert "note: eps is 8/255 in A and 0.4 in B" in table.out
    result = json.loads(elle("compare", tmp_path / "a", tmp_path / "b" / "evaluation.json", "--json").out)
    assert result["attacks"]["fgsm"]["only_a_breaks"] == []
    assert len(result["attacks"]["fgsm"]["only_b_breaks"]) > 5


_BEGUN = '{"schema": "elle-evaluation/1", "eps": 1, "norm": "linf", "seed": 0, "engine": "fast", "precision": "fp32", '


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[]",
        '{"schema": "elle-evaluation/0"}',
        _BEGUN + '"data": null, "attacks": {"fgsm": {}}}',
        _BEGUN + '"data": {"count": 9}, "attacks": {"fgsm": {}}}',
        _BEGUN + '"data": {"count": 9}, "attacks": {"fgsm": {"survived": "AA=="}}}',
        _BEGUN + '"data": {"count": 9}, "attacks": []}',
    ],
)
def test_what_is_no_record_is_not_compared(elle, tmp_path, content):
    file = tmp_path / "record.json"
    if content is not None:
        file.write_text(content)
    assert_one_line(elle("compare", file, file), 2)


def test_images_are_shown(elle, run_copy):
    outcome = elle("show", run_copy, "--count", 3, "--eps", "0.1")
    assert outcome.code == 0
    assert "eps 0.1" in outcome.out
    assert Image.open(run_copy / "adversarial.png").width > 300


def test_torchrun_is_not_needed_to_evaluate_on_several_devices(elle, finished_run, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("elle.cli.command.leave", sys.exit)  # a rank's own end would be the tests' end
    outcome = elle("evaluate", finished_run)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "start it without torchrun, with --devices 0,1" in outcome.err
