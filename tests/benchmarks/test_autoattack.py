"""The comparison of both AutoAttacks counts what each breaks, part by part, and goes on where it was cut."""

import json
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ROOT / "results" / "digits-n-fgsm+elle-a"
WORDS = [str(RUN), "--images", "10", "--part", "4", "--device", "cpu", "--save"]


class Cut(Exception):
    pass


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """The module, saving into the test's own folder, with attacks that change the images whose places are named."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(import_module("results"), "FOLDER", tmp_path)
    module = import_module("autoattack")

    def engines(broken, stop=None):
        def engine(places):
            def attack(name, x, y):
                found = x.clone()
                for image in range(len(x)):
                    place = next(i for i in range(10) if (x[image] == everything[i]).all())
                    if place == stop:
                        raise Cut
                    if place in places and name == "apgd-t":
                        found[image] += 1
                return found

            return attack

        everything = module.load_run(RUN).test_images(None, 10)[0]
        monkeypatch.setattr(module, "engines_of", lambda *_: {key: engine(value) for key, value in broken.items()})

    return module, engines


def test_an_interrupted_comparison_goes_on_and_ends_as_an_uninterrupted_one(benchmark, tmp_path, capsys):
    module, engines = benchmark
    broken = {"fast": {0, 1, 5, 9}, "reference": {0, 5, 6}}
    engines(broken, stop=8)
    with pytest.raises(Cut):
        module.main(WORDS)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["runs"][0]["found"]["images"] == 8
    engines(broken)
    capsys.readouterr()
    module.main(WORDS)
    (run,) = json.loads(file.read_text())["runs"]
    found = run["found"]
    assert found["images"] == found["right"] == 10
    assert {label: rows["square"]["standing"] for label, rows in found["engines"].items()} == {
        "fast": 6,
        "reference": 7,
    }
    assert (found["broken_by_fast_alone"], found["broken_by_reference_alone"]) == ([1, 9], [6])
    out = capsys.readouterr().out
    assert "images 8 to 9" in out
    assert "images 0 to 3" not in out
    assert "fast: 60.00 %" in out
    assert "broken by reference alone: 6" in out


def test_other_settings_are_another_comparison(benchmark, tmp_path):
    module, engines = benchmark
    engines({"fast": set(), "reference": set()})
    module.main(WORDS)
    module.main([*WORDS, "--eps", "16/255"])
    (file,) = tmp_path.iterdir()
    assert [run["eps"] for run in json.loads(file.read_text())["runs"]] == ["8/255", "16/255"]
