"""Weights that were not written here are read whatever wrapped the network, and never by running what is in a file."""

import pytest
import torch
from safetensors.torch import save_file

from elle.engine.weights import read_weights
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


WEIGHTS = {"fc.weight": torch.ones(2), "fc.bias": torch.ones(1)}
AVERAGED = {"n_averaged": torch.tensor(3)} | {f"module.{name}": value for name, value in WEIGHTS.items()}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"model": WEIGHTS, "model_ema": WEIGHTS}, "model, model_ema"),
        ({"epoch": 1, "state_dict_ema": WEIGHTS, "state_dict": WEIGHTS}, "state_dict, state_dict_ema"),
        ({"model": WEIGHTS, "state_dict": WEIGHTS}, "state_dict, model"),
        ({"model": WEIGHTS, "swa": AVERAGED}, "model, swa"),
        ({"model": WEIGHTS, "ema": {"decay": 0.999, "module": WEIGHTS}}, "model, ema"),
    ],
)
def test_a_file_that_holds_a_network_s_weights_twice_is_refused(tmp_path, content, names):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(InputError, match=rf"of the same network several times \({names}\); save those you mean"):
        read_weights(tmp_path / "weights.pt")


def test_a_network_s_weights_beside_its_optimiser_s_state_are_read(tmp_path):
    layer = torch.nn.Linear(2, 1)
    optimiser = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimiser.step()
    content = {"model": layer.state_dict(), "optimizer": optimiser.state_dict(), "epoch": 3, "args": {"lr": 0.1}}
    torch.save(content, tmp_path / "weights.pt")
    assert torch.equal(read_weights(tmp_path / "weights.pt")["weight"], layer.weight)


@pytest.mark.parametrize("content", [b"", b"hello", b"<html>", b"\x80\x02h\x01.", bytes(range(256))])
def test_a_file_of_anything_else_is_refused(tmp_path, content):
    file = tmp_path / "weights.pt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"save it with torch.save\(model.state_dict\(\), FILE\)"):
        read_weights(file)
