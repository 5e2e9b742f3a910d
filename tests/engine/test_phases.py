"""A run in phases: image size and batch change, everything else goes on; stopped anywhere, it resumes bitwise."""

import json
import signal

import numpy as np
import pytest
import torch

from elle.config import load_config
from elle.core.controller import OnOff
from elle.data.resident import Resident
from elle.data.streaming import Streaming
from elle.engine import checkpoint
from elle.engine.guard import Guard
from elle.engine.loop import Run, train
from elle.engine.probe import CollapseMonitor
from elle.engine.ranks import ALONE, Ranks
from elle.engine.step import Step
from elle.engine.trained import load_network
from elle.engine.watcher import Watcher
from elle.errors import InputError, WorkError
from elle.files import file_digest
from elle.methods import METHODS

from ..data.photographs import write_folder
from .interrupting import assert_same_run, signal_after_step

STEPS = (5, 5, 7, 7, 11)
"""Of each epoch: batches of 4, 3 and 2 of the 22 images that 2 for validation leave."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("set"))


def words(root, out, *more):
    return [
        *("data=folder", f"root={root}", "model=tests.networks:any_size_net", "method=n-fgsm+elle-a"),
        *("phases=2:8:4,2:16:3,1:24:2", "lr=0.02", "weight=100", "method.weight.ramp=6", "method.weight.history=5"),
        *("method.regulariser.power=smooth-l1", "decay_norm=false", "workers=1", "track=clean", "final=clean"),
        *("device=cpu", f"out={out}", *more),
    ]


@pytest.fixture(scope="module")
def uninterrupted(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    seen, batch = [], Streaming.batch

    def noted(data, index):
        x, y = batch(data, index)
        seen.append(tuple(x.shape))
        return x, y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streaming, "batch", noted)
        train(load_config(words(root, out, "final=clean,pgd-50-10")))
    return out, seen


def test_each_phase_trains_on_its_own_size_and_batch(uninterrupted):
    run, seen = uninterrupted
    assert seen == [(4, 3, 8, 8)] * 10 + [(3, 3, 16, 16)] * 14 + [(2, 3, 24, 24)] * 11
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == sum(STEPS)
    assert [result["config"][key] for key in ("epochs", "batch", "image_size")] == [5, 4, 24]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [sum(STEPS[: k + 1]) for k in range(5)]
    assert result["test"]["pgd-50-10"]["total"] == 8
    assert load_config([], run / "config.toml").phases == ((2, 8, 4), (2, 16, 3), (1, 24, 2))


@pytest.mark.parametrize("step", [3, 10, 13, 30], ids=["first", "between", "second", "third"])
def test_a_run_stopped_in_any_phase_resumes_to_the_same_weights(root, uninterrupted, tmp_path, step):
    config = load_config(words(root, tmp_path / "run"))
    with pytest.raises(WorkError, match=f"stopped by SIGTERM at step {step} of {sum(STEPS)}"):
        train(config, watcher=signal_after_step(step, signal.SIGTERM))
    train(config, resume=True)
    assert_same_run(tmp_path / "run", uninterrupted[0])


def test_the_ramp_starts_anew_with_each_phase(uninterrupted):
    tensors, _ = checkpoint.load_checkpoint(checkpoint.checkpoints(uninterrupted[0])[-1])
    assert float(tensors["rule.since"]) == STEPS[-1]


def test_a_step_is_made_anew_where_a_phase_begins_and_nowhere_else(root, tmp_path, monkeypatch):
    made = []
    runnable = Run._runnable
    monkeypatch.setattr(Run, "_runnable", lambda run: made.append(run.batches.size) or runnable(run))
    monkeypatch.setattr(OnOff, "begin_phase", lambda rule, state: made.append("ramp"))
    train(load_config(words(root, tmp_path / "run", "eval_every=0", "max_steps=26")))
    assert made == [4, "ramp", 3, "ramp", 2, "ramp"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("epochs=3", "phases=2:8:4,2:16:3,1:24:2 means epochs=5; leave epochs out"),
        ("batch=8", "means batch=4; leave batch out"),
        ("loading=resident", "leave loading=resident out"),
        ("method=free", "free keeps its batch for several steps"),
        ("model=small-cnn", r"model=small-cnn does not take images of shape \(3, (8|16), (8|16)\)"),
        ("phases=6:128", "EPOCHS:IMAGE_SIZE:BATCH"),
    ],
)
def test_what_cannot_be_trained_in_phases_is_refused_before_it_starts(root, tmp_path, word, message):
    plain = [one for one in words(root, tmp_path / "run") if not one.startswith(("method.", "weight="))]
    with pytest.raises(InputError, match=message):
        train(load_config([*plain, word]))
    assert not (tmp_path / "run").exists()


def arrays(folder, height=16, width=16):
    stream = np.random.default_rng(0)
    for name, count in (("train", 24), ("test", 8)):
        x = stream.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", x=x, y=np.arange(count) % 4)
    return folder


def words_of_arrays(root, out, *more):
    return [
        *("data=arrays", f"root={root}", "model=tests.networks:any_size_net", "method=n-fgsm+elle-a", "eps=8/255"),
        *("phases=2:8:4,2:16:3", "lr=0.02", "weight=100", "crop=4", "validation=2", "track=clean", "final=clean"),
        *("device=cpu", f"out={out}", *more),
    ]


def test_arrays_are_resized_for_each_phase_and_evaluated_as_they_are(tmp_path, monkeypatch):
    seen, batch = [], Resident.batch

    def noted(data, index):
        seen.append((data.crop, *data.x.shape))
        return batch(data, index)

    monkeypatch.setattr(Resident, "batch", noted)
    whole = tmp_path / "whole"
    result = train(load_config(words_of_arrays(arrays(tmp_path), whole)))
    assert seen == [(2, 22, 3, 12, 12)] * 10 + [(4, 22, 3, 24, 24)] * 14  # padded by the crop on either side
    assert result["steps"] == 24
    assert result["test"]["clean"]["total"] == 8
    assert load_network(whole / "model.safetensors")[1]["shape"] == [3, 16, 16]
    for step in (7, 10, 20):
        config = load_config(words_of_arrays(tmp_path, tmp_path / f"cut{step}"))
        with pytest.raises(WorkError, match=f"stopped by SIGTERM at step {step} of 24"):
            train(config, watcher=signal_after_step(step, signal.SIGTERM))
        train(config, resume=True)
        assert_same_run(tmp_path / f"cut{step}", whole)


def test_one_phase_of_the_images_own_size_is_a_run_without_phases(tmp_path):
    root = arrays(tmp_path)
    rest = [word for word in words_of_arrays(root, "") if not word.startswith(("phases", "out"))]
    for name, length in (("phases", ["phases=2:16:5"]), ("plain", ["epochs=2", "batch=5"])):
        train(load_config([*rest, *length, f"out={tmp_path / name}"]))
    assert file_digest(tmp_path / "phases/model.safetensors") == file_digest(tmp_path / "plain/model.safetensors")


def test_phases_of_images_that_are_not_square_are_refused(tmp_path):
    with pytest.raises(InputError, match="phases are of square images, and these are 12 x 16 pixels; leave phases out"):
        train(load_config(words_of_arrays(arrays(tmp_path, 12), tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_padding_that_is_too_much_is_told_as_it_was_given(tmp_path):
    with pytest.raises(InputError, match="crop=17 is more padding than images of 16 x 16 pixels have"):
        train(load_config(words_of_arrays(arrays(tmp_path), tmp_path / "run", "crop=17", "phases=2:8:4,2:24:3")))


@pytest.mark.parametrize("decay_norm", [True, False])
def test_decay_spares_batchnorm_and_biases_if_asked(decay_norm):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2), torch.nn.Linear(2, 2))
    settings = {"eps": 0.1, "momentum": 0.9, "precision": "fp32", "steps_per_epoch": 1, "total_steps": 1}
    step = Step(model, METHODS["fgsm"], None, weight_decay=0.1, decay_norm=decay_norm, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.ones_like(parameter)
    step.lr.fill_(0.5)
    step.optimizer.step()
    decayed, spared = 1 - 0.5 * (1 + 0.1), 1 - 0.5
    other = decayed if decay_norm else spared
    found = {name: float(parameter.detach().mean()) for name, parameter in model.named_parameters()}
    weights = {"0.weight": decayed, "2.weight": decayed}
    assert found == pytest.approx(dict.fromkeys(("0.bias", "1.weight", "1.bias", "2.bias"), other) | weights)


def test_a_run_that_goes_back_into_an_earlier_phase_goes_on_as_it_did_before(root, tmp_path, monkeypatch):
    plain = [
        word for word in words(root, tmp_path / "plain", "method=fgsm") if not word.startswith(("method.", "weight="))
    ]
    train(load_config(plain))
    rolled = []

    def look(guard, seconds):
        if guard.run.done == 8 and not rolled:
            guard.healthy_state = {name: value.detach().clone() for name, value in guard.run.step.state().items()}
            guard.healthy_step = 8
        if guard.run.done == 13 and not rolled:
            rolled.append(guard.run.batches.size)
            guard._roll_back(seconds, guard.run.step.method)
            return True
        return False

    monkeypatch.setattr(Guard, "due", lambda guard: True)
    monkeypatch.setattr(Guard, "look", look)
    train(load_config([*plain, f"out={tmp_path / 'rolled'}"]))
    assert rolled == [3]
    assert_same_run(tmp_path / "rolled", tmp_path / "plain")


def test_every_phase_is_looked_at_twice_an_epoch_of_its_own(root, tmp_path, monkeypatch):
    """Its epochs, of 5, 7 and 11 steps, have a look every 2, 3 and 5, counted from where the phase begins."""
    looks, look = [], Guard.look

    def noted(guard, seconds):
        back = look(guard, seconds)
        looks.append((guard.run.done, guard.monitor.per_epoch))
        return back

    monkeypatch.setattr(Guard, "look", noted)
    train(load_config(words(root, tmp_path / "run", "eval_every=0")))
    assert [done for done, _ in looks] == [2, 4, 6, 8, 10, 13, 16, 19, 22, 29, 34]
    assert {per_epoch for _, per_epoch in looks} == {2}


def test_looks_asked_for_by_steps_know_how_many_make_an_epoch_of_their_phase(root, tmp_path, monkeypatch):
    looks = {}
    monkeypatch.setattr(Guard, "_keep_state", lambda guard: looks.update({guard.run.done: guard.monitor.per_epoch}))
    monkeypatch.setattr(CollapseMonitor, "healthy", True)
    train(load_config(words(root, tmp_path / "run", "eval_every=0", "probe_every=4")))
    assert {step: count for step, count in looks.items() if step} == {
        **{4: 1, 8: 1},
        **{12: 1, 16: 1, 20: 1, 24: 1},
        **{28: 2, 32: 2},
    }


def test_a_look_knows_the_steps_since_the_last_one_of_its_own_phase_alone(root, tmp_path):
    """Epochs of 11 and 5 steps: behind the rows of the second phase's first steps are others than those just made."""
    own = ["phases=1:8:2,2:16:4", "probe_every=4", "eval_every=0"]
    train(load_config(words(root, tmp_path / "run", *own)))
    epochs, probes = (
        [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        for name in ("steps.jsonl", "probes.jsonl")
    )
    losses = [loss for epoch in epochs for loss in epoch["loss"]]
    since = {4: 0, 8: 4, 12: 11, 16: 12, 20: 16}
    assert [probe["step"] for probe in probes] == [*since]
    for probe in probes:
        expected = np.mean(losses[since[probe["step"]] : probe["step"]])
        assert probe["loss"] == pytest.approx(expected, rel=1e-3)


def test_the_first_look_waits_for_the_eps_that_the_steps_are_trained_with(root, tmp_path):
    """eps grows for a third of the epochs, which in these phases is a twelfth of the steps."""
    grown = ["schedule=short-svhn", "phases=2:8:8,4:16:2", "probe_every=2", "eval_every=0"]
    train(load_config(words(root, tmp_path / "run", *grown)))
    probes = [json.loads(line) for line in (tmp_path / "run" / "probes.jsonl").read_text().splitlines()]
    assert probes[0]["step"] == 4


def test_a_run_resumed_when_all_is_trained_evaluates_as_it_did_at_the_end_of_its_last_phase(
    root, tmp_path, monkeypatch
):
    """It takes as many images at once as a step does: those of the first phase may be too many of the last's size."""
    batches = []

    def conclude(run):
        batches.append(run.batches.size)
        return {}

    monkeypatch.setattr("elle.engine.loop.conclude", conclude)
    config = load_config(words(root, tmp_path / "run", "eval_every=0"))
    train(config)
    train(config, resume=True)
    assert batches == [2, 2]


def test_an_evaluation_takes_no_more_pixels_at_once_than_a_step_of_its_phase(root, tmp_path):
    """Images of 512 pixels fit four at a time whatever the step; 16 of 16 pixels, or of 256, are fewer than that."""
    sizes = ["phases=1:16:16,1:256:16,1:512:8", "eval_every=0"]
    run = Run(load_config(words(root, tmp_path / "run", *sizes)).resolved(), tmp_path / "run", Watcher())
    fitting = []
    for epoch in range(3):
        run.batches.enter(epoch)
        fitting.append(run.evaluation_batch(1024))
    run.step.data.close()
    assert fitting == [4, 4, 8]


def test_the_seconds_before_a_file_that_cannot_be_read_stay_counted(root, tmp_path, monkeypatch):
    stage = Streaming.stage

    def failing(data, epoch, step):
        if (epoch, step) == (0, 3):
            raise WorkError("a.jpg: cannot be read")
        stage(data, epoch, step)

    monkeypatch.setattr(Streaming, "stage", failing)
    with pytest.raises(WorkError, match="cannot be read; the run is saved at step 3"):
        train(load_config(words(root, tmp_path / "run", "eval_every=0")))
    (saved,) = checkpoint.checkpoints(tmp_path / "run")
    assert checkpoint.load_checkpoint(saved)[1]["epoch_seconds"] > 0


@pytest.mark.parametrize(
    ("done", "ranks", "words_after"),
    [
        (0, ALONE, "nothing is trained yet; continue with: elle train --out "),
        (3, Ranks(0, 2), "what was saved stays; continue with the same command and --resume"),
    ],
    ids=["at the first step", "on one of two ranks"],
)
def test_a_file_that_cannot_be_read_is_told_with_how_to_go_on_also_where_nothing_is_saved(
    root, tmp_path, monkeypatch, done, ranks, words_after
):
    def failing(data, epoch, step):
        raise WorkError("a.jpg: cannot be read; replace it")

    monkeypatch.setattr(Streaming, "stage", failing)
    run = Run(load_config(words(root, tmp_path / "run")).resolved(), tmp_path / "run", Watcher())
    run.done, run.ranks = done, ranks
    with pytest.raises(WorkError, match=f"a.jpg: cannot be read; replace it; {words_after}"):
        run._stage(0.0)
    assert not checkpoint.checkpoints(tmp_path / "run")
