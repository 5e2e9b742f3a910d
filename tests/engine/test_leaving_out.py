"""Steps that leave out a negligible penalty: when, what is lost, and that an interrupted run takes the same ones."""

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file

from elle.core.controller import Constant, OnOff
from elle.engine.leaving_out import LeavingOut, leaves_out
from elle.engine.loop import train
from elle.engine.records import means
from elle.engine.step import RECORDED
from elle.errors import InputError
from elle.methods import configured
from tests.engine.steps import make_step, parameters, take

WEIGHT, NEGLIGIBLE = 50.0, 0.3


def lazy_step(rule, **settings):
    step = make_step("elle-a", **settings)
    step.use(dataclasses.replace(step.method, weight=rule))
    return step


class Recorded:
    """Runs a step in its form and writes the form down, with the rule's weight before it."""

    def __init__(self, step):
        self.seen = []
        self.run = LeavingOut(step, self.prepare)
        self.step = step

    def prepare(self, form):
        def run(index):
            self.seen.append((form.keywords["penalty"], float(self.step.rule["weight"])))
            form(index)

        return run

    def __call__(self, index):
        self.run(index)


def jumping(**fields):
    """A rule that jumps every few steps: the errors of a barely trained network scatter around their mean."""
    return OnOff(WEIGHT, decay=0.5, sensitivity=0.2, next_step=True, **fields)


def batches(run, *numbers):
    for number in numbers:
        run(torch.arange(8 * number, 8 * number + 8))


def test_the_penalty_is_left_out_exactly_where_its_weight_is_negligible():
    run = Recorded(lazy_step(jumping(negligible=NEGLIGIBLE)))
    for _ in range(2):
        batches(run, *range(6))
        run.step.position.zero_()
    assert {form for form, _ in run.seen} == {"trained", "measured"}
    for form, weight in run.seen:
        assert (form == "measured") == (weight < NEGLIGIBLE * WEIGHT)


def one_update(rule, weight):
    """The change of the parameters by one step of rate 1 at this weight, and the gradient of the error there."""
    step = lazy_step(rule, momentum=0.0)
    step.optimizer.param_groups[0]["weight_decay"] = 0.0
    step.rule["weight"].fill_(weight)
    step.lr.fill_(1.0)
    before = parameters(step)
    torch.manual_seed(4)
    x, y = step.data.batch(torch.arange(8))
    step.method.regulariser(step.model, x, y, step.eps).mean().backward()
    slope = [parameter.grad.clone() for parameter in step.model.parameters()]
    torch.manual_seed(4)
    LeavingOut(step, lambda form: form)(torch.arange(8))
    return [new - old for new, old in zip(parameters(step), before, strict=True)], slope


def length(tensors):
    return torch.cat([value.flatten() for value in tensors]).norm()


def test_the_gradient_it_drops_is_within_the_stated_bound():
    weight = 0.99 * NEGLIGIBLE * WEIGHT
    whole, slope = one_update(jumping(), weight)
    lazy, _ = one_update(jumping(negligible=NEGLIGIBLE), weight)
    dropped = length([mine - theirs for mine, theirs in zip(lazy, whole, strict=True)])
    bound = NEGLIGIBLE * WEIGHT * length(slope)
    assert 0.9 * bound < dropped < bound


def test_at_the_threshold_nothing_is_dropped():
    weight = NEGLIGIBLE * WEIGHT
    for mine, theirs in zip(
        one_update(jumping(), weight)[0], one_update(jumping(negligible=NEGLIGIBLE), weight)[0], strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_the_errors_and_the_rule_do_not_notice_what_is_left_out():
    steps = lazy_step(jumping()), lazy_step(jumping(negligible=1.0))
    for step in steps:
        step.lr.zero_()  # the same network throughout: only what is measured could differ
        torch.manual_seed(1)
        batches(LeavingOut(step, lambda form: form), *range(6))
    whole, lazy = (step.records[:, [RECORDED.index("error"), RECORDED.index("threshold")]] for step in steps)
    torch.testing.assert_close(lazy, whole, rtol=1e-5, atol=0)
    torch.testing.assert_close(steps[1].rule, steps[0].rule, rtol=1e-5, atol=0)
    weight = RECORDED.index("weight")
    assert {WEIGHT, WEIGHT / 2} <= set(steps[0].records[:, weight].tolist())
    recorded = steps[1].records[:, weight]
    assert ((recorded == 0) == (steps[0].records[:, weight] < WEIGHT)).all()


def test_with_next_step_an_error_sets_the_weight_of_the_step_after_it():
    now, later = lazy_step(dataclasses.replace(jumping(), next_step=False)), lazy_step(jumping())
    for step in (now, later):
        step.lr.zero_()
        torch.manual_seed(1)
        take(step, *range(6))
    weight = RECORDED.index("weight")
    assert now.records[:-1, weight].max() == WEIGHT
    torch.testing.assert_close(later.records[1:, weight], now.records[:-1, weight])
    assert later.records[0, weight] == 0


@pytest.mark.parametrize("rule", [Constant(WEIGHT, every=3), OnOff(WEIGHT, every=3)], ids=["elle", "elle-a"])
def test_between_every_so_many_steps_there_is_no_penalty(rule):
    step = lazy_step(rule)
    run = Recorded(step)
    batches(run, *range(6))
    expected = ["trained", "left out", "left out"] * 2
    assert [form for form, _ in run.seen] == expected
    measured = ~step.records[:, RECORDED.index("error")].isnan()
    assert measured.tolist() == [form == "trained" for form in expected]


class Event:
    """What a GPU's event is told, in a log of the steps too."""

    def __init__(self, log):
        self.log = log

    def record(self):
        self.log.append("record")

    def synchronize(self):
        self.log.append("wait")


def test_the_host_waits_for_the_last_step_with_an_error_and_for_none_of_those_after_it():
    log = []
    run = LeavingOut(lazy_step(jumping(negligible=1.0, every=3)), lambda form: lambda _: log.append("step"))
    run.copied = Event(log)
    batches(run, *range(5))
    assert log == ["record", "wait", "step", "record", "step", "step", "wait", "step", "record", "step"]


def test_the_means_of_an_epoch_are_of_the_steps_that_have_the_number():
    nothing = math.nan
    rows = [[1, 0.5, 4, 10, math.inf], [3, 1, nothing, nothing, nothing], [2, 0, 2, 30, 5]]
    assert means(torch.tensor(rows)) == {"loss": 2, "accuracy": 0.5, "error": 3, "weight": 20}


def test_a_step_without_its_penalty_is_the_base_method_s():
    step, base = lazy_step(Constant(WEIGHT, every=2)), make_step("fgsm")
    for one in (step, base):
        one.done.fill_(1)
    batches(LeavingOut(step, lambda form: form), 0)
    take(base, 0)
    torch.testing.assert_close(parameters(step), parameters(base), rtol=0, atol=0)


@pytest.mark.parametrize("rule", [Constant(WEIGHT), OnOff(WEIGHT), OnOff(WEIGHT, next_step=True)], ids=str)
def test_a_plain_rule_leaves_nothing_out(rule):
    assert not leaves_out(lazy_step(rule))


LAZY = [
    "method=elle-a",
    *("method.weight.next_step=true", "method.weight.negligible=0.2", "method.weight.every=2"),
    *("method.weight.decay=0.3", "method.weight.sensitivity=0.2"),
]


def test_an_interrupted_run_takes_the_same_steps(settings, tmp_path):
    train(settings(*LAZY, "epochs=2", out="whole"))
    train(settings(*LAZY, "epochs=2", "max_steps=7", out="parts"))
    train(settings(*LAZY, "epochs=2", out="parts"), resume=True)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"negligible": 0.1}, "negligible needs next_step=true"),
        ({"negligible": 2.0, "next_step": True}, "negligible is 2.0; it must be from 0 to 1"),
        ({"every": 0}, "every is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(option, message):
    with pytest.raises(InputError, match=message):
        configured("elle-a", options={"weight": option})
