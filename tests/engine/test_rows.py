"""Every row through the engine's own step and loop: its passes, its traces on the network, and its way back."""

import signal
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elle.config import load_config
from elle.core.attacks import SignStep
from elle.core.subspace import flattened
from elle.data.resident import Resident
from elle.engine import checkpoint
from elle.engine.loop import Run, train
from elle.engine.step import RECORDED, Step
from elle.engine.watcher import Watcher
from elle.errors import WorkError
from elle.methods import METHODS, Cost, configured
from elle.models.registry import build_model
from tests.networks import bfloat16_autocast, conv_net
from tests.networks import images as float_images
from tests.test_methods import EPS, WHEN, Probe, every_row

from ..conftest import QUICK
from .interrupting import assert_same_run, signal_after_step
from .steps import images

BATCH, SHAPE = 8, (1, 8, 8)
IN_EVAL_MODE = {"gat": 2, "gat-original": 2, "nuat": 2, "trades-single": 2, "trades": 11}
"""Forwards that leave BatchNorm's statistics alone."""


def small_cnn():
    return build_model("small-cnn", SHAPE, 10)


def make_step(method, network=small_cnn, *, crop=0, precision="fp32", total=12, options=None):
    torch.manual_seed(0)
    step = Step(
        network().train(),
        configured(method, weight=10.0, options=options),
        Resident(images(), "cpu", crop, flip=crop > 0),
        eps=0.1,
        momentum=0.9,
        weight_decay=5e-4,
        precision=precision,
        steps_per_epoch=total,
        total_steps=total,
    )
    step.data.y %= 4
    step.prepare(BATCH, SHAPE)
    step.lr.fill_(0.05)
    return step


def take(step, *numbers):
    """Train on the batches with these numbers, as the loop does."""
    for number in numbers:
        step(torch.arange(BATCH * number, BATCH * (number + 1)))
        step.between(int(step.done))


def forward(method, model, x, y):
    """The passes of a step without its backward."""
    x_adv = method.attack(model, x, y, EPS) if isinstance(method.attack, SignStep) else x
    total, logits = method.loss(model, x, y, x_adv, EPS, WHEN)
    if method.regulariser is not None:
        total = total + method.regulariser(model, x, y, EPS, adversarial=(x_adv, logits)).mean()
    return total


# Every row


@every_row
def test_a_step_makes_the_passes_its_row_declares(name):
    layers = {"loss": {"layers": "last"}} if name == "slat" else None
    step = make_step(name, Probe, options=layers)
    for steps in (1, 2):
        take(step, 0)
        counted = [getattr(step.model, kind) for kind in ("forwards", "input_gradients", "weight_gradients")]
        assert Cost(*(count // BATCH // steps for count in counted)) == METHODS[name].cost
        assert all(count % (BATCH * steps) == 0 for count in counted)


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({}, 9),
        ({"share": 0.25}, 9 / 4),
        ({"samples": 2}, 18),
        ({"form": "5-point"}, 15),
        ({"form": "2p", "power": 1}, 6),
        ({"alpha": "max"}, 32),
        ({"alpha": "max", "samples": 2, "share": 0.5}, 32),
    ],
)
def test_a_step_makes_the_passes_that_its_penalty_declares(fields, passes):
    step = make_step("elle", Probe, options={"regulariser": fields})
    take(step, 0)
    counted = sum(getattr(step.model, kind) for kind in ("forwards", "input_gradients", "weight_gradients"))
    assert step.method.regulariser.passes == passes
    assert counted / BATCH == METHODS["fgsm"].cost.total + passes


@every_row
def test_the_gradient_of_a_step_reaches_every_parameter(name):
    step = make_step(name)
    take(step, 0, 1)
    for parameter_name, parameter in step.model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.abs().max() > 1e-8, parameter_name


@every_row
def test_a_step_in_half_precision_is_finite_and_near_that_in_single(name):
    half, single = make_step(name, precision="fp16"), make_step(name)
    for step in (half, single):
        torch.manual_seed(1)
        take(step, 0, 1)
    assert all(value.isfinite().all() for value in half.model.state_dict().values())
    first = [step.records[0, RECORDED.index("loss")] for step in (half, single)]
    torch.testing.assert_close(*first, rtol=0.05, atol=0)


@every_row
def test_the_loss_and_its_gradient_are_finite_in_bfloat16(name):
    model = small_cnn()
    with bfloat16_autocast():
        total = forward(METHODS[name], model, *float_images(BATCH))
    total.backward()
    assert total.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@every_row
def test_nothing_is_left_on_the_network_before_the_backward(name):
    model = small_cnn()
    model.features[1].eval()
    modes = [module.training for module in model.modules()]
    x, y = float_images(BATCH)
    kept = x.clone()
    forward(METHODS[name], model, x, y)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(x, kept)
    assert not x.requires_grad


@every_row
def test_batchnorm_sees_the_forwards_that_the_row_makes_in_train_mode_and_no_others(name):
    step = make_step(name)
    seen = {True: 0, False: 0}
    norm = step.model.features[1]

    def count(module, arguments):
        seen[module.training] += len(arguments[0])

    norm.register_forward_pre_hook(count)
    take(step, 0)
    in_eval_mode = IN_EVAL_MODE.get(name, 0)
    assert seen == {True: BATCH * (METHODS[name].cost.forwards - in_eval_mode), False: BATCH * in_eval_mode}


class OutOfMemoryError(RuntimeError):
    pass


class Failing(nn.Module):
    """Raises at the call with this number."""

    def __init__(self, fails_at):
        super().__init__()
        self.fails_at, self.calls = fails_at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.fails_at:
            raise OutOfMemoryError
        return x


@every_row
def test_a_network_that_raises_is_left_in_its_modes_and_without_hooks(name):
    for fails_at in range(1, 20):
        model = nn.Sequential(*conv_net(), Failing(fails_at)).train()
        model[2].eval()
        try:
            forward(METHODS[name], model, *float_images(BATCH))
        except OutOfMemoryError:
            assert [module.training for module in model] == [True, True, False, True, True, True]
            assert not any(module._forward_hooks for module in model)
            assert all(parameter.grad is None for parameter in model.parameters())
        else:
            break
    assert fails_at > 1  # it did raise, and then no more
    assert model[-1].calls < fails_at


WORDS = [*QUICK, "epochs=2", "batch=16", "validation=1169", "crop=1", "flip=true", "eps=0.03", "lr=0.05"]
"""16 steps in two epochs of 8; the basis of `subspace` is formed after step 8, `free` changes its batch there."""


def saved_and_resumed(name, stop, tmp_path, epochs=2):
    """What was saved at the step where a run was stopped; its end is that of an uninterrupted one."""
    words = [*WORDS, f"method={name}", f"epochs={epochs}"]
    whole, stopped = (load_config([*words, f"out={tmp_path / run}"]) for run in ("whole", "stopped"))
    train(whole)
    with pytest.raises(WorkError, match=f"at step {stop} of {8 * epochs}"):
        train(stopped, watcher=signal_after_step(stop, signal.SIGTERM))
    saved, _ = checkpoint.load_checkpoint(checkpoint.checkpoints(tmp_path / "stopped")[-1])
    train(stopped, resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    return saved


@every_row
def test_a_run_stopped_inside_an_epoch_ends_as_the_uninterrupted_one(name, tmp_path):
    saved_and_resumed(name, 5, tmp_path, epochs=1)


@pytest.mark.parametrize("stop", [5, 8, 11])
def test_a_run_stopped_anywhere_in_a_round_of_replays_ends_as_the_uninterrupted_one(stop, tmp_path):
    saved = saved_and_resumed("free+elle-a", stop, tmp_path)
    assert saved["kept.delta"].abs().max() == pytest.approx(0.03)
    assert saved["kept.x"].any()


@pytest.mark.parametrize("stop", [5, 8, 11])
def test_the_samples_and_then_the_basis_are_saved_and_restored(stop, tmp_path):
    saved = saved_and_resumed("subspace+elle-a", stop, tmp_path)
    assert bool(saved["kept.active"]) == (stop >= 8)
    lengths = saved["kept.basis"].norm(dim=1)
    if stop >= 8:
        assert lengths[:8].tolist() == pytest.approx([1] * 8, rel=1e-4)  # nine distinct samples, centred
        assert not lengths[8:].any()
    else:
        assert lengths[: saved["kept.sampled"]].min() > 1
        assert not lengths[saved["kept.sampled"] :].any()


# Free


class Recording(nn.Module):
    """A network that keeps the points it is trained on."""

    def __init__(self):
        super().__init__()
        self.network, self.points = small_cnn(), []

    def forward(self, x):
        self.points.append(x.detach().clone())
        return self.network(x)


def test_replays_train_on_the_same_augmented_batch_with_a_perturbation_that_lives_on():
    step = make_step("free", Recording, crop=2, options={"attack": {"replays": 3}})
    deltas, batches, weights = [step.kept["delta"].clone()], [], [flattened(step.model.parameters())]
    for number in (0, 0, 0, 1, 1, 1, 2):
        take(step, number)
        deltas.append(step.kept["delta"].clone())
        batches.append(step.kept["x"].clone())
        weights.append(flattened(step.model.parameters()))
    for k, points in enumerate(step.model.points):
        assert torch.equal(points, (batches[k] + deltas[k]).clamp(0, 1))
    assert [torch.equal(*pair) for pair in pairwise(batches)] == [
        *(True, True, False),
        *(True, True, False),
    ]
    unchanged = Resident(images(), "cpu").batch(torch.arange(BATCH))[0]
    assert not torch.equal(batches[0], unchanged)  # cropped and mirrored
    assert all(not torch.equal(*pair) for pair in pairwise(deltas))
    assert max(float(delta.abs().max()) for delta in deltas) <= step.eps * (1 + 1e-6)
    assert all(not torch.equal(*pair) for pair in pairwise(weights))


def test_the_first_replay_is_clean_and_the_second_at_the_point_of_fgsm():
    free, standard = make_step("free", Recording), make_step("standard", Recording)
    x, y = free.data.batch(torch.arange(BATCH))
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(free.model.network(leaf), y), leaf)
    for step in (free, standard):
        take(step, 0)
    assert torch.equal(free.records[0, :2], standard.records[0, :2])
    assert torch.equal(flattened(free.model.parameters()), flattened(standard.model.parameters()))
    take(free, 0)
    torch.testing.assert_close(free.model.points[-1], (x + 0.1 * slope.sign()).clamp(0, 1))


def test_with_one_replay_each_batch_is_trained_on_once_with_the_last_one_s_perturbation():
    step = make_step("free", Recording, options={"attack": {"replays": 1}})
    for number in (0, 1, 2):
        before = step.kept["delta"].clone()
        take(step, number)
        x, _ = step.data.batch(torch.arange(BATCH * number, BATCH * (number + 1)))
        assert torch.equal(step.model.points[-1], (x + before).clamp(0, 1))
    assert step.kept["delta"].abs().max() == pytest.approx(0.1)


def followed(tmp_path, *words):
    """The batches and rates of each step of a run."""
    config = load_config([*WORDS, *words, f"out={tmp_path / words[0]}"]).resolved()
    run = Run(config, tmp_path / words[0], Watcher())
    run.directory.mkdir()
    batches, rates = [], []
    take_step = run.run_step

    def watch(index):
        batches.append(index.tolist())
        rates.append(float(run.step.lr))
        take_step(index)

    run.run_step = watch
    run.finish()
    return batches, rates


def test_the_schedule_counts_replays_and_the_set_is_passed_more_slowly(tmp_path):
    once, rates = followed(tmp_path, "method=fgsm")
    replayed, same_rates = followed(tmp_path, "method=free", "method.attack.replays=2")
    assert same_rates == rates
    assert replayed == [batch for batch in once[:8] for _ in range(2)]
    assert len({image for batch in replayed for image in batch}) == 128  # one pass in two epochs
    odd, _ = followed(tmp_path, "method=free+elle", "method.attack.replays=3")
    assert odd == [once[k // 3] for k in range(16)]


# Subspace

ROOM = {"subspace": {"samples": 5, "dimension": 3}}


def test_before_its_basis_a_subspace_run_is_its_base_method_bit_for_bit():
    ours, base = make_step("subspace", options=ROOM), make_step("fgsm")
    for step in (ours, base):
        take(step, *range(5))
    assert torch.equal(flattened(ours.model.parameters()), flattened(base.model.parameters()))
    assert int(ours.kept["sampled"]) == 4


def test_after_its_basis_a_subspace_run_moves_from_its_first_weights_in_the_span():
    step = make_step("subspace", options=ROOM)
    first = flattened(step.model.parameters())
    take(step, *range(5), 0)
    assert bool(step.kept["active"])
    assert torch.equal(flattened(step.model.parameters()), first)
    assert not any(buffer.any() for state in step.optimizer.state.values() for buffer in state.values())
    basis = step.kept["basis"][:3].clone()
    take(step, 1, 2, 3)
    moved = flattened(step.model.parameters()) - first
    assert moved.norm() > 0.01
    torch.testing.assert_close(moved, (basis @ moved) @ basis, rtol=0, atol=1e-5)
    assert torch.equal(step.kept["basis"][:3], basis)


def test_the_rate_inside_the_subspace_is_that_many_times_the_schedule_s():
    moved = []
    for rate in (1.0, 5.0):
        step = make_step("subspace", options={"subspace": ROOM["subspace"] | {"rate": rate}})
        take(step, *range(5), 0)
        first = flattened(step.model.parameters())
        take(step, 1)
        moved.append(flattened(step.model.parameters()) - first)
    torch.testing.assert_close(moved[1], 5 * moved[0], rtol=1e-3, atol=1e-6)
