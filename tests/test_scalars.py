"""TensorBoard scalars: written where the extra is installed, and asked for by name where it is not."""

import sys

import pytest

from elle.engine.loop import Watcher
from elle.engine.monitor import Verdict
from elle.errors import InputError, WorkError
from elle.scalars import with_tensorboard


def test_records_looks_and_verdicts_are_written_and_passed_on(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records, verdicts, looks = [], [], []
    watched = Watcher(recorded=records.append, judged=verdicts.append, looked=lambda *seen: looks.append(seen))
    watcher = with_tensorboard(watched, tmp_path / "tensorboard")
    assert not (tmp_path / "tensorboard").exists()
    for step in (10, 20):
        watcher.recorded({"epoch": step // 10, "step": step, "loss": 0.5 + step, "error": None})
    watcher.looked({"step": 15, "multi": 0.25, "rate": None}, "collapse")
    watcher.judged(Verdict("collapse", 20, 15, "it fell", "high"))
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(10, 10.5), (20, 20.5)]
    assert [(one.step, one.value) for one in found.Scalars("probe/multi")] == [(15, 0.25)]
    assert sorted(found.Tags()["scalars"]) == ["loss", "probe/multi"]
    assert (len(records), len(verdicts)) == (2, 1)
    assert looks == [({"step": 15, "multi": 0.25, "rate": None}, "collapse")]


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
