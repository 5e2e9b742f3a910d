"""A unit depends on its name alone: not on order, interruption, chunks elsewhere, or how the images are kept."""

import numpy as np
import pytest
import torch
from torch import nn

from elle.errors import InputError
from elle.evaluation import worker as workers
from elle.evaluation.evaluate import assess, evaluate
from elle.evaluation.names import parse_attacks
from elle.evaluation.results import unpacked
from elle.evaluation.units import (
    Memory,
    Settings,
    Unit,
    default_chunk,
    fitting_batch,
    plan,
    unit_seed,
)
from elle.evaluation.worker import Worker, is_inside
from tests.networks import Affine, conv_net, images, trained

CPU = torch.device("cpu")
NAMES = "clean,fgsm,pgd-5-2"


@pytest.fixture(scope="module")
def data():
    return images(60, seed=1)


@pytest.fixture(scope="module")
def model():
    return trained(conv_net(), *images(64), steps=15, lr=0.05).eval()


def worker(model, data, names=NAMES, **settings):
    return Worker(model, *data, parse_attacks(names), Settings(0.1, chunk=16, **settings), CPU)


def bits(store):
    return {unit: outcome.broken.tolist() for unit, outcome in store.outcomes.items()}


def test_the_units_of_a_chunk_are_each_chain_from_its_beginning_and_none_twice():
    chains = [unit.chain for unit in plan(parse_attacks("fgsm,apgd-ce,autoattack"), 3)]
    first = ("apgd-ce",)
    second, third = (*first, "apgd-t"), (*first, "apgd-t", "fab-t")
    assert chains == [(), ("fgsm",), first, second, third, (*third, "square")]


def test_order_does_not_matter(model, data):
    forward, backward = Memory(), Memory()
    worker(model, data).run(forward, range(4))
    worker(model, data, "pgd-5-2,fgsm,clean").run(backward, reversed(range(4)))
    assert bits(forward) == bits(backward)


def test_shares_and_an_interruption_do_not_matter(model, data):
    whole, shared = Memory(), Memory()
    worker(model, data).run(whole, range(4))

    class Interrupted(Exception):
        pass

    def interrupt():
        if len(shared.outcomes) == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        worker(model, data).run(shared, [0, 2], interrupt)
    for share in ([1, 3], [0, 2]):
        worker(model, data).run(shared, share)
    assert bits(shared) == bits(whole)


def test_what_is_done_is_not_done_again(model, data):
    store, calls = Memory(), []
    worker(model, data).run(store, range(4))
    worker(model, data).run(store, range(4), lambda: calls.append(1))
    assert calls == []


def test_seeds_differ_by_seed_attack_and_chunk():
    seeds = {
        unit_seed(seed, Unit(chain, chunk))
        for seed in (0, 1)
        for chain in (("apgd-ce",), ("apgd-ce", "square"))
        for chunk in (0, 1)
    }
    assert len(seeds) == 8


def test_a_search_is_seeded_the_same_alone_and_in_the_ensemble():
    assert unit_seed(0, Unit(("square",), 2)) == unit_seed(0, Unit(("apgd-ce", "square"), 2))


def test_a_unit_s_seed_is_the_same_with_numpy_1(monkeypatch):
    class Unsigned(np.uint64):
        def __rshift__(self, places):  # as NumPy 1.26 answers, in which 1 is a signed number
            raise TypeError("ufunc 'right_shift' not supported for the input types")

    class Sequence(np.random.SeedSequence):
        def generate_state(self, count, dtype=np.uint32):
            return [Unsigned(number) for number in super().generate_state(count, dtype)]

    usual = unit_seed(0, Unit(("fgsm",), 3))
    monkeypatch.setattr(np.random, "SeedSequence", Sequence)
    assert unit_seed(0, Unit(("fgsm",), 3)) == usual == 3366476756859686878


def test_images_in_a_memory_mapped_file_give_what_floats_give(model, data, tmp_path):
    x, y = (data[0] * 255).round().to(torch.uint8), data[1]
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    results = [
        {name: one["correct"] for name, one in evaluate(model, *pair, NAMES, 0.1, chunk=16).items()}
        for pair in [(mapped, y.numpy()), (x, y), (x.float() / 255, y)]
    ]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("x", [torch.rand(4, 1, 8, 8) * 3, torch.ones(4, 1, 8, 8, dtype=torch.int64)])
def test_images_that_are_not_in_0_to_1_are_refused(model, x):
    with pytest.raises(InputError, match="images"):
        evaluate(model, x, torch.zeros(4, dtype=torch.long), "clean")


def test_a_label_the_network_does_not_have_is_refused(model, data):
    with pytest.raises(InputError, match="labels are 9 to 9; the network has 4 classes"):
        evaluate(model, data[0], torch.full((60,), 9), "clean")


def test_accuracy_falls_with_eps(model, data):
    correct = [evaluate(model, *data, "pgd-10-2", eps)["pgd-10-2"]["correct"] for eps in (0.0, 0.03, 0.06, 0.1, 0.2)]
    assert correct == sorted(correct, reverse=True)
    assert correct[-1] < correct[0]


@pytest.mark.parametrize(("norm", "length"), [("linf", 1.0), ("l2", 12**0.5), ("l1", 12.0)])
def test_inside_is_measured_in_the_norm(norm, length):
    x = torch.full((1, 3, 2, 2), 0.5)
    step = torch.full_like(x, 0.3 / length)
    assert is_inside(x + step, x, 0.3, norm).all()
    assert not is_inside(x + 1.001 * step, x, 0.3, norm).any()
    assert not is_inside(x + 0.6, x, 100.0, norm).any()


def outside(name, model, x, y, settings, **rest):
    return (x + 0.4).clamp(0, 1)


def nowhere(name, model, x, y, settings, **rest):
    return x + 1e-5 * (0.5 - x)


@pytest.mark.parametrize(("search", "key"), [(outside, "outside"), (nowhere, "unverified")])
def test_a_point_that_left_the_ball_or_is_classified_correctly_does_not_count(model, data, monkeypatch, search, key):
    monkeypatch.setattr(workers, "searched", search)
    record = assess(model, *data, "clean,apgd-ce", 0.1, chunk=16)
    entry = record["attacks"]["apgd-ce"]
    assert entry["correct"] == record["attacks"]["clean"]["correct"]
    assert entry[key] == entry["correct"]
    inside = next(one for one in record["checks"] if one["check"] == "inside")
    assert inside["passed"] is False
    assert f"{entry['correct']} images" in inside["words"]


def test_an_ensemble_attacks_what_is_left(monkeypatch):
    seen = []

    def every_other(name, model, x, y, settings, **rest):
        seen.append((name, len(x)))
        # A far corner is wrong for this model: a stand-in for a search that breaks every other point.
        return torch.where((torch.arange(len(x)) % 2 == 0).view(-1, 1, 1, 1), 1 - x.round(), x)

    class Mean(nn.Module):
        def forward(self, x):
            return torch.stack([x.flatten(1).mean(1), 1 - x.flatten(1).mean(1)], 1)

    monkeypatch.setattr(workers, "searched", every_other)
    x, y = torch.full((16, 1, 2, 2), 0.9), torch.zeros(16, dtype=torch.long)
    record = assess(Mean(), x, y, "autoattack", 1.0)
    assert seen == [("apgd-ce", 16), ("apgd-t", 8), ("fab-t", 4), ("square", 2)]
    entry = record["attacks"]["autoattack"]
    assert [part["correct"] for part in entry["parts"]] == [8, 4, 2, 1]
    assert entry["correct"] == 1
    assert record["order"] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert unpacked(entry["survived"], 16).sum() == 1


def test_a_record_holds_what_a_reader_needs(data):
    model = Affine(64, 4)
    record = assess(model, *data, "clean,fgsm", 0.05, seed=3, chunk=25)
    assert record["schema"] == "elle-evaluation/1"
    assert (record["eps"], record["norm"], record["seed"], record["classes"]) == (0.05, "linf", 3, 4)
    assert (record["engine"], record["precision"], record["chunk"]) == ("fast", "fp32", 25)
    assert set(record["versions"]) >= {"python", "torch", "numpy"}
    survived = unpacked(record["attacks"]["clean"]["survived"], 60)
    assert survived.tolist() == (model(data[0]).argmax(1) == data[1]).tolist()


def test_processes_that_share_the_chunks_have_the_result_of_one(model, data):
    seen = []

    def shared(part, *others):
        """The result of this process, given what the others have found."""

        def exchange(own):
            seen.append(dict(own))
            return [own, *others]

        result = evaluate(model, *data, NAMES, 0.1, chunk=16, part=part, exchange=exchange)
        return {name: one | {"seconds": 0} for name, one in result.items()}

    whole = shared((0, 1))
    assert shared((1, 2), seen[0]) == whole
    assert {unit.chunk for unit in seen[1]} == {1, 3}
    assert shared((0, 2), seen[1]) == whole
    assert {unit.chunk for unit in seen[2]} == {0, 2}


def test_a_unit_and_a_batch_hold_fewer_large_images():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (default_chunk(cpu), default_chunk(gpu)) == (1024, 2500)
    for size in (64, 224, 288):
        assert 12 * size**2 * default_chunk(gpu, size**2) <= 2**28
    assert (fitting_batch(512, 32 * 32), fitting_batch(512, 224 * 224), fitting_batch(512, 224 * 224, 128)) == (
        512,
        20,
        128,
    )


def test_points_outside_the_ball_are_found_wherever_they_are_in_the_set():
    x = torch.full((150, 1, 2, 2), 0.5)
    x_adv = x + 0.1
    outside = [0, 63, 64, 127, 128, 149]
    x_adv[outside] += 0.01
    found = is_inside(x_adv, x, 0.1, "linf")
    assert (~found).nonzero().squeeze(1).tolist() == outside
