"""TensorBoard scalars: written where the extra is installed, and asked for by name where it is not."""

import sys

import pytest

from elle.cli.tensorboard import with_tensorboard
from elle.engine.monitor import Verdict
from elle.engine.watcher import Watcher
from elle.errors import InputError, WorkError


def test_records_looks_and_verdicts_are_written_and_passed_on(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records, verdicts, looks = [], [], []
    watched = Watcher(recorded=records.append, judged=verdicts.append, looked=lambda *seen: looks.append(seen))
    watcher = with_tensorboard(watched, tmp_path / "tensorboard")
    assert not (tmp_path / "tensorboard").exists()
    watcher.recorded({"epoch": 1, "step": 10, "loss": 10.5, "error": None})
    watcher.looked({"step": 15, "multi": 0.25, "rate": None}, "collapse")
    watcher.recorded({"epoch": 2, "step": 20, "loss": 20.5, "error": None})
    watcher.judged(Verdict("collapse", 20, 15, "it fell", "high"))
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(10, 10.5), (20, 20.5)]
    assert [(one.step, one.value) for one in found.Scalars("probe/multi")] == [(15, 0.25)]
    assert sorted(found.Tags()["scalars"]) == ["loss", "probe/multi"]
    assert (len(records), len(verdicts)) == (2, 1)
    assert looks == [({"step": 15, "multi": 0.25, "rate": None}, "collapse")]


def test_what_a_killed_run_wrote_of_steps_that_come_again_is_taken_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for number, (done, steps) in enumerate([(0, (10, 20, 30)), (20, (30, 40))]):
        starts = []
        watched = Watcher(started=lambda *given, starts=starts: starts.append(given))
        watcher = with_tensorboard(watched, tmp_path / "tensorboard")
        watcher.started(None, 40, done)
        assert starts == [(None, 40, done)]
        for step in steps:
            watcher.recorded({"step": step, "loss": step + 0.5 * number})
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(10, 10.0), (20, 20.0), (30, 30.5), (40, 40.5)]


def test_what_a_rollback_has_undone_is_taken_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watcher = with_tensorboard(Watcher(), tmp_path / "tensorboard")
    for step, value in [(10, 1.0), (20, 2.0), (30, 3.0), (20, 4.0), (30, 5.0)]:
        watcher.looked({"step": step, "multi": value}, None)
        watcher.recorded({"step": step, "loss": value})
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in ("probe/multi", "loss"):
        assert [(one.step, one.value) for one in found.Scalars(name)] == [(10, 1.0), (20, 4.0), (30, 5.0)]


def test_without_the_extra_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'elle-at\[tensorboard\]'"):
        with_tensorboard(Watcher(), tmp_path)


def test_the_command_refuses_before_it_trains(elle, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    outcome = elle("train", "data=digits", "--tensorboard", f"out={tmp_path / 'run'}")
    assert (outcome.code, "elle-at[tensorboard]" in outcome.err) == (2, True)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_fails_in_one_line(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file in its place")
    watcher = with_tensorboard(Watcher(), tmp_path / "tensorboard")
    with pytest.raises(WorkError, match=r"could not write .*tensorboard: File exists; .* --resume"):
        watcher.recorded({"step": 10, "loss": 0.5})
