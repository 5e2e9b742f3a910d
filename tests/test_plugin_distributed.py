"""Two processes train as one: the same weight on every rank, and the gradient of the whole batch."""

import datetime
import itertools
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import elle
from elle.core.linearity import error
from tests.networks import conv_net, gradient, images, smooth_net

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
EPS = 8 / 255
RANKS, STEPS, SECONDS = 2, 8, 120
# The error of step 5 leaves the history: the weight is 0, jumps, and decays.
RADII = [EPS] * 5 + [8 * EPS] + [EPS] * 2


def opposite_offsets():
    """x_a and x_b on opposite sides of x, by its pixels alone: the same in one process and in two."""
    signs = itertools.cycle([1, -1])
    return lambda x, eps, norm="linf": next(signs) * eps * torch.sin(50 * x)


def train(model, shards, steps=STEPS, called=None):
    """The contract of the design on this process's part of each batch; what was seen at each step.

    `called`: what is called in place of the model, and calls it.
    """
    called = model if called is None else called
    reg = elle.ELLE(EPS, weight=1e4, decay=0.5, alpha=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = {"error": [], "weight": [], "threshold": [], "gradient": []}
    for step in range(steps):
        x, y = shards(step)
        reg.eps = RADII[step]
        x_adv = elle.attacks.fgsm(called, x, y, eps=EPS)
        loss = F.cross_entropy(called(x_adv), y) + reg(called, x, y)
        loss.backward()
        for name in ("error", "weight", "threshold"):
            seen[name].append(getattr(reg, name).clone())
        seen["gradient"].append(gradient(model))
        optimizer.step()
        optimizer.zero_grad()
    return {name: torch.stack(values) for name, values in seen.items()}


# Ways to call a network that is in DistributedDataParallel, and not to be it.
CALLED = {
    "a function": lambda model: lambda x: model(x),
    "a module": torch.nn.Sequential,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "a function of torch.compile": lambda model: (lambda compiled: lambda x: compiled(x))(
        torch.compile(model, backend="eager")
    ),
}


def part(step, rank):
    x, y = images(8 * RANKS, seed=step)
    return x[8 * rank : 8 * rank + 8], y[8 * rank : 8 * rank + 8]


def worker(rank, folder):
    """One rank: everything the tests look at, saved to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting-point",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=SECONDS / 2),
    )
    seen = {}
    torch.manual_seed(100 + rank)  # different random points on each rank, as in practice
    seen["batchnorm"] = train(DistributedDataParallel(conv_net()), lambda step: part(step, rank))
    seen["own_error"] = own_error(rank)
    seen["two_backwards"] = two_backwards(rank)
    seen["static"] = train(DistributedDataParallel(conv_net(), static_graph=True), lambda step: part(step, rank))
    error.uniform_in_ball = opposite_offsets()
    for way, called in CALLED.items():
        model = DistributedDataParallel(smooth_net(64), static_graph=True)
        seen[way] = train(model, lambda step: part(step, rank), called=called(model))
    model = DistributedDataParallel(smooth_net(64), static_graph=True)
    elle.evaluate(torch.nn.Sequential(model), *part(0, rank), "clean,fgsm", EPS)
    seen["evaluated before"] = train(model, lambda step: part(step, rank))
    seen["plain"] = train(DistributedDataParallel(smooth_net(64)), lambda step: part(step, rank))
    torch.save(seen, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


def own_error(rank):
    """What this rank's error would be alone, and what the plug-in reports."""
    model, reg = smooth_net(64), elle.ELLE(EPS)
    x, y = part(0, rank)
    torch.manual_seed(rank)
    alone = error.triplet_error(model, x, y, EPS).mean().detach()
    torch.manual_seed(rank)
    reg(DistributedDataParallel(model), x, y)
    return {"alone": alone, "reported": reg.error}


def two_backwards(rank):
    """The gradient when the loss and the penalty each get a backward of their own, to save memory."""
    model = DistributedDataParallel(smooth_net(64))
    reg = elle.ELLE(EPS, weight=1e4, adaptive=False)
    x, y = part(0, rank)
    F.cross_entropy(model(x), y).backward()
    reg(model, x, y).backward()
    return gradient(model)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes saw."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = mp.spawn(worker, (str(folder),), nprocs=RANKS, join=False)
    deadline = time.monotonic() + SECONDS
    try:
        while not processes.join(timeout=5):
            assert time.monotonic() < deadline, "the two processes do not finish: one waits for the other"
    finally:
        for process in processes.processes:
            process.kill()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("network", ["batchnorm", "plain", "static", "evaluated before", *CALLED])
@pytest.mark.parametrize("quantity", ["error", "weight", "threshold", "gradient"])
def test_every_rank_sees_the_same(ranks, network, quantity):
    assert torch.equal(ranks[0][network][quantity], ranks[1][network][quantity])


def test_the_weight_is_exercised_on_both_sides(ranks):
    weight = ranks[0]["plain"]["weight"]
    assert weight.tolist() == [0] * 5 + [1e4, 5e3, 2.5e3]


def test_the_error_is_the_mean_over_the_ranks(ranks):
    alone = [rank["own_error"]["alone"] for rank in ranks]
    assert alone[0] != alone[1]
    for rank in ranks:
        torch.testing.assert_close(rank["own_error"]["reported"], (alone[0] + alone[1]) / 2, rtol=1e-4, atol=0)


@pytest.mark.parametrize("quantity", ["error", "weight", "threshold", "gradient"])
@pytest.mark.parametrize("network", ["plain", "evaluated before", *CALLED])
def test_two_processes_train_as_one_on_the_whole_batch(ranks, network, quantity, monkeypatch):
    """With static_graph too, where DistributedDataParallel takes the first backward at all for that of a step."""
    monkeypatch.setattr(error, "uniform_in_ball", opposite_offsets())
    one = train(smooth_net(64), lambda step: images(8 * RANKS, seed=step))
    atol = 1e-5 if quantity == "gradient" else 0
    torch.testing.assert_close(ranks[0][network][quantity], one[quantity], rtol=1e-2, atol=atol)


def test_a_penalty_with_a_backward_of_its_own_is_averaged_over_the_ranks(ranks):
    assert torch.equal(ranks[0]["two_backwards"], ranks[1]["two_backwards"])


@pytest.mark.parametrize("look", ["evaluate", "monitor"])
@pytest.mark.parametrize("inside", [False, True], ids=["itself", "inside another module"])
def test_one_rank_may_look_at_its_network_alone(tmp_path, monkeypatch, look, inside):
    """The wrapper's forward broadcasts BatchNorm's buffers, which would wait for the others for ever."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting-point", rank=0, world_size=1)
    try:
        model, (x, y) = DistributedDataParallel(conv_net()), images(8)
        waits = "_sync_buffers" if inside else "forward"
        monkeypatch.setattr(DistributedDataParallel, waits, lambda *_: pytest.fail("waits for the other ranks"))
        wrapper, model = model, torch.nn.Sequential(model) if inside else model
        if look == "evaluate":
            assert elle.evaluate(model, x, y, "clean,fgsm", EPS).keys() == {"clean", "fgsm"}
        else:
            assert elle.CollapseMonitor(x, y, EPS).check(model, 1) is None
        assert all(module.training for module in model.modules())
        assert wrapper.require_forward_param_sync
        assert wrapper.require_backward_grad_sync
    finally:
        dist.destroy_process_group()
