"""A run that goes on: with what it was told when it was resumed, and on the images it was trained on."""

import io
import json
import os
import shutil
from pathlib import Path

import numpy
import pytest

from elle.cli import main
from elle.cli.watch import watch
from elle.config import load_config
from elle.data.registry import load_dataset
from elle.engine.loop import train
from elle.engine.run_files import run_directory
from elle.errors import WorkError
from elle.experiments.rundir import open_run

from ..data.photographs import write_folder, write_photographs


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Ten photographs each of two classes, without a test split."""
    root = tmp_path_factory.mktemp("set") / "photos"
    for seed, name in enumerate(("cat", "dog")):
        write_photographs(root / name, 10, seed)
    return root


@pytest.fixture(scope="module")
def run_on_photographs(photographs, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "run"
    words = ["data=folder", f"root={photographs}", "image_size=8", "model=small-cnn", "epochs=1", "method=fgsm"]
    train(load_config([*words, "validation=0", "track=clean", "final=clean", "device=cpu", f"out={run}"]))
    return run


@pytest.fixture
def photos(photographs, run_on_photographs, tmp_path):
    """A copy of the photographs, to change, where the copy of the run looks for them."""
    root = shutil.copytree(photographs, tmp_path / "photos")
    run = shutil.copytree(run_on_photographs, tmp_path / "run")
    file = run / "config.toml"
    file.write_text(file.read_text().replace(str(photographs), str(root)))
    return root


def test_what_a_resumed_run_is_told_holds_for_the_next_resume(elle, run_copy):
    assert elle("train", "--out", run_copy, "--resume", "probe_every=3", "on_collapse=rollback").code == 0
    config = load_config([], run_copy / "config.toml")
    assert (config.probe_every, config.on_collapse) == (3, "rollback")


def test_a_run_continued_elsewhere_is_a_whole_run(elle, run_copy, tmp_path):
    checkpoint = run_copy / "checkpoints" / "step-00000018.safetensors"
    settings = ["--config", run_copy / "config.toml", "--out", tmp_path / "elsewhere"]
    assert elle("train", "--from", checkpoint, *settings, "max_steps=19").code == 0
    assert open_run(tmp_path / "elsewhere").config.max_steps == 19


def test_the_run_directory_may_be_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_directory(load_config(["out=~/runs/mine"])) == tmp_path / "runs" / "mine"


def test_a_finished_run_that_goes_on_is_not_called_finished(run_copy, capsys):
    with open(run_copy / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": "resume", "time": 0, "step": 18}) + "\n")
    watch([run_copy], once=True)
    assert "finished" not in capsys.readouterr().out


@pytest.mark.parametrize("change", ["one more", "one less"])
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["train", "--resume", "--out"], "belongs to a run on 18 training and 2 test images, and there are"),
        (["evaluate", "--attack", "clean"], "the folder held 20 images"),
        (["metrics", "--metric", "error"], "the folder held 20 images"),
    ],
)
def test_a_folder_that_has_changed_is_refused(elle, photos, change, command, reason):
    if change == "one more":
        shutil.copy(photos / "cat" / "000.jpg", photos / "cat" / "new.jpg")
    else:
        (photos / "cat" / "000.jpg").unlink()
    outcome = elle(*command, photos.parent / "run")
    assert outcome.code == 2
    assert reason in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["train", "--resume", "--out"], "belongs to a run on other files"),
        (["evaluate", "--attack", "clean"], "the folder holds other files than when"),
        (["metrics", "--metric", "error"], "the folder holds other files than when"),
    ],
)
def test_a_folder_of_as_many_images_that_would_be_split_otherwise_is_refused(elle, photos, command, reason):
    (photos / "cat" / "000.jpg").rename(photos / "cat" / "new.jpg")  # now the last: the numbers of all others change
    outcome = elle(*command, photos.parent / "run")
    assert outcome.code == 2
    assert reason in outcome.err
    assert outcome.err.count("\n") == 1


def test_arrays_that_were_split_anew_are_refused(elle, tmp_path):
    """As many images as before, and the test images are others, most of them trained on."""
    rng = numpy.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 8, 8, 1), numpy.uint8), numpy.arange(40) % 4

    def split(order):
        for name, part in (("train", order[:30]), ("test", order[30:])):
            numpy.savez(tmp_path / f"{name}.npz", x=x[part], y=y[part])

    words = ["data=arrays", f"root={tmp_path}", "model=small-cnn", "batch=10", "epochs=2", "final=clean"]
    split(rng.permutation(40))
    assert elle("train", *words, "max_steps=3", "--out", tmp_path / "run").code == 0
    split(rng.permutation(40))
    outcome = elle("train", "--resume", "max_steps=6", "--out", tmp_path / "run")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "belongs to a run on other training images, or on these in another order" in outcome.err


@pytest.mark.parametrize("command", [["train", "--resume", "--out"], ["evaluate", "--attack", "clean"]])
def test_a_folder_with_other_classes_is_refused(elle, photos, command):
    (photos / "dog").rename(photos / "wolf")
    outcome = elle(*command, photos.parent / "run")
    assert outcome.code == 2
    assert "was trained on other classes: 'dog' is missing and 'wolf' is new" in outcome.err


def test_a_folder_that_has_changed_is_refused_however_it_is_written(elle, photos, monkeypatch):
    shutil.copy(photos / "cat" / "000.jpg", photos / "cat" / "new.jpg")
    monkeypatch.chdir(photos.parent)
    for root in (f"{photos}/", f"./{photos.name}"):
        outcome = elle("evaluate", photos.parent / "run", "--root", root, "--attack", "clean")
        assert outcome.code == 2
        assert "the folder held 20 images" in outcome.err


def test_another_folder_of_the_same_classes_is_evaluated_when_it_is_named(elle, photos, tmp_path):
    root = write_folder(tmp_path / "others", train=2, test=3)
    outcome = elle("evaluate", photos.parent / "run", "--root", root, "--attack", "clean", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["attacks"]["clean"]["total"] == 6


def test_images_that_are_not_read_are_counted_in_a_line(elle, photos, tmp_path):
    for name in ("a.gif", "b.GIF", "c.tiff", "._d.gif", "notes.txt"):
        (photos / "cat" / name).touch()
    line = "left out, as only JPEG, PNG and WebP files are read: 2 .gif, 1 .tiff; convert them"
    assert load_dataset("folder", photos).skipped.startswith(line)
    assert line in elle("data", "check", "folder", "--root", photos).out
    assert line in elle("train", "--resume", "--out", tmp_path / "run").out


def test_a_class_may_be_called_like_markup(elle, photos):
    (photos / "cat").rename(photos / "[red]")
    assert "[red]" in elle("data", "check", "folder", "--root", photos).out


def test_a_folder_given_to_a_set_that_has_none_is_refused(elle, photos):
    outcome = elle("train", f"root={photos}", "--out", photos.parent / "new")
    assert outcome.code == 2
    assert "did you mean data=folder" in outcome.err
    assert not (photos.parent / "new").exists()


def test_other_programs_half_files_are_left_alone(elle, run_copy):
    for name in (".download.part", ".model.safetensors.123.part"):
        (run_copy / name).touch()
    assert elle("train", "--resume", "--out", run_copy).code == 0
    assert [path.name for path in run_copy.glob(".*.part")] == [".download.part"]


@pytest.fixture
def undecodable(photos):
    """The run, and one of its class folders, with a name in another encoding than the system's."""
    name = os.fsdecode(b"caf\xe9")
    (photos / "cat").rename(photos / name)
    words = ["--config", photos.parent / "run" / "config.toml", "--out", photos.parent / "named"]
    return photos.parent / "named", words


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_name_that_the_terminal_cannot_show_ends_no_training(undecodable, monkeypatch, encoding):
    _, words = undecodable
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding, errors="strict", write_through=True))
    monkeypatch.setattr("sys.argv", ["elle", "train", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert rb"caf\udce9" in shown.getvalue()


def test_a_network_whose_classes_have_undecodable_names_is_exported(elle, undecodable):
    run, words = undecodable
    assert elle("train", *words).code == 0
    assert elle("export", run).code == 0
    assert r"classes = ['caf\udce9', 'dog']" in (run / "exported" / "model.safetensors.md").read_text()


@pytest.mark.parametrize(("step", "collapsed"), [(18, None), (32, None), (34, 30), (36, 30)])
def test_a_run_continued_from_before_its_collapse_is_not_called_collapsed(run_copy, step, collapsed):
    events = [{"event": "collapse", "step": 34, "since": 30}, {"event": "resume", "step": step}, {"event": "finish"}]
    (run_copy / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = open_run(run_copy)
    assert (run.collapse_step(), run.first_fall()) == (collapsed, collapsed)


@pytest.mark.parametrize(
    "words",
    [["image_size=8", "batch=1"], ["image_size=8", "batch=2", "accumulate=2"], ["phases=1:16:1,1:8:1"]],
)
def test_single_images_that_batch_norm_cannot_measure_are_refused(elle, photographs, tmp_path, words):
    words = ["data=folder", f"root={photographs}", "model=preact-resnet18", "device=cpu", *words]
    outcome = elle("train", *words, "--out", tmp_path / "run")
    assert outcome.code == 2
    assert "takes one image at a time" in outcome.err
    assert not (tmp_path / "run").exists()


def test_what_befell_a_run_that_left_no_checkpoint_is_not_told_of_the_next_one(settings):
    with pytest.raises(WorkError, match="diverged"):
        train(settings("lr=1e9"))
    train(settings())
    events = open_run(Path(settings().out)).events
    assert [event["event"] for event in events] == ["finish"]


def test_a_folder_is_no_checkpoint(elle, run_copy):
    outcome = elle("train", "--from", run_copy, "--out", run_copy)
    assert (outcome.code, "is a folder; name a file in it" in outcome.err) == (2, True)


def test_a_file_of_one_split_is_told_what_a_root_is(elle, tmp_path):
    numpy.savez(tmp_path / "train.npz", x=numpy.zeros((2, 8, 8), numpy.uint8), y=numpy.arange(2))
    outcome = elle("train", "data=arrays", f"root={tmp_path / 'train.npz'}")
    assert (outcome.code, "give train.npz and test.npz with x and y" in outcome.err) == (2, True)
