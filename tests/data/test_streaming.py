"""A batch is a function of (seed, epoch, position): whoever makes it, whenever, with or without a cache."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch

from elle.data.cache import ResizeCache
from elle.data.folder import FolderSplit
from elle.data.phases import Phase, Timetable
from elle.data.streaming import Streaming
from elle.data.workers import Decoder, Task, draws, usable_workers
from elle.errors import InputError, WorkError

from .photographs import photograph, write_photographs

COUNT, BATCH, SIZE, EPOCHS = 22, 4, 24, 3
STEPS = [(epoch, step) for epoch in range(EPOCHS) for step in range(COUNT // BATCH)]
INDEX = torch.empty(0)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """Its labels are the numbers of the files."""
    return write_photographs(tmp_path_factory.mktemp("photographs"), COUNT, classes=COUNT)


def timetable(files, sizes=(SIZE,) * EPOCHS):
    """An epoch of each image size."""
    return Timetable(tuple(Phase(1, size, BATCH) for size in sizes), len(files))


@pytest.fixture
def stream(split):
    made = []

    def make(files: FolderSplit = split, sizes=(SIZE,) * EPOCHS, **options) -> Streaming:
        made.append(Streaming(files, "cpu", timetable(files, sizes), **{"seed": 5, "workers": 0} | options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def batches(source, steps):
    found = []
    for step in steps:
        source.stage(*step)
        x, y = source.batch(INDEX)
        found.append((x.clone(), y.clone()))
    return found


@pytest.fixture(scope="module")
def expected(split):
    return batches(Streaming(split, "cpu", timetable(split), seed=5, workers=0), STEPS)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


def test_batches_are_images_in_the_unit_interval_with_their_labels(expected):
    for x, y in expected:
        assert (x.shape, x.dtype, y.dtype) == ((BATCH, 3, SIZE, SIZE), torch.float32, torch.int64)
        assert x.min() > 0
        assert x.max() <= 1


def test_the_labels_come_in_the_order_of_the_epoch(stream, expected):
    source, steps = stream(), COUNT // BATCH
    for epoch in range(EPOCHS):
        labels = torch.cat([y for _, y in expected[epoch * steps : (epoch + 1) * steps]])
        assert torch.equal(labels, source.order(5, epoch)[: steps * BATCH])
        assert len(labels.unique()) == steps * BATCH


@pytest.mark.parametrize("first", [1, 4, 5, 8, len(STEPS) - 1])
def test_starting_in_the_middle_of_an_epoch_gives_the_same_batches(stream, expected, first):
    assert_same(batches(stream(), STEPS[first:]), expected[first:])


@pytest.mark.parametrize(("workers", "ahead"), [(1, 1), (2, 3), (3, 2)])
def test_neither_the_workers_nor_the_depth_change_a_batch(stream, expected, workers, ahead):
    assert_same(batches(stream(workers=workers, ahead=ahead), STEPS), expected)


def test_going_back_and_forth_gives_the_same_batches(stream, expected):
    steps = [2, 3, 0, 1, 1, 7, 8, 2]
    assert_same(batches(stream(workers=1), [STEPS[k] for k in steps]), [expected[k] for k in steps])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_each_global_batch_and_crop_as_one_process_does(stream, expected, ranks):
    parts = [batches(stream(rank=rank, ranks=ranks), STEPS) for rank in range(ranks)]
    together = [tuple(map(torch.cat, zip(*step, strict=True))) for step in zip(*parts, strict=True)]
    assert_same(together, expected)


def test_another_seed_and_another_epoch_crop_differently(stream, split):
    one = FolderSplit(split.paths[:BATCH], split.y[:BATCH])
    by_label = {}
    for seed, epoch in ((5, 0), (5, 1), (6, 0)):
        x, y = batches(stream(one, seed=seed), [(epoch, 0)])[0]
        by_label[seed, epoch] = x[y.argsort()]
    first, second, third = by_label.values()
    for k in range(BATCH):
        assert not torch.equal(first[k], second[k])
        assert not torch.equal(first[k], third[k])


def test_the_size_may_change_from_epoch_to_epoch(stream):
    sizes = [16, 32, 24]
    source = stream(sizes=sizes, workers=2)
    assert [x.shape[2:] for x, _ in batches(source, STEPS)[:: COUNT // BATCH]] == [(size, size) for size in sizes]


def test_a_size_reached_after_another_gives_the_batches_of_that_size_alone(stream, expected):
    steps = COUNT // BATCH
    found = batches(stream(sizes=[40, SIZE, 40], workers=1), STEPS)
    assert_same(found[steps : 2 * steps], expected[steps : 2 * steps])


def test_half_of_the_images_are_mirrored(split):
    count = 1000
    files = FolderSplit([split.paths[0]] * count, np.zeros(count, np.int64))
    task = Task(0, 0, np.arange(count), 8)
    for flip, share in ((True, 0.5), (False, 0)):
        mirrored, _ = Decoder(files, flip=flip).write(task, np.empty((count, 8, 8, 3), np.uint8))
        assert mirrored.mean() == pytest.approx(share, abs=0.05)


def test_some_of_the_images_are_mirrored_and_nothing_else_changes(stream, expected):
    plain = batches(stream(flip=False), STEPS)
    mirrored = 0
    for (x, _), (other, _) in zip(expected, plain, strict=True):
        for one, straight in zip(x, other, strict=True):
            assert torch.equal(one, straight) or torch.equal(one, straight.flip(-1))
            mirrored += not torch.equal(one, straight)
    assert 0.25 < mirrored / (len(STEPS) * BATCH) < 0.75


def test_without_random_crops_every_epoch_shows_the_middle(stream):
    source = stream(crop=False, flip=False)
    shown = [{int(label): x for x, label in zip(*source_batch, strict=True)} for source_batch in batches(source, STEPS)]
    seen = {}
    for batch in shown:
        for label, x in batch.items():
            assert torch.equal(seen.setdefault(label, x), x)


def test_the_training_s_random_numbers_are_left_alone(stream):
    before = torch.get_rng_state()
    batches(stream(workers=1), STEPS[:3])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("first", "count"), [(0, 10), (60, 10), (130, 200)])
def test_random_numbers_depend_on_the_position_and_not_on_the_batch(first, count):
    np.testing.assert_array_equal(draws(3, 1, first, count), draws(3, 1, 0, 400)[first : first + count])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_becomes_unreadable_is_named_when_it_is_reached(tmp_path, stream, workers):
    files = write_photographs(tmp_path, COUNT)
    source = stream(files, workers=workers, ahead=1)
    last = int(source.order(5, 0)[2 * BATCH])
    files.paths[last].write_bytes(b"no longer an image")
    assert len(batches(source, STEPS[:2])) == 2
    with pytest.raises(WorkError, match=f"{files.paths[last].name}: is no JPEG, PNG or WebP"):
        source.stage(0, 2)


def test_a_file_that_is_damaged_below_the_part_shown_is_named_in_the_first_epoch(tmp_path):
    path = tmp_path / "photo.jpg"
    photograph(np.random.default_rng(0), 320, 960).save(path, quality=95)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 9 // 10])
    files, into = FolderSplit([path], np.zeros(1, np.int64)), np.empty((1, 8, 8, 3), np.uint8)
    with pytest.raises(InputError, match=r"photo\.jpg: .*truncated"):
        Decoder(files).write(Task(0, 0, np.zeros(1, np.int64), 8), into)
    Decoder(files).write(Task(1, 0, np.zeros(1, np.int64), 8), into)  # its middle, without what is below
    assert into.any()


def test_a_worker_that_is_killed_ends_the_run_in_one_line(stream):
    source = stream(workers=2)
    source.stage(0, 0)
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkError, match=r"a process that decodes images died \(.*\); .* workers=2"):
        batches(source, STEPS[1:])
    source.close()
    assert not multiprocessing.active_children()


def test_workers_leave_the_group_that_ctrl_c_reaches_and_end_with_the_last_batch(stream):
    source = stream(workers=2)
    source.stage(0, 0)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    batches(source, STEPS[1:2])  # made by the second worker: both have begun
    assert all(os.getpgid(worker.pid) == worker.pid for worker in workers)
    batches(source, STEPS[2:])
    assert not multiprocessing.active_children()


def test_workers_are_one_a_core_less_one_but_at_least_one(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert (usable_workers(None), usable_workers(3), usable_workers(0)) == (15, 3, 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert usable_workers(None) == 1


# --- the cache


@pytest.fixture
def cached(split, tmp_path):
    """The batches by way of a cache, and the cache."""
    source = Streaming(split, "cpu", timetable(split), seed=5, workers=0, cache=tmp_path / "cache")
    return batches(source, STEPS), source.decoder.cache


def test_a_full_cache_gives_the_batches_that_an_empty_one_gave_without_reading_a_file(
    stream, cached, tmp_path, monkeypatch
):
    monkeypatch.setattr("elle.data.workers.OpenImage", None)  # would fail if a file were decoded
    assert_same(batches(stream(cache=tmp_path / "cache"), STEPS), cached[0])


def test_the_cache_shows_the_same_parts_of_the_images(cached, expected):
    for (x, y), (other, labels) in zip(cached[0], expected, strict=True):
        assert torch.equal(y, labels)
        assert (x - other).abs().mean() < 0.03  # squeezed and enlarged again, but the same box
    assert cached[1].side == 27  # as many pixels as an evaluation resizes the short side to


def test_many_processes_fill_one_cache(stream, cached, tmp_path):
    found = batches(stream(workers=3, cache=tmp_path / "other"), STEPS)
    assert_same(found, cached[0])
    assert_same(batches(stream(cache=tmp_path / "other"), STEPS), cached[0])


def test_a_damaged_cache_is_noticed_and_repaired(stream, cached, tmp_path):
    (pixels,) = (tmp_path / "cache").glob("*.pixels")
    raw = bytearray(pixels.read_bytes())
    raw[1000] ^= 1
    raw[-1000] ^= 1
    pixels.write_bytes(raw)
    assert cached[1].get(0) is None
    assert_same(batches(stream(cache=tmp_path / "cache"), STEPS), cached[0])
    assert cached[1].get(0) is not None


def test_a_cache_cut_short_is_filled_again(stream, cached, tmp_path):
    for file in (tmp_path / "cache").iterdir():
        os.truncate(file, file.stat().st_size // 2)
    assert_same(batches(stream(cache=tmp_path / "cache"), STEPS), cached[0])


def test_a_full_disk_leaves_the_cache_as_it_is(stream, cached, tmp_path, monkeypatch):
    monkeypatch.setattr("elle.data.cache._FREE_SHARE", 1.0)
    assert_same(batches(stream(cache=tmp_path / "small"), STEPS), cached[0])
    assert all(file.stat().st_size == 0 for file in (tmp_path / "small").iterdir())


@pytest.mark.parametrize("change", ["content", "order", "side"])
def test_other_files_or_another_size_have_another_cache(tmp_path, change):
    files = write_photographs(tmp_path / "photographs", 3).paths
    before = ResizeCache(tmp_path / "cache", files, 16).stem
    assert ResizeCache(tmp_path / "cache", files, 16).stem == before
    if change == "content":
        files[1].write_bytes(files[1].read_bytes() + b"0")
    if change == "order":
        files = files[::-1]
    assert ResizeCache(tmp_path / "cache", files, 24 if change == "side" else 16).stem != before


def test_a_cache_that_cannot_be_written_is_refused(tmp_path, stream):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cache=.*file: .*; name a folder that can be written"):
        stream(cache=tmp_path / "file")
