"""`elle train data=folder`: streamed and kept, interrupted and resumed, with damaged files and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from elle.config import load_config
from elle.engine import checkpoint
from elle.engine.loop import train
from elle.engine.watcher import Watcher
from elle.errors import WorkError

from ..data.photographs import write_folder
from .interrupting import assert_same_run, signal_after_step

STEPS = 5  # of 4 of the 22 images that 2 for validation leave


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("set"))


def words(root, out, *more):
    return [
        *("data=folder", f"root={root}", "image_size=16", "model=small-cnn", "method=n-fgsm+elle-a", "batch=4"),
        *("epochs=2", "track=clean", "final=clean", "device=cpu", "loading=streaming", "workers=1", f"out={out}"),
        *more,
    ]


@pytest.fixture(scope="module")
def uninterrupted(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(load_config(words(root, out)))
    return out


def test_a_streamed_run_leaves_what_any_run_leaves(uninterrupted, elle):
    result = json.loads((uninterrupted / "result.json").read_text())
    assert (result["steps"], result["classes"], result["test"]["clean"]["total"]) == (2 * STEPS, ["cat", "dog"], 8)
    assert (result["config"]["image_size"], result["config"]["validation"]) == (16, 2)
    outcome = elle("evaluate", uninterrupted, "--attack", "clean", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["attacks"]["clean"]["correct"] == result["test"]["clean"]["correct"]


@pytest.mark.parametrize("step", [2, STEPS, STEPS + 3])
def test_a_streamed_run_stopped_at_any_step_resumes_to_the_same_weights(root, uninterrupted, tmp_path, step):
    config = load_config(words(root, tmp_path / "run"))
    with pytest.raises(WorkError, match=f"stopped by SIGTERM at step {step}"):
        train(config, watcher=signal_after_step(step, signal.SIGTERM))
    train(load_config(words(root, tmp_path / "run", "workers=2")), resume=True)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_the_size_found_in_the_files_is_written_down(elle, root, tmp_path):
    small = [word for word in words(root, tmp_path / "run", "loading=auto") if not word.startswith("image_size")]
    outcome = elle("train", *small, "max_steps=2")
    assert outcome.code == 0, outcome.err
    assert load_config([], tmp_path / "run" / "config.toml").image_size > 40


def test_a_set_that_is_kept_trains_to_other_weights_than_a_streamed_one(root, uninterrupted, tmp_path):
    train(load_config(words(root, tmp_path / "run", "loading=resident")))
    kept, streamed = (
        checkpoint.read_tensors(run / "model.safetensors")[0] for run in (tmp_path / "run", uninterrupted)
    )
    assert not all(torch.equal(kept[name], streamed[name]) for name in kept)


def test_a_cache_that_images_on_the_device_do_not_need_is_told(root, tmp_path):
    heard = []
    config = load_config(words(root, tmp_path / "run", "loading=auto", "max_steps=1", f"cache={tmp_path / 'cache'}"))
    train(config, watcher=Watcher(said=heard.append))
    assert f"cache={tmp_path / 'cache'} is not used: these images are few enough to be kept decoded" in heard
    assert not (tmp_path / "cache").exists()


def test_a_file_damaged_while_training_is_named_and_what_was_trained_is_saved(uninterrupted, tmp_path):
    root, run = write_folder(tmp_path / "set"), tmp_path / "run"
    files = {path: path.read_bytes() for path in (root / "train").rglob("*.jpg")}

    def damage(step):
        if step == 3:
            for path in files:
                path.write_bytes(b"damaged")

    config = load_config(words(root, run, "workers=0"))
    with pytest.raises(WorkError, match=r"train/.*\.jpg: is no JPEG.*; the run is saved at step 3; continue with"):
        train(config, watcher=Watcher(stepped=damage))
    for path, content in files.items():
        path.write_bytes(content)
    train(config, resume=True)
    assert_same_run(run, uninterrupted)


@pytest.mark.parametrize("word", ["image_size=4", "image_size=big", "workers=-1", "loading=fast"])
def test_a_setting_that_cannot_be_meant_is_refused(elle, root, tmp_path, word):
    outcome = elle("train", *words(root, tmp_path / "run", word))
    assert (outcome.code, len(outcome.err.strip().splitlines())) == (2, 1)
    assert word.partition("=")[0] in outcome.err


def processes(marker: Path) -> list[int]:
    """Whose command line holds the marker: forked workers keep that of their parent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(marker) in command:
                found.append(int(entry.name))
    return found


def running(root, run):
    """A run of many steps in a process group of its own, past its first epoch."""
    command = [sys.executable, "-m", "elle", "train", *words(root, run, "epochs=10000", "workers=2", "eval_every=0")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    while process.poll() is None and not checkpoint.checkpoints(run):
        time.sleep(0.02)
    assert process.poll() is None, process.stderr.read()
    assert len(processes(run)) == 3
    return process


def test_ctrl_c_saves_the_run_and_leaves_no_process_behind(root, tmp_path):
    process = running(root, tmp_path / "run")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
    errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130
    assert "stopped by SIGINT at step" in errors
    assert len(errors.strip().splitlines()) == 1
    assert not processes(tmp_path / "run")


@pytest.mark.slow
def test_the_workers_of_a_killed_run_end_by_themselves(root, tmp_path):
    process = running(root, tmp_path / "run")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while processes(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes(tmp_path / "run")
