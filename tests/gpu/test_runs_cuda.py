"""Whole runs on a GPU: checkpoints that are written while steps run, and phases, each with a graph of its own."""

import signal

import numpy as np
import pytest
import torch

from elle.config import load_config
from elle.engine import checkpoint
from elle.engine.loop import train
from elle.engine.runtime import GraphedStep
from elle.engine.watcher import Watcher
from elle.errors import WorkError
from tests.gpu.test_cuda import DEVICE, images, losses, make_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_a_checkpoint_is_of_when_it_was_taken_whatever_steps_run_before_it_is_written(tmp_path):
    step = make_step("elle-a", "fp16", average=0.5)
    run = GraphedStep(step, 64, DEVICE)
    losses(step, run, 8)
    write = checkpoint.take_checkpoint(tmp_path, 8, step.state(), {})
    then = {name: value.detach().cpu().clone() for name, value in step.state().items()}
    losses(step, run, 8)
    saved, _ = checkpoint.load_checkpoint(write())
    assert saved.keys() == then.keys()
    # Rows of steps that are still to come are NaN in both.
    assert [name for name in then if not torch.equal(saved[name].nan_to_num(), then[name].nan_to_num())] == []
    assert int(step.done) == 16


def test_a_run_in_phases_that_is_cut_goes_on(tmp_path):
    for name, count in (("train", 1024), ("test", 64)):
        data = images(count)
        np.savez(tmp_path / f"{name}.npz", x=data.x.transpose(0, 2, 3, 1), y=data.y)
    words = [
        *("data=arrays", f"root={tmp_path}", "model=preact-resnet18", "method=n-fgsm+elle-a", "eps=8/255", "crop=4"),
        *("phases=2:16:128,2:32:64", "validation=0", "eval_every=0", "probe_every=0", "final=clean", "average=0.9"),
        *("method.loss.smoothing=0.1", "method.weight.every=2", f"out={tmp_path / 'run'}"),
    ]

    def cut(step):
        if step == 30:  # in the second phase, whose epochs have 16 steps
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(WorkError, match="stopped by SIGTERM at step 30 of 48; everything is saved"):
        train(load_config(words), watcher=Watcher(stepped=cut))
    result = train(load_config(words), resume=True)
    assert result["steps"] == 48
    assert result["test"]["clean"]["total"] == 64
    weights, _ = checkpoint.read_tensors(tmp_path / "run/model.safetensors")
    assert all(bool(value.isfinite().all()) for value in weights.values())
