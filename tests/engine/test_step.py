"""One optimisation step: what it writes down, what it depends on, and that a weight of 0 changes nothing."""

import dataclasses

import pytest
import torch
from torch import nn

from elle.core.losses import CrossEntropy
from elle.engine.step import RECORDED
from elle.methods import METHODS

from .steps import make_step, parameters, small_cnn, take


@pytest.mark.parametrize(("base", "penalised"), [("fgsm", "elle"), ("fgsm", "elle-a"), ("standard", "standard+elle")])
def test_a_weight_of_zero_gives_the_parameters_of_the_base_method(base, penalised):
    # FGSM draws nothing, so the penalty's own draws do not move the two apart.
    steps = [make_step(base), make_step(penalised, weight=0.0)]
    for step in steps:
        take(step, *range(6))
    for mine, theirs in zip(*map(parameters, steps), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)


def test_a_positive_weight_gives_other_parameters():
    steps = [make_step("fgsm"), make_step("elle", weight=100.0)]
    for step in steps:
        take(step, *range(6))
    assert any(not torch.equal(mine, theirs) for mine, theirs in zip(*map(parameters, steps), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_moves_the_parameters_to_finite_values(method):
    step = make_step(method, weight=1.0, network=small_cnn)
    before = parameters(step)
    take(step, 0, 1, 2)
    assert all(value.isfinite().all() for value in parameters(step))
    assert any(not torch.equal(old, new) for old, new in zip(before, parameters(step), strict=True))


def test_records_are_written_in_the_order_of_the_steps():
    step, other = make_step(), make_step()
    for one in (step, other):
        one.lr.zero_()  # a batch then has the same loss whenever its turn comes
    take(step, 3, 1, 0, 2)
    take(other, 0, 1, 2, 3)
    torch.testing.assert_close(step.records[:4], other.records[[3, 1, 0, 2]], rtol=0, atol=0, equal_nan=True)
    assert int(step.position) == 4
    assert step.records[4:].isnan().all()


def test_a_record_holds_the_loss_and_accuracy_at_the_adversarial_points():
    step = make_step("fgsm")
    x, y = step.data.batch(torch.arange(8))
    x_adv = step.method.attack(step.model, x, y, step.eps)
    logits = step.model(x_adv)
    take(step, 0)
    record = dict(zip(RECORDED, step.records[0].tolist(), strict=True))
    assert record["loss"] == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-6)
    assert record["accuracy"] == float((logits.argmax(1) == y).float().mean())


@pytest.mark.parametrize(("method", "recorded"), [("fgsm", False), ("elle", True), ("elle-a", True)])
def test_error_and_weight_are_recorded_where_there_is_a_penalty(method, recorded):
    step = make_step(method, weight=3.0)
    take(step, 0)
    record = dict(zip(RECORDED, step.records[0].tolist(), strict=True))
    assert (record["error"] >= 0) == recorded
    assert (record["weight"] >= 0) == recorded


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("method", ["fgsm", "elle-a"])
def test_half_precision_trains_on_a_cpu(precision, method):
    step, exact = make_step(method, weight=1.0, precision=precision), make_step(method, weight=1.0)
    for one in (step, exact):
        take(one, *range(4))
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in parameters(step))
    torch.testing.assert_close(step.records[:4, 0], exact.records[:4, 0], rtol=0.05, atol=0.05)


def test_training_in_bfloat16_does_not_change_the_error():
    errors = []
    for precision in ("bf16", "fp32"):
        step = make_step("elle-a", weight=1.0, precision=precision)
        step.lr.fill_(0)  # the same weights at every step
        take(step, *range(4))
        errors.append(step.records[:4, RECORDED.index("error")])
    torch.testing.assert_close(*errors, rtol=0.05, atol=0)


@pytest.mark.parametrize("method", ["fgsm", "elle-a", "n-fgsm+elle", "free", "subspace"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_restored_step_continues_as_the_first_would(method, precision, momentum):
    settings = {"weight": 1.0, "precision": precision, "momentum": momentum, "crop": 1}
    first, second = make_step(method, **settings), make_step(method, **settings, seed=1)
    take(first, 0, 1, 2)
    state = {name: value.clone() for name, value in first.state().items()}
    take(first, 3, 4)
    take(second, 5)
    second.restore(state)
    take(second, 3, 4)
    torch.testing.assert_close(second.state(), first.state(), rtol=0, atol=0, equal_nan=True)


def test_a_state_of_another_shape_is_refused_by_name():
    state = make_step(network=small_cnn).state()
    with pytest.raises((KeyError, RuntimeError), match=r"model\."):
        make_step().restore(state)


@pytest.mark.parametrize("name", ["model.0.weight", "optimizer.1.momentum_buffer", "rule.mean", "random.cpu"])
def test_a_state_that_lacks_a_tensor_is_refused_by_name(name):
    step = make_step("elle-a", weight=1.0)
    state = {key: value for key, value in step.state().items() if key != name}
    with pytest.raises(KeyError, match=name):
        step.restore(state)


@pytest.mark.parametrize(
    ("method", "name"), [("free", "kept.x"), ("free", "kept.delta"), ("subspace", "kept.basis"), ("fgsm", "done")]
)
def test_a_state_that_lacks_what_its_method_keeps_is_refused_by_name(method, name):
    step = make_step(method)
    state = {key: value for key, value in step.state().items() if key != name}
    with pytest.raises(KeyError, match=name):
        step.restore(state)


def test_a_loss_that_changes_in_time_is_told_the_steps_and_the_share_done():
    told = []
    step = make_step("fgsm")

    def loss(model, x, y, x_adv, eps, when):
        told.append(tuple(float(value) for value in when))
        return CrossEntropy()(model, x, y, x_adv, eps)

    step.method = dataclasses.replace(step.method, loss=loss)
    take(step, 0, 1, 2)
    assert told == [(0, 0), (1, pytest.approx(1 / 12)), (2, pytest.approx(2 / 12))]


def test_the_learning_rate_is_read_at_every_step():
    step = make_step(momentum=0.0)
    step.lr.zero_()
    before = parameters(step)
    take(step, 0)
    torch.testing.assert_close(parameters(step), before, rtol=0, atol=0)
    step.lr.fill_(0.1)
    take(step, 0)
    assert any(not torch.equal(old, new) for old, new in zip(before, parameters(step), strict=True))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_eps_as_a_tensor_attacks_the_points_that_a_number_does(method):
    kept = []
    for eps in (None, 0.1):
        step = make_step(method)
        if eps is not None:
            step.eps = eps
        take(step, 0, 1)
        kept.append(parameters(step))
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_the_step_attacks_within_the_eps_it_is_filled_with():
    step, seen = make_step("pgd-10"), []
    step.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    for eps in (0.0, 0.02, 0.1):
        step.eps.fill_(eps)
        seen.clear()
        take(step, 0)
        assert float((seen[-1] - seen[0]).abs().max()) == pytest.approx(eps, abs=1e-6)
