"""Micro-batches leave the gradient, the weight and the records of the whole batch, up to BatchNorm."""

import pytest
import torch

from elle.engine.step import RECORDED
from elle.methods import METHODS

from .test_step import make_step, take

# NuAT's nuclear norm is of the whole batch's logits: it does not divide into parts.
DIVISIBLE = [name for name in METHODS if name != "nuat"]


@pytest.mark.parametrize("method", DIVISIBLE)
def test_micro_batches_train_as_the_whole_batch(method):
    whole, parts = (make_step(method, weight=5.0 if "elle" in method else None, crop=1) for _ in range(2))
    parts.accumulate = 4
    for step in (whole, parts):
        torch.manual_seed(1)
        take(step, *range(5))
    torch.testing.assert_close(parts.records[:5], whole.records[:5], rtol=1e-4, atol=1e-5, equal_nan=True)
    for mine, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-5)


def test_the_weight_of_the_rule_acts_on_the_step_that_raised_it():
    step = make_step("elle-a", weight=5.0)
    step.accumulate = 2
    step.rule["count"].fill_(5)  # any error lies above a history of zeros
    take(step, 0)
    assert step.records[0, RECORDED.index("weight")] == 5
    assert float(step.rule["count"]) == 6  # one observation a step, not one a micro-batch
