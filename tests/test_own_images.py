"""docs/own-images.md, walked through: 60 photographs in class folders become a network in four formats."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from elle.config import load_config
from elle.data.folder import FolderSplit
from elle.data.image_folder import FolderImages

PAGE = (Path(__file__).parent.parent / "docs" / "own-images.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines() if line.startswith("elle ")]
(PYTHON,) = [text for kind, text in BLOCKS if kind == "python"]
REAL = "elle train data=folder root=photos model=resnet50 image_size=224 --out runs/photos"


def write_photos(root: Path, count: int = 20) -> None:
    """Fruit of three colours."""
    draw = np.random.default_rng(0)
    for channel, name in enumerate(("apple", "pear", "plum")):
        (root / name).mkdir(parents=True)
        for number in range(count):
            coarse = draw.integers(0, 90, (5, 6, 3))
            coarse[..., channel] += 140
            photo = Image.fromarray(coarse.astype(np.uint8)).resize(tuple(draw.integers(40, 70, 2)))
            photo.save(root / name / f"{number:03d}.{'png' if number % 4 == 0 else 'jpg'}")


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
            small = {"image_size=224": "image_size=16", "model=resnet50": "model=tests.networks:any_size_net"}
            words = [small.get(word, word) for word in words] + ["epochs=6"]
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
    exec(compile(PYTHON.replace("size = 224", "size = 16"), "own-images.md", "exec"), names)
    assert torch.isfinite(names["logits"]).all()
    assert names["logits"].shape == (1, 3)
    card = (folder / "runs/photos/exported/model.safetensors.md").read_text()
    assert "apple, pear, plum" in card
    assert "CC BY 4.0" in card
    assert "| pgd-50-10 | 4/255 |" in card


@pytest.mark.parametrize("size", [16, 40, 47, 50, 64])
def test_the_tutorial_s_photograph_is_shown_as_the_evaluation_shows_it(tmp_path, monkeypatch, size):
    (tmp_path / "photos" / "apple").mkdir(parents=True)
    draw = np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8)
    Image.fromarray(draw).resize((70, 50)).save(tmp_path / "photos/apple/001.jpg", "PNG")
    monkeypatch.chdir(tmp_path)
    lines = PYTHON.splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("photo = "))
    last = next(k for k, line in enumerate(lines) if line.startswith("x = "))
    imports = [line for line in lines if re.match("(import|from) ", line)]
    names = {"size": size}
    exec("\n".join([*imports, *lines[first : last + 1]]), names)
    shown = FolderImages(FolderSplit([Path("photos/apple/001.jpg")], np.zeros(1, np.int64)), size, 0)
    # Within what the box's being of whole pixels makes.
    assert (names["x"] * 255 - torch.from_numpy(shown.x)).abs().mean() < 3


def test_the_real_training_is_spelled_right():
    config = load_config([word for word in REAL.split() if "=" in word]).resolved()
    assert (config.data, config.model, config.image_size, config.eps) == ("folder", "resnet50", 224, 4 / 255)
