"""Ranks on GPUs: the message of a step is captured with it, and two GPUs train as one."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from elle.engine.ranks import Ranks
from elle.engine.runtime import GraphedStep

from .test_cuda import DEVICE, losses, make_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def group(tmp_path):
    """A job of one process, over NCCL."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting-point", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_captured_step_holds_its_messages(group, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    rows = []
    for captured in (False, True):
        step = make_step("elle-a", "fp32", crop=0)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        # The first of two whose partner adds nothing: every message is sent, and halves what it carries.
        step.ranks = Ranks(0, 2)
        torch.manual_seed(1)
        rows.append(losses(step, GraphedStep(step, 64, DEVICE) if captured else step, 8))
    torch.testing.assert_close(rows[1][:, :3], rows[0][:, :3], rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one(tmp_path):
    found = []
    for devices in (1, 2):
        words = ["data=mnist5k", "method=elle-a", "epochs=2", "batch=128", "sync_bn=true", "precision=fp32"]
        out = tmp_path / str(devices)
        command = [sys.executable, "-m", "elle", "train", *words, f"devices={devices}", f"out={out}", "device=cuda"]
        subprocess.run(command, check=True, timeout=600)
        found.append(json.loads((out / "steps.jsonl").read_text().splitlines()[0])["loss"][:10])
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-3, atol=1e-3)
