"""A folder of runs for a report, and what is gathered from it."""

import pytest

from elle.experiments.collected import gather

from .reports import ACCURACIES, RECIPE, write_result
from .runs import run_directory


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "radii.toml").write_text(RECIPE)
    for method, by_eps in ACCURACIES.items():
        for eps, values in zip(("8/255", "16/255"), by_eps, strict=True):
            for seed, value in enumerate(values):
                fall = 4 if method == "fgsm" and eps == "16/255" else None
                words = (f"method={method}", f"eps={eps}", f"seed={seed}", "model=small-cnn")
                run = run_directory(tmp_path / "runs" / f"{method}-{eps[:2].strip('/')}-{seed}", *words, fall=fall)
                write_result(run, value)
    return tmp_path


@pytest.fixture
def collected(folder):
    return gather([str(folder / "radii.toml"), str(folder / "runs")])
