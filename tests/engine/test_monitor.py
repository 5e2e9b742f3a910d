"""Numbers in, verdict out: which traces are a collapse, and since when."""

import pytest

from elle.engine.monitor import collapse_epoch

TRACES = {
    "a fall to 0 with a high single-step accuracy": ([0.3, 0.4, 0.5, 0.9, 0.95], [0.3, 0.35, 0.4, 0.05, 0.0], 3),
    "one low epoch at the end": ([0.3, 0.4, 0.9], [0.3, 0.4, 0.0], None),
    "one high epoch at the end": ([0.3, 0.4, 0.9, 0.9, 0.9], [0.3, 0.4, 0.0, 0.0, 0.3], 2),
    "a slow fall": ([0.4, 0.5, 0.6, 0.8, 0.9], [0.4, 0.4, 0.25, 0.19, 0.0], 3),
    "a healthy run": ([0.2, 0.3, 0.4, 0.5], [0.2, 0.28, 0.37, 0.45], None),
    "a healthy run with a dip": ([0.3, 0.4, 0.4, 0.5], [0.3, 0.4, 0.3, 0.45], None),
    "forgetting both": ([0.3, 0.5, 0.1, 0.1], [0.3, 0.45, 0.1, 0.1], None),
    "noise at low accuracy": ([0.1, 0.12, 0.1, 0.11], [0.1, 0.12, 0.03, 0.02], None),
    "a high single-step accuracy alone": ([0.9, 0.95, 0.99], [0.4, 0.4, 0.4], None),
    "recovery at the end": ([0.3, 0.4, 0.9, 0.5], [0.3, 0.4, 0.0, 0.4], None),
    "recovery and a second fall": ([0.3, 0.4, 0.9, 0.5, 0.9, 0.9], [0.3, 0.4, 0.0, 0.4, 0.0, 0.0], 4),
    "never robust at all": ([0.9, 0.9], [0.0, 0.0], None),
    "one epoch": ([0.9], [0.1], None),
    "no epochs": ([], [], None),
}


@pytest.mark.parametrize(("single", "multi", "expected"), TRACES.values(), ids=TRACES)
def test_the_verdict_of(single, multi, expected):
    assert collapse_epoch(single, multi) == expected


def test_a_collapse_is_seen_one_epoch_after_the_fall_and_dated_to_it():
    single, multi = [0.3, 0.4, 0.9, 0.95, 0.97], [0.3, 0.4, 0.05, 0.0, 0.0]
    verdicts = [collapse_epoch(single[:k], multi[:k]) for k in range(6)]
    assert verdicts == [None, None, None, None, 2, 2]


def test_traces_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        collapse_epoch([0.1, 0.2], [0.1])
