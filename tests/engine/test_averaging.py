"""A running mean of the weights: what it is, that it is what is evaluated and kept, and that it disturbs nothing."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elle.engine import checkpoint
from elle.engine.averaging import Average
from elle.engine.loop import train
from elle.engine.trained import load_network
from tests.engine.interrupting import PulledPlugError, assert_same_run, crash_after_step, records
from tests.engine.steps import make_step, take

WORDS = ("method=elle-a", "epochs=2", "average=0.9", "eval_every=1", "track=clean,pgd-2")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_it_is_the_mean_it_says():
    model = network()
    average = Average(model, 0.7)
    mean, tracked = model[0].weight.detach().clone(), model[1].num_batches_tracked
    for done in range(40):
        with torch.no_grad():
            model[0].weight.normal_()
            tracked += 1
        average.update(torch.tensor(done))
        decay = min(0.7, (1 + done) / (10 + done))
        mean = decay * mean + (1 - decay) * model[0].weight.detach()
    torch.testing.assert_close(average.tensors["0.weight"], mean)
    assert int(average.tensors["1.num_batches_tracked"]) == 40


def test_a_step_tells_it_how_many_came_before():
    step = make_step(average=0.7)
    mean = step.model[0].weight.detach().clone()
    for done in range(6):
        take(step, done)
        decay = min(0.7, (1 + done) / (10 + done))
        mean = decay * mean + (1 - decay) * step.model[0].weight.detach()
    torch.testing.assert_close(step.average.tensors["0.weight"], mean)


def test_a_layer_more_costs_no_launch_more():
    """On a GPU each of BatchNorm's counts was copied by a launch of its own, at every step."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += 1
            return function(*args, **(kwargs or {}))

    counts = []
    for layers in (1, 5):
        average, before = Average(nn.Sequential(*map(nn.BatchNorm1d, [4] * layers)), 0.9), torch.tensor(3)
        with Counting() as counting:
            average.update(before)
        counts.append(counting.count - layers * 5)  # state_dict detaches each
    assert counts[0] == counts[1]


def test_it_is_shown_in_the_network_s_own_memory_and_taken_away_again():
    model = network()
    average = Average(model, 0.9)
    with torch.no_grad():
        model[0].weight.add_(1)
    own, place = model[0].weight.detach().clone(), model[0].weight.data_ptr()
    with average.shown():
        assert torch.equal(model[0].weight, average.tensors["0.weight"])
        assert not torch.equal(model[0].weight, own)
        assert model[0].weight.data_ptr() == place
    assert torch.equal(model[0].weight, own)


def test_it_is_what_a_run_keeps_and_does_not_change_the_training(settings, tmp_path):
    train(settings(*WORDS))
    train(settings(*WORDS, "average=0", out="plain"))
    run, plain = tmp_path / "run", tmp_path / "plain"
    last = checkpoint.checkpoints(run)[-1]
    tensors, _ = checkpoint.load_checkpoint(last)
    kept = checkpoint.read_tensors(run / "model.safetensors")[0]
    for name, value in kept.items():
        assert torch.equal(value, tensors[f"average.{name}"])
    torch.testing.assert_close(dict(load_network(last)[0].state_dict()), kept, rtol=0, atol=0)
    raw = checkpoint.read_tensors(plain / "model.safetensors")[0]
    for name, value in raw.items():
        assert torch.equal(value, tensors[f"model.{name}"])
        assert not value.is_floating_point() or not torch.equal(value, kept[name])
    losses = [[one["loss"] for one in records(directory)] for directory in (run, plain)]
    assert losses[0] == losses[1]
    assert [one["tracked_error"] for one in records(run)] != [one["tracked_error"] for one in records(plain)]


def test_it_resumes(settings, tmp_path):
    train(settings(*WORDS, out="whole"))
    with pytest.raises(PulledPlugError):
        train(settings(*WORDS), watcher=crash_after_step(25))
    train(settings(*WORDS), resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
