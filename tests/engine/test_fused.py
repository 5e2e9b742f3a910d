"""Methods whose small arithmetic is done by kernels; on a CPU it is torch's all the same."""

import pytest
import torch

from elle.engine.fused import by_kernels
from elle.methods import METHODS, configured
from tests.engine.steps import make_step, parameters, take


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_otherwise_what_it_was(name):
    method = configured(name)
    fused = by_kernels(method)
    assert vars(fused).keys() == vars(method).keys()
    for part, value in vars(method).items():
        same = vars(fused)[part]
        assert isinstance(same, type(value))
        assert same == value or vars(same) == vars(value)


@pytest.mark.parametrize("name", ["fgsm", "n-fgsm", "zerograd", "multigrad", "fw-at", "trades-single", "elle-a"])
def test_where_kernels_do_not_apply_a_step_is_the_same(name, monkeypatch):
    trained = []
    for fuses in (False, True):
        step = make_step(name)
        monkeypatch.setattr(step, "_may_fuse", lambda fuses=fuses: fuses)
        take(step, 0, 1)
        trained.append([*parameters(step), step.records.nan_to_num()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
