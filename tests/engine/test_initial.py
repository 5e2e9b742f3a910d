"""A training that starts from given weights: a run's, or anyone's, with a new last layer for other classes."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from elle.config import load_config
from elle.data.registry import load_dataset
from elle.engine.checkpoint import checkpoints
from elle.engine.initial import _last_layers
from elle.engine.loop import train
from elle.engine.parts import build_parts
from elle.engine.ranks import ALONE
from elle.engine.trained import load_network
from elle.engine.watcher import Watcher
from elle.errors import InputError, Interrupted
from elle.experiments.recipe import run_id
from elle.models.registry import build_model
from tests.conftest import QUICK, assert_one_line

CPU = torch.device("cpu")


def begun(*words):
    """The network of a run before its first step, and what is said of its weights."""
    parts = build_parts(load_config([*QUICK, *words]).resolved(), CPU, "fp32", ALONE)
    parts.step.data.close()
    return parts.step.model, parts.begun


def assert_same(state, tensors, but=()):
    assert state.keys() == tensors.keys()
    for name in state:
        assert torch.equal(state[name], tensors[name]) == (name not in but), name


def in_other_classes(folder, classes):
    """The digits as arrays, with fewer classes."""
    images = load_dataset("digits", None)
    folder.mkdir()
    for split, part in (("train", images.train), ("test", images.test)):
        kept = part.y < classes
        np.savez(folder / f"{split}.npz", x=np.moveaxis(part.x[kept], 1, -1), y=part.y[kept])
    return ["data=arrays", f"root={folder}", "model=small-cnn", "lr=0.05", "batch=32"]


def test_a_run_starts_with_the_weights_of_another(finished_run):
    network, said = begun(f"init={finished_run}", "seed=5")
    assert_same(network.state_dict(), load_file(finished_run / "model.safetensors"))
    assert said == f"starting from {finished_run}/model.safetensors"
    assert network.training


def test_what_was_learned_is_there_after_a_tiny_first_step(finished_run, settings):
    result = train(settings("max_steps=1", "lr=1e-6", f"init={finished_run}"))
    theirs = json.loads((finished_run / "result.json").read_text())
    assert result["test"]["clean"]["accuracy"] == pytest.approx(theirs["test"]["clean"]["accuracy"], abs=0.05)
    anew = train(settings("max_steps=1", "lr=1e-6", out="other"))
    assert anew["test"]["clean"]["accuracy"] < result["test"]["clean"]["accuracy"] - 0.1


def test_a_last_layer_for_other_classes_starts_anew_and_is_told(finished_run, tmp_path, settings):
    words = in_other_classes(tmp_path / "seven", 7)
    network, said = begun(*words, f"init={finished_run}")
    state, theirs = network.state_dict(), load_file(finished_run / "model.safetensors")
    last = [name for name, value in state.items() if value.shape != theirs[name].shape]
    assert [state[name].shape[0] for name in last] == [7, 7]
    random, _ = begun(*words)
    assert_same(state, theirs | {name: random.state_dict()[name] for name in last})
    assert said.endswith(f", with a new {last[0]} and {last[1]} for 7 classes")
    heard = []
    watcher = Watcher(said=heard.append)
    train(settings(*words, "max_steps=1", f"init={finished_run}"), watcher=watcher)
    assert said in heard


def test_a_file_without_a_last_layer_gets_one(tmp_path):
    state = build_model("resnet18", (1, 8, 8), 10).state_dict()
    torch.save({name: value for name, value in state.items() if not name.startswith("fc.")}, tmp_path / "body.pt")
    network, said = begun("model=resnet18", f"init={tmp_path / 'body.pt'}")
    assert_same(network.state_dict(), state, but=("fc.weight", "fc.bias"))
    assert "with a new fc.weight and fc.bias for 10 classes" in said


@pytest.mark.parametrize("prefix", ["", "module."])
def test_anyone_s_weights_are_put_behind_the_images_own_statistics(tmp_path, prefix):
    state = build_model("small-cnn", (1, 8, 8), 10).state_dict()
    torch.save({"state_dict": {prefix + name: value for name, value in state.items()}}, tmp_path / "weights.pth")
    network, _ = begun("normalise=dataset", f"init={tmp_path / 'weights.pth'}")
    assert_same(network.network.state_dict(), state)
    plain, _ = begun("normalise=dataset")
    assert torch.equal(network.normalise.mean, plain.normalise.mean)


def test_weights_behind_statistics_of_their_own_keep_them(tmp_path):
    model = build_model("small-cnn", (1, 8, 8), 10, normalise=([0.3], [0.7]))
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    network, _ = begun("normalise=dataset", f"init={tmp_path / 'weights.safetensors'}")
    assert_same(network.state_dict(), model.state_dict())
    with pytest.raises(InputError, match=r"is a network with normalise=dataset; give normalise=dataset"):
        begun(f"init={tmp_path / 'weights.safetensors'}")


@pytest.mark.parametrize("word", ["normalise=dataset", "activation=silu"])
def test_a_run_s_weights_are_refused_by_a_network_that_computes_otherwise(finished_run, word):
    key = word.partition("=")[0]
    own = {"normalise": "none", "activation": "relu"}[key]
    with pytest.raises(InputError, match=rf"is a network with {key}={own}; give {key}={own}"):
        begun(f"init={finished_run}", word)


def test_a_checkpoint_gives_the_weights_that_its_run_would_have_ended_with(settings, tmp_path):
    train(settings("epochs=2", "average=0.9"))
    last = checkpoints(tmp_path / "run")[-1]
    network, _ = begun(f"init={last}", "average=0.9")
    assert_same(network.state_dict(), dict(load_network(last)[0].state_dict()))
    assert_same(network.state_dict(), load_file(tmp_path / "run" / "model.safetensors"))


def test_the_mean_of_the_weights_starts_from_them_too(finished_run):
    parts = build_parts(load_config([*QUICK, f"init={finished_run}", "average=0.9"]).resolved(), CPU, "fp32", ALONE)
    parts.step.data.close()
    assert_same(parts.step.average.tensors, load_file(finished_run / "model.safetensors"))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("init=missing.pt", "init=missing.pt does not exist"),
        ("init=.", "init=. has no model.safetensors, as a finished run has; give a file in it"),
        ("init=text.pt", "init=text.pt is neither safetensors nor a plain state_dict"),
        ("init=other.safetensors", "init=other.safetensors does not fit the network small-cnn"),
    ],
)
def test_weights_that_cannot_be_used_are_told_in_one_line_and_leave_no_folder(elle, tmp_path, monkeypatch, word, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_text("hello")
    save_file(torch.nn.Conv2d(1, 2, 3).state_dict(), tmp_path / "other.safetensors")
    outcome = elle("train", *QUICK, word, "--out", "run")
    assert_one_line(outcome, 2)
    assert said in outcome.err
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_equals_an_uninterrupted_one_though_the_file_is_gone(finished_run, settings, tmp_path):
    weights = shutil.copy(finished_run / "model.safetensors", tmp_path / "weights.safetensors")
    words = ["epochs=2", f"init={weights}"]
    train(settings(*words, out="whole"))

    def stop(step):
        if step == 20:
            raise Interrupted("stopped by the test")

    with pytest.raises(Interrupted):
        train(settings(*words), watcher=Watcher(stepped=stop))
    weights.unlink()
    train(settings(*words), resume=True)
    assert_same(load_file(tmp_path / "run" / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors"))
    with pytest.raises(InputError, match="does not exist"):  # nothing there to be resumed
        train(settings(*words, out="new"), resume=True)


def test_where_it_starts_is_a_part_of_a_run_s_identity(settings, finished_run):
    assert run_id(settings(f"init={finished_run}")) != run_id(settings())
    assert settings(f"init={finished_run}").differences(settings()) == ["init"]


def test_a_network_that_is_one_linear_layer_gets_a_new_one():
    tensors = {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
    assert _last_layers(torch.nn.Linear(2, 5), 5, tensors) == ["weight", "bias"]
    assert _last_layers(torch.nn.Linear(2, 3), 3, tensors) == []
    assert _last_layers(torch.nn.Linear(4, 5), 5, tensors) == []  # for other inputs: it does not fit
