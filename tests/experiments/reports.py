"""Runs made by hand for a report: of four methods at two radii, with their recipe."""

import json

from elle.experiments.collected import gather

RECIPE = """
title = "Accuracy at two radii"
seeds = 3
[base]
data = "digits"
model = "small-cnn"
epochs = 6
track = "clean,pgd-10"
[grid]
method = ["fgsm", "n-fgsm", "elle-a", "pgd-10"]
eps = ["8/255", "16/255"]
[[expected]]
metric = "autoattack"
rows = "method"
columns = "eps"
table = '''
       | 8/255         | 16/255
fgsm   | 40.0 +- 0.30  | 0.01 +- 0.01 collapsed
n-fgsm | 44.0 +- 0.30  | 20.0 +- 0.20
elle-a | 45.0          | 18.0
'''
[figure]
metric = ["autoattack", "clean"]
rows = "method"
columns = "eps"
"""
ACCURACIES = {  # of AutoAttack at each radius, seed by seed
    "fgsm": ([40.1, 40.3, 40.5], [0.0, 0.0, 0.0]),
    "n-fgsm": ([44.9, 45.0, 45.1], [20.0, 20.2, 20.4]),
    "elle-a": ([44.8, 44.9, 45.0], [21.0]),
    "pgd-10": ([46.0, 46.5, 47.0], [24.0, 24.5, 25.0]),
}


def write_result(run, autoattack):
    test = {
        "clean": {"accuracy": 0.8, "total": 500},
        "autoattack": {"accuracy": autoattack / 100, "total": 500},
    }
    result = {"collapse_epoch": None, "steps": 60, "test": test, "device": "cpu"}
    (run / "result.json").write_text(json.dumps(result | {"train_seconds": 100.0, "seconds_per_epoch": 1.0}))


def with_figure(folder, figure):
    (folder / "radii.toml").write_text(RECIPE.partition("[figure]")[0] + "[figure]\n" + figure)
    return gather([str(folder / "radii.toml"), str(folder / "runs")])


def with_results(folder, **keys):
    """All results with these keys changed, by a function of the run's place."""
    for place, file in enumerate(sorted((folder / "runs").glob("*/result.json"))):
        result = json.loads(file.read_text())
        file.write_text(json.dumps(result | {key: value(place) for key, value in keys.items()}))
