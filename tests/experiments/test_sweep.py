"""A sweep as a user runs it: killed in the middle and continued, with a run that fails; and the report of its runs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from elle.cli.sweep import _conclude, _interrupted
from elle.config import load_config
from elle.errors import InputError, Interrupted, WorkError
from elle.experiments.local import LocalExecutor
from elle.experiments.parcel import pack, unpack
from elle.experiments.ray_cluster import RayExecutor
from elle.experiments.recipe import load_recipe
from elle.experiments.rundir import open_run
from elle.experiments.sweep import Item, chosen_runs, link_runs, plan, run_name, run_sweep
from elle.experiments.sweep_view import SweepView, cells, columns, duration, shown_keys
from elle.experiments.training import is_running, outcome, start_training
from elle.files import FolderLock, is_held, write_text

from .recipes import tiny_recipe

FAILING = """
[[runs]]
[[runs]]
method = "fgsm"
eps = "0.1"
model = "no_such_module:network"
"""


def start(recipe: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "elle", "sweep", recipe.name, "--jobs", "2", *words]
    return subprocess.Popen(command, cwd=recipe.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep that was killed outright while it trained, and what the same command did then."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("sweep"), epochs=4, more=FAILING)
    folder = recipe.parent / "runs" / "tiny"
    first = start(recipe)
    wait_for(lambda: list(folder.glob("*/checkpoints/step-*")), first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = {path.parent.parent.name for path in folder.glob("*/checkpoints/step-*")}
    finished = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    second = start(recipe)
    out, err = second.communicate()
    return folder, before, finished, (second.returncode, out, err)


def test_a_killed_sweep_continues_and_repeats_nothing(swept):
    folder, before, finished, _ = swept
    results = list(folder.glob("*/result.json"))
    assert len(results) == 4
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    resumed = 0
    for path in results:
        run = open_run(path.parent)
        assert [record["epoch"] for record in run.records] == list(range(1, 5))
        resumed += any(event["event"] == "resume" for event in run.events)
        assert not is_running(path.parent)
    assert before
    assert resumed >= len(before - {path.parent.name for path in finished})


def test_a_failing_run_is_recorded_and_stops_no_other(swept):
    folder, _, _, (code, out, err) = swept
    assert code == 1
    assert err.startswith("elle: 1 of 5 runs failed, first digits-fgsm-eps0.1-seed0-")
    assert err.count("\n") == 1
    failure = json.loads(next(folder.glob("*/failure.json")).read_text())
    assert "no_such_module" in failure["reason"]
    assert f"failed   {next(folder.glob('*/failure.json')).parent.name}: {failure['reason']}" in out
    assert out.count("finished") == 4 - len(swept[2])


def test_the_same_command_then_tries_only_what_failed(swept, elle, monkeypatch):
    folder = swept[0]
    monkeypatch.chdir(folder.parent.parent)
    states = [row["state"] for row in json.loads(elle("sweep", "tiny.toml", "--dry-run", "--json").out)]
    assert states == ["finished"] * 4 + ["waiting"]
    outcome = elle("sweep", "tiny.toml", "--only", "method=elle-a")  # all finished: nothing is started
    assert outcome.code == 0, outcome.err
    assert outcome.out == "2 runs in runs/tiny are finished: elle report tiny.toml\n"


def test_only_chooses_runs_and_a_dry_run_starts_none(tmp_path, elle, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)
    outcome = elle("sweep", "tiny.toml", "--dry-run", "--seeds", "2", "--only", "eps=0.1", "method=fgsm")
    assert outcome.code == 0
    assert "2 runs in runs/tiny: 2 waiting; nothing was started" in outcome.out
    assert not (tmp_path / "runs").exists()
    rows = json.loads(elle("sweep", "tiny.toml", "--dry-run", "--only", "eps=0.1", "--json").out)
    assert [row["state"] for row in rows] == ["waiting", "waiting"]
    assert elle("sweep", "tiny.toml", "--only", "eps=0.5").code == 2
    assert elle("sweep", "tiny.toml", "--only", "method=eps").code == 2
    assert elle("sweep", "tiny.toml", "--gpus", "a").code == 2
    assert elle("sweep", "tiny.toml", "--gpus", "", "--dry-run").code == 2
    assert elle("sweep", "tiny.toml", "--gpus", "a", "--dry-run").code == 2
    assert "add --on ray" in elle("sweep", "tiny.toml", "--gpus-per-run", "1", "--dry-run").err
    assert "--gpus-per-run says" in elle("sweep", "tiny.toml", "--on", "ray", "--gpus", "0", "--dry-run").err
    assert elle("sweep", "tiny.toml", "--on", "moon").code == 2


def test_a_dry_run_tells_apart_what_differs_in_another_setting_than_method_and_eps(tmp_path, elle, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(
        'title = "Mine"\nseeds = 1\n[base]\ndata = "digits"\nmethod = "gradalign"\n[grid]\n'
        'model = ["small-cnn", "preact-resnet18"]\n"method.loss.weight" = [1, 2]\n'
    )
    head, *rows, _ = [line.split() for line in elle("sweep", "mine.toml", "--dry-run").out.splitlines()]
    assert head == ["run", "method", "eps", "model", "options", "seed", "epoch", "state"]
    weights = ["method.loss.weight=1", "method.loss.weight=2"]
    assert [row[3:5] for row in rows] == [[model, one] for model in ("small-cnn", "preact-resnet18") for one in weights]
    one = elle("sweep", "mine.toml", "--dry-run", "--only", "model=small-cnn", "method.loss.weight=1").out
    assert one.splitlines()[0].split() == ["run", "method", "eps", "seed", "epoch", "state"]
    assert one.splitlines()[-1] == "1 run in runs/mine: 1 waiting; nothing was started"


def test_a_run_is_told_by_the_options_it_has_in_one_column(tmp_path):
    """A column for each option of each shortcut cut off method and eps on a terminal of 100 characters."""
    options = [[], ["method.weight.every=2"], ["method.regulariser.share=0.5"]]
    items = plan([load_config(["data=digits", "method=elle-a", *words]) for words in options], tmp_path)
    keys = shown_keys(items)
    assert columns(keys) == ["run", "method", "eps", "options", "seed", "epoch", "state", ""]
    assert [cells(item, keys)[3] for item in items] == ["-", *(words[0] for words in options[1:])]


def test_a_dry_run_beside_a_sweep_says_what_is_under_way(tmp_path, elle, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, *_ = plan(load_recipe(tiny_recipe(tmp_path)).runs(), tmp_path / "runs" / "tiny")
    with FolderLock(first.path, ".lock"):
        states = [row["state"] for row in json.loads(elle("sweep", "tiny.toml", "--dry-run", "--json").out)]
        assert states == ["running", "waiting", "waiting", "waiting"]
    assert "4 runs in runs/tiny: 4 waiting" in elle("sweep", "tiny.toml", "--dry-run").out


def test_a_gpu_that_is_not_there_is_told_before_a_run_trains_on_the_cpu(tmp_path, elle, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)
    outcome = elle("sweep", "tiny.toml", "--gpus", "0,99")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "CUDA devices that torch can use" in outcome.err
    assert not (tmp_path / "runs").exists()


def test_a_mistyped_method_is_told_before_any_run(tmp_path, elle, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tiny_recipe(tmp_path)
    file.write_text(file.read_text().replace("fgsm", "fgsn"))
    outcome = elle("sweep", "tiny.toml")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "did you mean 'fgsm'?" in outcome.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ('"fgsm", ', '"fgsn", ', "did you mean 'fgsm'?"),
        ("clean,pgd-10", "clean,pgd10", "recipe tiny: attack 'pgd10' does not exist"),
        ("clean,pgd-2", "clean,pgd2", "recipe tiny: track: attack 'pgd2' does not exist"),
        ("batch = 64", 'batch = 64\n"method.atack.noise" = 2', "has no part 'atack'"),
        ("small-cnn", "smal-cnn", "recipe tiny: model 'smal-cnn' does not exist, did you mean 'small-cnn'?"),
        (
            "[grid]",
            "[[expected]]\nmetric = 'pgd10'\nvalue = 1\n[grid]",
            "expected pgd10: attack 'pgd10' does not exist",
        ),
        (
            "[grid]",
            "[figure]\nmetric = ['autoatack']\n[grid]",
            "[figure]: metric autoatack: attack 'autoatack' does not",
        ),
        (
            "[grid]",
            "[figure]\ncurves = ['loss', 'tracked_eror']\n[grid]",
            "[figure]: curves tracked_eror: no run records it, did you mean 'tracked_error'?",
        ),
        (
            "[grid]",
            "[figure]\nkind = 'curves'\nmetric = 'tracked_misalignment'\n[grid]",
            "[figure]: metric tracked_misalignment: no run records it",
        ),
        (
            'validation = 97\ntrack = "clean,pgd-2"\nfinal = "clean,pgd-10"\nprobe_every = 0\ndevice = "cpu"\n',
            "[figure]\nmetric = 'validation pgd-2'\n",
            "[figure]: metric validation pgd-2: no run holds out images",
        ),
    ],
)
def test_what_no_run_could_do_is_told_by_a_dry_run_too(tmp_path, elle, monkeypatch, right, wrong, words):
    monkeypatch.chdir(tmp_path)
    file = tiny_recipe(tmp_path)
    text = file.read_text().partition("[[expected]]")[0]
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong))
    outcome = elle("sweep", "tiny.toml", "--dry-run")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert words in outcome.err


def test_a_key_given_twice_allows_either(tmp_path):
    recipe = load_recipe(tiny_recipe(tmp_path))
    assert len(chosen_runs(recipe, 1, ["eps=0.1", "eps=0.3", "method=fgsm"])) == 2
    with pytest.raises(InputError, match=r"eps=0\.5"):
        chosen_runs(recipe, 1, ["eps=0.1", "eps=0.5"])
    with pytest.raises(InputError, match="no run of recipe tiny has method=ele-a, did you mean 'elle-a'"):
        chosen_runs(recipe, 1, ["method=ele-a"])


def test_the_name_of_a_run_tells_its_settings_and_its_identity(tmp_path):
    config = load_config(["data=digits", "method=fgsm", "eps=8/255"])
    other = load_config(["data=digits", "method=fgsm", "eps=8/255", "lr=0.3"])
    assert run_name(config).startswith("digits-fgsm-eps8-255-seed0-")
    assert run_name(config) != run_name(other)
    assert run_name(config) == run_name(load_config(["data=digits", "method=fgsm", "eps=8/255", "device=cpu"]))
    assert len(plan([config, config, other], tmp_path)) == 2


def test_one_sweep_a_folder(tmp_path, elle, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)
    with FolderLock(tmp_path / "runs" / "tiny", ".sweep.lock"):
        assert is_held(tmp_path / "runs" / "tiny", ".sweep.lock")
        outcome = elle("sweep", "tiny.toml")
    assert outcome.code == 2
    assert f"in use by another process (pid {os.getpid()})" in outcome.err
    assert not is_held(tmp_path / "runs" / "tiny", ".sweep.lock")


def test_a_cluster_that_is_not_there_is_told_at_once(tmp_path, elle, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    tiny_recipe(tmp_path)
    outcome = elle("sweep", "tiny.toml", "--on", "ray", "--address", "127.0.0.1:1")
    assert outcome.code == 2
    assert outcome.err.startswith("elle: no Ray cluster at 127.0.0.1:1 (")


def test_a_node_without_elle_is_told_so(tmp_path, monkeypatch):
    class RayTaskError(Exception):
        cause = RuntimeError(
            "The remote function failed to import on the worker, which has the sys.path ['/', ...]:\n\n"
            "Traceback (most recent call last):\nModuleNotFoundError: No module named 'elle'\n"
        )

    def get(message):
        raise RayTaskError

    kinds = SimpleNamespace(RayTaskError=RayTaskError, RayError=OSError)
    monkeypatch.setitem(sys.modules, "ray.exceptions", kinds)
    executor = object.__new__(RayExecutor)
    executor.ray = SimpleNamespace(get=get)
    item = Item(load_config(["data=digits"]), tmp_path)
    assert executor._next(iter([None]), item) == [
        (item, "on its node: ModuleNotFoundError: No module named 'elle'"),
    ]


@pytest.mark.parametrize(
    ("gpus", "told"), [(0, ""), (1, "no node of the cluster has what a run asks for (2 CPU, 1 GPU); the runs wait\n")]
)
def test_what_no_node_has_is_told_as_the_runs_would_wait_without_a_word(monkeypatch, capsys, gpus, told):
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": False, "Resources": {"CPU": 4.0, "GPU": 8.0}}]
    cluster = SimpleNamespace(init=lambda **_: None, nodes=lambda: nodes, remote=lambda **_: lambda task: task)
    monkeypatch.setitem(sys.modules, "ray", cluster)
    RayExecutor("auto", cpus=2, gpus=gpus, retries=3)
    assert capsys.readouterr().err.removeprefix("elle: ") == told


class Fake:
    """An executor whose runs end at once, or never."""

    slots = 1

    def __init__(self, reasons):
        self.reasons, self.started, self.stopped = reasons, [], False

    def start(self, item):
        item.path.mkdir(parents=True)
        item.state = "running"
        self.started.append(item)

    def ended(self):
        item = self.started[-1]
        reason = self.reasons[len(self.started) - 1]
        if reason == "interrupt":
            raise KeyboardInterrupt
        return [(item, reason)]

    def stop(self):
        self.stopped = True


def items_in(folder):
    return [Item(load_config(["data=digits", f"seed={k}"]).resolved(), folder / f"run{k}") for k in range(3)]


class Talking:
    """Ends each run at once and, as Ray does where a node is lost, speaks on stdout of its own accord."""

    slots = 9

    def __init__(self):
        self.ends = []

    def start(self, item):
        print("(raylet) a node is lost")
        self.ends.append((item, None))

    def ended(self):
        ends, self.ends = self.ends, []
        return ends

    def stop(self):
        print("(raylet) and was lost once more")


def test_what_a_cluster_says_is_no_part_of_the_json(tmp_path, elle, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("elle.cli.sweep._local", lambda *_: Talking())
    tiny_recipe(tmp_path)
    told = elle("sweep", "tiny.toml", "--json")
    assert [row["state"] for row in json.loads(told.out)] == ["finished"] * 4
    assert "a node is lost" in told.err
    assert "once more" in told.err
    assert "a node is lost" in elle("sweep", "tiny.toml").out


def test_an_interrupt_stops_the_children_and_keeps_the_order(tmp_path):
    items, executor = items_in(tmp_path), Fake([None, "interrupt"])
    with pytest.raises(KeyboardInterrupt):
        run_sweep(items, executor, lambda item: None, pause=0)
    assert executor.stopped
    assert [item.state for item in items] == ["finished", "stopped", "waiting"]


def test_an_interrupted_sweep_says_no_more_than_that_it_goes_on_from_what_is_saved(tmp_path):
    """On a cluster what was begun since a run last came back is not saved."""
    items = items_in(tmp_path)
    items[0].state = "finished"
    with pytest.raises(Interrupted) as told:
        _interrupted(items, tmp_path)
    words = f"interrupted: 1 of 3 runs finished; the same command goes on from what is saved in {tmp_path}"
    assert str(told.value) == words


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    items, executor = items_in(tmp_path), Fake([None, "disk full", None])
    with SweepView(items) as view:
        run_sweep(items, executor, view, pause=0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "[3/3] finished run2"
    assert "[2/3] failed   run1: disk full" in lines


@pytest.mark.parametrize("problem", [OSError("No space left on device"), SystemExit(1)])  # rich's, of a broken pipe
def test_a_log_that_cannot_be_written_ends_no_sweep(tmp_path, monkeypatch, problem):
    def refuse(*_, **__):
        raise problem

    monkeypatch.setattr("elle.experiments.sweep_view.Console.print", refuse)
    items = items_in(tmp_path)
    run_sweep(items, Fake([None] * 3), SweepView(items), pause=0)
    assert [item.state for item in items] == ["finished"] * 3


def test_a_live_table_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    items, executor = items_in(tmp_path), Fake([None, "disk full", None])
    with SweepView(items) as view:
        items[0].epochs_done, items[0].state = 10.0, "running"
        view.epochs_before, view.started = 0.0, time.monotonic() - 10
        ahead = sum(item.config.epochs for item in items) - 10
        assert view.left() == pytest.approx(ahead, rel=0.05)
        items[0].epochs_done, items[0].state = 0.0, "waiting"
        run_sweep(items, executor, view, pause=0)
    out = capsys.readouterr().out
    assert "disk full" in out
    assert "2 finished, 1 failed" in out


def test_a_live_table_on_a_narrow_terminal_cuts_off_no_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "24")
    words = [("digits", 1000), ("digits", 100000), ("mnist5k", 1000)]
    configs = [load_config([f"data={data}", "method=n-fgsm+elle-a", "eps=0.1", f"weight={weight}"]).resolved()
               for data, weight in words]  # fmt: skip
    said = "clean 74.0%, fgsm 45.4%, pgd-20 42.8%"
    items = [Item(config, tmp_path / f"{config.data}-n-fgsm+elle-a-eps0.1-seed0-{k}", "finished", said)
             for k, config in enumerate(configs)]  # fmt: skip
    view = SweepView(items)

    def lines(ended):
        with view.console.capture() as captured:
            view.console.print(view._table(ended))
        return re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()

    live = lines(False)
    assert live[0].split() == ["method", "eps", "data", "weight", "seed", "epoch", "state"]
    assert [tuple(line.split()[2:4]) for line in live[1:4]] == [(data, str(weight)) for data, weight in words]
    assert all("finished" in line for line in live[1:4])
    assert len(live) == 5  # a line a run, or the screen would not hold as many as are counted on
    assert view.console.width == 60
    for item in items:
        assert f"{item.name}: {said}" in " ".join(" ".join(lines(True)).split())
    view.console.width = 50
    assert [line.split()[3] for line in lines(False)[1:4]] == ["1000", "100\u2026", "1000"]


def test_what_the_lines_of_a_sweep_have_room_for_is_not_told_once_more_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    items = items_in(tmp_path)[:2]
    items[0].state, items[0].said = "finished", "clean 74.0%"
    items[1].state, items[1].said = "failed", "training diverged in epoch 2: " + 10 * "the loss is not finite; "
    view = SweepView(items)
    with view.console.capture() as captured:
        view.console.print(view._table(ended=True))
    said = " ".join(captured.get().split())
    assert (said.count("clean 74.0%"), said.count(items[1].said.strip())) == (1, 1)


def test_a_sweep_that_has_ended_tells_no_time_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    items = items_in(tmp_path)
    with SweepView(items) as view:
        items[0].epochs_done, items[0].state = 1.0, "finished"
        view.started = time.monotonic() - 10
        assert view.left()
        view(items[0])
        assert "left" in capsys.readouterr().out
    assert "left" not in capsys.readouterr().out


def test_the_time_left_counts_epochs_that_are_known_when_images_are_counted(tmp_path):
    config = load_config(["data=folder", f"root={tmp_path}"]).resolved()
    items = [Item(config, tmp_path / name, "running") for name in ("begun", "waiting")]
    view = SweepView(items)
    assert [cells(item, [])[2] for item in items] == ["0/?", "0/?"]
    items[0].path.mkdir()
    (items[0].path / "config.toml").write_text(config.model_copy(update={"epochs": 100}).to_toml())
    items[0].look()
    items[0].epochs_done, view.started = 10.0, time.monotonic() - 1000
    assert cells(items[0], [])[2] == "10/100"
    assert view.left() == pytest.approx(19_000, rel=0.05)


@pytest.mark.parametrize(("seconds", "words"), [(45, "45 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations_are_written_for_people(seconds, words):
    assert duration(seconds) == words


def test_gpus_are_dealt_out_in_turn():
    assert LocalExecutor(5, [0, 1]).places == [0, 1, 0, 1, 0]
    assert LocalExecutor(2).places == [None, None]


@pytest.fixture
def environments(tmp_path, monkeypatch):
    """What a LocalExecutor sets for the processes of the runs that it is to start, in their order."""
    given = []
    monkeypatch.setattr("elle.experiments.local.start_training", lambda config, path, own: given.append(own))

    def started(executor, count):
        for number in range(count):
            executor.start(Item(load_config(["data=digits", f"seed={number}"]), tmp_path / str(number)))
        return given

    return started


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("4,6,7", ["4", "6"]), ("GPU-ab, GPU-cd", ["GPU-ab", "GPU-cd"])]
)
def test_gpus_are_counted_among_those_that_a_scheduler_has_given(monkeypatch, environments, visible, names):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [own["CUDA_VISIBLE_DEVICES"] for own in environments(LocalExecutor(2, [0, 1]), 2)] == names


def test_jobs_share_the_cores_that_they_may_use(monkeypatch, environments):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert [own["OMP_NUM_THREADS"] for own in environments(LocalExecutor(4), 4)] == ["2"] * 4


def test_a_run_that_died_says_by_what(tmp_path):
    assert outcome(tmp_path, -9) == "killed by SIGKILL"
    (tmp_path / "train.log").write_text("epoch 1\nelle: the disk is full\n\n")
    assert outcome(tmp_path, 1) == "the disk is full"
    assert outcome(tmp_path, 0) == "the disk is full"  # no result, whatever the code says
    (tmp_path / "result.json").write_text("{}")
    assert outcome(tmp_path, 0) is None


def test_a_run_directory_travels_with_its_newest_checkpoint(tmp_path):
    old = tmp_path / "a"
    (old / "checkpoints").mkdir(parents=True)
    for step in (10, 20):
        (old / "checkpoints" / f"step-{step:08d}.safetensors").write_text(str(step))
    (old / "result.json").write_text("{}")
    (old / ".lock").write_text("pid 1")
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    (tmp_path / "b" / "checkpoints" / "step-00000010.safetensors").write_text("10")
    (tmp_path / "b" / "final.parts" / "0a").mkdir(parents=True)
    (tmp_path / "b" / "final.parts" / "0a" / "clean.00000.npz").write_text("of an evaluation that has ended since")
    unpack(pack(old), tmp_path / "b")
    there = sorted(str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*") if path.is_file())
    assert there == ["checkpoints/step-00000020.safetensors", "result.json"]


def test_a_run_travels_with_what_is_done_of_its_final_evaluation(tmp_path):
    part = Path("final.parts", "0a", "clean.00000.npz")
    (tmp_path / "a" / part).parent.mkdir(parents=True)
    (tmp_path / "a" / part).write_text("done")
    unpack(pack(tmp_path / "a"), tmp_path / "b")
    assert (tmp_path / "b" / part).read_text() == "done"


def test_a_run_that_is_tried_again_is_made_where_the_recipe_says_now(tmp_path):
    config = load_config(["data=folder", "root=nowhere", "model=small-cnn", "image_size=16", "method=fgsm"])
    path = tmp_path / "run"
    start_training(config, path, {}).wait()
    assert "nowhere: no such folder" in str(outcome(path, 2))
    start_training(config.model_copy(update={"root": str(tmp_path / "images"), "image_size": 32}), path, {}).wait()
    assert f"{tmp_path / 'images'}: no such folder" in str(outcome(path, 2))
    assert open_run(path).config.image_size == 16  # what is trained stays what it was
    for then, now, kept in ((None, "b", None), ("a", None, "a"), ("a", "b", "b")):
        write_text(path / "config.toml", config.model_copy(update={"cache": then}).to_toml())
        start_training(config.model_copy(update={"cache": now}), path, {}).wait()
        assert open_run(path).config.cache == kept  # decoded anew or taken from a cache, as it was begun
    (path / "config.toml").write_text("damaged")
    start_training(config, path, {}).wait()
    assert "config.toml is not a readable TOML file" in str(outcome(path, 2))


def test_a_data_folder_that_is_not_there_is_told_once_before_anything_begins(tmp_path):
    recipe = tiny_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("[base]", "[base]\nroot = 'nowhere'").replace("digits", "cifar10"))
    sweep = start(recipe)
    out, err = sweep.communicate()
    assert (sweep.returncode, out) == (2, "")
    assert err.startswith("elle: no CIFAR-10 found; looked in nowhere (no such folder), ")
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [recipe.name]


def test_only_chooses_seeds_too(tmp_path):
    recipe = load_recipe(tiny_recipe(tmp_path))
    assert {run.seed for run in chosen_runs(recipe, 3, ["seed=1", "seed=2"])} == {1, 2}
    with pytest.raises(InputError, match="has seed=3; its runs differ in eps, method, seed"):
        chosen_runs(recipe, 3, ["seed=3"])


def test_a_folder_that_cannot_be_used_stops_no_other_run(tmp_path):
    config = load_config(["data=digits", "model=no_such_module:network", "method=fgsm"])
    items = plan([config.model_copy(update={"seed": seed}) for seed in range(3)], tmp_path)
    items[0].path.write_text("a file where the folder should be")
    (items[1].path / "train.log").mkdir(parents=True)
    run_sweep(items, LocalExecutor(1), lambda item: None)
    assert [item.state for item in items] == ["failed"] * 3
    assert "Not a directory" in items[0].said or "File exists" in items[0].said
    assert "train.log" in items[1].said
    assert "no_such_module" in items[2].said
    with pytest.raises(WorkError) as nothing_started:
        _conclude(items, None)
    assert "the log is in" not in str(nothing_started.value)
    with pytest.raises(WorkError, match=re.escape(f"the log is in {items[2].path / 'train.log'}; the same command")):
        _conclude(items[2:], None)


def test_a_damaged_record_is_said_of_its_run_and_stops_no_other(tmp_path):
    config = load_config(["data=digits", "method=fgsm"])
    path = tmp_path / run_name(config)
    path.mkdir()
    (path / "metrics.jsonl").write_text("damaged\n")
    (item,) = plan([config], tmp_path)
    assert item.state == "waiting"
    assert "metrics.jsonl is damaged" in item.said


def test_a_run_that_another_recipe_has_finished_is_linked_and_not_trained_again(tmp_path):
    """Figure 3 has the runs of Table 2, but looked for them in its own folder alone: 47 GPU hours, twice."""
    configs = load_recipe(tiny_recipe(tmp_path)).runs()
    first, second = tmp_path / "runs/first", tmp_path / "runs/second"
    made = first / run_name(configs[0])
    made.mkdir(parents=True)
    (made / "config.toml").write_text(configs[0].resolved().to_toml())
    (made / "result.json").write_text('{"test": {}}')
    second.mkdir()
    assert {item.state for item in plan(configs, second)} == {"waiting"}  # a folder that a user has named
    items = plan(configs, second, beside=True)
    assert [item.state for item in items] == ["finished", "waiting", "waiting", "waiting"]
    assert not list(second.iterdir())  # as --dry-run leaves it
    assert link_runs(items, second) == 1
    assert (second / made.name / "result.json").is_file()
    assert [item.path.parent for item in items] == [second] * 4
    assert link_runs(plan(configs, second, beside=True), second) == 0
    (made / "result.json").unlink()
    (made / "config.toml").unlink()
    made.rmdir()
    items = plan(configs, second, beside=True)
    assert items[0].state == "waiting"
    link_runs(items, second)
    assert not items[0].path.is_symlink()  # the training makes a folder there


def test_what_only_leaves_out_is_linked_too_where_it_is_finished(tmp_path, elle, monkeypatch):
    """A report compares with the recipe's default, which `--only` with an option cannot name."""
    monkeypatch.chdir(tmp_path)
    made = [run for run in load_recipe(tiny_recipe(tmp_path)).runs() if run.seed == 0]
    for config in made:
        path = tmp_path / "runs/first" / run_name(config)
        path.mkdir(parents=True)
        (path / "config.toml").write_text(config.resolved().to_toml())
        (path / "result.json").write_text('{"test": {}}')
    outcome = elle("sweep", "tiny.toml", "--seeds", "1", "--only", "eps=0.1", "--only", "method=fgsm")
    assert outcome.code == 0
    assert f"{len(made)} runs that another recipe's sweep has finished: linked into runs/tiny" in outcome.out
    assert "1 run in runs/tiny is finished" in outcome.out
    assert {path.name for path in (tmp_path / "runs/tiny").iterdir() if path.is_symlink()} == set(map(run_name, made))


def test_on_a_filesystem_without_links_the_run_is_made_again(tmp_path, monkeypatch):
    config = load_recipe(tiny_recipe(tmp_path)).runs()[0]
    made = tmp_path / "runs/first" / run_name(config)
    made.mkdir(parents=True)
    (made / "result.json").write_text('{"test": {}}')

    def refuse(*_):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    (item,) = items = plan([config], tmp_path / "runs/second", beside=True)
    assert link_runs(items, tmp_path / "runs/second") == 0
    assert (item.state, item.path.parent.name) == ("waiting", "second")


def test_own_images_are_not_taken_from_another_sweep(tmp_path):
    """Two folders of the same name hold other images."""
    config = load_config(["data=folder", "root=a/photographs"])
    made = tmp_path / "runs/first" / run_name(config)
    made.mkdir(parents=True)
    (made / "result.json").write_text('{"test": {}}')
    (item,) = plan([config], tmp_path / "runs/second", beside=True)
    assert item.state == "waiting"
