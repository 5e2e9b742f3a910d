"""Warn, stop, roll back: what a run does about a collapse, and that it can be interrupted anywhere in between."""

import json
from itertools import pairwise

import pytest
import torch

from elle.config import load_config
from elle.core.controller import Constant, OnOff
from elle.engine import checkpoint
from elle.engine.guard import MAX_ROLLBACKS, strengthened
from elle.engine.loop import Run, train
from elle.engine.parts import method_of
from elle.engine.probe import IMAGES, CollapseMonitor
from elle.engine.records import means
from elle.engine.tracking import Tracking
from elle.engine.watcher import Watcher
from elle.errors import InputError, WorkError
from elle.experiments.rundir import open_run
from elle.methods import METHODS

EPOCH = 18  # steps


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(run):
    return [(event["event"], event.get("step")) for event in lines(run / "events.jsonl") if event["event"] != "resume"]


@pytest.fixture
def collapsing(monkeypatch):
    """collapsing(4, 5): the looks of this number, counted over the whole run, show a collapsed network."""

    def make(*bad):
        seen = []

        def check(self, model, step, *, loss, accuracy, rate):
            seen.append(len(seen) + 1)
            fell = seen[-1] in bad
            levels = (
                {"multi": 0.01, "single": 0.9, "error": 0.1} if fell else {"multi": 0.4, "single": 0.5, "error": 1e-5}
            )
            known = {
                "clean": 0.7,
                "chance": 0.1,
                "step": step,
                "loss": loss,
                "accuracy": levels["single"],
                "rate": rate,
            }
            return self.observe(levels | known)

        monkeypatch.setattr(CollapseMonitor, "check", check)

    return make


def trained_weights(run):
    return checkpoint.read_tensors(run / "model.safetensors")[0]


def test_training_with_the_monitor_is_training_without_it(settings, tmp_path):
    for every in (0, 5):
        train(settings(f"probe_every={every}", "method=n-fgsm", out=str(every)))
    mine, theirs = trained_weights(tmp_path / "0"), trained_weights(tmp_path / "5")
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert [one["step"] for one in lines(tmp_path / "5" / "probes.jsonl")] == [5, 10, 15]
    assert not (tmp_path / "0" / "probes.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "looks"),
    [
        (["method=fgsm"], 2),
        (["method=elle-a"], 2),
        (["method=pgd-3"], 0),
        (["method=standard"], 0),
        (["method=pgd-3", "on_collapse=stop"], 2),
        (["method=pgd-3", "probe_every=6"], 3),
        (["method=fgsm", "probe_every=0"], 0),
    ],
)
def test_the_monitor_is_on_for_single_step_methods_and_where_it_is_asked_for(settings, tmp_path, words, looks):
    train(settings(*words))
    path = tmp_path / "run" / "probes.jsonl"
    assert (len(lines(path)) if path.exists() else 0) == looks


def test_two_looks_fit_into_an_epoch_of_an_odd_number_of_steps(settings, tmp_path):
    train(settings("method=fgsm", "batch=68", "epochs=1"))
    (record,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert record["step"] == 17
    assert [one["step"] for one in lines(tmp_path / "run" / "probes.jsonl")] == [8, 16]


def test_there_is_no_look_while_eps_still_grows(settings, tmp_path):
    """A network trained in a smaller ball than the probe's is no collapsed one."""
    train(settings("method=fgsm", "schedule=short-svhn", "epochs=3"))  # over the first third
    assert [one["step"] for one in lines(tmp_path / "run" / "probes.jsonl")] == [18, 27, 36, 45, 54]


def test_the_images_looked_at_are_spread_over_the_set_from_its_first_to_its_last(settings, tmp_path):
    """It may be sorted by class."""
    run = Run(settings("method=fgsm", "validation=500").resolved(), tmp_path / "run", Watcher())
    (x, y), looked = run.tracking_images, run.guard.monitor
    assert len(looked.y) == IMAGES < len(y)
    places = [int((x == image).flatten(1).all(1).nonzero()[0]) for image in looked.x]
    assert (places[0], places[-1]) == (0, len(x) - 1)
    steps = {later - earlier for earlier, later in pairwise(places)}
    assert max(steps) - min(steps) <= 1
    assert torch.equal(looked.y, y[places])


def test_a_look_knows_all_steps_since_the_last_one_also_those_of_the_epoch_before(settings, tmp_path):
    train(settings("method=fgsm", "batch=68", "epochs=2"))
    accuracy = [value for line in lines(tmp_path / "run" / "steps.jsonl") for value in line["accuracy"]]
    for look in lines(tmp_path / "run" / "probes.jsonl"):
        since = accuracy[look["step"] - 8 : look["step"]]
        assert look["accuracy"] == pytest.approx(sum(since) / 8, abs=1e-4), look["step"]


def test_a_look_takes_no_more_images_at_once_than_an_evaluation(settings, monkeypatch):
    """Of large images a device may have room for no more than it trains on, far fewer than the probe's."""
    batches, look = [], CollapseMonitor.look
    monkeypatch.setattr(CollapseMonitor, "look", lambda self, model: batches.append(self.batch) or look(self, model))
    monkeypatch.setattr(Run, "evaluation_batch", lambda run, batch: min(batch, 20))
    train(settings("method=fgsm"))
    assert batches == [20, 20]


def test_a_guard_without_its_monitor_is_refused(settings):
    with pytest.raises(InputError, match="on_collapse=stop needs the monitor"):
        train(settings("on_collapse=stop", "probe_every=0"))


def test_a_warning_goes_to_the_events_the_watcher_and_the_result(settings, tmp_path, collapsing):
    collapsing(3, 4)
    said, verdicts = [], []
    result = train(settings("epochs=3"), watcher=Watcher(said=said.append, judged=verdicts.append))
    assert events(tmp_path / "run") == [("collapse", 36), ("recovery", 54), ("finish", 54)]
    assert [(one["kind"], one["step"], one["since"]) for one in result["verdicts"]] == [
        ("collapse", 36, 27),
        ("recovery", 54, 45),
    ]
    assert [verdict.kind for verdict in verdicts] == ["collapse", "recovery"]
    assert any("collapse at step 36 (high confidence): accuracy under the multi-step" in text for text in said)
    assert result["rollbacks"] == 0


def test_stopping_leaves_the_last_healthy_state(settings, tmp_path, collapsing):
    collapsing(3, 4)
    said = []
    with pytest.raises(
        WorkError, match="^stopped: collapse at step 36 .* last healthy state, step 18, .*on_collapse=rollback"
    ) as told:
        train(settings("epochs=3", "on_collapse=stop"), watcher=Watcher(said=said.append))
    assert events(tmp_path / "run") == [("collapse", 36), ("rollback", 18), ("stop", 18)]
    assert open_run(tmp_path / "run").rollbacks() == 0
    assert lines(tmp_path / "run" / "events.jsonl")[-1]["reason"] == str(told.value)
    assert not any("going on" in text for text in said)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["step-00000018.safetensors"]
    train(settings("epochs=3", "max_steps=18", out="short"))
    stopped, short = (
        checkpoint.load_checkpoint(checkpoint.checkpoint_path(tmp_path / name, 18))[0] for name in ("run", "short")
    )
    model = {name for name in short if name.startswith("model.")}
    torch.testing.assert_close({k: stopped[k] for k in model}, {k: short[k] for k in model}, rtol=0, atol=0)


def test_stopping_leaves_the_state_of_the_penalty_too(settings, tmp_path, collapsing):
    """The errors of a collapsed network in its history, the rule would hardly ever jump again."""
    collapsing(3, 4)
    with pytest.raises(WorkError, match="^stopped: collapse at step 36"):
        train(settings("epochs=3", "method=elle-a", "on_collapse=stop"))
    train(settings("epochs=3", "method=elle-a", "max_steps=18", out="short"))
    stopped, short = (
        checkpoint.load_checkpoint(checkpoint.checkpoint_path(tmp_path / name, 18))[0] for name in ("run", "short")
    )
    rule = {name for name in short if name.startswith("rule.")}
    assert "rule.mean" in rule
    torch.testing.assert_close({k: stopped[k] for k in rule}, {k: short[k] for k in rule}, rtol=0, atol=0)


def test_a_ramp_does_not_hold_back_the_weight_that_a_rollback_asks_for(settings, collapsing, monkeypatch):
    highest, update = [], OnOff.update

    def noted(rule, state, error):
        highest.append(float(rule._ramped(state)[1]))
        return update(rule, state, error)

    monkeypatch.setattr(OnOff, "update", noted)
    collapsing(3, 4)
    train(settings("epochs=3", "method=elle-a", "weight=10", "method.weight.ramp=72", "on_collapse=rollback"))
    assert highest[35] == pytest.approx(5)
    assert highest[36:] == [20] * 36


def test_nor_does_a_ramp_where_a_rollback_leads_to_the_start_of_a_phase(settings, tmp_path, monkeypatch):
    def check(self, model, step, *, loss, accuracy, rate):
        fooled = len(self.readings) < 2 and not (tmp_path / "run" / "after-collapse.safetensors").exists()
        levels = {"multi": 0.02, "clean": 0.15, "accuracy": 0.4, "error": 0.03} if fooled else {
            "multi": 0.2, "clean": 0.4, "accuracy": 0.25, "error": 1e-5}  # fmt: skip
        return self.observe(levels | {"single": 0.3, "chance": 0.1, "step": step, "loss": loss, "rate": rate})

    monkeypatch.setattr(CollapseMonitor, "check", check)
    config = settings("epochs=2", "method=elle-a", "weight=10", "method.weight.ramp=72", "on_collapse=rollback")
    train(config)
    run = tmp_path / "run"
    assert events(run) == [("collapse", 18), ("rollback", 0), ("finish", 36)]
    tensors, header = checkpoint.load_checkpoint(checkpoint.checkpoint_path(run, 36))
    assert float(tensors["rule.since"]) == 72 + 36
    assert header["guard"]["strengthened_at"] == 0


def test_a_rollback_undoes_the_collapse_and_goes_on_with_elle_a(settings, tmp_path, collapsing):
    collapsing(3, 4)
    result = train(settings("epochs=3", "on_collapse=rollback"))
    run = tmp_path / "run"
    assert events(run) == [("collapse", 36), ("rollback", 18), ("finish", 54)]
    rollback = next(event for event in lines(run / "events.jsonl") if event["event"] == "rollback")
    assert (rollback["method"], rollback["weight"], rollback["undone_from"]) == ("fgsm+elle-a", 100, 36)
    assert [one["step"] for one in rollback["probes"]] == [27, 36]
    assert (result["rollbacks"], result["steps"]) == (1, 54)
    records = lines(run / "metrics.jsonl")
    assert [(record["step"], record["error"] is None) for record in records] == [(18, True), (36, False), (54, False)]
    assert [one["step"] for one in lines(run / "probes.jsonl")] == [9, 18, 27, 36, 45, 54]
    assert [(one["step"], len(one["loss"])) for one in lines(run / "steps.jsonl")] == [(1, 18), (19, 18), (37, 18)]


def test_the_result_names_the_epoch_of_a_collapse_that_stands(settings, tmp_path, collapsing):
    collapsing(5, 6)
    result = train(settings("epochs=3"))  # its records hold no accuracy under attack
    assert events(tmp_path / "run") == [("collapse", 54), ("finish", 54)]
    assert result["collapse_epoch"] == 3


def records_show_a_collapse(monkeypatch):
    """From the third epoch on."""
    monkeypatch.setattr("elle.engine.loop.means", lambda rows: means(rows) | {"accuracy": 0.5})

    def record(self):
        fell = len(self.run.history) >= 2
        return {"pgd-2": 0.01 if fell else 0.4, "tracked_error": 0.1 if fell else 1e-5, "eval_seconds": 0.0}

    monkeypatch.setattr(Tracking, "record", record)


def test_a_collapse_that_was_undone_is_none_whatever_the_records_say(settings, collapsing, monkeypatch):
    records_show_a_collapse(monkeypatch)
    words = ("epochs=3", "eval_every=1", "track=pgd-2", "on_collapse=rollback")
    collapsing(3, 4)
    undone = train(settings(*words, out="undone"))
    assert (undone["rollbacks"], undone["collapse_epoch"]) == (1, None)


def test_a_run_has_collapsed_in_the_result_if_and_only_if_the_monitor_said_so(settings, collapsing, monkeypatch):
    records_show_a_collapse(monkeypatch)
    words = ("epochs=4", "eval_every=1", "track=pgd-2")
    collapsing()
    silent = train(settings(*words, out="silent"))
    assert (silent["verdicts"], silent["collapse_epoch"]) == ([], None)
    collapsing(4, 5, 6, 7, 8)  # from the end of the second epoch on, an epoch before the records
    assert train(settings(*words, out="told"))["collapse_epoch"] == 2
    collapsing()
    assert train(settings(*words, "probe_every=0", out="records"))["collapse_epoch"] == 3


def test_the_time_that_a_rollback_undoes_stays_counted(settings, tmp_path, collapsing):
    collapsing(4, 5)
    train(settings("epochs=3", "on_collapse=rollback"))
    rollback = next(event for event in lines(tmp_path / "run" / "events.jsonl") if event["event"] == "rollback")
    (undone,) = rollback["records"]
    again = lines(tmp_path / "run" / "metrics.jsonl")[1]
    assert undone["epoch"] == again["epoch"] == 2
    assert again["seconds"] > undone["seconds"]


def test_a_rollback_into_the_middle_of_an_epoch_continues_that_epoch(settings, tmp_path, collapsing):
    collapsing(4, 5)
    train(settings("epochs=4", "on_collapse=rollback"))
    run = tmp_path / "run"
    assert events(run)[:2] == [("collapse", 45), ("rollback", 27)]
    assert [record["step"] for record in lines(run / "metrics.jsonl")] == [18, 36, 54, 72]
    errors = lines(run / "steps.jsonl")[1]["error"]
    # From step 27 on there is a penalty, where the steps done before divide by 4: at 28 and 32, 18 of them of epoch 1.
    assert [k for k, error in enumerate(errors) if error is not None] == [10, 14]


def test_a_run_that_collapses_at_once_goes_back_to_its_first_state(settings, tmp_path, monkeypatch):
    seen = []

    def check(self, model, step, *, loss, accuracy, rate):
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        fooled = len(seen) <= 3
        levels = {"multi": 0.02, "clean": 0.15, "accuracy": 0.4, "error": 0.03} if fooled else {
            "multi": 0.2, "clean": 0.4, "accuracy": 0.25, "error": 1e-5}  # fmt: skip
        return self.observe(levels | {"single": 0.3, "chance": 0.1, "step": step, "loss": loss, "rate": rate})

    monkeypatch.setattr(CollapseMonitor, "check", check)
    result = train(settings("epochs=2", "on_collapse=rollback"))
    assert events(tmp_path / "run") == [("collapse", 18), ("rollback", 0), ("finish", 36)]
    assert result["rollbacks"] == 1
    steps = lines(tmp_path / "run" / "steps.jsonl")
    errors = [error for line in steps for error in line["error"]]
    assert [k for k, error in enumerate(errors) if error is not None] == list(range(0, 36, 4))
    assert [one["step"] for one in lines(tmp_path / "run" / "probes.jsonl")] == [9, 18, 27, 36]
    # What it went back to is the network as it was built.
    before = checkpoint.read_tensors(tmp_path / "run" / "before-collapse.safetensors")
    assert before[1]["step"] == 0
    torch.manual_seed(0)
    fresh = Run(settings("epochs=2", out="fresh").resolved(), tmp_path / "fresh", Watcher()).step.model.state_dict()
    torch.testing.assert_close(before[0], dict(fresh), rtol=0, atol=0)


def test_the_healthy_state_is_kept_where_it_was_kept_before(settings, tmp_path):
    run = Run(settings("epochs=1").resolved(), tmp_path / "run", Watcher())
    run.guard.start()
    places = {name: value.data_ptr() for name, value in run.guard.healthy_state.items()}
    first = {name: value.clone() for name, value in run.guard.healthy_state.items()}
    run.finish()
    assert run.guard.healthy_step > 0
    assert {name: value.data_ptr() for name, value in run.guard.healthy_state.items()} == places
    assert not torch.equal(first["model.classifier.1.weight"], run.guard.healthy_state["model.classifier.1.weight"])


def test_the_guard_never_loops_forever(settings, tmp_path, collapsing):
    collapsing(*range(3, 100))
    with pytest.raises(WorkError, match=f"stopped after {MAX_ROLLBACKS} rollbacks: .* start again with method=elle-a"):
        train(settings("epochs=3", "on_collapse=rollback"))
    assert [name for name, _ in events(tmp_path / "run")] == ["collapse", "rollback"] * (MAX_ROLLBACKS + 1) + ["stop"]
    assert open_run(tmp_path / "run").rollbacks() == MAX_ROLLBACKS, "the stop, which goes back too, is one of them"
    with pytest.raises(WorkError, match=f"stopped after {MAX_ROLLBACKS} rollbacks"):
        train(settings("epochs=3", "on_collapse=rollback"), resume=True)


def test_the_last_stop_leaves_the_rule_of_the_penalty_as_the_last_rollback_made_it(settings, tmp_path, collapsing):
    """Not that of the steps undone: the healthy state is older than the penalty."""
    collapsing(*range(3, 100))
    with pytest.raises(WorkError, match=f"stopped after {MAX_ROLLBACKS} rollbacks"):
        train(settings("epochs=3", "on_collapse=rollback"))
    *_, before, last = (one for one in lines(tmp_path / "run" / "events.jsonl") if one["event"] == "rollback")
    stopped, _ = checkpoint.load_checkpoint(checkpoint.checkpoints(tmp_path / "run")[-1])
    assert last["weight"] == before["weight"] == stopped["rule.weight"]
    assert stopped["rule.count"] == stopped["rule.mean"] == 0


def test_a_run_whose_healthy_state_was_not_kept_says_so(settings, collapsing):
    collapsing(3, 4)
    train(settings("epochs=3", "max_steps=27"))
    with pytest.raises(WorkError, match="no healthy state was kept"):
        train(settings("epochs=3", "on_collapse=rollback"), resume=True)


def test_looks_and_verdicts_outlive_a_part_of_the_run_without_looks(settings, tmp_path, collapsing):
    collapsing(3, 4)
    first = train(settings("epochs=5", "max_steps=36"))
    without = train(settings("epochs=5", "max_steps=54", "probe_every=0"), resume=True)
    again = train(settings("epochs=5", "max_steps=72"), resume=True)
    assert [one["kind"] for one in first["verdicts"]] == ["collapse"]
    assert first["verdicts"] == without["verdicts"] == again["verdicts"][:1]
    assert [one["step"] for one in lines(tmp_path / "run" / "probes.jsonl")] == [9, 18, 27, 36, 63, 72]


class PulledPlugError(Exception):
    pass


@pytest.mark.parametrize("cut", [19, 36, 40])
def test_interrupted_around_a_rollback_and_resumed_is_uninterrupted_bitwise(settings, tmp_path, collapsing, cut):
    words = ("epochs=3", "on_collapse=rollback", "method=n-fgsm")
    collapsing(3, 4)
    train(settings(*words, out="whole"))
    passed = []

    def stepped(step):
        passed.append(step)
        # The checkpoints are those of whole epochs: the looks made since the last one are made again.
        if passed.count(cut) == (2 if cut == 40 else 1) or (cut == 40 and step == 40):
            raise PulledPlugError

    collapsing(3, 4)
    with pytest.raises(PulledPlugError):
        train(settings(*words, out="cut"), watcher=Watcher(stepped=stepped))
    collapsing(*((1, 2) if cut == 19 else (1, 2) if cut == 36 else ()))
    train(settings(*words, out="cut"), resume=True)
    mine, theirs = (
        checkpoint.load_checkpoint(checkpoint.checkpoint_path(tmp_path / name, 54)) for name in ("whole", "cut")
    )
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=0, equal_nan=True)
    assert mine[1]["guard"] == theirs[1]["guard"] == {"rollbacks": 1, "healthy_step": 54, "strengthened_at": 18}
    assert mine[1]["monitor"] == theirs[1]["monitor"]
    assert lines(tmp_path / "whole" / "probes.jsonl") == lines(tmp_path / "cut" / "probes.jsonl")
    assert lines(tmp_path / "whole" / "steps.jsonl") == lines(tmp_path / "cut" / "steps.jsonl")


def test_a_run_killed_after_a_rollback_past_all_its_checkpoints_goes_on_from_there(settings, tmp_path, monkeypatch):
    looks = []

    def check(self, model, step, *, loss, accuracy, rate):
        looks.append(step)
        # Healthy in the first epoch; then, until it falls, no longer so, but not fallen either.
        multi = 0.4 if len(looks) <= 2 else 0.25 if len(looks) <= 6 else 0.01
        levels = {"multi": multi, "single": 0.5, "clean": 0.7, "chance": 0.1, "error": 1e-5, "accuracy": 0.5}
        return self.observe(levels | {"step": step, "loss": loss, "rate": rate})

    def stepped(step):
        if looks and step < looks[-1]:
            raise PulledPlugError

    monkeypatch.setattr(CollapseMonitor, "check", check)
    words = ("epochs=5", "on_collapse=rollback")
    with pytest.raises(PulledPlugError):
        train(settings(*words), watcher=Watcher(stepped=stepped))
    assert events(tmp_path / "run") == [("collapse", 72), ("rollback", 18)]
    said = []
    looks[:] = looks[:2]
    result = train(settings(*words, "max_steps=36"), resume=True, watcher=Watcher(said=said.append))
    assert said[0].startswith("continuing from step 18 ")
    assert result["rollbacks"] == 1


def test_a_run_killed_as_a_rollback_is_saved_still_tells_of_it(settings, tmp_path, collapsing, monkeypatch):
    """Its model card and reports would else name the method that it was started with for the whole run."""

    def killed(run):
        raise PulledPlugError

    collapsing(3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "cut_files", lambda run: killed(run) if run.done else None)
        with pytest.raises(PulledPlugError):
            train(settings("epochs=3", "on_collapse=rollback"))
    collapsing()
    result = train(settings("epochs=3", "on_collapse=rollback"), resume=True)
    run = open_run(tmp_path / "run")
    assert events(run.path) == [("collapse", 36), ("rollback", 18), ("finish", 54)]
    assert (result["rollbacks"], run.went_on_with(), run.first_fall()) == (1, "fgsm+elle-a at weight 100", 27)


def test_the_stronger_method(settings):
    config = settings("clip=true").resolved()
    first = strengthened(METHODS["n-fgsm"], config)
    assert (first.name, first.attack) == ("n-fgsm+elle-a", METHODS["n-fgsm"].attack)
    assert (first.weight, first.regulariser.clip) == (OnOff(100, every=4), True)
    second = strengthened(first, config)
    assert second.weight == OnOff(200, every=2)
    third = strengthened(second, config)
    assert third.weight == OnOff(400, every=1)
    assert strengthened(third, config).weight == OnOff(800, every=1)
    assert strengthened(METHODS["elle"], config).weight.value == 2 * METHODS["elle"].weight.value


@pytest.mark.parametrize("data", ["cifar10", "cifar100", "svhn", "imagenet", "folder"])
@pytest.mark.parametrize("name", ["fgsm", "n-fgsm", "gat", "trades-single"])
def test_a_rollback_goes_on_at_the_weight_that_the_stronger_method_has_by_default(name, data):
    words = [f"data={data}", "eps=8/255", "root=images"]
    method = strengthened(METHODS[name], load_config([f"method={name}", *words]).resolved())
    assert method.name == f"{name}+elle-a"
    assert method.weight.value == load_config([f"method={name}+elle-a", *words]).resolved().weight


@pytest.mark.parametrize(
    ("words", "weight"),
    [
        (["method=elle", "weight=20000"], Constant(40_000)),
        (["method=elle-a", "weight=30000", "method.weight.every=3"], OnOff(60_000, every=2)),
        (["method=n-fgsm+elle-a", "weight=9000"], OnOff(18_000)),
        (["method=elle", "weight=0"], Constant(1_000)),
        (["method=elle-a", "weight=0", "method.weight.decay=0.9"], OnOff(4_000, decay=0.9)),
    ],
)
def test_a_penalty_keeps_its_form_and_rule_and_becomes_stronger(words, weight):
    config = load_config(["data=cifar10", "method.regulariser.power=1", *words]).resolved()
    before = method_of(config)
    stronger = strengthened(before, config)
    assert (stronger.name, stronger.regulariser, stronger.weight) == (before.name, before.regulariser, weight)


@pytest.mark.slow
def test_a_real_collapse_is_seen_and_undone(tmp_path):
    """FGSM on MNIST's digits at the demo's settings: plain it ends near 0, rolled back it does not."""
    words = ["data=mnist5k", "method=fgsm", "seed=0", "device=cpu", "lr=0.05", "eval_every=0", "final=pgd-20"]
    plain = train(load_config([*words, f"out={tmp_path / 'plain'}"]))
    guarded = train(load_config([*words, "on_collapse=rollback", f"out={tmp_path / 'guarded'}"]))
    assert [verdict["kind"] for verdict in plain["verdicts"]][:1] == ["collapse"]
    assert guarded["rollbacks"] >= 1
    assert plain["test"]["pgd-20"]["accuracy"] < 0.1
    assert guarded["test"]["pgd-20"]["accuracy"] > 0.3
