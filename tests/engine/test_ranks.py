"""Two ranks train as one process with the same batch, stop together, and continue as one another."""

import errno
import importlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from elle import methods
from elle.config import load_config
from elle.core.losses import CrossEntropy
from elle.data.registry import load_dataset
from elle.data.sources import ImageSet, Split
from elle.engine import checkpoint, outcome
from elle.engine.batchnorm import synchronise
from elle.engine.loop import train
from elle.engine.ranks import ALONE, LOST, Ranks, _contact
from elle.engine.run_files import FINAL
from elle.engine.same_images import check_alike
from elle.engine.step import RECORDED, Step
from elle.engine.trained import load_run
from elle.errors import InputError, WorkError
from elle.evaluation.evaluate import evaluate
from tests.networks import conv_net, double_conv_net, images

from ..conftest import QUICK
from ..data.photographs import write_folder
from .interrupting import accuracies, kept_units
from .steps import SHAPE, make_step

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
METHODS = ["fgsm", "elle-a", "n-fgsm+elle-a", "gradalign", "free"]
STEPS, SECONDS = 20, 240
# 25 steps an epoch. In float64: two ranks add up in another order than one process, and in float32 that turns the sign
# of a gradient near 0 now and then, which moves everything after it (docs/scaling.md).
NETWORK = ("model=tests.networks:double_conv_net", "eps=0.1", "lr=0.05", "seed=1")
WORDS = (*QUICK, *NETWORK, "batch=48", "sync_bn=true", f"max_steps={STEPS}", "final=clean,pgd-2", "crop=1", "flip=true")
# The weight jumps and decays within the first few steps.
RULE = ("weight=20", "method.weight.sensitivity=-0.5", "method.weight.decay=0.5")


def configuration(folder, method, *words):
    rule = RULE if "elle" in method else ()
    return load_config([*WORDS, f"method={method}", *rule, *words, f"out={folder}"])


def in_phases(folder, out):
    """Streamed images, of 8 pixels in batches of 8 and then of 16 in batches of 6: 2 and 3 steps an epoch."""
    words = [word for word in WORDS if word.partition("=")[0] not in ("data", "model", "batch", "epochs", "max_steps")]
    images = ("data=folder", f"root={folder}/images", "model=tests.networks:double_any_size_net", "validation=2")
    own = ("phases=1:8:8,2:16:6", "workers=0", "lr=0.02", "method=elle-a", "method.weight.ramp=2", *RULE)
    return load_config([*words, *images, *own, f"out={out}"])


ROUTED = ("model=tests.networks:double_routed_net", "batch=8", "weight_decay=0.01")
"""Some batches have no image for one part of the network on one rank, or on both."""


# The weight acts a step later, and a step at which it is negligible leaves the penalty's backward out.
LAZY = ("method.weight.next_step=true", "method.weight.negligible=0.3")


# The nuclear norm of a part of the batch is not a part of the batch's (docs/scaling.md).
ROWS = [name for name in methods.METHODS if name != "nuat"]


def after_two_steps(name, ranks=ALONE):
    """The network, with its running statistics, after a row's first two steps on eight images."""
    step = make_step(name, network=lambda: synchronise(double_conv_net(), ranks), crop=1, ranks=ranks)
    share = 8 // ranks.count
    step.prepare(share, SHAPE)
    for first in (0, 0) if step.method.replays > 1 else (0, 8):
        step(torch.arange(first + ranks.rank * share, first + (ranks.rank + 1) * share))
    return step.model.state_dict()


def evaluated(part=(0, 1), exchange=lambda own: [own]):
    """What `evaluate` finds on 100 images in chunks of 30, by one process or its part of several."""
    torch.manual_seed(0)
    x, y = images(100)
    found = evaluate(conv_net(), x, y, "clean,pgd-2", 0.1, chunk=30, part=part, exchange=exchange)
    return {name: one | {"seconds": 0} for name, one in found.items()}


def cut_in_their_final_evaluation(rank, folder):
    """Two runs end after the first unit of each rank: on one disk, and on a disk each, where it is gone on with."""
    own_disk = configuration(f"{folder}/{'first' if rank == 0 else 'second'}-disk", "fgsm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcome, "default_chunk", lambda *_: 100)
        for config in (configuration(f"{folder}/one-disk", "fgsm"), own_disk):
            with kept_units(end_after=1, with_problem=WorkError):
                assert interrupted(lambda config=config: train(config)) == "ended"
        with kept_units() as done:
            result = train(own_disk, resume=True)["test"]
    return done, {name: one | {"seconds": 0} for name, one in result.items()}


def interrupted(work):
    """The message in which the work ends."""
    try:
        work()
    except WorkError as problem:
        return str(problem)
    return "went on"


def gloo_threads():
    return sum("gloo" in Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task"))


def worker(rank, folder):
    """One rank: every run that the tests look at, into folders of their own; what it saw, into a file."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-point", rank=rank, world_size=2)
    said = {"threads": []}
    for method in METHODS:
        train(configuration(f"{folder}/{method}", method))
        said["threads"].append(gloo_threads())
    train(configuration(f"{folder}/lazy", "elle-a", *LAZY))
    train(configuration(f"{folder}/low", "elle-a", "memory=low"))
    train(in_phases(folder, f"{folder}/phases"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcome, "default_chunk", lambda *_: 100)
        train(configuration(f"{folder}/routed", "fgsm", *ROUTED))
    for method in ("elle-a", "free"):
        train(configuration(f"{folder}/{method}-resumed", method, "max_steps=9"))
        if rank == 0:
            shutil.copytree(f"{folder}/{method}-resumed", f"{folder}/{method}-at-9")
        train(configuration(f"{folder}/{method}-resumed", method), resume=True)
    signalled = configuration(f"{folder}/signalled", "elle-a")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Step, "between", lambda self, done: done == 5 and os.kill(os.getpid(), signal.SIGTERM))
        said["signal"] = interrupted(lambda: train(signalled))
    train(signalled, resume=True)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            loss = CrossEntropy.__call__
            patch.setattr(CrossEntropy, "__call__", lambda *given: [value * torch.nan for value in loss(*given)])
        said["nan"] = interrupted(lambda: train(configuration(f"{folder}/nan", "fgsm", "max_steps=25")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_write", full_disk)
        said["full"] = interrupted(lambda: train(configuration(f"{folder}/full", "fgsm", "epochs=2", "max_steps=40")))
    train(configuration(f"{folder}/local", "elle-a", "sync_bn=false"))
    said["rows"] = {name: after_two_steps(name, Ranks(rank, 2)) for name in ROWS}
    said["average"] = [torch.full((2,), float(rank)), torch.full((1, 3), 10.0 * rank)]
    Ranks(rank, 2).average(said["average"])
    said["evaluated"] = evaluated((rank, 2), Ranks(rank, 2).exchanged)
    said["done"], said["final"] = cut_in_their_final_evaluation(rank, folder)
    said["heard"] = signalled_while_waiting(rank, folder)
    said["refused"] = refusal(configuration(f"{folder}/odd", "fgsm", "batch=49"))
    torch.save(said, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


def signalled_while_waiting(rank, folder):
    """Whether the second rank hears a signal before the first one comes to what it waits for."""
    control, heard = dist.new_group(), Path(folder, "heard")
    if rank == 0:
        deadline = time.monotonic() + 60
        while not heard.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    else:
        before = signal.signal(signal.SIGALRM, lambda *_: interrupt())
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(InterruptedError):
            Ranks(rank, 2, control=control).exchanged(None)
        signal.signal(signal.SIGALRM, before)
        heard.touch()
        return True
    in_time = heard.exists()
    dist.barrier(group=control)  # the second rank's message is still under way
    return in_time


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt():
    raise InterruptedError


def refusal(config):
    try:
        train(config)
    except InputError as problem:
        return str(problem)
    return None


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder in which two ranks have trained."""
    folder = tmp_path_factory.mktemp("two")
    write_folder(folder / "images")
    processes = mp.spawn(worker, (str(folder),), nprocs=2, join=False)
    deadline = time.monotonic() + SECONDS
    try:
        while not processes.join(timeout=5):
            assert time.monotonic() < deadline, "the two ranks do not finish: one waits for the other"
    finally:
        for process in processes.processes:
            process.kill()
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """one("fgsm") -> the folder of the same run by one process, made once."""
    made = {}

    def make(method, *words):
        key = (method, *words)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("one") / method
            train(configuration(made[key], method, *words))
        return made[key]

    return make


def state(run):
    return checkpoint.load_checkpoint(checkpoint.checkpoints(run)[-1])[0]


def column(run, name):
    return state(run)["records"][:STEPS, RECORDED.index(name)]


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_lose_as_one_process(two, one, method):
    mine, theirs = column(two / method, "loss"), column(one(method), "loss")
    assert theirs.isfinite().all()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_two_ranks_take_the_first_steps_of_every_row_as_one_process(two):
    for name, mine in torch.load(two / "rank-1.pt")["rows"].items():
        theirs = after_two_steps(name)
        assert all(torch.allclose(mine[key], value, rtol=0, atol=1e-7) for key, value in theirs.items()), name


@pytest.mark.parametrize("method", ["elle-a", "n-fgsm+elle-a"])
def test_two_ranks_weigh_the_penalty_as_one_process(two, one, method):
    mine, theirs = column(two / method, "weight"), column(one(method), "weight")
    assert (theirs[1:] > theirs[:-1]).any(), "the weight never jumped"
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_two_ranks_leave_out_the_steps_that_one_process_does(two, one):
    mine, theirs = (column(run, "weight") for run in (two / "lazy", one("elle-a", *LAZY)))
    assert (theirs == 0).any()
    assert (theirs > 0).any()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    losses = (column(run, "loss") for run in (two / "lazy", one("elle-a", *LAZY)))
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)


def test_ranks_that_compute_blocks_anew_train_as_those_that_keep_them(two):
    for name in ("loss", "weight"):
        torch.testing.assert_close(column(two / "low", name), column(two / "elle-a", name), rtol=0, atol=1e-6)


def test_two_ranks_train_in_phases_on_streamed_images_as_one_process(two, tmp_path):
    train(in_phases(two, tmp_path / "one"))
    mine, theirs = state(two / "phases"), state(tmp_path / "one")
    assert theirs["done"] == 2 + 3 + 3
    assert theirs["rule.since"] == 6  # the ramp has begun anew with the second phase
    for name in theirs:
        if name.startswith(("model.", "rule.", "records")):
            torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-6, equal_nan=True)


def test_two_ranks_train_a_part_of_the_network_that_one_has_no_image_for_as_one_process(two, one):
    mine, theirs = state(two / "routed"), state(one("fgsm", *ROUTED))
    for name, value in theirs.items():
        if name.startswith(("model.", "optimizer.")) and not name.endswith("mean"):
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-9)


def test_all_ranks_evaluate_the_network_that_is_written_whatever_each_remembers(two):
    test = load_dataset("digits", None).test
    found = evaluate(load_run(two / "routed").model, test.x, test.y, "clean,pgd-2", 0.1, batch=500, seed=1, chunk=100)
    mine = json.loads((two / "routed" / "result.json").read_text())["test"]
    assert {name: found[name]["correct"] for name in found} == {name: mine[name]["correct"] for name in found}


def test_the_shares_of_an_evaluation_are_the_evaluation(two):
    for rank in range(2):
        assert torch.load(two / f"rank-{rank}.pt")["evaluated"] == evaluated()


@pytest.fixture
def final(two):
    """What the final evaluation of two ranks' network finds, in five chunks and nothing in between."""
    test = load_dataset("digits", None).test
    model = load_run(two / "fgsm").model
    found = evaluate(model, test.x, test.y, "clean,pgd-2", 0.1, batch=500, seed=1, chunk=100)
    return {name: one | {"seconds": 0} for name, one in found.items()}


def test_ranks_on_separate_disks_go_on_each_with_its_own_part_of_a_final_evaluation(two, final):
    said = [torch.load(two / f"rank-{rank}.pt") for rank in range(2)]
    assert [len(one["done"]) for one in said] == [2 * 3 - 1, 2 * 2 - 1]
    assert said[0]["final"] == said[1]["final"] == accuracies(two / "first-disk") == final
    assert not (two / "first-disk" / FINAL).exists()
    assert not (two / "second-disk" / FINAL).exists()


def test_one_process_goes_on_with_what_two_ranks_have_done_of_a_final_evaluation(two, final, monkeypatch):
    monkeypatch.setattr(outcome, "default_chunk", lambda *_: 100)
    with kept_units() as done:
        train(configuration(two / "one-disk", "fgsm"), resume=True)
    assert len(done) == 2 * 5 - 2
    assert accuracies(two / "one-disk") == final
    assert not (two / "one-disk" / FINAL).exists()


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_end_with_the_accuracies_of_one(two, one, method):
    mine, theirs = (json.loads((run / "result.json").read_text()) for run in (two / method, one(method)))
    assert (mine["ranks"], mine["batchnorm"], theirs["ranks"]) == (2, "all ranks", 1)
    for attack in ("clean", "pgd-2"):
        assert mine["test"][attack]["correct"] == theirs["test"][attack]["correct"]


@pytest.mark.parametrize("name", ["elle-a-resumed", "free-resumed", "signalled"])
def test_resumed_on_as_many_ranks_is_uninterrupted_bitwise(two, name):
    method = "free" if "free" in name else "elle-a"
    torch.testing.assert_close(state(two / name), state(two / method), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", ["elle-a", "free"])
def test_a_run_of_two_ranks_continues_on_one(two, method):
    run = two / f"{method}-at-9"
    train(configuration(run, method), resume=True)
    torch.testing.assert_close(column(run, "loss"), column(two / method, "loss"), rtol=0, atol=1e-6)
    assert trained_on(run) == ([2, 1], "all ranks")


def test_a_result_says_how_many_trained_and_not_how_many_evaluated(two, tmp_path):
    run = shutil.copytree(two / "elle-a", tmp_path / "elle-a")
    train(configuration(run, "elle-a"), resume=True)
    assert trained_on(run) == (2, "all ranks")


def trained_on(run):
    result = json.loads((run / "result.json").read_text())
    return result["ranks"], result["batchnorm"]


def test_a_signal_to_one_rank_stops_both_at_the_same_step(two):
    said = [torch.load(two / f"rank-{rank}.pt")["signal"] for rank in range(2)]
    assert said[0] == said[1]
    # Not by `elle train` alone, which would be one process: these were started otherwise.
    saved = "everything is saved; continue with the same command and --resume"
    assert said[0] == f"stopped by SIGTERM at step 8 of {STEPS}; {saved}"


def test_a_checkpoint_that_cannot_be_written_stops_both_at_the_same_step(two):
    for rank in range(2):
        assert "step-00000025.safetensors: No space left" in torch.load(two / f"rank-{rank}.pt")["full"]
    (stop,) = (json.loads(line) for line in (two / "full" / "events.jsonl").read_text().splitlines())
    assert stop["step"] in (25, 32)


def test_a_rank_that_waits_for_another_hears_a_signal(two):
    assert torch.load(two / "rank-0.pt")["heard"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda train: Split(train.x[1:], train.y[1:]),
            "rank 1 has 1296 training and 500 test images, and rank 0 1297",
        ),
        (lambda train: Split(train.x, train.y[::-1].copy()), "rank 1 has other classes or labels than rank 0"),
    ],
)
def test_ranks_with_other_images_than_the_first_are_refused(change, message):
    digits, known = load_dataset("digits", None), []
    ranks = SimpleNamespace(exchanged=lambda mine: known.append(mine) or known)
    check_alike(digits, ranks)
    with pytest.raises(InputError, match=message):
        check_alike(ImageSet(change(digits.train), digits.test, digits.classes), ranks)


def test_a_loss_that_is_nan_on_one_rank_stops_both(two):
    for rank in range(2):
        assert torch.load(two / f"rank-{rank}.pt")["nan"].startswith("training diverged in epoch 1")


def test_batchnorm_of_each_rank_is_said_so_and_trains_otherwise(two, one):
    assert json.loads((two / "local" / "result.json").read_text())["batchnorm"] == "each rank"
    difference = (column(two / "local", "loss") - column(one("elle-a"), "loss")).abs()
    assert 1e-3 < difference.max() < 0.5


def test_a_run_leaves_no_threads_of_its_own_group_behind(two):
    """One that lets go of a message while Python ends would abort the process."""
    for rank in range(2):
        threads = torch.load(two / f"rank-{rank}.pt")["threads"]
        assert threads == [threads[0]] * len(METHODS)


def test_an_average_is_the_same_on_every_rank(two):
    for rank in range(2):
        average = torch.load(two / f"rank-{rank}.pt")["average"]
        assert [part.tolist() for part in average] == [[0.5, 0.5], [[5.0, 5.0, 5.0]]]


def test_a_batch_that_cannot_be_split_is_refused_with_one_that_can(two):
    said = torch.load(two / "rank-1.pt")["refused"]
    assert said == "batch=49 does not divide into 2 equal parts (2 ranks); use batch=48"


def test_a_batch_that_accumulation_cannot_split_is_refused(settings):
    with pytest.raises(InputError, match="batch=64 does not divide into 3 equal parts .* accumulate=3.*batch=63"):
        train(settings("accumulate=3"))


def test_a_program_that_asks_for_devices_without_a_launcher_is_told_of_torchrun(settings, tmp_path):
    with pytest.raises(InputError, match="devices=2: .* torchrun --nproc-per-node=2, or set devices=1"):
        train(settings("devices=2"))
    assert not (tmp_path / "run").exists()


def test_alone_a_message_is_the_value_itself():
    value = torch.ones(3)
    assert ALONE.mean(value) is value
    assert ALONE.exchanged(5) == [5]
    assert ALONE.from_first(lambda: 7) == 7


def test_the_parts_of_the_ranks_are_the_batch():
    rows = torch.arange(12).view(6, 2)
    assert torch.equal(torch.cat([Ranks(rank, 3).own(rows) for rank in range(3)]), rows)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "[/a/pair.cc:537] Read error [::1]:5: reset by peer. This is typically\nmore",
            "Read error [::1]:5: reset by peer",
        ),
        ("[Rank 1] Watchdog caught a timeout", "[Rank 1] Watchdog caught a timeout"),
        ("", "no reason given"),
    ],
)
def test_a_lost_rank_is_told_in_the_first_sentence_of_what_was_heard(message, said, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(WorkError) as told, _contact():
        raise RuntimeError(message)
    assert str(told.value).startswith(f"{LOST} (rank 3 heard: {said}); ")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"RANK": "1"}, "RANK=1 and WORLD_SIZE=1, which no process can be"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE=two, which no process can be"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 but no MASTER_ADDR; start the job with torchrun"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"},
            "the ranks cannot meet at MASTER_ADDR=127.0.0.1, MASTER_PORT=http: ",
        ),
    ],
)
def test_half_an_announcement_of_a_job_is_refused_in_a_line(said, message, monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        train(load_config([*QUICK, "max_steps=1", f"out={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


def test_ctrl_c_ends_a_rank_that_waits_for_others_which_never_come(monkeypatch, tmp_path):
    """The waiting is a library's, from which no handler of Python's is called."""
    announced = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in announced.items():
        monkeypatch.setenv(name, value)
    handlers = [signal.getsignal(signal.SIGINT)]

    def meeting(*_, **known):
        handlers.append(signal.getsignal(signal.SIGINT))
        raise RuntimeError("nobody is here")

    monkeypatch.setattr(importlib.import_module("torch.distributed.rendezvous"), "rendezvous", meeting)
    with pytest.raises(InputError, match="cannot meet at .*: nobody is here"):
        train(load_config([*QUICK, f"out={tmp_path / 'run'}"]))
    assert handlers[1] is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is handlers[0]
