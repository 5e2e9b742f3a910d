"""Every row of METHODS trains, costs what it declares, and is its base method where its own part is nothing."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from elle.core.attacks import Replay, SignStep
from elle.core.controller import Constant, OnOff
from elle.core.linearity import Linearity
from elle.core.subspace import Subspace
from elle.errors import InputError
from elle.methods import METHODS, Cost, configured, find_method
from tests.networks import conv_net, gradient, images

EPS = 16 / 255
WHEN = (torch.tensor(3), torch.tensor(0.3))
WITHOUT_PENALTY = [name for name, row in METHODS.items() if row.penalty is None]
every_row = pytest.mark.parametrize("name", METHODS)


def backward(method, model, x, y, state=None, eps=EPS):
    """The passes of one training step, as the engine makes them: the total loss and the rule's new state."""
    if method.replays > 1:
        x_adv, loss = method.attack.points(x, torch.zeros_like(x)), method.loss
    else:
        x_adv, loss = method.attacked(model, x, y, eps)
    total, logits = loss(model, x, y, x_adv, eps, WHEN)
    assert logits.shape[0] == len(x)
    if method.regulariser is not None:
        error = method.regulariser(model, x, y, eps).mean()
        state = method.weight.update(state or method.weight.start(), error.detach())
        total = total + state["weight"] * error
    total.backward()
    return float(total.detach()), state


def train(method, steps=5):
    """The total losses of a few steps of plain SGD on a fixed network and fixed data.

    The fourth step has twice the radius, so that the error leaves its history and ELLE-A's weight jumps. In float64:
    the signs of small gradients are then those of any other processor, also after ten steps of an attack.
    """
    model, losses, state = conv_net().double(), [], None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = images(32, seed=step)
        loss, state = backward(method, model, x.double(), y, state, EPS * (2 if step == 3 else 1))
        optimizer.step()
        losses.append(loss)
    return losses


class Probe(nn.Module):
    """A network that counts the images of its passes: forwards, gradients of an activation, gradients of a weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(6, 64) / 8)
        self.last = nn.Linear(6, 4)
        self.forwards = self.input_gradients = self.weight_gradients = 0

    def forward(self, x):
        images = len(x)
        self.forwards += images
        # A copy of the weight for each image: a gradient with respect to x alone does not pass through it.
        weight = self.first.expand(images, 6, 64)
        hidden = (weight @ x.flatten(1).unsqueeze(-1)).squeeze(-1)
        if hidden.requires_grad:
            weight.register_hook(lambda _: self.count("weight_gradients", images))
            hidden.register_hook(lambda _: self.count("input_gradients", images))
        return self.last(hidden.tanh())

    def count(self, name, images):
        setattr(self, name, getattr(self, name) + images)


def test_a_cost_is_the_sum_of_its_passes():
    assert Cost(1, 2, 3).total == 6
    assert Cost(1, 2, 3) + Cost(3, 3, 3) == Cost(4, 5, 6)


# Total loss at each of five steps; made by this code on a CPU (torch 2.13), to be renewed only on purpose.
GOLDEN = {
    "standard": [1.44754, 1.20232, 1.00349, 0.88894, 0.73493],
    "fgsm": [1.99876, 1.62312, 1.37267, 1.59059, 1.08069],
    "rs-fgsm": [1.93468, 1.56744, 1.32376, 1.54169, 1.03329],
    "n-fgsm": [2.00859, 1.61874, 1.40159, 1.68487, 1.13704],
    "pgd-10": [2.05116, 1.65632, 1.39470, 1.75763, 1.10368],
    "r-fgsm": [1.75504, 1.42163, 1.19788, 1.33234, 0.90964],
    "zerograd": [1.96177, 1.58838, 1.33762, 1.55319, 1.05178],
    "multigrad": [1.99629, 1.61913, 1.35638, 1.58858, 1.07108],
    "gradalign": [2.00715, 1.63515, 1.38328, 1.61684, 1.09372],
    "llr": [2.05513, 1.64450, 1.38676, 1.87087, 1.12760],
    "trades-single": [1.64554, 1.35528, 1.16362, 1.56413, 0.97453],
    "trades": [1.69077, 1.35505, 1.18987, 1.64312, 0.99832],
    "free": [1.44754, 1.20232, 1.00349, 0.88894, 0.73493],
    "fw-at": [2.01445, 1.62944, 1.37972, 1.66673, 1.09333],
    "grad-penalty": [2.97520, 2.01834, 1.63635, 1.44701, 1.28705],
    "cure": [2.04590, 1.64910, 1.38813, 1.61725, 1.09617],
    "llr-original": [3.83312, 2.57673, 2.15599, 3.34711, 1.76024],
    "gat": [1.69026, 1.41420, 1.24007, 1.63086, 1.01748],
    "gat-original": [1.51922, 1.30415, 1.16067, 1.50116, 1.03287],
    "nuat": [1.63049, 1.40832, 1.21705, 1.36559, 1.00568],
    "slat": [3.25552, 2.50388, 2.17729, 2.29094, 1.80270],
    "fast-bat": [1.99586, 1.62273, 1.37840, 1.65755, 1.11157],
    "advmixup-single": [1.62314, 1.51449, 1.45222, 1.48667, 1.36957],
    "advmixup": [1.64501, 1.52341, 1.45619, 1.51494, 1.37151],
    "subspace": [1.99876, 1.62312, 1.37267, 1.59059, 1.08069],
    "no-attack+elle": [1.47440, 1.21074, 0.99687, 1.04412, 0.75541],
    "elle": [2.02562, 1.61428, 1.35991, 1.70627, 1.10470],
    "elle-a": [1.99876, 1.62312, 1.37267, 2.11621, 1.15872],
    "n-fgsm+elle": [2.03092, 1.64229, 1.43647, 1.70871, 1.15065],
    "n-fgsm+elle-a": [2.00859, 1.64386, 1.43403, 1.89771, 1.20221],
}


@every_row
def test_the_first_five_losses_are_the_golden_ones(name):
    assert train(METHODS[name]) == pytest.approx(GOLDEN[name], rel=1e-4)


def test_what_five_steps_do_not_show_is_as_published():
    """Replays of one batch, and the second half of a training."""
    assert METHODS["free"].attack == Replay(replays=8, alpha=1.0, clip=True, norm="linf")
    assert METHODS["free"].replays == 8
    assert METHODS["subspace"].subspace == Subspace(until=0.5, samples=40, dimension=30, rate=5.0)


@every_row
def test_the_loss_of_every_row_falls(name):
    losses = train(METHODS[name], 25)
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


@every_row
def test_a_row_is_found_by_its_name_and_holds_no_state(name):
    assert find_method(name) is METHODS[name]
    assert METHODS[name].name == name
    before = repr(METHODS[name])
    train(METHODS[name], 2)
    assert repr(METHODS[name]) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        METHODS[name].name = "other"


@every_row
def test_a_row_says_whether_it_differentiates_a_gradient(name, monkeypatch):
    kept, gradient_of = [], torch.autograd.grad

    def watched(*arguments, create_graph=False, **others):
        kept.append(create_graph)
        return gradient_of(*arguments, create_graph=create_graph, **others)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    backward(METHODS[name], conv_net(), *images(8))
    assert METHODS[name].double_backpropagation == any(kept)


@every_row
def test_a_row_has_a_regulariser_exactly_where_it_has_a_weight(name):
    row = METHODS[name]
    assert (row.regulariser is None) == (row.weight is None) == (row.penalty is None)


@pytest.mark.parametrize("penalty", ["elle", "elle-a"])
@pytest.mark.parametrize("base", WITHOUT_PENALTY)
def test_with_weight_zero_the_gradient_is_that_of_the_base_method(base, penalty):
    gradients = []
    for method in (find_method(base), configured(f"{base}+{penalty}", weight=0)):
        model = conv_net()
        torch.manual_seed(3)
        backward(method, model, *images(16))
        gradients.append(gradient(model))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("penalty", "rule"), [("elle", Constant(1000)), ("elle-a", OnOff(4000))], ids=["elle", "elle-a"]
)
@pytest.mark.parametrize("base", WITHOUT_PENALTY)
def test_either_penalty_can_be_added_to_a_row_without_one(base, penalty, rule):
    method = find_method(f"{base}+{penalty}")
    assert (method.name, method.penalty, method.weight) == (f"{base}+{penalty}", penalty, rule)
    assert method.attack == METHODS[base].attack
    assert method.regulariser == Linearity()


@pytest.mark.parametrize("penalty", ["elle", "elle-a"])
def test_the_paper_s_own_names_are_fgsm_with_a_penalty(penalty):
    assert dataclasses.replace(find_method(f"fgsm+{penalty}"), name=penalty) == METHODS[penalty]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fgms", "did you mean 'fgsm'"),
        ("ele-a", "did you mean 'elle-a'"),
        ("n-fgsm+elle-b", r"did you mean 'n-fgsm\+elle"),
        ("elle+elle", "does not exist"),
        ("elle-a+elle", "does not exist"),
        ("fgsm+elle+elle-a", "does not exist"),
        ("+elle", "does not exist"),
        ("fgsm+", "does not exist"),
        ("", "does not exist; choose from standard"),
        ("FGSM", "does not exist"),
    ],
)
def test_an_unknown_method_or_a_second_penalty_is_refused(name, hint):
    with pytest.raises(InputError, match=hint) as problem:
        find_method(name)
    assert "\n" not in str(problem.value)


ZERO = {"loss": {"weight": 0.0}}


@pytest.mark.parametrize(
    ("name", "options", "base"),
    [
        ("gradalign", ZERO, configured("fgsm", clip=True)),
        ("cure", ZERO, METHODS["fgsm"]),
        ("llr", ZERO, METHODS["fgsm"]),
        ("grad-penalty", ZERO, METHODS["standard"]),
        ("llr-original", {"loss": {"weight": 0.0, "nominal": 1.0}}, METHODS["standard"]),
        ("gat-original", ZERO, METHODS["standard"]),
        ("nuat", ZERO, METHODS["standard"]),
        ("trades", {"loss": {"beta": 0.0}}, METHODS["standard"]),
        ("trades-single", {"loss": {"beta": 0.0}}, METHODS["standard"]),
        ("advmixup", {"loss": {"gamma": 0.0, "at_vertex": 1.0}}, METHODS["standard"]),
        ("slat", {"loss": {"alpha": 0.0, "latent": 0.0}}, METHODS["standard"]),
        ("fw-at", {"attack": {"steps": 1}}, METHODS["fgsm"]),
        ("zerograd", {"attack": {"zero": 0.0, "alpha": 1.25}}, METHODS["rs-fgsm"]),
    ],
)
def test_with_its_own_part_at_zero_a_row_is_its_base_method(name, options, base):
    x, y = images(16)
    gradients = []
    for method in (configured(name, options=options), base, configured(name)):
        model = conv_net()
        if name == "llr-original":
            model[1] = nn.Identity()  # its forward of x and x + d together shares BatchNorm's statistics
        torch.manual_seed(0)
        backward(method, model, 0.2 + 0.6 * x, y)
        gradients.append(gradient(model))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert (gradients[2] - gradients[1]).abs().max() > 1e-3


def test_with_weight_zero_gat_is_cross_entropy_at_its_one_step_from_a_corner():
    x, y = images(16)
    gradients = []
    corner = SignStep(noise=1, start="sign", clip=True, eval_mode=True)
    for method in (configured("gat", options=ZERO), dataclasses.replace(METHODS["fgsm"], attack=corner)):
        model = conv_net()
        torch.manual_seed(0)
        backward(method, model, x, y)
        gradients.append(gradient(model))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
def test_pgd_has_any_number_of_steps(steps):
    method = find_method(f"pgd-{steps}")
    assert (method.attack.steps, method.attack.alpha) == (steps, min(2 / steps, 1))
    model = Probe()
    backward(method, model, *images(8))
    assert Cost(model.forwards // 8, model.input_gradients // 8, model.weight_gradients // 8) == method.cost
    assert find_method(f"pgd-{steps}+elle-a").penalty == "elle-a"


@pytest.mark.parametrize("name", ["pgd-0", "pgd-", "pgd-1000", "pgd-x"])
def test_other_numbers_of_steps_are_refused(name):
    with pytest.raises(InputError, match="does not exist"):
        find_method(name)


def test_gradalign_is_finite_where_a_gradient_is_zero():
    model = conv_net()
    with torch.no_grad():
        model[-1].weight.zero_()
    loss, _ = backward(METHODS["gradalign"], model, *images(8))
    assert math.isfinite(loss)
    assert gradient(model).isfinite().all()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_gradalign_takes_the_gradient_at_the_image_once_and_loses_nothing(norm):
    method, (x, y) = configured("gradalign", norm=norm), images(16)
    outcomes, forwards = [], []
    for attacked in (method.attacked, lambda *images: (method.attack(*images), method.loss)):
        model = conv_net()
        torch.manual_seed(2)
        x_adv, loss = attacked(model, x, y, EPS)
        total, _ = loss(model, x, y, x_adv, EPS)
        total.backward()
        outcomes.append((x_adv, total, gradient(model)))
        forwards.append(int(model[1].num_batches_tracked))
    assert forwards == [3, 4]
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fields", [{"noise": 1}, {"steps": 2}, {"agree": 3}, {"eval_mode": True}])
def test_gradalign_takes_its_own_gradient_where_the_attack_s_is_another(fields):
    method = configured("gradalign", options={"attack": fields})
    assert method.attacked(conv_net(), *images(4), EPS)[1] is method.loss


@pytest.mark.parametrize("name", ["trades", "trades-single"])
def test_the_trades_attack_leaves_batchnorm_and_the_modes_alone(name):
    model = conv_net().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    METHODS[name].attack(model, *images(8), EPS)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


BAD_WORDS = [
    ("slat method.loss.layers=nowhere", "has no layer 'nowhere'"),
    ("slat method.loss.layers=3", "method.loss.layers=3 should be like its default"),
    ("elle-a method.weight.history=al", "method.weight.history='al' should be a whole number"),
    ("slat method.loss.layer=features", "did you mean 'layers'"),
    ("slat method.loss.alpha=far", "method.loss.alpha='far'"),
    ("subspace method.subspace.samples=2.5", "method.subspace.samples=2.5"),
    ("subspace method.subspace.samples=10", "dimension is 30"),
    ("subspace method.subspace.until=1", "until is 1"),
    ("subspace method.subspace.size=3", "method.subspace has until, samples, dimension, rate"),
    ("fgsm method.subspace.samples=5", "has no part 'subspace'"),
    ("free method.attack.replays=0", "replays is 0"),
    ("free method.attack.replays=1.5", "method.attack.replays=1.5"),
    ("free method.attack.steps=3", "method.attack has replays, alpha, clip, norm"),
    ("free method.attack.norm=l1", "norm is 'l1'"),
    ("free method.attack.norm=l2", "method.attack.norm=l2: eps, and the evaluation, are in norm=linf; write norm=l2"),
    ("trades method.attack.noise=0", "objective is 'kl'"),
    ("fgsm method.attack.objective=kl", "its gradient there is rounding; give noise"),
    ("gat method.loss.weight=-1", "weight is -1"),
    ("free method.attack.alpha=-1", "alpha is -1"),
    ("gat method.loss.alpha=-1", "alpha is -1"),
    ("nuat method.loss.late=nan", "late is nan"),
    ("slat method.loss.latent=-1.8", "latent is -1.8"),
    ("fast-bat method.loss.rate=-1", "rate is -1"),
    ("llr-original method.loss.rate=inf", "rate is inf"),
    ("advmixup method.loss.gamma=-2", "gamma is -2"),
    ("subspace method.subspace.rate=0", "rate is 0"),
    ("gat method.loss.clean=1", "method.loss.clean=1"),
    ("gat method.loss.distance=2", "distance is 2"),
    ("nuat method.loss.distance=l2", "distance is 'l2'"),
    ("nuat method.loss.ramp=yes", "method.loss.ramp='yes'"),
    ("fast-bat method.loss.weight=0", "weight is 0"),
    ("fast-bat method.loss.steps=1.5", "method.loss.steps=1.5"),
    ("fast-bat method.loss.gradient=1", "method.loss has rate, steps, weight"),
    ("llr-original method.loss.slope=-0.3", "slope is -0.3"),
    ("llr-original method.loss.rate=big", "method.loss.rate='big'"),
    ("advmixup method.loss.at_image=2", "at_image is 2"),
    ("advmixup method.loss.gamma=wide", "method.loss.gamma='wide'"),
    ("fw-at method.attack.frank_wolfe=2", "method.attack.frank_wolfe=2"),
    ("trades method.loss.beta=-6", "beta is -6"),
    ("gradalign method.loss.weight=-1", "weight is -1"),
    ("gradalign method.loss.penalty=none", "method.loss has weight, norm"),
    ("cure method.loss.weight=much", "method.loss.weight='much'"),
    ("elle-a weight=-1", "weight=-1"),
    *((f"{name} norm=l2 eps=0.5", f"method {name} is defined for norm=linf only") for name in (
        "gat", "gat-original", "nuat", "slat", "fast-bat", "llr-original", "gat+elle-a")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), BAD_WORDS, ids=[words for words, _ in BAD_WORDS])
def test_what_a_row_cannot_do_is_one_line_and_exit_code_2(elle, tmp_path, words, message):
    name, *others = words.split()
    outcome = elle("train", "data=digits", "device=cpu", f"method={name}", *others, "--out", tmp_path / "run")
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_slat_without_a_convolution_is_refused_and_named_layers_serve_any_network():
    slat = METHODS["slat"]
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4))
    with pytest.raises(InputError, match="the network has no convolution"):
        slat.check(linear, (1, 8, 8))
    named = configured("slat", options={"loss": {"layers": "1"}})
    named.check(linear, (1, 8, 8))
    loss, _ = backward(named, linear, *images(8))
    assert math.isfinite(loss)


class Unmoved(nn.Module):
    """A network with layers whose outputs no method can move."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ModuleList([nn.Linear(64, 8), nn.Tanh()])
        self.recurrent, self.head, self.aside = nn.LSTM(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.weights_alone = nn.Linear(8, 8)

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.listed:
            x = layer(x)
        x = nn.functional.linear(self.recurrent(x)[0], self.weights_alone.weight)
        self.aside(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ("listed", "is not called in its forward"),
        ("weights_alone", "is not called in its forward"),
        ("recurrent", "gives nothing that leads to its logits"),
        ("aside", "gives nothing that leads to its logits"),
    ],
)
def test_slat_refuses_a_layer_whose_output_it_could_not_move(layer, why):
    network = Unmoved()
    slat = configured("slat", options={"loss": {"layers": f"head,{layer}"}})
    with pytest.raises(InputError, match=f"^method.loss.layers of slat: the layer '{layer}' of the network {why}; "):
        slat.check(network, (1, 8, 8))
    configured("slat", options={"loss": {"layers": "head,listed.0"}}).check(network, (1, 8, 8))
    assert all(parameter.grad is None for parameter in network.parameters())
