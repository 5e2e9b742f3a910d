"""Batches are crops and flips of the images, in an order that depends on seed and epoch alone."""

import numpy as np
import pytest
import torch

from elle.data.resident import Resident, resized, split_validation, to_tensors
from elle.data.sources import Split
from elle.errors import InputError

CPU = torch.device("cpu")


def fake_split(count: int, height: int = 6, width: int = 5) -> Split:
    """Images whose pixels are never zero, so that padding shows."""
    x = np.random.default_rng(0).integers(1, 256, (count, 3, height, width), dtype=np.uint8)
    return Split(x, np.arange(count, dtype=np.int64) % 10)


def variants(image: np.ndarray, crop: int, flip: bool) -> dict[bytes, tuple[int, int, bool]]:
    """Every crop and flip of one image, made the slow way: its bytes -> (top, left, flipped)."""
    height, width = image.shape[1:]
    padded = np.pad(image, ((0, 0), (crop, crop), (crop, crop)))
    found = {}
    for top in range(2 * crop + 1):
        for left in range(2 * crop + 1):
            window = padded[:, top : top + height, left : left + width]
            found[window.tobytes()] = (top, left, False)
            if flip:
                found[window[:, :, ::-1].tobytes()] = (top, left, True)
    return found


@pytest.mark.parametrize(("crop", "flip"), [(2, True), (2, False), (1, True), (0, True)])
def test_each_image_is_a_crop_or_flip_of_its_original_and_all_occur(crop, flip):
    data = fake_split(7)
    resident = Resident(data, CPU, crop, flip)
    torch.manual_seed(0)
    seen = {index: set() for index in range(len(data))}
    expected = [variants(image, crop, flip) for image in data.x]
    index = torch.arange(7).repeat(100)
    x, y = resident.batch(index)
    assert torch.equal(y, torch.tensor(data.y)[index])
    for image, source in zip((x * 255).round().to(torch.uint8).numpy(), index.tolist(), strict=True):
        seen[source].add(expected[source][image.tobytes()])  # KeyError: not a crop or flip of its image
    count = (2 * crop + 1) ** 2 * (2 if flip else 1)
    assert set.union(*seen.values()) == {place for table in expected for place in table.values()}
    assert len(set.union(*seen.values())) == count


@pytest.mark.parametrize(("crop", "flip"), [(2, True), (2, False), (0, True)])
def test_the_draws_are_flip_then_top_then_left(crop, flip):
    """A seed's batches are part of its result: what is drawn, in which order, must not change."""
    data = fake_split(40)
    resident = Resident(data, CPU, crop, flip)
    index = torch.arange(40).flip(0)
    torch.manual_seed(3)
    x, _ = resident.batch(index)
    after = torch.rand(1)
    torch.manual_seed(3)
    flips = torch.randint(2, (40,), dtype=torch.bool).tolist() if flip else [False] * 40
    tops, lefts = (torch.randint(2 * crop + 1, (40,)).tolist() if crop else [0] * 40 for _ in range(2))
    padded = np.pad(data.x, ((0, 0), (0, 0), (crop, crop), (crop, crop)))
    for image, source, mirrored, top, left in zip(x, index, flips, tops, lefts, strict=True):
        window = padded[source, :, top : top + 6, left : left + 5].astype(np.float32) / 255
        np.testing.assert_array_equal(image.numpy(), window[:, :, ::-1] if mirrored else window)
    assert torch.equal(after, torch.rand(1))


def test_the_crops_are_a_view_that_takes_no_memory():
    resident = Resident(fake_split(3), CPU, crop=2)
    assert resident._crops.shape == (3, 5, 5, 3, 6, 5)
    assert resident._crops.untyped_storage().data_ptr() == resident.x.untyped_storage().data_ptr()


def test_images_of_one_batch_are_augmented_independently():
    resident = Resident(fake_split(1), CPU, crop=2, flip=True)
    x, _ = resident.batch(torch.zeros(64, dtype=torch.int64))
    assert len({image.numpy().tobytes() for image in x}) > 20


def test_crops_reach_over_the_edge_into_zeros():
    resident = Resident(fake_split(4), CPU, crop=2)
    assert resident.x.dtype == torch.uint8
    assert resident.x.shape == (4, 3, 10, 9)
    assert resident.x[:, :, 2:-2, 2:-2].min() > 0
    assert int(resident.x.sum()) == int(resident.x[:, :, 2:-2, 2:-2].sum())
    x, _ = resident.batch(torch.zeros(200, dtype=torch.int64))
    assert (x[:, :, :2].sum((1, 2, 3)) == 0).any()
    assert (x[:, :, -2:].sum((1, 2, 3)) == 0).any()


def test_without_augmentation_a_batch_is_the_images_and_draws_nothing():
    data = fake_split(9)
    resident = Resident(data, CPU)
    before = torch.get_rng_state()
    index = torch.tensor([3, 3, 8, 0])
    x, y = resident.batch(index)
    assert torch.equal(torch.get_rng_state(), before)
    everything, labels = to_tensors(data, CPU)
    assert torch.equal(x, everything[index])
    assert torch.equal(y, labels[index])


@pytest.mark.parametrize(("crop", "flip"), [(0, False), (4, True)])
def test_batches_are_float32_in_zero_to_one(crop, flip):
    data = fake_split(16, height=32, width=32)
    data.x[0], data.x[1] = 0, 255
    x, y = Resident(data, CPU, crop, flip).batch(torch.arange(16))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.shape == (16, 3, 32, 32)
    assert x[0].max() == 0
    assert x[1].max() == 1
    assert 0 <= x.min() <= x.max() <= 1


def test_the_same_draws_give_the_same_batch():
    resident = Resident(fake_split(16), CPU, crop=2, flip=True)
    torch.manual_seed(5)
    first, _ = resident.batch(torch.arange(16))
    second, _ = resident.batch(torch.arange(16))
    torch.manual_seed(5)
    again, _ = resident.batch(torch.arange(16))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_order_holds_every_image_once_and_depends_on_seed_and_epoch_alone():
    resident = Resident(fake_split(50), CPU)
    torch.manual_seed(1)
    np.random.seed(1)
    order = resident.order(seed=3, epoch=4)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    np.random.seed(2)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(50))
    assert torch.equal(order, resident.order(seed=3, epoch=4))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_orders_of_different_seeds_and_epochs_differ():
    resident = Resident(fake_split(50), CPU)
    pairs = [(seed, epoch) for seed in (0, 1, 2, 3, 2**32, 2**40) for epoch in range(5)]
    orders = {tuple(resident.order(seed, epoch).tolist()) for seed, epoch in pairs}
    validation = tuple(np.random.default_rng(0).permutation(50).tolist())
    assert len(orders | {validation}) == len(pairs) + 1


def test_validation_takes_images_out_by_the_seed():
    data = fake_split(40)
    data = Split(data.x, np.arange(40, dtype=np.int64))
    train, held_out = split_validation(data, 12, seed=7)
    assert (len(train), len(held_out)) == (28, 12)
    assert sorted([*train.y, *held_out.y]) == list(range(40))
    np.testing.assert_array_equal(train.x, data.x[train.y])
    np.testing.assert_array_equal(held_out.x, data.x[held_out.y])
    np.testing.assert_array_equal(split_validation(data, 12, seed=7)[1].y, held_out.y)
    assert set(split_validation(data, 12, seed=8)[1].y) != set(held_out.y)


def test_no_validation_leaves_the_training_set_as_it_is():
    data = fake_split(10)
    train, held_out = split_validation(data, 0, seed=7)
    np.testing.assert_array_equal(train.x, data.x)
    assert held_out.x.shape == (0, 3, 6, 5)
    assert len(to_tensors(held_out, CPU)[0]) == 0


@pytest.mark.parametrize("count", [10, 11, -1])
def test_validation_must_leave_something_to_train_on(count):
    with pytest.raises(InputError, match=f"validation={count}"):
        split_validation(fake_split(10), count, seed=0)


def test_read_only_arrays_are_taken_without_a_warning(recwarn):
    data = fake_split(4)
    data.x.setflags(write=False)
    data.y.setflags(write=False)
    Resident(data, CPU, crop=1)
    to_tensors(data, CPU)
    assert not recwarn.list


@pytest.mark.gpu
def test_batches_are_captured_in_a_cuda_graph_and_differ_at_each_replay():
    device = torch.device("cuda")
    data = fake_split(64)
    resident = Resident(data, device, crop=2, flip=True)
    index = resident.order(0, 0)
    assert torch.equal(index.cpu(), Resident(data, CPU).order(0, 0))
    resident.batch(index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, y = resident.batch(index)
    graph.replay()
    first = x.clone()
    graph.replay()
    assert not torch.equal(x, first)
    assert torch.equal(y.cpu(), torch.tensor(data.y)[index.cpu()])
    tables = [variants(image, 2, True) for image in data.x]
    for image, source in zip((x * 255).round().to(torch.uint8).cpu().numpy(), index.tolist(), strict=True):
        assert image.tobytes() in tables[source]


@pytest.mark.gpu
@pytest.mark.parametrize(("crop", "flip"), [(2, True), (2, False), (0, True), (0, False)])
def test_batches_on_a_gpu_have_their_channels_last_and_the_values_of_a_division(crop, flip):
    data = fake_split(256)
    data.x[:] = np.arange(256, dtype=np.uint8)[:, None, None, None]
    x, _ = Resident(data, "cuda", crop, flip).batch(torch.arange(256, device="cuda"))
    assert x.is_contiguous(memory_format=torch.channels_last)
    levels = torch.arange(256, dtype=torch.uint8, device="cuda").to(torch.float32) / 255
    assert torch.equal(x.amax((1, 2, 3)), levels)


def test_a_resized_image_is_the_mean_of_the_pixels_it_is_made_of():
    flat = np.repeat(np.arange(0, 240, 30, dtype=np.uint8).reshape(2, 1, 4, 1), 3, axis=1).repeat(4, axis=3)
    data = Split(flat.repeat(8, axis=2).repeat(8, axis=3), np.zeros(2, dtype=np.int64))  # stripes of 8 of 32 pixels
    small = resized(data, 16, CPU)
    assert small.x.shape == (2, 3, 16, 16)
    assert small.x.dtype == np.uint8
    within = small.x[:, :, 1::4, :]  # of each stripe, away from its neighbours
    assert np.array_equal(within, flat[:, :, :, :1].repeat(16, axis=3))
    assert abs(small.x.mean(axis=(1, 2, 3)) - data.x.mean(axis=(1, 2, 3))).max() < 1
    assert resized(data, 32, CPU) is data
