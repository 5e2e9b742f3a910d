"""What is on the disk: whole or not there, readable or refused by name, and held by one process at a time."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file

from elle.engine import checkpoint
from elle.engine.loop import train
from elle.engine.watcher import Watcher
from elle.errors import InputError, WorkError
from elle.files import write_json

from .interrupting import signal_after_step

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7), "c": torch.tensor([1, 2], dtype=torch.uint8)}
HOLDER = """
import sys, time
from pathlib import Path
from elle.engine.checkpoint import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def save_two(run):
    return [checkpoint.take_checkpoint(run, step, TENSORS, {"history": []})() for step in (10, 20)]


@pytest.fixture
def no_large_files():
    """A function that makes writing beyond 100 kB fail, as a full disk does, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)  # Python ignores SIGXFSZ: the write fails with EFBIG
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the run directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_tensors_and_header_read_back_as_written(tmp_path):
    path = tmp_path / "some" / "folder" / "x.safetensors"
    header = {"step": 3, "history": [{"loss": 0.1, "error": None}], "text": "é"}
    checkpoint.write_tensors(path, TENSORS, header)
    tensors, read_header = checkpoint.read_tensors(path)
    torch.testing.assert_close(tensors, TENSORS, rtol=0, atol=0)
    assert read_header == header


def test_the_library_reads_tensors_of_every_type_and_shape():
    ramp = torch.arange(-3, 9)
    tensors = {f"{kind}": ramp.to(kind).view(3, 4) for kind in checkpoint._KINDS}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(2.5, dtype=torch.float64), "odd": torch.ones(3).bool()}
    torch.testing.assert_close(load(checkpoint.packed(tensors, {})), tensors, rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind",
    [torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_the_library_reads_what_a_network_of_the_user_s_may_hold(kind):
    value = torch.arange(6).to(kind).view(2, 3)
    read = load(checkpoint.packed({"x": value}, {}))["x"]
    assert (read.dtype, read.shape) == (kind, value.shape)
    assert torch.equal(read.view(torch.uint8), value.view(torch.uint8))


def test_channels_last_are_copied_as_they_are_and_laid_out_anew_when_they_are_written():
    x = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (copy,) = checkpoint._copied({"x": x}).values()
    assert copy.stride() == x.stride()
    assert copy.data_ptr() != x.data_ptr()
    read = load(checkpoint.packed({"x": x}, {}))["x"]
    assert read.is_contiguous()
    assert torch.equal(read, x)


def test_tensors_that_share_storage_are_written_in_full(tmp_path):
    base = torch.arange(4.0)
    checkpoint.write_tensors(tmp_path / "x", {"all": base, "part": base[1:3], "turned": base.view(2, 2).T}, {})
    tensors, _ = checkpoint.read_tensors(tmp_path / "x")
    assert tensors["part"].tolist() == [1, 2]
    assert tensors["turned"].tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch, call, number):
    path = tmp_path / "x.json"
    write_json(path, "old")

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(WorkError, match=rf"could not write .*x\.json: {os.strerror(number)}; .*--resume"):
        write_json(path, "new")
    assert json.loads(path.read_text()) == "old"
    assert names(tmp_path) == ["x.json"]


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_an_interrupted_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch, call):
    path = tmp_path / "x.json"
    write_json(path, "old")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, "new")
    assert json.loads(path.read_text()) == "old"
    assert names(tmp_path) == ["x.json"]


def test_a_full_disk_ends_the_run_with_its_older_checkpoint_intact(settings, tmp_path, no_large_files):
    config, folder = settings("epochs=2"), tmp_path / "run" / "checkpoints"

    def stepped(step):
        if step == 36:
            until = time.monotonic() + 30
            while not (folder / "step-00000018.safetensors").exists() and time.monotonic() < until:
                time.sleep(0.01)
            no_large_files()

    with pytest.raises(WorkError, match=r"could not write .*step-00000036.*File too large"):
        train(config, watcher=Watcher(stepped=stepped))
    assert names(folder) == ["step-00000018.safetensors"]
    assert checkpoint.load_checkpoint(folder / "step-00000018.safetensors")[1]["step"] == 18


def test_a_run_whose_checkpoint_cannot_be_written_ends_before_it_has_trained_another_epoch(
    settings, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(WorkError, match=r"could not write .*step-00000018.*No space left"):
        train(settings("epochs=2"), watcher=Watcher(stepped=lambda step: time.sleep(0.3 * (step == 19))))
    (stop,) = (json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert 18 <= stop["step"] <= 20


def test_a_run_stopped_by_a_full_disk_can_be_resumed(settings, monkeypatch):
    config = settings("epochs=2")

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(WorkError, match="No space left"), monkeypatch.context() as full:
        train(config, watcher=Watcher(recorded=lambda record: full.setattr(os, "fsync", fail)))
    assert train(config, resume=True)["steps"] == 36


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_a_full_disk_while_a_line_is_appended_is_failed_work_not_a_crash(settings, tmp_path, name):
    def fill(step):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to("/dev/full")

    with pytest.raises(WorkError, match="No space left"):
        train(settings("max_steps=2"), watcher=Watcher(stepped=fill))


def test_only_the_last_two_checkpoints_are_kept(tmp_path):
    for step in (5, 900, 10, 123_456_789):
        checkpoint.take_checkpoint(tmp_path, step, TENSORS, {})()
    kept = [checkpoint.load_checkpoint(path)[1]["step"] for path in checkpoint.checkpoints(tmp_path)]
    assert kept == [900, 123_456_789]


def test_a_run_keeps_its_last_two_checkpoints(settings, tmp_path):
    train(settings("epochs=4", "batch=400"))
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000009.safetensors", "step-00000012.safetensors"]


def test_a_checkpoint_is_of_when_it_was_taken(tmp_path):
    tensors, history = {"w": torch.zeros(3)}, [1]
    write = checkpoint.take_checkpoint(tmp_path, 10, tensors, {"history": history})
    tensors["w"].fill_(1.0)
    history.append(2)
    tensors, header = checkpoint.load_checkpoint(write())
    assert tensors["w"].tolist() == [0.0, 0.0, 0.0]
    assert header["history"] == [1]


def slow_to_write(monkeypatch, may_go_on):
    """Have each checkpoint wait for an event before it is written."""
    take = checkpoint.take_checkpoint

    def taken(*given):
        write = take(*given)
        return lambda: may_go_on.wait(30) and write()

    monkeypatch.setattr(checkpoint, "take_checkpoint", taken)


def test_a_run_trains_on_while_its_checkpoint_is_written(settings, tmp_path, monkeypatch):
    trained_on, there = threading.Event(), []
    slow_to_write(monkeypatch, trained_on)

    def stepped(step):
        there.append(names(tmp_path / "run" / "checkpoints") if (tmp_path / "run" / "checkpoints").exists() else [])
        if step == 4:  # the first of the second epoch
            trained_on.set()

    train(settings("epochs=2", "batch=400"), watcher=Watcher(stepped=stepped))
    assert there[:4] == [[]] * 4
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000003.safetensors", "step-00000006.safetensors"]
    saved, _ = checkpoint.load_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003.safetensors")
    assert int(saved["done"]) == 3


def test_a_run_that_is_stopped_has_its_checkpoint_when_it_says_so(settings, tmp_path, monkeypatch):
    may_go_on = threading.Event()
    slow_to_write(monkeypatch, may_go_on)
    later = threading.Timer(0.3, may_go_on.set)
    later.start()
    with pytest.raises(WorkError, match="everything is saved"):
        train(settings("epochs=2", "batch=400"), watcher=signal_after_step(2, signal.SIGTERM))
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000002.safetensors"]


def test_a_last_checkpoint_that_cannot_be_written_is_failed_work(settings, tmp_path, monkeypatch):
    take = checkpoint.take_checkpoint

    def no_room(path):
        raise WorkError(f"could not write {path}: No space left on device")

    def taken(run, step, *rest):
        if step == 6:
            monkeypatch.setattr(checkpoint, "atomically", no_room)
        return take(run, step, *rest)

    monkeypatch.setattr(checkpoint, "take_checkpoint", taken)
    with pytest.raises(WorkError, match="step-00000006.safetensors: No space left"):
        train(settings("epochs=2", "batch=400"))
    assert not (tmp_path / "run" / "result.json").exists()
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000003.safetensors"]


def assert_refused(path, older):
    with pytest.raises(InputError) as problem:
        checkpoint.load_checkpoint(path)
    assert str(path) in str(problem.value)
    assert f"--from {older}" in str(problem.value)


def test_a_checkpoint_truncated_anywhere_is_refused_and_the_older_one_offered(tmp_path):
    older, newer = save_two(tmp_path)
    content = newer.read_bytes()
    for length in {0, 1, 7, 8, 9, len(content) - 1, *range(0, len(content), 13)}:
        newer.write_bytes(content[:length])
        assert_refused(newer, older)
    assert checkpoint.load_checkpoint(older)[1]["step"] == 10


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [8, 100, 10_000])
def test_random_bytes_are_refused_and_the_older_checkpoint_offered(tmp_path, seed, size):
    older, newer = save_two(tmp_path)
    newer.write_bytes(np.random.default_rng(seed).bytes(size))
    assert_refused(newer, older)


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {"format": "pt"}, {"elle": ""}, {"elle": "{"}, {"elle": "{}"}, {"elle": '{"kind": "model"}'}],
    ids=str,
)
def test_a_foreign_file_is_refused_and_the_older_checkpoint_offered(tmp_path, metadata):
    older, newer = save_two(tmp_path)
    save_file(TENSORS, newer, metadata=metadata)
    assert_refused(newer, older)


@pytest.mark.parametrize("header", ["[1, 2]", "null"])
def test_a_header_that_is_no_dictionary_is_refused_and_the_older_checkpoint_offered(tmp_path, header):
    older, newer = save_two(tmp_path)
    save_file(TENSORS, newer, metadata={"elle": header})
    assert_refused(newer, older)


def test_a_folder_in_place_of_a_checkpoint_is_refused_and_the_older_one_offered(tmp_path):
    older, newer = save_two(tmp_path)
    newer.unlink()
    newer.mkdir()
    assert_refused(newer, older)


def test_a_file_in_place_of_a_folder_is_a_failed_write(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WorkError, match=r"could not write .*file/x\.json: File exists"):
        write_json(tmp_path / "file" / "x.json", {})
    assert (tmp_path / "file").read_text() == "mine"


def test_an_older_checkpoint_that_cannot_be_read_either_is_not_offered(tmp_path):
    older, newer = save_two(tmp_path)
    older.write_bytes(b"")
    newer.write_bytes(b"")
    with pytest.raises(InputError, match="there is no older one to use"):
        checkpoint.load_checkpoint(newer)


def test_without_an_older_checkpoint_the_error_says_so(tmp_path):
    path = checkpoint.take_checkpoint(tmp_path, 10, TENSORS, {})()
    path.write_bytes(b"")
    with pytest.raises(InputError, match="there is no older one"):
        checkpoint.load_checkpoint(path)


def test_a_missing_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match="step-00000030.safetensors does not exist"):
        checkpoint.load_checkpoint(checkpoint.checkpoint_path(tmp_path, 30))


def test_nothing_in_a_run_directory_is_a_pickle(finished_run):
    files = [path for path in finished_run.rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.suffix for path in files} == {".toml", ".jsonl", ".json", ".safetensors"}
    # A safetensors file begins with eight bytes that count those of its header, and any of them may be a pickle's.
    plain = [path for path in files if path.suffix != ".safetensors"]
    assert not [path for path in plain if path.read_bytes().startswith((b"\x80", b"PK"))]
    assert all(path.read_bytes()[8:9] == b"{" for path in files if path not in plain)
    assert all(checkpoint.read_tensors(path)[0] for path in files if path.suffix == ".safetensors")


def test_a_finished_run_leaves_no_temporary_file(finished_run):
    assert not list(finished_run.rglob("*.part"))


def test_a_run_directory_is_held_by_one_run_at_a_time(tmp_path):
    with checkpoint.RunLock(tmp_path / "run"), pytest.raises(InputError, match=f"in use by .*pid {os.getpid()}"):
        checkpoint.RunLock(tmp_path / "run")
    checkpoint.RunLock(tmp_path / "run").__exit__()


def test_a_run_directory_held_by_another_process_names_its_pid(settings, holder):
    with pytest.raises(InputError, match=rf"run is in use by another process \(pid {holder.pid}\)"):
        train(settings())


def test_a_killed_process_lets_go_of_its_run_directory(settings, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert train(settings("max_steps=1"))["steps"] == 1


def test_what_killed_processes_have_begun_to_write_is_removed_and_no_export_that_runs(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = tmp_path / "exported"
    folder.mkdir()
    kept = [f".model.{os.getpid()}.part.onnx", ".mine.part", ".notes.part.txt", "model.1.part"]
    for name in [f".model.{ended.pid}.part.onnx", f".result.json.{os.getpid()}.part", f".x.{10**20}.part.pt2", *kept]:
        (folder / name).touch()
    checkpoint.RunLock(tmp_path).__exit__()
    assert names(folder) == sorted(kept)


def test_a_file_in_place_of_a_run_directory_is_refused(settings, tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(InputError, match="cannot use the folder .*run: "):
        train(settings())
    assert (tmp_path / "run").read_text() == "mine"


def test_a_file_that_may_not_be_read_is_not_called_missing(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    checkpoint.write_tensors(path, TENSORS, {})

    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("builtins.open", refuse)  # nothing is refused to root
    with pytest.raises(InputError, match=r"model.safetensors cannot be read: Permission denied$"):
        checkpoint.read_tensors(path)
