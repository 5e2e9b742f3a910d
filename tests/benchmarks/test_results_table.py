"""What sweeps have measured becomes small JSON, and a table beside the paper's numbers on a page."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from elle.config import load_config
from elle.errors import InputError

from ..experiments.runs import run_directory

PAGE = "# Page\n\n<!-- results -->\nold\n<!-- /results -->\n\nThe end.\n"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return import_module("results_table")


def measured_run(path, method, seed, autoattack=None, *others, fall=None):
    words = ["data=cifar10", "model=preact-resnet18", f"method={method}", "eps=8/255", f"seed={seed}", *others]
    run = run_directory(path, *words, fall=fall)
    test = {"clean": 0.8, "pgd-20": 0.48} | ({} if autoattack is None else {"autoattack": autoattack})
    entries = {name: {"accuracy": value, "total": 10_000} for name, value in test.items()}
    result = {"collapse_epoch": None, "steps": 60, "test": entries, "device": "NVIDIA H200"}
    result |= {"train_seconds": 100.0, "seconds_per_epoch": 3.25}
    (run / "result.json").write_text(json.dumps(result))
    return run


def test_runs_are_gathered_in_several_goes_and_stand_beside_the_paper_s(module, tmp_path):
    file, page = tmp_path / "results/short.json", tmp_path / "page.md"
    page.write_text(PAGE)
    measured_run(tmp_path / "a/elle-a-0", "elle-a", 0, 0.441)
    run_directory(tmp_path / "a/unfinished", "method=elle", finished=False)
    module.main([str(tmp_path / "a"), "--file", str(file)])
    # Again, with another evaluation: it replaces the first, and is no second run of one seed.
    measured_run(tmp_path / "b/elle-a-0", "elle-a", 0, 0.442, "final=clean,pgd-20,autoattack")
    measured_run(tmp_path / "b/elle-a-1", "elle-a", 1, 0.444)
    measured_run(tmp_path / "b/fgsm-0", "fgsm", 0, fall=4)
    last = measured_run(tmp_path / "c", "n-fgsm", 0, 0.45)
    words = [str(tmp_path / "b"), str(last), "--file", str(file), "--into", str(page)]
    assert module.main([*words[2:], "--check"]) == 1
    assert page.read_text() == PAGE
    assert module.main(words) == 0
    assert [(run["method"], run["seed"]) for run in json.loads(file.read_text())["runs"]] == [
        *(("elle-a", 0), ("elle-a", 1), ("fgsm", 0), ("n-fgsm", 0)),
    ]
    kept = json.loads(file.read_text())["runs"][0]
    assert (kept["autoattack"], kept["seconds"], kept["seconds per epoch"]) == (44.2, 100.0, 3.25)
    text = page.read_text()
    assert text.startswith("# Page\n\n<!-- results -->\n| data |")
    assert text.endswith("<!-- /results -->\n\nThe end.\n")
    lines = [line for line in text.splitlines() if line.startswith("| cifar10")]
    assert lines == [
        "| cifar10 | 8/255 | `fgsm` | 80.00† | 48.00† |  |  |  | 1 |",
        "| cifar10 | 8/255 | `elle-a` | 80.00 ± 0.00 | 48.00 ± 0.00 | 44.30 ± 0.14 | 44.32 ± 0.04 | -0.02 | 2 |",
        "| cifar10 | 8/255 | `n-fgsm` | 80.00 | 48.00 | 45.00 | 44.81 ± 0.18 | +0.19 | 1 |",
    ]
    assert module.main([*words[2:], "--check"]) == 0


def test_what_is_missing_is_said(module, tmp_path):
    with pytest.raises(InputError, match="has no runs"):
        module.main(["--file", str(tmp_path / "none.json")])
    with pytest.raises(InputError, match="no finished run"):
        module.main([str(tmp_path), "--file", str(tmp_path / "none.json")])
    with pytest.raises(InputError, match="page needs the lines"):
        module.placed("no marks", "table", "page")


def test_a_number_that_some_seeds_lack_says_of_how_many_it_is(module, tmp_path):
    measured_run(tmp_path / "elle-a-0", "elle-a", 0, 0.441)
    measured_run(tmp_path / "elle-a-1", "elle-a", 1)
    (line,) = module.table(module.gathered([tmp_path])).splitlines()[2:3]
    assert "| 80.00 ± 0.00 | 48.00 ± 0.00 | 44.10 (1 of 2 seeds) |" in line


@pytest.mark.parametrize("word", ["on_collapse=rollback", "loading=streaming", "cache=x"])
def test_what_trains_another_network_is_another_setting(module, word):
    config = load_config(["data=cifar10", "method=fgsm", word]).resolved()
    assert module.other_settings(config) == word


def test_runs_with_other_settings_are_not_averaged_with_those_without(module, tmp_path):
    measured_run(tmp_path / "0", "elle-a", 0, 0.441)
    measured_run(tmp_path / "1", "elle-a", 0, 0.442, "precision=fp32", "fused=off", "root=elsewhere", "track=clean")
    measured_run(tmp_path / "2", "elle-a", 1, 0.444, "method.regulariser.share=0.5")
    lines = module.table(module.gathered([tmp_path])).splitlines()[2:5]
    assert [line.split(" | ")[2::3][:2] for line in lines] == [
        ["`elle-a`", "44.10"],
        ["`elle-a method.regulariser.share=0.5`", "44.40"],
        ["`elle-a precision=fp32 fused=off`", "44.20"],
    ]
