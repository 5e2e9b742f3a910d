"""The subspace is that of the samples' principal components, and updates stay in it."""

import numpy as np
import pytest
import torch
from torch import nn

from elle.core.subspace import Subspace, flattened, put
from tests.networks import conv_net

SIZE = 50


class Vector(nn.Module):
    """Parameters alone, in two pieces."""

    def __init__(self, values):
        super().__init__()
        self.first, self.rest = nn.Parameter(values[:10].clone().view(2, 5)), nn.Parameter(values[10:].clone())


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def walked(subspace, path, total):
    """The model and state after the weights have gone along `path`, a row a step, and when the basis was formed."""
    model = Vector(path[0])
    state = subspace.start(model)
    formed = []
    for done in range(total + 1):
        if not any(formed):
            put(model.parameters(), path[min(done, len(path) - 1)])
        formed.append(subspace.observe(state, model, done, total))
    return model, state, formed


def rank_of(basis):
    return int((basis.square().sum(1) > 0.5).sum())


def assert_orthonormal(basis, rank):
    expected = torch.zeros(len(basis), len(basis))
    expected[range(rank), range(rank)] = 1
    torch.testing.assert_close(basis @ basis.mT, expected, rtol=0, atol=1e-5)


def test_the_basis_is_numpy_s_principal_components_up_to_sign():
    path = normal(12, SIZE) * torch.linspace(1, 3, SIZE)
    subspace = Subspace(until=0.5, samples=12, dimension=7)
    _, state, _ = walked(subspace, path, 22)
    samples = path.double().numpy()
    components = np.linalg.svd(samples - samples.mean(0))[2][:7]
    basis = state["basis"][:7].double().numpy()
    np.testing.assert_allclose(np.abs(np.sum(basis * components, axis=1)), 1, rtol=0, atol=1e-6)
    assert_orthonormal(state["basis"][:7], 7)
    assert not state["basis"][7:].any()


@pytest.mark.parametrize("kind", ["smooth", "few steps", "noisy and small"])
def test_the_components_are_orthonormal_where_the_spectrum_falls_below_float32(kind):
    """A smooth path, or one of fewer steps than samples, has fewer directions than the basis has room for."""
    subspace = Subspace(until=0.5, samples=40, dimension=30)
    powers = torch.linspace(0, 1, 40).unsqueeze(1) ** torch.arange(6)
    path, total, rank = {
        "smooth": (powers @ normal(6, 500), 78, 5),
        "few steps": ((0.1 * normal(10, 500)).cumsum(0) + normal(500, seed=1), 18, 9),
        "noisy and small": (1e-5 * normal(40, 500) + normal(500, seed=1), 78, 30),
    }[kind]
    _, state, _ = walked(subspace, path, total)
    assert rank_of(state["basis"]) == rank
    assert_orthonormal(state["basis"][:30], rank)


def test_many_parameters_are_handled_in_pieces():
    path = normal(5, 600_000)
    subspace = Subspace(until=0.5, samples=5, dimension=3)
    _, state, _ = walked(subspace, path, 8)
    centred = (path - path.mean(0)).double()
    values = torch.linalg.eigvalsh(centred @ centred.mT).flip(0)[:3]
    torch.testing.assert_close((state["basis"][:3].double() @ centred.mT).square().sum(1), values)


@pytest.mark.parametrize(("until", "total", "last"), [(0.5, 20, 10), (0.3, 100, 30), (0.5, 1, 1), (0.9, 7, 6)])
def test_the_first_sample_is_taken_at_once_and_the_last_at_its_share(until, total, last):
    subspace = Subspace(until=until, samples=4, dimension=2)
    due = [subspace.due(done, total) for done in range(total + 1)]
    assert due[0] == 1
    assert due == sorted(due)
    assert due.index(4) == last
    assert due[-1] == 4


def test_with_the_last_sample_the_weights_go_back_to_the_first():
    path = normal(11, SIZE)
    model, state, formed = walked(Subspace(until=0.5, samples=6, dimension=3), path, 20)
    assert [done for done, now in enumerate(formed) if now] == [10]
    assert torch.equal(flattened(model.parameters()), path[0])
    assert bool(state["active"])
    assert int(state["sampled"]) == 6


def test_samples_are_the_weights_at_their_moments():
    path = normal(21, SIZE)
    subspace, model = Subspace(until=0.5, samples=6, dimension=3), Vector(path[0])
    state = subspace.start(model)
    for done in range(9):
        put(model.parameters(), path[done])
        assert not subspace.observe(state, model, done, 20)
        assert torch.equal(flattened(model.parameters()), path[done])
    assert torch.equal(state["basis"][:5], path[[0, 2, 4, 6, 8]])
    assert not state["active"]


def test_an_update_is_projected_onto_the_span_and_scaled():
    subspace = Subspace(until=0.5, samples=6, dimension=3, rate=2.0)
    model, state, _ = walked(subspace, normal(6, SIZE), 10)
    before = flattened(model.parameters())
    basis = state["basis"][:3]
    inside, any_update = normal(3, seed=3) @ basis, normal(SIZE, seed=4)
    for update, expected in ((inside, inside), (any_update, basis.mT @ (basis @ any_update))):
        put(model.parameters(), before + update)
        subspace.project(state, list(model.parameters()), before)
        moved = flattened(model.parameters()) - before
        torch.testing.assert_close(moved, 2 * expected, rtol=1e-4, atol=1e-5)
    outside = any_update - basis.mT @ (basis @ any_update)
    put(model.parameters(), before + outside)
    subspace.project(state, list(model.parameters()), before)
    torch.testing.assert_close(flattened(model.parameters()), before, rtol=0, atol=1e-5)


def test_before_there_is_a_basis_an_update_is_left_as_it_is():
    model = conv_net()
    subspace = Subspace(samples=6, dimension=3)
    state = subspace.start(model)
    subspace.observe(state, model, 0, 100)
    before = flattened(model.parameters())
    after = normal(len(before))  # far enough for before + (after - before) to be rounded
    put(model.parameters(), after)
    subspace.project(state, list(model.parameters()), before)
    assert torch.equal(flattened(model.parameters()), after)


def test_weights_that_never_moved_give_an_empty_basis():
    subspace = Subspace(samples=6, dimension=3)
    model, state, _ = walked(subspace, normal(1, SIZE), 10)
    assert not state["basis"].any()
    before = flattened(model.parameters())
    put(model.parameters(), before + 1)
    subspace.project(state, list(model.parameters()), before)
    assert torch.equal(flattened(model.parameters()), before)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"until": 0.0}, "until"),
        ({"until": 1.0}, "until"),
        ({"dimension": 0}, "dimension"),
        ({"samples": 30}, "dimension"),
        ({"samples": 0}, "dimension"),
    ],
)
def test_a_bad_setting_is_refused_by_name(fields, name):
    with pytest.raises(ValueError, match=f"^{name} is "):
        Subspace(**fields)


def test_going_back_to_the_first_weights_goes_back_to_their_statistics_too():
    """The first weights with the statistics of trained ones gave logits that were not finite."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    subspace = Subspace(until=0.5, samples=3, dimension=1)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    state = subspace.start(model)
    formed = []
    for done in range(5):
        formed.append(subspace.observe(state, model, done, 4 * 2))
        if not formed[-1]:
            model(100 * normal(8, 3, 6, 6, seed=done))
            with torch.no_grad():
                model[0].weight += normal(*model[0].weight.shape, seed=done)
            assert not torch.equal(model[1].running_var, first["1.running_var"])
    assert formed == [False] * 4 + [True]
    torch.testing.assert_close(model.state_dict(), first, rtol=0, atol=0)
