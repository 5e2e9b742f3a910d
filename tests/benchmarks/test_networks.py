"""The benchmarks of networks and augmentation run on a CPU, and what they save can be read."""

import importlib.util
import json
import os
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """A benchmark's module, saving into the test's own folder."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(import_module("results"), "FOLDER", tmp_path)
    return import_module


def saved(tmp_path):
    (file,) = tmp_path.iterdir()
    return json.loads(file.read_text())


def test_networks_are_timed_and_their_operations_counted(benchmark, tmp_path, capsys):
    module = benchmark("networks")
    module.main(["--models", "small-cnn", "--batches", "2,4", "--device", "cpu", "--save"])
    rows = saved(tmp_path)["rows"]
    assert [(row["model"], row["image"], row["batch"]) for row in rows] == [
        ("small-cnn", "3x32x32", 2),
        ("small-cnn", "3x32x32", 4),
    ]
    assert all(row["forward_ms"] > 0 and row["forward_backward_ms"] > 0 for row in rows)
    assert capsys.readouterr().out.count("small-cnn") == 2


def test_a_backward_counts_twice_a_forward_less_the_gradient_to_the_images(benchmark):
    module = benchmark("networks")
    row = module.MODELS["small-cnn"]
    first_layer = 2 * 16 * 3 * 5 * 5 * 16 * 16 / 1e9
    forward = module.giga_flops(row, backward=False)
    assert forward == pytest.approx(row.gflop, abs=5e-4)
    assert module.giga_flops(row, backward=True) == pytest.approx(3 * forward - first_layer)


def test_an_augmented_batch_is_compared_with_the_step(benchmark, tmp_path, monkeypatch):
    module = benchmark("augmentation")
    monkeypatch.setattr(module, "measure", lambda method, setting: {"ms": 4.0})
    module.main(["--device", "cpu", "--save"])
    result = saved(tmp_path)
    assert result["step_ms"] == 4.0
    assert result["share"] == pytest.approx(result["batch_ms"] / 4, abs=1e-5)
    assert result["batch_ms"] > 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is there")
def test_what_times_kernels_says_in_a_line_that_triton_is_missing(benchmark):
    with pytest.raises(SystemExit, match="No module named 'triton': .* run it where Triton is installed"):
        benchmark("normalisation")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1",
)
def test_kernels_and_tiles_are_timed(benchmark, tmp_path, monkeypatch, capsys):
    module = benchmark("normalisation")
    assert module.layers("preact-resnet18") == {(64, 32, 32): 5, (128, 16, 16): 4, (256, 8, 8): 4, (512, 4, 4): 4}
    monkeypatch.setattr(module, "layers", lambda name: Counter({(16, 4, 4): 3}))
    few = {name: tiles[:2] for name, tiles in module.CANDIDATES.items()}
    monkeypatch.setattr(module, "CANDIDATES", few)
    module.main(["--models", "small-cnn", "--batch", "2", "--device", "cpu", "--steps", "--save"])
    result = saved(tmp_path)
    assert [row["setting"] for row in result["steps"]] == ["fused=off", "fused=auto"] * 2 + [
        "TRITON=False",
        "TRITON=True",
    ]
    tried = {name: 3 if kernel.tried else 1 for name, kernel in module.KERNELS.items()}
    expected = Counter({name: 2 * count for name, count in tried.items()})
    assert Counter(row["kernel"] for row in result["layers"]) == expected
    assert all(row["us"] > 0 for row in result["layers"])
    output = capsys.readouterr().out
    assert all(f"{name}: microseconds" in output for name in few)
