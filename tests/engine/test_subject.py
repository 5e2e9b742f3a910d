"""Weights that were not written here are read whatever wrapped the network, and never by running what is in a file."""

import pytest
import torch
from safetensors.torch import save_file

from elle.engine.subject import read_weights
from elle.errors import InputError


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
