"""`devices=2` as a user types it: one job, one voice, and an end within seconds when a rank dies."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from elle.config import load_config
from elle.engine import checkpoint
from elle.engine.launch import _reason, launch_ranks
from elle.engine.loop import train
from elle.errors import InputError, Interrupted, WorkError
from elle.files import read_lines
from elle.signals import handling

from ..conftest import QUICK

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
STEPS = 25
"""Of an epoch. There are so many epochs that no run ends before it is killed; `max_steps` ends the resumed one."""
WORDS = [*QUICK, "epochs=1000", "batch=48", "method=elle-a"]


def start(run, *words):
    command = [sys.executable, "-m", "elle", "train", *WORDS, "devices=2", f"out={run}", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ranks_of(launcher):
    """The process ids of its two ranks."""
    with open(f"/proc/{launcher.pid}/task/{launcher.pid}/children") as file:
        return [int(word) for word in file.read().split()]


def epochs_done(run):
    return len(read_lines(run / "metrics.jsonl"))


def wait_until(condition, launcher):
    deadline = time.monotonic() + 300
    while not condition():
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill_one(run, rank, wait, *words):
    """Kill -9 one rank after `wait()` holds; how the job ended, and how long after."""
    launcher = start(run, *words)
    wait_until(lambda: len(ranks_of(launcher)) == 2 and wait(launcher), launcher)
    victims = ranks_of(launcher)
    killed = time.monotonic()
    os.kill(victims[rank], signal.SIGKILL)
    _, said = launcher.communicate(timeout=120)
    return launcher.returncode, said, time.monotonic() - killed


def assert_ended_cleanly(run, rank, code, said, seconds):
    assert (code, said.count("\n")) == (1, 1), said
    assert said.startswith(f"elle: rank {rank} was killed by SIGKILL"), said
    assert said.rstrip().endswith("--resume")
    assert seconds < 60
    for path in checkpoint.checkpoints(run):
        checkpoint.load_checkpoint(path)


def test_a_killed_rank_ends_the_job_in_a_line_and_the_run_resumes(tmp_path):
    run = tmp_path / "run"
    ended = kill_one(run, 1, lambda launcher: checkpoint.checkpoints(run))
    assert_ended_cleanly(run, 1, *ended)
    done = epochs_done(run)
    train(load_config([*WORDS, f"max_steps={(done + 1) * STEPS}", f"out={run}"]), resume=True)
    assert [record["epoch"] for record in read_lines(run / "metrics.jsonl")] == list(range(1, done + 2))
    events = [line["event"] for line in read_lines(run / "events.jsonl")]
    assert events == ["resume", "finish"]


def test_an_error_of_the_network_on_one_rank_is_told_with_its_rank_and_not_as_a_lost_contact(tmp_path):
    launcher = start(tmp_path / "run", "model=tests.networks:broken_on_second_rank")
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert "Traceback" in said
    assert said.splitlines()[-1] == "elle: rank 1: RuntimeError: no such; its traceback is above"


@pytest.mark.slow
def test_twenty_kills_at_random_moments_cost_no_run_and_no_checkpoint(tmp_path):
    moments = random.Random(9)
    for number in range(20):
        run, rank = tmp_path / f"run-{number}", number % 2
        # A few while the processes start and join, the others at any point of an epoch.
        epochs = 0 if number < 4 else moments.randint(1, 7)
        reached, delay = [], moments.uniform(0, 1 if epochs else 8)

        def now(launcher, run=run, epochs=epochs, reached=reached, delay=delay):
            if epochs_done(run) >= epochs and not reached:
                reached.append(time.monotonic())
            return bool(reached) and time.monotonic() > reached[0] + delay

        code, said, seconds = kill_one(run, rank, now)
        print(f"kill {number}: rank {rank} after epoch {epochs_done(run)}, the job ended in {seconds:.1f} s")
        assert_ended_cleanly(run, rank, code, said, seconds)
        end = (epochs_done(run) + 2) * STEPS
        again = start(run, "--resume", f"max_steps={end}")
        out, errors = again.communicate(timeout=300)
        assert again.returncode == 0, errors
        assert "everything is in" in out
        assert json.loads((run / "result.json").read_text())["steps"] == end


def reasons(folder, **said):
    for name, text in said.items():
        (folder / name.replace("_", "-")).write_text(text)
    return folder


def test_a_killed_rank_is_the_cause_whatever_the_others_say(tmp_path):
    folder = reasons(tmp_path, rank_0="1 lost contact with another rank (x)")
    problem = _reason(folder, {0: 1, 1: -9})
    assert isinstance(problem, WorkError)
    assert str(problem).startswith("rank 1 was killed by SIGKILL, perhaps for lack of memory")


def test_the_rank_with_a_reason_of_its_own_speaks_for_all(tmp_path):
    folder = reasons(tmp_path, rank_0="1 lost contact with another rank (x)", rank_1="1 a.jpg is damaged")
    assert str(_reason(folder, {0: 1, 1: 1})) == "rank 1: a.jpg is damaged"


def test_what_all_ranks_say_is_said_once_and_bad_input_stays_bad_input(tmp_path):
    folder = reasons(tmp_path, rank_0="2 batch=49 does not divide", rank_1="2 batch=49 does not divide")
    problem = _reason(folder, {1: -15})
    assert isinstance(problem, InputError)
    assert str(problem) == "batch=49 does not divide"


def test_bad_input_is_everyones_also_where_one_rank_alone_had_time_to_say_so(tmp_path):
    folder = reasons(tmp_path, rank_1="2 batch=49 does not divide")
    assert str(_reason(folder, {1: 2})) == "batch=49 does not divide"


@pytest.mark.parametrize("words", [["devices=200"], ["devices=40", "accumulate=2"]])
def test_more_parts_than_images_are_refused_before_a_process_is_started(monkeypatch, words):
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: pytest.fail("started"))
    with pytest.raises(InputError, match=f"^{words[0]}.*a batch of 64 images has no .* parts"):
        launch_ranks(load_config(["data=digits", "device=cpu", *words]), [])


@pytest.mark.parametrize(("before", "heard"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_terminal_that_closes_ends_no_job_under_nohup(monkeypatch, before, heard):
    asked = []
    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch",
        lambda settings, _: lambda *words: asked.append(settings.signals_to_handle.split(",")),
    )
    with handling(before, signal.SIGHUP):
        assert launch_ranks(load_config([*QUICK, "devices=2"]), ["train"])
    assert ("SIGHUP" in asked[0]) is heard
    assert {"SIGTERM", "SIGINT"} <= {*asked[0]}


def test_a_rank_that_ends_without_a_word_is_named(tmp_path):
    assert str(_reason(tmp_path, {1: 3})).startswith("rank 1 ended with exit code 3")


def test_a_job_that_was_told_to_stop_blames_no_rank(tmp_path):
    assert str(_reason(tmp_path, {}, "SIGTERM")).startswith("stopped by SIGTERM; what was saved stays")
    assert isinstance(_reason(tmp_path, {}, "SIGINT"), Interrupted)
    said = reasons(tmp_path, rank_0="1 stopped by SIGTERM at step 40")
    assert str(_reason(said, {}, "SIGTERM")) == "stopped by SIGTERM at step 40"


def test_a_rank_that_fails_ends_at_once_and_what_it_said_is_out():
    """Whatever else would happen at Python's end does not: a thread that is still at a message could abort it."""
    program = (
        "import atexit, sys\n"
        "from elle.errors import leave\n"
        "atexit.register(print, 'ceremony')\n"
        "print('said')\n"
        "leave(2)\n"
    )
    outcomes = {
        rank: subprocess.run([sys.executable, "-c", program], env=os.environ | rank_of, capture_output=True, text=True)
        for rank, rank_of in (("alone", {}), ("one of several", {"RANK": "1"}))
    }
    assert [one.returncode for one in outcomes.values()] == [2, 2]
    assert outcomes["alone"].stdout.split() == ["said", "ceremony"]
    assert outcomes["one of several"].stdout.split() == ["said"]
