"""The speedrun: its benchmark times a run in its parts, goes on where it was cut, and draws accuracy over seconds."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from elle.config import load_config
from elle.engine.checkpoint import checkpoints
from elle.engine.parts import method_of
from elle.errors import InputError, WorkError

RECIPE = """
title = "A tiny speedrun"
[base]
data = "digits"
model = "small-cnn"
epochs = 1
batch = 64
average = 0.9
eval_every = 0
probe_every = 0
device = "cpu"
[grid]
method = ["fgsm"]
"""


@pytest.fixture
def speedrun(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setattr(import_module("results"), "FOLDER", tmp_path / "results")
    return import_module("speedrun")


@pytest.fixture
def words(tmp_path):
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return ["--recipe", str(tmp_path / "tiny.toml"), "--runs", str(tmp_path / "runs"), "--attack", "clean,pgd-2"]


def saved(tmp_path):
    (file,) = (tmp_path / "results").glob("speedrun-*.json")
    return json.loads(file.read_text())


def ends(tmp_path):
    """When each training came to its end."""
    return {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").glob("*/times.json")}


def test_a_run_is_timed_in_its_parts_saved_and_not_made_again(speedrun, words, tmp_path, capsys):
    speedrun.main([*words, "--seeds", "1", "--save"])
    result = saved(tmp_path)
    (run,) = result["runs"]
    assert run["seconds"] == pytest.approx(run["loading"] + run["training"], abs=2e-3)
    assert all(run[name] > 0 for name in ("loading", "training", "warm_up"))
    assert run["elapsed"] >= run["seconds"] - 2e-3
    assert (run["epochs"], run["batch"], run["average"], run["images"]) == (1, 64, 0.9, 500)
    assert run["accuracy"]["clean"] > run["accuracy"]["pgd-2"]
    assert result["settings"][0]["accuracy"]["clean"] == {"mean": run["accuracy"]["clean"], "std": None}
    (curve,) = (tmp_path / "results").glob("speedrun-*.svg")
    assert "Accuracy over seconds" in curve.read_text()
    assert "the recipe: 1 seed," in capsys.readouterr().out
    shutil.rmtree(tmp_path / "runs")  # another machine, with the saved file alone
    speedrun.main([*words, "--seeds", "1", "--save"])
    assert not ends(tmp_path)
    assert saved(tmp_path) == result


def in_this_process(speedrun, cut):
    """The children's work, without starting Python for each; `cut` may raise before or after it."""

    def call(command, directory):
        if "--one" in command:
            cut("begin")
            speedrun.train_timed(Path(command[command.index("--one") + 1]), directory)
            cut("end")
        else:
            accuracy = {"accuracy": 0.5 + 0.1 * int("epochs=2" in (directory / "config.toml").read_text())}
            record = {"attacks": {"clean": accuracy, "pgd-2": accuracy}, "data": {"count": 500}}
            (directory / "evaluation.json").write_text(json.dumps(record))

    return call


def test_what_was_cut_is_made_again_and_what_has_finished_is_not(speedrun, words, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(moment):
        if moment == "end" and len(ends(tmp_path)) == 2:
            (last,) = [file for file in ends(tmp_path) if not (file.parent / "evaluation.json").exists()]
            last.unlink()
            raise Killed

    monkeypatch.setattr(speedrun, "_call", in_this_process(speedrun, kill))
    wanted = [*words, "epochs=1", "epochs=2", "--seeds", "1", "--save"]
    with pytest.raises(Killed):
        speedrun.main(wanted)
    before = ends(tmp_path)
    assert len(before) == 1
    assert len(saved(tmp_path)["runs"]) == 1
    monkeypatch.setattr(speedrun, "_call", in_this_process(speedrun, lambda moment: None))
    speedrun.main(wanted)
    assert before.items() < ends(tmp_path).items()
    assert [(run["setting"], run["epochs"]) for run in saved(tmp_path)["runs"]] == [("epochs=1", 1), ("epochs=2", 2)]
    for directory in (tmp_path / "runs").glob("*-seed0-*/"):
        assert "resume" not in (directory / "events.jsonl").read_text()
        assert checkpoints(directory)


def test_what_compiles_the_kernels_trains_a_few_steps_and_leaves_nothing(speedrun, words, tmp_path, monkeypatch):
    monkeypatch.setattr(speedrun, "_call", in_this_process(speedrun, lambda moment: trained.append(ends(tmp_path))))
    trained = []
    (config,) = speedrun.settings(words[1], ["epochs=9"], None, tmp_path / "runs").values()
    speedrun.compile_kernels(config, tmp_path / "runs")
    assert [len(found) for found in trained] == [0, 1]  # before and after
    assert not list((tmp_path / "runs").glob("*/"))


def test_what_compiles_the_kernels_enters_each_phase_and_pays_for_the_penalty(speedrun, words, tmp_path, monkeypatch):
    def train_alone(config, directory):
        speedrun.write_text(directory / "config.toml", config.to_toml())
        compiled.append(load_config([], directory / "config.toml"))

    monkeypatch.setattr(speedrun, "train_alone", train_alone)
    compiled = []
    setting = "method=n-fgsm+elle-a method.weight.next_step=true method.weight.negligible=0.1 phases=3:8:32,4:8:64"
    (config,) = speedrun.settings(words[1], [setting], None, tmp_path / "runs").values()
    speedrun.compile_kernels(config, tmp_path / "runs")
    (found,) = compiled
    assert (found.phases, found.epochs, found.max_steps) == (((1, 8, 32), (1, 8, 64)), 2, None)
    assert method_of(found).weight.next_step
    assert not method_of(found).weight.negligible
    assert method_of(config).weight.negligible == 0.1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--attack", "clean,pgd20"], "attack 'pgd20' does not exist"),
        (["method.attack.nois=1"], "nois"),
        (["model=smal-cnn"], "did you mean 'small-cnn'"),
        (["crop=99"], "crop=99: crop=99 is more padding than images of 8 x 8 pixels have"),
        (["model=tests.networks:nothing"], "could not be built"),
        (["model=preact-resnet18 batch=1"], "takes one image at a time"),
    ],
)
def test_a_mistake_is_told_before_anything_is_trained(speedrun, words, monkeypatch, wrong, said):
    monkeypatch.setattr(speedrun, "_call", lambda command, directory: pytest.fail("trained"))
    with pytest.raises(InputError, match=said):
        speedrun.main([*words, "epochs=1", *wrong])


def test_a_setting_that_fails_is_left_out_and_the_others_go_on(speedrun, words, monkeypatch, capsys):
    calls = []

    def call(command, directory):
        calls.append(directory)
        if "lr = 9.0" in (directory.with_name(f"{directory.name}.toml")).read_text():
            raise WorkError(f"{directory} failed")
        in_this_process(speedrun, lambda moment: None)(command, directory)

    monkeypatch.setattr(speedrun, "_call", call)
    with pytest.raises(WorkError, match="1 of 2 settings failed"):
        speedrun.main([*words, "lr=9", "epochs=1", "--seeds", "2"])
    assert len(calls) == 1 + 2 * 2
    told = capsys.readouterr()
    assert "failed; lr=9 is left out" in told.err
    assert "epochs=1: 2 seeds" in told.out


def test_settings_of_other_lengths_make_one_curve(speedrun):
    def run(setting, seed, seconds, accuracy):
        times = {"seconds": seconds, "loading": 1.0, "training": seconds - 1, "warm_up": 0.5, "elapsed": seconds + 2}
        own = {"method": "fgsm", "epochs": 1, "batch": 64, "lr": 0.1, "average": 0.0, "options": {}}
        return {"setting": setting, "seed": seed, **own, **times, "accuracy": accuracy}

    both = [run("epochs=2", seed, 20.0 + 2 * seed, {"clean": 0.7, "autoattack": 0.44 + seed / 50}) for seed in range(2)]
    short = run("epochs=1", 0, 10.0, {"clean": 0.6})
    rows = speedrun.summary([*both, short, run("epochs=1 batch=32", 0, 15.0, {"autoattack": 0.3})])
    assert [row["seconds"]["mean"] for row in rows] == [10, 15, 21]
    assert rows[-1]["accuracy"]["autoattack"] == {"mean": 0.45, "std": pytest.approx(0.01414, abs=1e-5)}
    assert [(line.name, line.x, line.y) for line in speedrun.curve(rows).series] == [
        ("clean", [10, 21], [0.6, 0.7]),
        ("batch=32, autoattack", [15], [0.3]),
        ("autoattack", [21], [0.45]),
    ]
    told = speedrun.line(rows[-1])
    assert "2 seeds, 21.0 +- 1.4 s (loading 1.0, warm-up 0.5; elapsed 23.0), clean 70.00 +- 0.00 %, " in told
    assert "autoattack 45.00 +- 1.41 %" in told


def test_no_run_is_begun_when_the_time_is_up(speedrun, words, tmp_path, capsys):
    speedrun.main([*words, "--limit", "-1"])
    assert not ends(tmp_path)
    assert "the time is up" in capsys.readouterr().out
