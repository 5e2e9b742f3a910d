"""The benchmark of whole epochs: it leaves out the first, and keeps one row for each method and settings."""

import json
from importlib import import_module
from pathlib import Path

import pytest

QUICK = ["data=digits", "model=small-cnn", "device=cpu"]


@pytest.fixture
def epochs(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setattr(import_module("results"), "FOLDER", tmp_path)
    return import_module("epochs")


def saved(tmp_path):
    (file,) = tmp_path.glob("epochs-cpu-*.json")
    return json.loads(file.read_text())


def test_the_median_is_of_all_epochs_but_the_first(epochs, tmp_path, capsys):
    epochs.main([*QUICK, "--methods", "fgsm,n-fgsm", "--epochs", "4", "--save"])
    found = saved(tmp_path)
    assert [row["method"] for row in found["rows"]] == ["fgsm", "n-fgsm"]
    for row in found["rows"]:
        assert len(row["epochs"]) == 4
        assert row["seconds_per_epoch"] == sorted(row["epochs"][1:])[1] > 0
        assert row["images"] == 1280
    assert capsys.readouterr().out.count("1280 images") == 2


def test_a_method_with_the_same_settings_replaces_its_row(epochs, tmp_path, capsys):
    for words in ([], [], ["probe_every=0"]):
        epochs.main([*QUICK, *words, "--methods", "fgsm", "--epochs", "2", "--save"])
    assert [row["settings"] for row in saved(tmp_path)["rows"]] == [QUICK, [*QUICK, "probe_every=0"]]


def test_one_epoch_is_too_few(epochs, capsys):
    with pytest.raises(SystemExit):
        epochs.main([*QUICK, "--epochs", "1"])
    assert "the first epoch does not count" in capsys.readouterr().err
