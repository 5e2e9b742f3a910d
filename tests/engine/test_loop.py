"""A whole run: what it writes, what its seed decides, when it stops, and what it refuses before it starts."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from elle.config import load_config
from elle.engine import checkpoint
from elle.engine.loop import Run, train
from elle.engine.records import means
from elle.engine.run_files import run_directory
from elle.engine.step import Step
from elle.engine.tracking import Tracking
from elle.engine.watcher import Watcher
from elle.errors import InputError, WorkError
from elle.experiments.rundir import open_run
from elle.files import read_lines

from ..data.layouts import write_npz

OWN_NETWORK = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

def wrong_count(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes + 1))

def no_module(num_classes):
    return "a string"

def broken(num_classes):
    raise RuntimeError("out of ideas")

def keyless(num_classes):
    return {}["weights"]

class Threshold(nn.Module):
    def forward(self, x):
        return (x > 0.5).float()

def nothing_to_train(num_classes):
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(num_classes))

def frozen(num_classes):
    return build(num_classes).requires_grad_(False)

def cut_off(num_classes):
    return nn.Sequential(Threshold(), *build(num_classes))

def softmax(num_classes):
    return nn.Sequential(*build(num_classes), nn.Softmax(1))
"""


def weights(run):
    return checkpoint.read_tensors(run / "model.safetensors")[0]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def own_network(tmp_path, monkeypatch):
    (tmp_path / "own_network.py").write_text(OWN_NETWORK)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("method", ["fgsm", "n-fgsm+elle-a"])
def test_the_same_seed_gives_the_same_weights(settings, tmp_path, method):
    for out in ("a", "b"):
        torch.rand(3)  # what was drawn before must not matter
        train(settings(f"method={method}", out=out))
    torch.testing.assert_close(weights(tmp_path / "a"), weights(tmp_path / "b"), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["fgsm", "n-fgsm+elle-a"])
def test_another_seed_gives_other_weights(settings, tmp_path, method):
    for seed in (0, 1):
        train(settings(f"method={method}", f"seed={seed}", out=str(seed)))
    first, second = weights(tmp_path / "0"), weights(tmp_path / "1")
    assert not torch.equal(first["classifier.1.weight"], second["classifier.1.weight"])


def test_a_run_directory_holds_what_the_contract_names(finished_run):
    names = {path.name for path in finished_run.iterdir() if not path.name.startswith(".")}
    assert names == {
        "config.toml",
        "metrics.jsonl",
        "steps.jsonl",
        "probes.jsonl",
        "events.jsonl",
        "checkpoints",
        "model.safetensors",
        "result.json",
    }


def test_the_written_configuration_is_the_resolved_one(settings, tmp_path):
    config = settings("max_steps=2", "method=n-fgsm+elle-a", "method.attack.noise=3")
    train(config)
    assert load_config([], tmp_path / "run" / "config.toml") == config.resolved()


def test_what_is_configured_reaches_the_step(settings, tmp_path):
    words = ("momentum=0.5", "weight_decay=0.01", "decay_norm=false", "average=0.8", "crop=1", "flip=true", "clip=true")
    step = Run(settings(*words).resolved(), tmp_path / "run", Watcher()).step
    assert step.optimizer.momentum == 0.5
    assert [group["weight_decay"] for group in step.optimizer.param_groups] == [0.01, 0]
    assert step.average.decay == 0.8
    assert (step.data.crop, step.data.flip, step.method.attack.clip) == (1, True, True)


def test_the_result_says_what_was_run_and_what_came_out(settings, tmp_path):
    config = settings("epochs=2", "final=clean,fgsm")
    result = train(config)
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["config"] == config.resolved().model_dump()
    assert (result["steps"], result["device"], result["precision"]) == (36, "cpu", "fp32")
    assert (result["collapse_epoch"], result["classes"]) == (None, list("0123456789"))
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result["train_seconds"] == pytest.approx(sum(seconds))
    assert result["seconds_per_epoch"] == pytest.approx(sum(seconds) / 2)  # the median of two
    assert list(result["test"]) == ["clean", "fgsm"]
    for one in result["test"].values():
        assert one["total"] == 500
        assert one["interval"][0] <= one["accuracy"] == one["correct"] / 500 <= one["interval"][1]


def test_an_epoch_that_is_cut_short_is_not_timed_as_one(settings, tmp_path):
    assert train(settings("epochs=2", "max_steps=5"))["seconds_per_epoch"] is None
    result = train(settings("epochs=2", "max_steps=20"), resume=True)
    whole, cut = lines(tmp_path / "run" / "metrics.jsonl")
    assert (whole["step"], cut["step"]) == (18, 20)
    assert result["seconds_per_epoch"] == whole["seconds"]
    assert result["train_seconds"] == pytest.approx(whole["seconds"] + cut["seconds"])
    assert ("epoch_steps" in whole, cut["epoch_steps"]) == (False, 18)
    assert open_run(tmp_path / "run").epochs() == pytest.approx(20 / 18)


def test_every_step_is_written_down_under_its_number(settings, tmp_path):
    train(settings("epochs=3", "max_steps=40"))
    epochs = lines(tmp_path / "run" / "steps.jsonl")
    numbers = [(line["epoch"], line["step"], len(line["loss"])) for line in epochs]
    assert numbers == [(1, 1, 18), (2, 19, 18), (3, 37, 4)]
    records = lines(tmp_path / "run" / "metrics.jsonl")
    for line, record in zip(epochs, records, strict=True):
        assert sum(line["loss"]) / len(line["loss"]) == pytest.approx(record["loss"], rel=1e-4)


@pytest.mark.parametrize(("method", "has_penalty"), [("fgsm", False), ("elle-a", True)])
def test_a_record_is_written_for_every_epoch(settings, tmp_path, method, has_penalty):
    train(settings(f"method={method}", "epochs=3", "eval_every=2", "track=clean,pgd-2"))
    records = lines(tmp_path / "run" / "metrics.jsonl")
    assert [(record["epoch"], record["step"]) for record in records] == [(1, 18), (2, 36), (3, 54)]
    assert ["pgd-2" in record for record in records] == [False, True, True]  # every second, and the last
    assert all((record["error"] is not None) == has_penalty for record in records)
    assert all((record["weight"] is not None) == has_penalty for record in records)
    assert all(0 <= record["accuracy"] <= 1 and record["loss"] > 0 for record in records)


def test_metrics_are_tracked_beside_attacks(settings, tmp_path):
    train(settings("max_steps=1", "eval_every=1", "track=clean,misalignment,curvature"))
    (record,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert 0 <= record["tracked_misalignment"] <= 2
    assert record["tracked_curvature"] is not None
    assert record["tracked_curvature_q05"] < record["tracked_curvature_q50"] < record["tracked_curvature_q95"]
    assert record["tracked_curvature_std"] > 0
    assert record["tracked_misalignment_undefined"] == 0
    assert "clean" in record


def test_metrics_are_tracked_alone(settings, tmp_path):
    train(settings("max_steps=1", "eval_every=1", "track=gradient_norm"))
    (record,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert record["tracked_gradient_norm"] > 0
    assert "clean" not in record


def test_a_tracked_number_that_is_not_finite_is_written_as_null(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("elle.engine.tracking.mean_error", lambda *_, **__: float("inf"))
    train(settings("max_steps=1", "eval_every=1"))
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["tracked_error"] is None


def test_a_batch_larger_than_the_set_takes_all_of_it_and_says_so(settings):
    said = []
    result = train(settings("batch=5000", "epochs=2"), watcher=Watcher(said=said.append))
    assert "batch=5000: there are 1200 training images, and a step takes all of them" in said
    assert result["steps"] == 2
    with pytest.raises(InputError, match="batch=5000: there are 1200 training images.*; batch=1200 does not divide"):
        train(settings("batch=5000", "accumulate=7", out="other"))


def dropping(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, num_classes))


@pytest.mark.parametrize(("method", "told"), [("elle-a", True), ("fgsm", False)])
def test_a_penalty_on_a_network_with_dropout_is_told_what_it_measures(settings, method, told):
    said = []
    words = [f"method={method}", f"model={__name__}:dropping", "max_steps=1"]
    train(settings(*words), watcher=Watcher(said=said.append))
    line = "layer 1 of this network draws anew for each point, and the error of elle-a measures that more than the loss"
    assert any(line in text for text in said) == told


def test_a_watcher_is_told_of_the_start_every_step_and_every_record(settings, tmp_path):
    started, steps, records, said = [], [], [], []
    watcher = Watcher(lambda *what: started.append(what), steps.append, records.append, said.append)
    config = settings("epochs=2", "batch=400", "validation=97")
    train(config, watcher=watcher)
    assert started == [(config.resolved(), 6, 0)]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert records == lines(tmp_path / "run" / "metrics.jsonl")
    assert any("500 test images" in text for text in said)


def test_a_finished_run_says_so_in_its_events(finished_run):
    assert [(event["event"], event["step"]) for event in lines(finished_run / "events.jsonl")] == [("finish", 36)]


@pytest.mark.parametrize(
    ("levels", "events", "epoch"),
    [
        ([0.4, 0.4, 0.01, 0.01, 0.01], [("collapse", 12)], 3),
        ([0.4, 0.01, 0.01, 0.4, 0.4], [("collapse", 9), ("recovery", 15)], None),
    ],
)
def test_without_the_monitor_the_records_tell_a_collapse_once_and_its_end(
    settings, tmp_path, monkeypatch, levels, events, epoch
):
    def record(self):
        level = levels[len(self.run.history)]
        return {"clean": 0.7, "pgd-2": level, "tracked_error": 1e-5 if level > 0.1 else 0.1, "eval_seconds": 0.0}

    monkeypatch.setattr(Tracking, "record", record)
    monkeypatch.setattr("elle.engine.loop.means", lambda rows: means(rows) | {"accuracy": 0.5})
    said = []
    words = ("epochs=5", "batch=400", "validation=97", "eval_every=1", "track=clean,pgd-2", "probe_every=0")
    result = train(settings(*words), watcher=Watcher(said=said.append))
    told = [(event["event"], event["step"]) for event in lines(tmp_path / "run" / "events.jsonl")]
    assert told == [*events, ("finish", 15)]
    assert sum("collapse at step" in text for text in said) == 1
    assert result["collapse_epoch"] == epoch
    assert (open_run(tmp_path / "run").collapse_step() is None) is (epoch is None)


def test_training_without_an_attack_is_not_stopped_as_collapsed(settings, tmp_path):
    words = ("method=standard", "eps=0.2", "epochs=6", "on_collapse=stop")
    assert train(settings(*words))["verdicts"] == []
    looks = lines(tmp_path / "run" / "probes.jsonl")
    assert looks[-1]["multi"] < 0.1 < 0.75 < looks[-1]["accuracy"]  # what a method with an attack is stopped for


@pytest.mark.parametrize("lr", ["1e6", "1e30"])
def test_a_diverged_run_is_failed_work_with_advice(settings, tmp_path, lr):
    with pytest.raises(WorkError, match="training diverged in epoch 1: .* lower lr"):
        train(settings(f"lr={lr}"))
    assert [event["event"] for event in lines(tmp_path / "run" / "events.jsonl")] == ["divergence", "stop"]
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(("given", "done"), [(1, 1), (20, 20), (36, 36), (1000, 36)])
def test_max_steps_ends_a_run_early_and_never_prolongs_it(settings, given, done):
    assert train(settings("epochs=2", f"max_steps={given}"))["steps"] == done


def test_max_steps_leaves_the_schedule_that_of_the_epochs(settings, tmp_path):
    train(settings("epochs=2", "max_steps=18", out="cut"))
    train(settings("epochs=2", out="whole"))
    cut = checkpoint.load_checkpoint(checkpoint.checkpoints(tmp_path / "cut")[-1])[0]
    whole = checkpoint.load_checkpoint(checkpoint.checkpoints(tmp_path / "whole")[0])[0]
    torch.testing.assert_close(cut, whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("batch", [1297, 100_000])
def test_a_batch_larger_than_the_set_takes_the_whole_set(settings, batch):
    assert train(settings("epochs=2", "validation=0", f"batch={batch}"))["steps"] == 2


@pytest.mark.parametrize(("validation", "steps", "tracked"), [(0, 20, 500), (97, 18, 97), (1296, 1, 1296)])
def test_validation_images_are_taken_from_the_training_set(settings, tmp_path, validation, steps, tracked):
    result = train(settings(f"validation={validation}", "eval_every=1", "track=clean"))
    accuracy = lines(tmp_path / "run" / "metrics.jsonl")[0]["clean"]
    assert result["steps"] == steps
    assert accuracy * tracked == pytest.approx(round(accuracy * tracked), abs=1e-3)


def test_a_validation_set_as_large_as_the_training_set_is_refused(settings):
    with pytest.raises(InputError, match="validation=1297: there are 1297 images; use 0 to 1296"):
        train(settings("validation=1297"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_in_half_precision_trains_on_a_cpu(settings, precision):
    result = train(settings(f"precision={precision}", "method=elle-a", "batch=16", "max_steps=2", "crop=1"))
    assert (result["precision"], result["steps"]) == (precision, 2)


def test_a_network_of_ones_own_is_trained(settings, tmp_path, own_network):
    train(settings("model=own_network:build", "max_steps=2"))
    assert list(weights(tmp_path / "run")) == ["1.bias", "1.weight"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("own_network:wrong_count", r"gives \(2, 11\) for 2 images; the data has 10 classes"),
        ("own_network:no_module", "returned str; it must return a torch.nn.Module"),
        ("own_network:broken", "could not be built: out of ideas"),
        ("own_network:keyless", "could not be built: no key 'weights'"),
        ("own_network:nothing_to_train", "has no parameters to train"),
        ("own_network:frozen", "requires_grad is false for all of them"),
        ("own_network:cut_off", "gives its images no gradient"),
        ("own_network:softmax", "gives probabilities, not logits"),
        ("own_network:absent", "could not be built"),
        ("no_such_module:build", "could not be built: No module named 'no_such_module'"),
        ("small-cn", r"did you mean 'small-cnn'\?"),
    ],
)
def test_a_network_that_cannot_be_used_is_refused_by_name(settings, own_network, model, reason):
    with pytest.raises(InputError, match=reason):
        train(settings(f"model={model}"))


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("method=fgsn", r"method 'fgsn' does not exist, did you mean 'fgsm'\?"),
        ("method=elle+elle", "method 'elle.elle' does not exist"),
        ("method.attack.nois=3", r"method\.attack\.nois is not an option of fgsm, did you mean 'noise'\?"),
        ("method.weight.decay=0.5", "method fgsm has no part 'weight'"),
        ("method.attack.steps=0", "steps is 0; it must be a whole number, 1 or more"),
        ("method.attack.noise=much", r"method\.attack\.noise='much' should be like its default"),
        ("track=pgd", "attack 'pgd' does not exist"),
        ("final=,", "no attack given"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused_before_training(settings, word, reason):
    with pytest.raises(InputError, match=reason):
        train(settings(word))


@pytest.mark.parametrize(("field", "value"), [("alpha", "fast"), ("steps", "2.5")])
def test_a_field_of_the_wrong_kind_is_refused_before_training(settings, field, value):
    with pytest.raises(InputError, match=field):
        train(settings(f"method.attack.{field}={value}"))


def test_a_missing_data_folder_names_the_places_looked_in(settings, tmp_path):
    with pytest.raises(InputError, match="no CIFAR-10 found") as problem:
        train(settings("data=cifar10", f"root={tmp_path / 'nowhere'}"))
    for name in ("nowhere", "nowhere/cifar-10-batches-bin", "nowhere/cifar-10-batches-py"):
        assert f"{tmp_path / name}" in str(problem.value)


def test_a_label_out_of_range_is_refused_with_its_file(settings, tmp_path):
    root = write_npz(tmp_path / "data")
    np.savez(root / "train.npz", x=np.zeros((30, 32, 32, 3), np.uint8), y=np.full(30, 10))
    with pytest.raises(InputError, match=r"train\.npz: label 10 is outside 0\.\.9"):
        train(settings("data=cifar10", f"root={root}"))


def test_colour_images_are_trained_on_with_crops_and_flips(settings, tmp_path):
    root = write_npz(tmp_path / "data")
    words = ("data=cifar10", f"root={root}", "model=small-cnn", "validation=20", "batch=40", "method=n-fgsm+elle-a")
    result = train(settings(*words, "eps=8/255"))
    assert (result["steps"], result["test"]["clean"]["total"]) == (2, 20)
    assert (result["config"]["crop"], result["config"]["flip"]) == (4, True)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["data=cifar10", "method=fgsm", "seed=3"], "cifar10-fgsm-eps8-255-seed3"),
        (["method=n-fgsm+elle-a"], "digits-n-fgsm+elle-a-eps0.2-seed0"),
    ],
)
def test_a_run_directory_is_named_after_its_settings(words, name):
    directory = run_directory(load_config(words).resolved())
    assert (directory.parent.name, directory.name) == ("runs", name)


@pytest.mark.parametrize(
    "option",
    ["form=2p", "form=5-point", "alpha=max", "alpha=0.5", "on=logits", "power=smooth-l1", "norm=l1", "samples=2"],
)
def test_every_variant_of_the_penalty_trains(settings, tmp_path, option):
    train(settings("method=elle", "weight=1", f"method.regulariser.{option}", "max_steps=3"))
    (record,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert record["error"] > 0


def test_eps_grows_with_its_schedule_and_the_monitor_waits_for_it(settings, monkeypatch):
    seen, rates = [], []

    def remember(step, index):
        seen.append(float(step.eps))
        rates.append(float(step.lr))
        return original(step, index)

    original = Step.__call__
    monkeypatch.setattr(Step, "__call__", remember)
    train(settings("schedule=short-svhn", "epochs=3", "probe_every=6", out="growing"))
    assert len(seen) == 54
    assert seen[:18] == pytest.approx([0.3 * (k + 0.5) / 18 for k in range(18)])
    assert seen[18:] == [0.3] * 36
    assert (rates[0], rates[-1]) == pytest.approx((0.2 * 0.5 / 54 / 0.4, 0.2 * 0.5 / 54 / 0.6))  # not 0 at either end
    probes = read_lines(Path(settings(out="growing").out) / "probes.jsonl")
    assert [probe["step"] for probe in probes] == list(range(18, 55, 6))


def test_training_imports_neither_torchs_compiler_nor_sympy(tmp_path):
    code = f"""
import sys
from elle.config import load_config
from elle.engine.loop import train
train(load_config(["data=mnist5k", "method=elle-a", "max_steps=2", "final=clean", "device=cpu", "out={tmp_path}/run"]))
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"
