"""The `elle data` commands as a user meets them."""

import json
import shutil

import numpy as np
import pytest

from elle.cli.data import app
from elle.data import download
from elle.data.registry import DATASETS, load_dataset
from elle.engine.trained import load_run

from ..data.layouts import encoded, small_images, write_npz

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(elle, command):
    outcome = elle("data", command, "--help")
    assert outcome.code == 0
    assert f"Example: elle data {command}" in outcome.out


def test_the_list_is_that_of_datasets(elle):
    assert elle("data", "list").out == elle("datasets").out
    assert [row["name"] for row in json.loads(elle("data", "list", "--json").out)] == list(DATASETS)


def test_check_prints_a_table_and_json(elle, tmp_path):
    write_npz(tmp_path / "data")
    outcome = elle("data", "check", "cifar10")
    assert outcome.code == 0
    assert [word for word in ("airplane", "32 x 32 (100)", "also training images: 0") if word not in outcome.out] == []
    report = json.loads(elle("data", "check", "cifar10", "--root", tmp_path / "data", "--json").out)
    assert report["splits"]["train"]["images"] == 100


def test_check_prints_the_most_frequent_sizes_and_says_how_many_others_there_are(elle, tmp_path):
    for width, name in enumerate("aabbbcdefg"):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True, exist_ok=True)
        pixels = small_images(1, (8, 10 + ord(name) - ord("a"), 3))[0][0]
        (folder / f"{width}.png").write_bytes(encoded(pixels, "PNG"))
    shutil.copytree(tmp_path / "train", tmp_path / "val")
    outcome = elle("data", "check", "folder", "--root", tmp_path)
    assert "pixels 11 x 8 (3), 10 x 8 (2), 12 x 8 (1), 13 x 8 (1), 14 x 8 (1) and 2 other sizes; mean" in outcome.out
    report = json.loads(elle("data", "check", "folder", "--root", tmp_path, "--json").out)
    assert report["splits"]["train"]["different_sizes"] == 7


def test_check_fails_where_a_file_cannot_be_read(elle, tmp_path):
    for split in ("train", "val"):
        folder = tmp_path / split / "cat"
        folder.mkdir(parents=True)
        (folder / "a.png").write_bytes(encoded(small_images(1, (8, 8, 3))[0][0], "PNG"))
    damaged = tmp_path / "train" / "cat" / "b.png"
    damaged.write_bytes(b"damaged")
    outcome = elle("data", "check", "folder", "--root", tmp_path)
    assert outcome.code == 1
    assert f"unreadable: {damaged}" in outcome.out.replace("\n", "")
    assert "also training images: 1" in outcome.out


def write_two_classes(root, images):
    for seed, name in enumerate(("cat", "dog")):
        (root / name).mkdir()
        for number, pixels in enumerate(small_images(images, (8, 8, 3), seed)[0]):
            (root / name / f"{number:02}.png").write_bytes(encoded(pixels, "PNG"))


def test_check_says_where_a_test_split_comes_from_that_has_no_folder(elle, tmp_path):
    write_two_classes(tmp_path, 1)
    outcome = elle("data", "check", "folder", "--root", tmp_path)
    assert outcome.code == 0
    assert "test: no folder of its own; as in training, it is a tenth of each class" in outcome.out
    assert "mean []" not in outcome.out


def test_check_finds_copies_of_the_images_that_training_would_test_on(elle, tmp_path):
    write_two_classes(tmp_path, 20)
    for file in sorted((tmp_path / "cat").iterdir()):
        shutil.copy(file, file.with_name(f"z{file.name}"))
    report = json.loads(elle("data", "check", "folder", "--root", tmp_path, "--json").out)
    taken = load_dataset("folder", tmp_path, image_size=8)
    for name, split in (("train", taken.train), ("test", taken.test)):
        assert list(report["splits"][name]["per_class"].values()) == np.bincount(split.y).tolist()
    cats = [path.name.removeprefix("z") for path in taken.test.files.paths if path.parent.name == "cat"]
    assert sorted(cats) == sorted(set(cats))  # no two of them are copies of each other: each has its own in training
    assert report["duplicates"]["count"] == len(cats) == 4


def test_separation_prints_the_distance_and_half_of_it(elle, tmp_path):
    x = np.full((4, 8, 8, 3), 100, np.uint8)
    x[1:, 0, 0, 0] = (130, 105, 190)
    np.savez(tmp_path / "train.npz", x=x, y=[0, 1, 0, 1])
    np.savez(tmp_path / "test.npz", x=x[:1] + 7, y=[1])
    found = json.loads(elle("data", "separation", "arrays", "--root", tmp_path, "--json").out)
    assert found["train-train"] == {"distance": "25/255", "eps": "12.5/255", "images": [1, 2], "classes": ["1", "0"]}
    assert found["test-train"]["distance"] == "7/255"
    outcome = elle("data", "separation", "arrays", "--root", tmp_path)
    assert [word for word in ("25/255", "12.5/255", "1 (1) and 2 (0)") if word not in outcome.out] == []


def test_get_goes_to_the_root_and_says_what_is_there(elle, tmp_path, monkeypatch):
    def pretend(name, root, report):
        report("file", 1, 2)
        report("file", 2, 2)
        return [root / "file"]

    monkeypatch.setattr(download, "get", pretend)
    assert elle("data", "get", "cifar10").out == "cifar10 is in data: 1 files, checked\n"
    monkeypatch.setenv("ELLE_DATA", str(tmp_path / "variable"))
    printed = json.loads(elle("data", "get", "cifar10", "--json").out)
    assert printed["files"] == [str(tmp_path / "variable" / "file")]


@pytest.mark.parametrize("command", ["check", "separation", "get"])
def test_mistakes_are_one_line_with_code_two(elle, command):
    outcome = elle("data", command, "cifar-10")
    assert outcome.code == 2
    assert outcome.err.startswith("elle: no ")
    assert "did you mean 'cifar10'?" in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_set_that_comes_with_the_installation_is_not_downloaded(elle):
    outcome = elle("data", "get", "digits")
    assert (outcome.code, outcome.err) == (
        2,
        "elle: digits comes with the installation: there is nothing to download\n",
    )


@pytest.mark.parametrize("name", ["imagenet", "folder", "arrays"])
def test_a_set_without_an_address_is_said_to_have_none(elle, name):
    outcome = elle("data", "get", name)
    assert outcome.code == 2
    assert outcome.err.startswith(f"elle: {name} has no public address")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("command", [("train", "data=folder"), ("data", "check", "folder")])
def test_a_folder_that_nobody_named_is_said_to_be_the_default(elle, command):
    outcome = elle(*command)
    assert outcome.code == 2
    assert outcome.err.startswith("elle: data: no such folder; ")
    assert "ELLE_DATA is not set; ELLE_DATA=FOLDER, root=FOLDER or --root FOLDER names another" in outcome.err


def test_nothing_there_names_the_places_and_where_the_root_came_from(elle):
    outcome = elle("data", "check", "svhn")
    assert outcome.code == 2
    assert [word for word in ("data/svhn", "ELLE_DATA", "elle data get svhn") if word not in outcome.err] == []


def test_class_names_travel_into_the_run_and_its_results(elle, tmp_path):
    root = tmp_path / "mine"
    root.mkdir()
    for split, seed in (("train", 0), ("test", 1)):
        x, y = small_images(40, (8, 8), seed)
        np.savez(root / f"{split}.npz", x=x, y=y % 3)
    (root / "classes.txt").write_text("red panda\nfox\nÜ-boat\n", encoding="utf-8")
    words = ["data=arrays", f"root={root}", "model=small-cnn", "method=fgsm", "epochs=1", "batch=20", "final=clean"]
    outcome = elle("train", *words, "eval_every=0", "device=cpu", f"out={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.err
    names = ["red panda", "fox", "Ü-boat"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["classes"] == names
    assert load_run(tmp_path / "run").classes == tuple(names)
