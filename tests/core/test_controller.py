"""The weight of the penalty follows Algorithm 1, in tensors alone."""

import math

import numpy as np
import pytest
import torch

from elle.core.controller import Constant, OnOff


def errors_with_jumps():
    """Errors as in training: log-normal noise around a level, with sudden jumps."""
    random = np.random.default_rng(0)
    errors = 1e-5 * np.exp(0.5 * random.standard_normal(300))
    errors[random.choice(300, 12, replace=False)] *= 100
    return errors.astype(np.float32)


def algorithm_1(errors, maximum, decay, sensitivity, window):
    """Weights and thresholds in plain numpy, the whole history kept."""
    weight, history, weights, thresholds = 0.0, [], [], []
    for error in errors:
        past = np.asarray(history if window is None else history[-window:], dtype=np.float64)
        threshold = past.mean() + sensitivity * past.std() if len(past) > 2 else math.inf
        weight = maximum if error > threshold else decay * weight
        history.append(error)
        weights.append(weight)
        thresholds.append(threshold)
    return weights, thresholds


def run(rule, errors, state=None):
    """The states after each error."""
    state, states = state or rule.start(), []
    for error in errors:
        state = rule.update(state, torch.tensor(float(error)))
        states.append(state)
    return states


def weights(states):
    return [float(state["weight"]) for state in states]


@pytest.mark.parametrize("window", [None, 3, 50, 500])
@pytest.mark.parametrize(("decay", "sensitivity"), [(0.99, 2.0), (0.5, 0.5)])
def test_the_weight_follows_algorithm_1(window, decay, sensitivity):
    errors = errors_with_jumps()
    expected, thresholds = algorithm_1(errors, 4000, decay, sensitivity, window)
    states = run(OnOff(4000, decay, sensitivity, window), errors)
    assert weights(states) == pytest.approx(expected, rel=1e-3, abs=1e-30)
    assert [float(state["threshold"]) for state in states] == pytest.approx(thresholds, rel=1e-3)
    jumps = sum(weight == 4000 for weight in expected)
    assert 3 < jumps < 250, "the errors do not exercise both branches"


@pytest.mark.parametrize("window", [None, 3, 10])
def test_the_first_three_errors_never_cause_a_jump(window):
    states = run(OnOff(4000, history=window), [1e-6, 1e3, 1e9, 1e30])
    assert weights(states)[:3] == [0, 0, 0]
    assert all(math.isinf(state["threshold"]) for state in states[:3])
    assert weights(states)[3] == 4000


def test_the_weight_decays_by_its_factor_after_a_jump():
    states = run(OnOff(100, decay=0.9), [1, 1, 1, 5, 1, 1, 1])
    assert weights(states)[3:] == pytest.approx([100, 90, 81, 72.9])


def test_an_error_equal_to_its_history_causes_no_jump():
    assert weights(run(OnOff(100), [1.0] * 10)) == [0] * 10


def test_a_jump_acts_on_the_step_of_its_own_error():
    assert weights(run(OnOff(100), [1, 1, 1, 2]))[-1] == 100


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_error_does_not_spoil_the_statistics(window, bad):
    rule = OnOff(100, history=window)
    before = run(rule, [1, 2, 1, 2])[-1]
    after = rule.update(before, torch.tensor(bad))
    for name in before.keys() - {"weight", "threshold"}:
        assert torch.equal(after[name], before[name]), name
    assert after["weight"].isfinite()
    assert run(rule, [1, 2, 9], after)[-1]["weight"] == 100


def test_an_overflow_causes_a_jump_and_a_nan_does_not():
    state = run(OnOff(100), [1, 2, 1, 2])[-1]
    assert float(OnOff(100).update(state, torch.tensor(math.inf))["weight"]) == 100
    assert float(OnOff(100).update(state, torch.tensor(math.nan))["weight"]) == 0


def test_a_window_forgets_what_is_older():
    errors = [1000.0] * 5 + [1.0] * 5 + [3.0]
    assert weights(run(OnOff(100, history=5), errors))[-1] == 100
    assert weights(run(OnOff(100), errors))[-1] == 0


def test_a_long_history_keeps_its_precision():
    """5,000 errors around 1e-5: the running statistics are those of all errors in double."""
    errors = 1e-5 * (1 + 0.01 * np.random.default_rng(0).standard_normal(5_000)).astype(np.float32)
    state = OnOff(1).start()
    rule = OnOff(1)
    for error in torch.from_numpy(errors):
        state = rule.update(state, error)
    mean, deviation = rule._statistics(state)
    assert float(mean) == pytest.approx(errors.astype(np.float64).mean(), rel=1e-4)
    assert float(deviation) == pytest.approx(errors.astype(np.float64).std(), rel=1e-2)


RULES = [Constant(5), OnOff(5), OnOff(5, history=4)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_an_update_leaves_the_state_it_was_given_alone(rule):
    state = run(rule, [1, 2, 3, 4])[-1] if not isinstance(rule, Constant) else rule.start()
    kept = {name: value.clone() for name, value in state.items()}
    rule.update(state, torch.tensor(100.0))
    for name, value in kept.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_an_update_needs_no_values_and_so_never_waits_for_the_device(rule):
    """On the meta device there are no values to wait for; names, shapes and types stay the same."""
    state = rule.start("meta")
    after = rule.update(state, torch.empty((), device="meta"))
    assert {k: (v.shape, v.dtype, v.device) for k, v in after.items()} == {
        k: (v.shape, v.dtype, v.device) for k, v in state.items()
    }


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_half_precision_error_leaves_the_state_in_float32(rule):
    after = rule.update(rule.start(), torch.tensor(1.0, dtype=torch.float16))
    assert all(value.dtype is torch.float32 for value in after.values())


@pytest.mark.parametrize("value", [0, 5, 4000.0])
def test_a_constant_weight_stays_what_it_is(value):
    assert weights(run(Constant(value), [1, 100, math.nan, math.inf])) == [value] * 4


@pytest.mark.parametrize("rule", [Constant, OnOff])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_a_weight_that_is_negative_or_not_finite_is_refused(rule, value):
    with pytest.raises(ValueError, match="weight"):
        rule(value)


@pytest.mark.parametrize(
    "arguments",
    [{"decay": -0.1}, {"decay": 1.1}, {"decay": math.nan}, {"history": 2}, {"history": 0}, {"sensitivity": math.nan}],
    ids=str,
)
def test_a_bad_setting_is_refused_by_name(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        OnOff(1, **arguments)


@pytest.mark.parametrize("window", [None, 5])
def test_a_ramp_lowers_the_first_jumps_of_each_phase(window):
    errors = [1e-6, 1.1e-6, 0.9e-6, 1.0, 1e-6, 1e-6, 1e6, 1e-6, 1e-6, 1e9]
    rule, plain = OnOff(1000, 0.5, history=window, ramp=8), OnOff(1000, 0.5, history=window)
    with_ramp, without = run(rule, errors), run(plain, errors)
    for step in (3, 6, 9):
        assert weights(without)[step] == 1000
        assert weights(with_ramp)[step] == pytest.approx(1000 * min(1, (step + 1) / 8))
    rule.begin_phase(with_ramp[-1])
    (again,) = run(rule, [1e12], with_ramp[-1])
    assert float(again["weight"]) == 1000 / 8


def test_a_ramp_is_as_many_steps_long_where_the_error_is_measured_at_some_of_them():
    states = run(OnOff(1000, every=4, ramp=32), [1e-6, 1.1e-6, 0.9e-6, 1.0, 1e6])  # at steps 1, 5, 9, 13 and 17
    assert weights(states)[3:] == [1000 * 16 / 32, 1000 * 20 / 32]


def test_a_negative_ramp_is_refused():
    with pytest.raises(ValueError, match="ramp is -1"):
        OnOff(1000, ramp=-1)
