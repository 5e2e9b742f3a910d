"""A finished run read back: the same network, or one line that says what is wrong with the folder."""

import json

import numpy as np
import pytest
import torch

import elle
from elle.data.registry import load_dataset
from elle.engine import checkpoint
from elle.engine.loop import Run, train
from elle.engine.trained import kept_network, load, load_run
from elle.engine.watcher import Watcher
from elle.errors import InputError, WorkError


def rewrite(run, change_tensors=lambda tensors: tensors, **header_changes):
    path = run / "model.safetensors"
    tensors, header = checkpoint.read_tensors(path)
    checkpoint.write_tensors(path, change_tensors(tensors), header | header_changes)
    return path


def test_a_run_read_back_gives_the_logits_it_ended_with(settings, tmp_path):
    run = Run(settings("method=elle-a").resolved(), tmp_path / "run", Watcher())
    run.directory.mkdir()
    (run.directory / "config.toml").write_text(run.config.to_toml())
    run.finish()
    trained = load_run(run.directory)
    x, _ = trained.test_images(limit=20)
    with torch.no_grad():
        expected = run.step.model.eval()(x)
        assert torch.equal(trained.model(x), expected)
        assert torch.equal(load(str(run.directory))(x), expected)
        assert torch.equal(elle.load(run.directory)(x), expected)


def test_a_run_read_back_has_its_activation_and_its_normalisation(settings, tmp_path):
    train(settings("activation=silu", "normalise=dataset"))
    model = load(tmp_path / "run")
    train_x = load_dataset("digits").train.x / 255
    assert model.normalise.mean.item() == pytest.approx(train_x.mean())
    assert model.normalise.std.item() == pytest.approx(train_x.std())
    assert isinstance(model.network.features[2], torch.nn.SiLU)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    x, y = load_run(tmp_path / "run").test_images()
    assert elle.evaluate(model, x, y, "clean")["clean"]["correct"] == result["test"]["clean"]["correct"]


def test_a_run_of_before_these_settings_is_read_back(run_copy):
    path = run_copy / "model.safetensors"
    tensors, header = checkpoint.read_tensors(path)
    former = {key: value for key, value in header.items() if key not in ("activation", "normalise")}
    assert former.keys() == header.keys() - {"activation", "normalise"} != header.keys()
    checkpoint.write_tensors(path, tensors, former)
    lines = (run_copy / "config.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("activation", "normalise"))]
    assert len(kept) == len(lines) - 2
    (run_copy / "config.toml").write_text("\n".join(kept) + "\n")
    trained = load_run(run_copy)
    assert trained.model.state_dict().keys() == tensors.keys()
    assert (trained.config.activation, trained.config.normalise) == ("relu", "none")


def test_an_activation_that_does_not_exist_is_refused(run_copy):
    rewrite(run_copy, activation="tanh")
    with pytest.raises(InputError, match="activation 'tanh' does not exist"):
        load_run(run_copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", None),
        ("model", ["small-cnn"]),
        ("activation", []),
        ("shape", None),
        ("shape", [8, 8]),
        ("shape", [1, 8, -8]),
        ("shape", [1, 8.0, 8]),
        ("shape", [1, 8, 10**30]),
        ("classes", None),
        ("classes", []),
        ("classes", [0, 1]),
    ],
)
def test_a_header_that_does_not_say_what_the_network_is_is_named_in_one_line(run_copy, key, value):
    path = rewrite(run_copy, **{key: value})
    with pytest.raises(InputError, match=f"model.safetensors is damaged: its header has no {key} "):
        load(path)
    tensors, header = checkpoint.read_tensors(path)
    del header[key]
    checkpoint.write_tensors(path, tensors, header)
    if key != "activation":  # runs of former versions do not name it
        with pytest.raises(InputError, match=f"its header has no {key} "):
            load_run(run_copy)


@pytest.mark.parametrize("network", [None, [], "small-cnn"])
def test_a_checkpoint_whose_network_is_no_description_is_refused(run_copy, network):
    path = rewrite(run_copy, kind="checkpoint", network=network)
    assert kept_network(path) is None
    with pytest.raises(InputError, match="is not a model that `elle train` wrote"):
        load(path)


def test_a_run_read_back_is_in_eval_mode_and_knows_its_settings(finished_run):
    trained = load_run(finished_run)
    assert not any(module.training for module in trained.model.modules())
    assert (trained.config.method, trained.config.eps, trained.config.epochs) == ("fgsm", 0.3, 2)
    assert trained.classes == tuple("0123456789")


def test_a_run_read_back_reaches_the_accuracy_of_its_result(finished_run):
    trained = load_run(finished_run)
    x, y = trained.test_images()
    accuracy = elle.evaluate(trained.model, x, y, "clean")["clean"]
    expected = json.loads((finished_run / "result.json").read_text())["test"]["clean"]
    assert (accuracy["correct"], accuracy["total"]) == (expected["correct"], expected["total"])


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (50, 50), (None, 500), (10_000, 500)])
def test_a_limit_takes_the_first_test_images(finished_run, limit, count):
    x, y = load_run(finished_run).test_images(limit=limit)
    assert (tuple(x.shape), tuple(y.shape)) == ((count, 1, 8, 8), (count,))
    assert 0 <= x.min() <= x.max() <= 1


@pytest.mark.parametrize("command", [("evaluate", "--attack", "clean"), ("metrics", "--metric", "error")])
def test_arrays_that_have_gained_a_class_since_are_refused(elle, settings, tmp_path, command):
    root = tmp_path / "arrays"
    root.mkdir()

    def write(classes):
        x, y = np.zeros((12, 8, 8, 1), np.uint8), np.arange(12) % classes
        for split in ("train", "test"):
            np.savez(root / f"{split}.npz", x=x, y=y)

    write(3)
    train(settings("data=arrays", f"root={root}", "model=small-cnn", "max_steps=1", "validation=0", "batch=4"))
    write(4)
    outcome = elle(*command, tmp_path / "run")
    assert outcome.code == 2
    assert "model.safetensors was trained on 3 classes, and arrays has 4; give its own data" in outcome.err


def test_an_unfinished_run_is_refused_with_the_way_to_finish_it(settings, tmp_path):
    def crash(step):
        raise WorkError("enough")

    with pytest.raises(WorkError):
        train(settings(), watcher=Watcher(stepped=crash))
    with pytest.raises(InputError, match=r"has no model\.safetensors: the run has not finished; .*--resume"):
        load_run(tmp_path / "run")


def test_a_folder_that_is_no_run_is_not_taken_for_an_unfinished_one(tmp_path):
    with pytest.raises(InputError, match="is not a run directory: it has no config.toml; `elle train` writes one"):
        load_run(tmp_path)
    (tmp_path / "one-run").mkdir()
    (tmp_path / "one-run" / "config.toml").touch()
    with pytest.raises(InputError, match=r"no config\.toml; give a run in it, such as .*one-run"):
        load_run(tmp_path)


@pytest.mark.parametrize(("name", "what"), [("nowhere", "does not exist"), ("a-file", "is not a folder")])
def test_what_is_no_folder_is_refused_by_name(tmp_path, name, what):
    (tmp_path / "a-file").touch()
    with pytest.raises(InputError, match=f"{name} {what}; give the run directory"):
        load_run(tmp_path / name)


def test_a_run_without_its_configuration_is_refused_by_name(run_copy):
    (run_copy / "config.toml").unlink()
    with pytest.raises(InputError, match="has no config.toml"):
        load_run(run_copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {name: value for name, value in tensors.items() if "classifier" not in name},
        lambda tensors: tensors | {"extra": torch.zeros(1)},
        lambda tensors: tensors | {"classifier.1.weight": torch.zeros(3, 3)},
    ],
    ids=["missing", "extra", "another shape"],
)
def test_weights_that_do_not_fit_the_network_are_refused_by_name(run_copy, change):
    path = rewrite(run_copy, change)
    with pytest.raises(InputError, match=rf"{path} does not fit the network small-cnn: \S"):
        load_run(run_copy)


def test_weights_of_another_network_are_refused(run_copy):
    rewrite(run_copy, model="preact-resnet18")
    with pytest.raises(InputError, match="does not fit the network preact-resnet18"):
        load_run(run_copy)


def test_a_network_that_no_longer_exists_is_refused_by_name(run_copy):
    rewrite(run_copy, model="gone:build")
    with pytest.raises(InputError, match="model=gone:build could not be built"):
        load_run(run_copy)


def test_a_checkpoint_in_place_of_the_weights_is_refused(run_copy):
    checkpoint.checkpoints(run_copy)[-1].rename(run_copy / "model.safetensors")
    with pytest.raises(InputError, match="is not a model that `elle train` wrote"):
        load_run(run_copy)


def test_truncated_weights_are_refused_by_name(run_copy):
    path = run_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="model.safetensors is truncated"):
        load_run(run_copy)
