"""What the records of a run without the monitor tell: its collapse, by the monitor's own rule."""

from types import SimpleNamespace

import pytest

from elle.config import Config
from elle.engine.tracking import Tracking
from elle.methods import METHODS

TRACES = {
    "a fall to 0 with a high single-step accuracy": ([0.3, 0.4, 0.5, 0.9, 0.95], [0.3, 0.35, 0.4, 0.05, 0.0], 4),
    "one low epoch at the end": ([0.3, 0.4, 0.9], [0.3, 0.4, 0.0], None),
    "one high epoch at the end": ([0.3, 0.4, 0.9, 0.9, 0.9], [0.3, 0.4, 0.0, 0.0, 0.3], 3),
    "a slow fall": ([0.4, 0.5, 0.6, 0.8, 0.9], [0.4, 0.4, 0.25, 0.19, 0.0], 4),
    "a healthy run": ([0.2, 0.3, 0.4, 0.5], [0.2, 0.28, 0.37, 0.45], None),
    "a healthy run with a dip": ([0.3, 0.4, 0.4, 0.5], [0.3, 0.4, 0.3, 0.45], None),
    "forgetting both": ([0.3, 0.5, 0.1, 0.1], [0.3, 0.45, 0.1, 0.1], None),
    "training that stumbles": ([0.9, 0.9, 0.5, 0.5, 0.5], [0.4, 0.4, 0.15, 0.15, 0.15], None),
    "a fall of a network with little accuracy": ([0.3, 0.35, 0.33, 0.33], [0.28, 0.33, 0.05, 0.05], 3),
    "noise at low accuracy": ([0.6, 0.6, 0.6, 0.6, 0.6], [0.08, 0.08, 0.02, 0.02, 0.02], None),
    "a high single-step accuracy alone": ([0.9, 0.95, 0.99], [0.4, 0.4, 0.4], None),
    "recovery at the end": ([0.3, 0.4, 0.9, 0.5], [0.3, 0.4, 0.0, 0.4], None),
    "recovery and a second fall": ([0.3, 0.4, 0.9, 0.5, 0.9, 0.9], [0.3, 0.4, 0.0, 0.4, 0.0, 0.0], 5),
    "its own attack learnt alone": ([0.2, 0.9, 0.9], [0.1, 0.0, 0.0], 2),
    "one epoch": ([0.9], [0.1], None),
    "no epochs": ([], [], None),
}


def tracking(single, multi, method="fgsm", track="pgd-2,pgd-10", grown=0):
    def error(high, level):
        return 3e-2 if high > level + 0.5 else 1e-5  # a loss that is bent, and one that is not

    history = [
        {"step": k + 1, "loss": 1.0, "accuracy": high, "pgd-2": high, "pgd-10": level}
        | {"tracked_error": error(high, level)}
        for k, (high, level) in enumerate(zip(single, multi, strict=True))
    ]
    images = SimpleNamespace(classes=tuple("0123456789"))
    guard = SimpleNamespace(can_judge=lambda step: step > grown)
    config, row = Config(track=track), METHODS[method]
    return Tracking(SimpleNamespace(config=config, history=history, images=images, method=row, guard=guard))


@pytest.mark.parametrize(("single", "multi", "expected"), TRACES.values(), ids=TRACES)
def test_the_collapse_that_stands_after(single, multi, expected):
    assert tracking(single, multi).judged().collapsed_since == expected


def test_a_collapse_is_seen_one_epoch_after_the_fall_and_dated_to_it():
    verdicts = tracking([0.3, 0.4, 0.9, 0.95, 0.97], [0.3, 0.4, 0.05, 0.0, 0.0]).judged().verdicts
    assert [(verdict.kind, verdict.step, verdict.since) for verdict in verdicts] == [("collapse", 4, 3)]


def test_records_are_judged_once_as_they_come():
    single, multi, _ = TRACES["recovery and a second fall"]
    whole, growing = tracking(single, multi), tracking(single, multi)
    history, growing.run.history = growing.run.history, []
    for record in history:
        growing.run.history.append(record)
        growing.judged()
    monitor = growing.judged()
    assert len(monitor.readings) == len(history)
    assert monitor.verdicts == whole.judged().verdicts


@pytest.mark.parametrize("other", [{"method": "standard"}, {"track": "clean"}, {"track": "fgsm"}])
def test_no_collapse_is_claimed_where_none_could_be_seen(other):
    assert tracking([0.3, 0.4, 0.9, 0.95], [0.3, 0.4, 0.05, 0.0], **other).judged().collapsed_since is None


def test_records_of_epochs_in_which_eps_still_grew_tell_nothing():
    single, multi = [0.8, 0.9, 0.9, 0.6, 0.5, 0.5], [0.0, 0.0, 0.0, 0.3, 0.35, 0.4]
    assert [verdict.kind for verdict in tracking(single, multi).judged().verdicts] == ["collapse", "recovery"]
    assert tracking(single, multi, grown=3).judged().verdicts == []
