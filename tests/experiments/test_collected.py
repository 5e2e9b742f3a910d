"""Runs gathered for a report: which of them count, with which numbers, and what is told of the others."""

import json
import math
import shutil

import numpy as np
import pytest

from elle.errors import InputError
from elle.experiments.collected import Score, Setting, gather, measured, telling_keys
from elle.experiments.layout import lay_out
from elle.experiments.report import write_report
from elle.experiments.report_tables import markdown, result_tables
from elle.experiments.rundir import open_run

from .reports import RECIPE, write_result
from .runs import run_directory


def test_without_a_recipe_the_strongest_attack_comes_first(tmp_path):
    run = run_directory(tmp_path / "run", "model=small-cnn")
    strongest_first = ["autoattack", "pgd-50-10", "pgd-20-10", "pgd-20-2", "pgd-20", "pgd-9-10", "pgd-9"]
    strongest_first += ["apgd-ce", "square", "fgsm", "clean"]
    test = {name: {"accuracy": 0.5, "total": 500} for name in sorted(strongest_first)}
    (run / "result.json").write_text(json.dumps({"collapse_epoch": None, "steps": 60, "test": test}))
    assert gather([str(run)]).metrics == strongest_first


def test_a_score_is_the_mean_and_the_sample_s_std_and_one_collapsed_seed_marks_it(tmp_path):
    runs = []
    for seed, value in enumerate((10, 20, 60)):
        path = run_directory(tmp_path / str(seed), f"seed={seed}", "model=small-cnn", fall=4 if seed == 1 else None)
        write_result(path, value)
        runs.append(open_run(path))
    assert Setting(runs).score("autoattack") == Score(pytest.approx(30), pytest.approx(math.sqrt(700)), 3, True)
    assert Setting(runs[::2]).score("autoattack") == Score(pytest.approx(35), pytest.approx(math.sqrt(1250)), 2, False)
    assert Setting(runs[:1]).score("autoattack") == Score(pytest.approx(10), None, 1, False)


def test_the_validation_accuracy_is_that_of_the_last_epoch(tmp_path):
    run = run_directory(tmp_path / "run", "validation=100", "model=small-cnn", epochs=6, fall=6)
    assert measured(open_run(run))["validation pgd-10"] == pytest.approx(1.0)


def test_every_tracked_attack_has_a_validation_accuracy(tmp_path):
    run = run_directory(tmp_path / "run", "validation=100", "track=clean,fgsm", epochs=1)
    (run / "metrics.jsonl").write_text('{"epoch": 1, "step": 10, "accuracy": 0.9, "clean": 0.8, "fgsm": 0.25}\n')
    numbers = {name: value for name, value in measured(open_run(run)).items() if name.startswith("validation")}
    assert numbers == {"validation clean": 80, "validation fgsm": 25}


def test_an_evaluation_at_the_run_s_own_radius_counts(folder):
    run = folder / "runs" / "elle-a-8-0"
    entry = {"accuracy": 0.5, "total": 500}
    record = {"eps": 8 / 255, "norm": "linf", "attacks": {"autoattack": entry, "pgd-50-10": entry}}
    (run / "evaluation.json").write_text(json.dumps(record))
    assert measured(open_run(run))["autoattack"] == 50
    assert measured(open_run(run))["pgd-50-10"] == 50
    for other in ({"eps": 4 / 255}, {"norm": "l2"}):  # 8/255 in l2 is a far smaller ball
        (run / "evaluation.json").write_text(json.dumps(record | other))
        assert measured(open_run(run))["autoattack"] == 44.8
    few = {"autoattack": {"accuracy": 0.1, "total": 50}}  # fewer images than the run itself used
    (run / "evaluation.json").write_text(json.dumps(record | {"attacks": few}))
    assert measured(open_run(run))["autoattack"] == 44.8
    (run / "evaluation.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        measured(open_run(run))


def test_an_evaluation_on_another_folder_of_own_images_does_not_count(elle, tmp_path):
    stream = np.random.default_rng(0)
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        for part in ("train", "test"):
            x, y = stream.integers(0, 256, (40, 8, 8, 1), dtype=np.uint8), np.arange(40) % 2
            np.savez(tmp_path / name / f"{part}.npz", x=x, y=y)
    run = tmp_path / "run"
    words = ("data=arrays", "model=small-cnn", "eps=0.1", "batch=20", "max_steps=2", "final=clean")
    assert elle("train", "method=fgsm", f"root={tmp_path / 'mine'}", *words, "--out", run).code == 0
    before = measured(open_run(run))["clean"]
    (tmp_path / "mine").rename(tmp_path / "moved")
    for name, counts in (("theirs", False), ("moved", True)):
        told = elle("evaluate", run, "--attack", "clean,fgsm", "--root", tmp_path / name)
        assert told.code == 0, told.err
        numbers = measured(open_run(run))
        assert ("fgsm" in numbers, numbers["clean"]) == (counts, before)
        assert elle("export", run, "--out", tmp_path / f"{name}.safetensors", "--root", tmp_path / "moved").code == 0
        assert ("| fgsm |" in (tmp_path / f"{name}.safetensors.md").read_text()) == counts


def test_an_evaluation_with_other_attacks_does_not_hide_the_one_before(folder):
    run = folder / "runs" / "elle-a-8-0"

    def record(name, accuracy, weights="w", **more):
        return {"eps": 8 / 255, "norm": "linf", "model": {"sha256": weights},
                "attacks": {name: {"accuracy": accuracy, "total": 500}}} | more  # fmt: skip

    data = open_run(run).config.data
    files = {
        "evaluation.1.json": record("autoattack", 0.1, "of before the run went on", data={"name": data}),
        "evaluation.2.json": record("apgd-t", 0.2, data={"name": data}),
        "evaluation.9.json": record("autoattack", 0.4, data={"name": data}),
        "evaluation.10.json": record("autoattack", 0.41, data={"name": data}),
        "evaluation.11.json": record("autoattack", 0.9, data={"name": "another dataset"}),
        "evaluation.json": record("fgsm", 0.7, data={"name": data}),
    }
    for name, content in files.items():
        (run / name).write_text(json.dumps(content))
    (run / "evaluation.12.json").write_text("{")  # a damaged record is set aside by the next evaluation
    numbers = measured(open_run(run))
    assert (numbers["autoattack"], numbers["apgd-t"], numbers["fgsm"]) == (41, 20, 70)
    (run / "model.safetensors").write_bytes(b"those of the run that went on")
    assert measured(open_run(run))["autoattack"] == 44.8


def test_the_runs_of_a_recipe_that_has_changed_are_reported_without_it(folder, elle):
    runs = folder / "runs"
    (runs / "sweep.json").write_text(json.dumps({"recipe": str(folder / "radii.toml"), "runs": []}))
    assert gather([str(runs)]).recipe is not None
    (folder / "radii.toml").write_text(RECIPE.replace("[grid]", "lr = 0.5\n[grid]"))
    outcome = elle("report", folder / "radii.toml", runs)
    assert outcome.code == 2
    assert "belongs to recipe radii as it is now; make them with `elle sweep" in outcome.err
    assert (gather([str(runs)]).recipe, len(gather([str(runs)]).runs)) == (None, 22)


def test_runs_of_another_recipe_are_left_out(folder):
    run = run_directory(folder / "runs" / "other", "method=fgsm", "eps=8/255", "lr=0.5", "model=small-cnn")
    write_result(run, 99.0)
    both = [str(folder / "radii.toml"), str(folder / "runs")]
    assert "other" not in {one.name for one in gather(both).runs}
    alone = gather([str(folder / "runs")])
    assert "other" in {one.name for one in alone.runs}
    assert telling_keys(alone.configs) == ["method", "eps", "lr"]
    assert "| fgsm, lr=0.5 |" in markdown(result_tables(alone, lay_out(alone))[0])


def test_accuracy_on_held_out_images_is_a_number_of_its_own(tmp_path):
    run = run_directory(tmp_path / "a", "method=fgsm", "validation=97")
    write_result(run, 50.0)
    numbers = measured(open_run(run))
    assert numbers["validation pgd-10"] == 40
    assert numbers["seconds per step"] == pytest.approx(100 / 60)
    assert "validation pgd-10" not in gather([str(run)]).metrics
    tracked_on_test = run_directory(tmp_path / "b", "method=fgsm", "validation=0")
    assert "validation pgd-10" not in measured(open_run(tracked_on_test))


def test_mistakes_are_told_in_a_line(tmp_path, folder):
    with pytest.raises(InputError, match="no recipe 'table-99'"):
        gather(["table-99"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no run"):
        gather([str(tmp_path / "empty")])
    lonely = run_directory(tmp_path / "lonely" / "a", "method=fgsm", finished=False)
    with pytest.raises(InputError, match=r"no run in .* has finished \(of 1\); continue"):
        gather([str(lonely)])
    with pytest.raises(InputError, match="belongs to recipe radii"):
        gather([str(folder / "radii.toml"), str(tmp_path / "lonely")])


def test_a_copy_of_a_run_is_no_further_seed(folder):
    shutil.copytree(folder / "runs", folder / "copied")
    (folder / "runs" / "n-fgsm-8-0" / "result.json").unlink()  # the copy alone has finished
    (folder / "copied" / "n-fgsm-8-1" / "result.json").unlink()  # the copy alone has not
    found = gather([str(folder / "radii.toml"), str(folder / "runs"), str(folder / "copied")])
    scores = {(one.config.method, one.label("eps")): one.score("autoattack") for one in found.settings}
    assert scores["n-fgsm", "8/255"].count == 3
    assert scores["n-fgsm", "8/255"].std == pytest.approx(0.1)
    write_report(found, folder / "report")
    assert "22 more are left out: another has the same settings and seed" in (folder / "report/report.md").read_text()


@pytest.mark.parametrize(
    "damaged", [{"test": None}, {"test": {"clean": 0.5}}, {"test": {"clean": {"accuracy": math.nan, "total": 5}}}]
)
def test_a_result_that_cannot_be_read_is_named(folder, damaged):
    run = folder / "runs" / "fgsm-8-0"
    (run / "result.json").write_text(json.dumps(damaged))
    with pytest.raises(InputError, match="fgsm-8-0/result.json is damaged"):
        gather([str(folder / "runs")])


def test_an_evaluation_that_cannot_be_read_is_named(folder):
    attacks = {"clean": {"accuracy": 0.5}}
    file = folder / "runs" / "fgsm-8-0" / "evaluation.json"
    file.write_text(json.dumps({"eps": 8 / 255, "norm": "linf", "attacks": attacks}))
    with pytest.raises(InputError, match="evaluation.json is damaged; evaluate the run again"):
        gather([str(folder / "runs")])


def test_a_record_without_its_step_is_damaged(folder):
    (folder / "runs" / "fgsm-8-0" / "metrics.jsonl").write_text('{"epoch": 1}\n')
    with pytest.raises(InputError, match="fgsm-8-0/metrics.jsonl is damaged"):
        gather([str(folder / "runs")])


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_a_failure_without_a_reason_is_a_run_that_has_not_finished(folder, content):
    run = folder / "runs" / "fgsm-8-0"
    (run / "result.json").unlink()
    (run / "failure.json").write_text(content)
    assert gather([str(folder / "runs")]).failures == {}


def test_a_run_that_a_sweep_has_linked_from_another_is_no_copy(folder):
    """`elle report runs/*` after Table 2 and Figure 3 told of hundreds of runs that were left out."""
    (folder / "linked").mkdir()
    (folder / "linked" / "n-fgsm-8-0").symlink_to(folder / "runs" / "n-fgsm-8-0")
    found = gather([str(folder / "runs"), str(folder / "linked")])
    assert found.copies == 0
    assert len(found.runs) == len(gather([str(folder / "runs")]).runs)
