"""docs/own-images.md, walked through: 60 photographs in class folders become a network in four formats."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from elle.config import load_config
from elle.data.registry import load_dataset
from elle.methods import METHODS
from elle.models.registry import MODELS

PAGE = (Path(__file__).parent.parent / "docs" / "own-images.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines() if line.startswith("elle ")]
(PYTHON,) = [text for kind, text in BLOCKS if kind == "python"]
REAL = "elle train data=folder root=photos --out runs/photos"


def write_photos(root: Path) -> None:
    """Fruit of three colours."""
    draw = np.random.default_rng(0)
    for channel, name in enumerate(("apple", "pear", "plum")):
        (root / name).mkdir(parents=True)
        for number in range(20):
            coarse = draw.integers(0, 90, (5, 6, 3))
            coarse[..., channel] += 140
            photo = Image.fromarray(coarse.astype(np.uint8)).resize(tuple(draw.integers(40, 70, 2)))
            photo.save(root / name / f"{number:03d}.{'png' if number % 4 == 0 else 'jpg'}")


def write_every_kind(root: Path) -> None:
    """Photographs of every kind and shape in two classes: what tells them apart is how bright they are."""
    draw = np.random.default_rng(0)
    shapes = [(64, 64), (37, 37), (36, 50), (1, 40), (40, 1), (20, 16), (333, 517), (257, 255), (33, 400), (300, 148)]
    for label, name in enumerate(("dark", "light")):
        (root / name).mkdir(parents=True)
        for number, (width, height) in enumerate(shapes):
            pixels = draw.integers(0, 128, (height, width, 3)) + 120 * label
            photo = Image.fromarray(pixels.astype(np.uint8))
            grey = photo.convert("L")
            deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
            tag = Image.Exif()
            tag[0x0112] = 1 + number % 8
            kinds: dict[str, tuple[Image.Image, dict[str, Any]]] = {
                "plain.jpg": (photo, {}),
                "turned.jpg": (photo, {"exif": tag}),
                "progressive.jpg": (photo, {"progressive": True}),
                "cmyk.jpg": (photo.convert("CMYK"), {}),
                "grey.jpg": (grey, {}),
                "named.png": (photo, {"format": "JPEG"}),
                "plain.png": (photo, {}),
                "alpha.png": (photo.convert("RGBA"), {}),
                "palette.png": (photo.quantize(16), {}),
                "deep.png": (deep, {}),
                "clear.webp": (photo, {"lossless": True}),
            }
            for kind, (image, options) in kinds.items():
                image.save(root / name / f"{number}-{kind}", **options)


def reader(card: Path) -> str:
    """The card's code that reads a photograph."""
    _, code = re.findall(r"^```python\n(.*?)^```$", card.read_text(), re.MULTILINE | re.DOTALL)
    return str(code)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    write_photos(folder / "photos")
    return folder


def test_the_tutorial_s_commands_run_one_after_the_other(elle, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert REAL in COMMANDS
    assert len(COMMANDS) == 9
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        if command == REAL:
            # As printed it takes a GPU: here with small images, a small network and few epochs.
            words += ["image_size=16", "model=tests.networks:any_size_net", "epochs=6"]
        outcome = elle(*words)
        assert outcome.code == 0, (command, outcome.err)
        if command == REAL:
            assert "3 classes (apple, pear, plum): 49 training, 5 validation and 6 test images" in outcome.out
    assert (folder / "runs/rehearsal/adversarial.png").stat().st_size > 0
    assert {file.name for file in (folder / "runs/photos/exported").iterdir()} == {
        f"model{suffix}{card}"
        for suffix in (".safetensors", ".torchscript.pt", ".pt2", ".onnx")
        for card in ("", ".md")
    }
    result = json.loads((folder / "runs/photos/result.json").read_text())
    assert result["classes"] == ["apple", "pear", "plum"]
    assert set(result["test"]) == {"clean", "fgsm", "pgd-20"}
    # The colours are far apart: not even three dozen steps on 49 images leave it at chance.
    assert result["test"]["pgd-20"]["accuracy"] > 0.5
    names = {}
    exec(compile(reader(folder / "runs/photos/exported/model.safetensors.md"), "card", "exec"), names)
    exec(compile(PYTHON, "own-images.md", "exec"), names)
    assert torch.isfinite(names["logits"]).all()
    assert names["logits"].shape == (1, 3)
    card = (folder / "runs/photos/exported/model.safetensors.md").read_text()
    assert "apple, pear, plum" in card
    assert "CC BY 4.0" in card
    assert "| pgd-50-10 | 4/255 |" in card


def test_a_deployed_file_classifies_photographs_of_every_kind_as_the_evaluation_did(elle, tmp_path, monkeypatch):
    """The card's code, in place of elle's own, on the files: no pixel is off by more than rounding twice."""
    monkeypatch.chdir(tmp_path)
    write_every_kind(tmp_path / "photos")
    words = ("data=folder", "root=photos", "image_size=37", "model=tests.networks:any_size_net", "batch=4", "epochs=1")
    outcome = elle("train", *words, "eval_every=0", "final=clean", "--out", "run")
    assert outcome.code == 0, outcome.err
    assert elle("export", "run", "--to", "torchscript").code == 0
    names: dict[str, Any] = {}
    exec(compile(reader(Path("run/exported/model.torchscript.pt.md")), "card", "exec"), names)
    read_image = names["read_image"]
    test = load_dataset("folder", "photos", image_size=37).test
    network = torch.jit.load("run/exported/model.torchscript.pt").eval()
    correct = [int(network(read_image(path)).argmax()) for path in test.files.paths] == test.y
    result = json.loads(Path("run/result.json").read_text())
    assert correct.sum() == result["test"]["clean"]["correct"] > len(test) / 2
    for size in (16, 37, 64):
        images = load_dataset("folder", "photos", image_size=size).train
        for path, pixels in zip(images.files.paths, images.x, strict=True):
            read = read_image(path) if size == 37 else read_image(path, size, round(8 / 7 * size))
            assert (read[0] * 255 - torch.tensor(pixels)).abs().max() <= 2.01, (size, path)


def test_the_real_training_costs_what_the_page_says():
    config = load_config([word for word in REAL.split() if "=" in word]).resolved()
    passes = METHODS[config.method].cost.total
    small, large = (MODELS[name].gflop for name in ("resnet18", "resnet50"))
    assert f"an image costs {passes} passes of {small:.1f} GFLOP (`model=resnet50`: {large:.1f})" in PAGE
