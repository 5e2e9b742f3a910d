"""A recipe of four runs on digits that train in seconds."""

from pathlib import Path

TINY = """
title = "Tiny: FGSM and ELLE-A on digits"
seeds = 1
[base]
data = "digits"
model = "small-cnn"
epochs = {epochs}
batch = 64
lr = 0.1
validation = 97
track = "clean,pgd-2"
final = "clean,pgd-10"
probe_every = 0
device = "cpu"
[grid]
method = ["fgsm", "elle-a"]
eps = ["0.1", "0.3"]
[[expected]]
metric = "pgd-10"
rows = "method"
columns = "eps"
table = '''
       | 0.1           | 0.3
fgsm   | 60.0 +- 20.0  | 7.0 +- 0.5 collapsed
elle-a | 10.0 +- 0.1   | -
'''
"""


def tiny_recipe(folder: Path, epochs: int = 2, more: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.toml"
    path.write_text(TINY.format(epochs=epochs) + more)
    return path
