"""Weights that were not written here are read whatever wrapped the network, and never by running what is in a file."""

import pytest
import torch
from safetensors.torch import save_file

from elle.config import load_config
from elle.engine.loop import train
from elle.engine.subject import Source, load_subject, read_weights
from elle.errors import InputError
from tests.data.photographs import write_folder


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_what_wrappers_put_before_each_name_is_taken_off(tmp_path, ending, prefix):
    file, tensors = (
        tmp_path / f"weights.{ending}",
        {f"{prefix}fc.weight": torch.ones(2), f"{prefix}fc.bias": torch.ones(1)},
    )
    torch.save(tensors, file) if ending == "pt" else save_file(tensors, file)
    assert set(read_weights(file)) == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("content", [b"", b"hello", b"<html>", b"\x80\x02h\x01.", bytes(range(256))])
def test_a_file_of_anything_else_is_refused(tmp_path, content):
    file = tmp_path / "weights.pt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"save it with torch.save\(model.state_dict\(\), FILE\)"):
        read_weights(file)


def test_image_files_are_shown_to_a_network_as_large_as_in_its_training(tmp_path, finished_run):
    root, run = str(write_folder(tmp_path / "photos")), tmp_path / "run"
    words = ["data=folder", f"root={root}", "model=preact-resnet18", "image_size=8", "max_steps=1", f"out={run}"]
    train(load_config([*words, "device=cpu", "eval_every=0", "probe_every=0", "final=clean"]))
    weights, cpu = str(run / "model.safetensors"), torch.device("cpu")
    foreign = load_subject(Source(model="preact-resnet18", weights=weights, data="folder", root=root), cpu)
    assert foreign.test.x.shape[1:] == (3, 8, 8)
    with pytest.raises(InputError, match="--data folder has images 3x8x8 in 2 classes, and the network .* 1x8x8 in 10"):
        load_subject(Source(str(finished_run), data="folder", root=root), cpu)
    with pytest.raises(InputError, match="--data digits has images 1x8x8 in 10 classes, and the network .* 3x8x8 in 2"):
        load_subject(Source(str(run), data="digits"), cpu)
