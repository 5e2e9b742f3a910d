"""Interrupted and resumed = uninterrupted, bitwise: weights, momentum, rule, random state and records."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from elle.config import load_config
from elle.engine import checkpoint
from elle.engine.loop import train
from elle.engine.watcher import Watcher
from elle.errors import InputError, WorkError

from ..conftest import QUICK
from .interrupting import (
    PulledPlugError,
    assert_same_run,
    assert_same_state,
    crash_after_epoch,
    crash_after_step,
    records,
    signal_after_step,
)

METHODS = ["fgsm", "elle-a", "n-fgsm+elle-a"]
WORDS = [*QUICK, "epochs=2", "eval_every=1", "track=clean,pgd-2"]
EPOCH = 18  # steps of 64 of the 1,200 training images


def configuration(run, *words):
    return load_config([*WORDS, f"out={run}", *words])


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    return request.param


@pytest.fixture(scope="module")
def uninterrupted(method, tmp_path_factory):
    """A run of this method that nothing disturbed."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(configuration(run, f"method={method}"))
    return run


@pytest.fixture
def resumable(method, tmp_path):
    return configuration(tmp_path / "run", f"method={method}")


def events(run):
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


def test_the_state_compared_is_all_of_it(uninterrupted, method):
    tensors, _ = checkpoint.load_checkpoint(checkpoint.checkpoints(uninterrupted)[-1])
    kinds = {name.partition(".")[0] for name in tensors}
    assert kinds == {"model", "optimizer", "records", "position", "done", "random"} | (
        {"rule"} if "elle" in method else set()
    )


@pytest.mark.parametrize(
    "watcher",
    [crash_after_epoch(1), crash_after_epoch(2), crash_after_step(EPOCH + 7)],
    ids=["after-epoch-1", "after-epoch-2", "inside-epoch-2"],
)
def test_a_crashed_run_resumes_from_its_last_epoch(resumable, uninterrupted, tmp_path, watcher):
    with pytest.raises(PulledPlugError):
        train(resumable, watcher=watcher)
    train(resumable, resume=True)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_run_that_crashed_before_its_first_checkpoint_starts_afresh(resumable, uninterrupted, tmp_path):
    with pytest.raises(PulledPlugError):
        train(resumable, watcher=crash_after_step(5))
    train(resumable, resume=True)
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (signal.SIGTERM, 1),
        (signal.SIGINT, 7),
        (signal.SIGINT, EPOCH),
        (signal.SIGTERM, EPOCH + 1),
        (signal.SIGTERM, 2 * EPOCH),
    ],
)
def test_a_signalled_run_saves_and_resumes_from_that_very_step(resumable, uninterrupted, tmp_path, number, step):
    with pytest.raises(WorkError, match=rf"stopped by {number.name} at step {step} of 36; .*--resume"):
        train(resumable, watcher=signal_after_step(step, number))
    assert checkpoint.checkpoints(tmp_path / "run")[-1].name == f"step-{step:08d}.safetensors"
    train(resumable, resume=True)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_run_interrupted_again_and_again_ends_the_same(resumable, uninterrupted, tmp_path):
    for step in (3, 4, EPOCH, EPOCH + 9):
        with pytest.raises(WorkError):
            train(resumable, resume=True, watcher=signal_after_step(step, signal.SIGTERM))
    train(resumable, resume=True)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_run_cut_short_at_an_epoch_by_max_steps_can_be_continued(method, uninterrupted, resumable, tmp_path):
    train(configuration(tmp_path / "run", f"method={method}", f"max_steps={EPOCH}"))
    train(resumable, resume=True)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_run_cut_short_inside_an_epoch_by_max_steps_continues_to_the_same_weights(
    method, uninterrupted, resumable, tmp_path
):
    train(configuration(tmp_path / "run", f"method={method}", "max_steps=7"))
    train(resumable, resume=True)
    weights = [checkpoint.read_tensors(run / "model.safetensors")[0] for run in (tmp_path / "run", uninterrupted)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_a_run_cut_short_inside_an_epoch_by_max_steps_continues_to_the_same_records(
    method, uninterrupted, resumable, tmp_path
):
    train(configuration(tmp_path / "run", f"method={method}", "max_steps=7"))
    train(resumable, resume=True)
    assert records(tmp_path / "run") == records(uninterrupted)


def test_the_command_that_goes_on_can_be_pasted_into_a_shell(tmp_path):
    with pytest.raises(WorkError, match=r"continue with: elle train --out '.*/my runs/a & b' --resume$"):
        train(
            configuration(tmp_path / "my runs" / "a & b", "method=fgsm"),
            watcher=signal_after_step(2, signal.SIGTERM),
        )


def test_a_full_memory_is_told_in_one_line_with_a_command_that_needs_less(tmp_path, elle):
    def fill(step):
        if step == EPOCH + 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation.")

    words = r"memory is full at step 20 of 36; what was saved stays; continue with: (elle train --out .* --resume \S+) "
    with pytest.raises(WorkError, match=words) as problem:
        train(configuration(tmp_path / "run", "method=fgsm"), watcher=Watcher(stepped=fill))
    assert events(tmp_path / "run")[-1] == "stop"
    command = re.search(words, str(problem.value))[1].split()
    assert command[-1] == "accumulate=2"
    assert elle(*command[1:]).code == 0
    assert len(records(tmp_path / "run")) == 2


def test_a_run_does_not_end_before_the_step_it_has_come_to(tmp_path):
    train(configuration(tmp_path / "run", "method=fgsm", f"max_steps={EPOCH}"))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=f"max_steps={EPOCH - 1}: .* is of step {EPOCH}; give as many steps or more"):
        train(configuration(tmp_path / "run", "method=fgsm", f"max_steps={EPOCH - 1}"), resume=True)
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_signalled_at_the_step_that_max_steps_allows_last_resumes_to_the_same_records(tmp_path):
    whole, stopped = (configuration(tmp_path / name, "method=fgsm", "max_steps=7") for name in ("whole", "stopped"))
    train(whole)
    with pytest.raises(WorkError):
        train(stopped, watcher=signal_after_step(7, signal.SIGTERM))
    train(stopped, resume=True)
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")


def test_a_run_can_be_continued_from_its_older_checkpoint(resumable, uninterrupted, tmp_path):
    train(resumable)
    older, newer = checkpoint.checkpoints(tmp_path / "run")
    newer.write_bytes(newer.read_bytes()[:1000])
    with pytest.raises(InputError, match=f"--from {older}"):
        train(resumable, resume=True)
    train(resumable, start_from=older)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_run_killed_at_a_random_moment_resumes_to_the_same_end(tmp_path):
    words = [*QUICK, "method=n-fgsm+elle-a", "epochs=12", "eval_every=4", "track=clean,pgd-2"]
    whole = tmp_path / "whole"
    # On a busy machine the run may end before it is killed; then another one is, sooner.
    for number in range(5):
        killed = tmp_path / f"killed-{number}"
        command = [sys.executable, "-m", "elle", "train", *words, "--out", str(killed)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and not checkpoint.checkpoints(killed):
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.6) / 2**number)
        process.kill()
        if process.wait() == -signal.SIGKILL:
            break
    assert process.returncode == -signal.SIGKILL
    config = load_config(words)
    train(config.model_copy(update={"out": str(killed)}), resume=True)
    train(config.model_copy(update={"out": str(whole)}))
    assert_same_run(killed, whole)
    assert events(killed) == ["resume", "finish"]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("seed=1", "seed=0"),
        ("eps=0.1", "eps=0.3"),
        ("method=elle", "method=fgsm"),
        ("lr=0.1", "lr=0.2"),
        ("epochs=3", "epochs=2"),
        ("batch=32", "batch=64"),
        ("flip=true", "flip=false"),
        ("phases=2:8:64", "no phases"),
        ("method.attack.noise=1", "no method.PART.FIELD"),
    ],
)
def test_resuming_with_another_value_is_refused_by_name(run_copy, settings, word, hint):
    before = {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(InputError, match=f"belongs to a run with .*{hint}"):
        train(settings("epochs=2", word, f"out={run_copy}"), resume=True)
    assert before == {path: path.read_bytes() for path in before}


def test_a_finished_run_returns_its_result_without_training(run_copy, settings):
    steps = []
    before = json.loads((run_copy / "result.json").read_text())
    result = train(settings("epochs=2", f"out={run_copy}"), resume=True, watcher=Watcher(stepped=steps.append))
    assert steps == []
    assert result["test"]["clean"]["correct"] == before["test"]["clean"]["correct"]
    assert result["train_seconds"] == before["train_seconds"]


def test_an_existing_run_is_not_overwritten(run_copy, settings):
    with pytest.raises(InputError, match="already holds a run; continue it with --resume"):
        train(settings("epochs=2", f"out={run_copy}"))


def test_a_moved_run_can_be_resumed(finished_run, settings, tmp_path):
    moved = shutil.copytree(finished_run, tmp_path / "moved")
    assert train(settings("epochs=2", f"out={moved}"), resume=True)["steps"] == 36


@pytest.mark.parametrize("missing", ["config", "step", "history"])
def test_a_checkpoint_whose_header_lacks_an_entry_is_refused_by_name(run_copy, settings, missing):
    path = checkpoint.checkpoints(run_copy)[-1]
    tensors, header = checkpoint.read_tensors(path)
    checkpoint.write_tensors(path, tensors, {key: value for key, value in header.items() if key != missing})
    with pytest.raises(InputError, match=path.name):
        train(settings("epochs=2", f"out={run_copy}"), resume=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.classifier.1.weight", torch.zeros(3)),
        ("optimizer.0.momentum_buffer", None),
        ("position", torch.zeros(1)),
        ("random.cpu", None),
        ("random.cpu", torch.zeros(3, dtype=torch.uint8)),
        ("random.cpu", torch.zeros(3)),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(run_copy, settings, name, value):
    path = checkpoint.checkpoints(run_copy)[-1]
    tensors, header = checkpoint.read_tensors(path)
    del tensors[name]
    checkpoint.write_tensors(path, tensors if value is None else tensors | {name: value}, header)
    with pytest.raises(InputError, match=path.name):
        train(settings("epochs=2", f"out={run_copy}"), resume=True)


def test_evaluating_while_training_does_not_change_the_weights(method, uninterrupted, tmp_path):
    train(configuration(tmp_path / "run", f"method={method}", "eval_every=0"))
    assert_same_state(tmp_path / "run", uninterrupted)
