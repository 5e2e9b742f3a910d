"""The monitor in a user's own loop: it changes nothing, sees a real collapse, and works beside the plug-in."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import elle
from elle.engine.probe import CollapseMonitor

from ..networks import bfloat16_autocast, conv_net, images, trained

EPS = 0.1


@pytest.fixture
def monitor():
    return CollapseMonitor(*images(count=16), EPS)


def test_a_look_leaves_mode_gradients_statistics_and_random_state_alone(monitor):
    model = conv_net()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    monitor.check(model, 1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model[1].training) == (True, False)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_two_looks_at_one_network_are_the_same(monitor):
    model = conv_net()
    assert monitor.look(model) == monitor.look(model)


def test_a_look_at_few_images_at_once_sees_the_same(monitor):
    model = trained(conv_net(), *images(count=16))
    expected, taken = monitor.look(model), []
    model.register_forward_pre_hook(lambda _, given: taken.append(len(given[0])))
    assert CollapseMonitor(*images(count=16), EPS, batch=5).look(model) == pytest.approx(expected, rel=1e-3)
    assert max(taken) == 15, "three points of each of five images"


def test_a_look_draws_nothing_and_its_points_come_from_the_seed_alone(monkeypatch):
    x, y = images(count=16)
    torch.manual_seed(5)
    first = CollapseMonitor(x, y, EPS, seed=1)
    torch.manual_seed(6)
    second, other = CollapseMonitor(x, y, EPS, seed=1), CollapseMonitor(x, y, EPS, seed=2)
    model = conv_net()
    for name in ("rand", "rand_like", "randn"):
        monkeypatch.delattr(torch, name)
    assert first.look(model) == second.look(model)
    assert first.look(model)["error"] != other.look(model)["error"]


def test_the_points_of_a_look_are_in_the_ball_and_new_for_each_image(monitor):
    for points in (monitor.begin, *monitor.drawn[:2]):
        offset = (points - monitor.x).flatten(1)
        assert offset.abs().max() <= EPS * (1 + 1e-5)
        assert len({tuple(row) for row in offset.tolist()}) == len(offset)


def test_a_look_is_in_the_precision_of_the_autocast_around_it(monitor):
    model = conv_net()
    exact = monitor.look(model)
    with bfloat16_autocast():
        rounded = monitor.look(model)
    # E_lin leaves a bf16 autocast, which would drown it; its points and its error are the same.
    assert rounded["error"] == exact["error"]
    assert not torch.is_autocast_enabled("cpu")


def test_a_look_tells_accuracies_that_an_attack_lowers():
    x, y = images(count=64)
    seen = CollapseMonitor(x, y, EPS).look(trained(conv_net(), x, y))
    assert 1 >= seen["clean"] >= seen["single"] >= seen["multi"] >= 0
    assert seen["clean"] > 0.9
    assert (seen["chance"], seen["error"] > 0) == (0.25, True)


def test_a_look_compares_the_training_loss_with_the_probes_under_attack(monitor):
    model = conv_net()
    monitor.check(model, 1, loss=0.5)
    monitor.check(model, 2)
    first, second = monitor.readings
    x_adv = monitor.multi(model.eval(), monitor.x, monitor.y, monitor.eps, monitor.begin)
    assert first["probe_loss"] == pytest.approx(F.cross_entropy(model(x_adv), monitor.y).item(), rel=1e-5)
    assert (first["loss_ratio"], second["loss_ratio"]) == (0.5 / first["probe_loss"], None)


def test_a_network_that_is_not_finite_has_no_error_and_is_right_nowhere(monitor):
    model = conv_net()
    with torch.no_grad():
        model[-1].bias.fill_(torch.nan)
    verdict = monitor.check(model, 7)
    assert (verdict.kind, verdict.step) == ("divergence", 7)
    assert monitor.readings[0]["clean"] == 0
    json.dumps(monitor.state_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(3)}, "one label an image"),
        ({"y": torch.zeros(16, 4)}, r"labels have shape \(16, 4\)"),
        ({"x": torch.zeros(0, 1, 8, 8), "y": torch.zeros(0)}, "one label an image"),
        ({"y": torch.full((16,), 0.5)}, "labels are not whole numbers"),
        ({"eps": 8}, "8/255"),
        ({"eps": torch.full((1, 3, 1, 1), EPS)}, r"eps has shape \[1, 3, 1, 1\]; give one number"),
        ({"x": torch.full((16, 1, 8, 8), 255.0)}, r"in 255 to 255; give floats in \[0, 1\]"),
        ({"x": torch.zeros(16, 1, 8, 8, dtype=torch.uint8)}, "uint8"),
        ({"x": [0.5], "y": [1]}, "x is a list; give a tensor"),
        ({"per_epoch": 0}, "1 or more"),
        ({"batch": 0}, "batch is 0; it must be a whole number"),
        ({"graph": True}, "needs probe images on an NVIDIA GPU"),
    ],
)
def test_what_cannot_be_meant_is_refused(change, message):
    x, y = images(count=16)
    with pytest.raises(ValueError, match=message):
        CollapseMonitor(**{"x": x, "y": y, "eps": EPS} | change)


def test_a_large_ball_takes_a_longer_attack():
    x, y = images(count=4)
    steps = [
        CollapseMonitor(x, y, eps, norm=norm).multi.steps for eps, norm in ((8 / 255, "linf"), (0.3, "linf"), (1, "l2"))
    ]
    assert steps == [3, 10, 3]


def test_a_loss_given_as_a_tensor_is_kept_as_a_number(monitor):
    network = conv_net()
    monitor.check(network, 1, loss=network(monitor.x).mean(), accuracy=torch.tensor(0.5), rate=torch.tensor(0.1))
    reading = monitor.readings[-1]
    assert all(type(reading[name]) is float for name in ("loss", "loss_ratio", "accuracy", "rate"))


def test_the_state_after_numbers_of_numpy_is_plain_data(monitor):
    monitor.check(conv_net(), np.int64(1), loss=np.float32(0.5), accuracy=np.mean([0.5, 0.25]), rate=np.float64(0.1))
    file = io.BytesIO()
    torch.save(monitor.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == json.loads(json.dumps(monitor.state_dict()))


def test_images_and_labels_that_the_caller_writes_over_are_looked_at_as_they_were():
    x, y = images(count=16)
    model = trained(conv_net(), x, y, steps=20, lr=0.05)
    monitor = CollapseMonitor(x, y, EPS)
    before = monitor.look(model)
    assert before["clean"] > 0.5
    x.zero_()
    y.zero_()
    assert monitor.look(model) == before


def test_a_function_is_refused_as_it_has_no_eval_mode(monitor):
    with pytest.raises(ValueError, match="the model is a function; give a torch.nn.Module"):
        monitor.check(lambda x: conv_net()(x), 1)


def test_an_accuracy_in_percent_is_refused(monitor):
    with pytest.raises(ValueError, match="accuracy is 75; .* 0 to 1"):
        monitor.check(conv_net(), 1, accuracy=75.0)
    assert monitor.readings == []


def test_a_step_that_is_no_number_is_refused(monitor):
    with pytest.raises(ValueError, match="step is 'a'; give the number of steps"):
        monitor.check(conv_net(), "a")
    assert monitor.readings == []


def test_a_state_that_is_none_is_refused_and_changes_nothing(monitor):
    monitor.check(conv_net(), 1)
    with pytest.raises(ValueError, match=r"the state has no 'readings'; give what a monitor's state_dict\(\) returned"):
        monitor.load_state_dict({})
    assert len(monitor.readings) == 1


def test_labels_of_any_integer_type_will_do():
    x, y = images(count=16)
    assert CollapseMonitor(x, y.int(), EPS).check(conv_net(), 1) is None


def test_a_network_that_nobody_has_looked_at_is_not_known_to_be_healthy(monitor):
    assert not monitor.healthy


def test_in_a_users_loop_with_the_plug_in_the_monitor_stays_silent_and_resumes():
    x, y = images(count=64)
    model, regulariser = conv_net(), elle.ELLE(eps=EPS, weight=10)
    monitor = elle.CollapseMonitor(x[:16], y[:16], EPS, per_epoch=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(1, 13):
        x_adv = elle.attacks.fgsm(model, x, y, EPS)
        loss = F.cross_entropy(model(x_adv), y) + regulariser(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            assert monitor.check(model, step, loss=float(loss.detach())) is None
    again = elle.CollapseMonitor(x[:16], y[:16], EPS, per_epoch=2)
    again.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert (again.check(model, 14), monitor.check(model, 14)) == (None, None)
    assert again.state_dict() == monitor.state_dict()
    assert [reading["step"] for reading in monitor.readings] == [2, 4, 6, 8, 10, 12, 14]


def test_the_loop_of_the_documentation_runs_and_its_steps_count_on_over_the_epochs(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "collapse.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    x, y = images(count=16)
    steps = []
    monkeypatch.setattr(CollapseMonitor, "check", lambda self, model, step: steps.append(step))
    loader = [(x, y)] * 5
    exec(code, {"elle": elle, "x_probe": x, "y_probe": y, "loader": loader, "epochs": 2, "model": conv_net()})
    assert steps == [2, 4, 6, 8, 10]
