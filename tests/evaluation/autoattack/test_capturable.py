"""Steps hold nothing that a CUDA graph cannot: nothing the host reads, no shape and no constant from data."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elle.evaluation.autoattack import ORDER, Budget
from elle.evaluation.autoattack.oracle import Oracle, constant
from elle.evaluation.autoattack.registry import make_attack

FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "is_nonzero", "equal.default")


class _Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "aten.index" in name and any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1] or ()):
            name += " by a mask"
        self.used.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("name", ORDER)
def test_a_step_can_be_captured(digits_net, name, norm):
    model, x, y = digits_net
    with constant(model), torch.no_grad():
        oracle = Oracle(model, x.device, "fp32")
        attack = make_attack(name, oracle, x, y, 0.1, norm, 10, 0, Budget(steps=8, queries=8))
        rows = attack.start(torch.arange(6), torch.zeros(6, dtype=torch.int64))
        places = {field: value.data_ptr() for field, value in vars(rows).items()}
        for _ in range(4):
            with _Recorded() as recorded:
                attack.step(rows)
    assert any("convolution" in used for used in recorded.used)
    assert not [used for used in recorded.used if "by a mask" in used or any(word in used for word in FORBIDDEN)]
    assert places == {field: value.data_ptr() for field, value in vars(rows).items()}
