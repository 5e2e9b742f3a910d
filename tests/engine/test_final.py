"""A run cut short in its final evaluation goes on there: what is done is kept, and used for the same network alone."""

import dataclasses
import json
import os
import signal

import pytest

from elle.data.sources import Split
from elle.engine import outcome, parts
from elle.engine.loop import train
from elle.engine.run_files import FINAL
from elle.errors import WorkError
from elle.evaluation.units import Files, Unit

from ..conftest import assert_one_line
from .interrupting import PulledPlugError, accuracies, kept_units

WORDS = ("epochs=2", "max_steps=18", "final=clean,pgd-2")
UNITS = {f"{attack}.{chunk:05d}" for attack in ("clean", "pgd-2") for chunk in range(3)}


@pytest.fixture(autouse=True)
def three_chunks(monkeypatch):
    monkeypatch.setattr(outcome, "default_chunk", lambda *_: 200)


@pytest.fixture
def unfinished(settings, tmp_path):
    """A run directory whose process died after four of the six units: the first chunk's, and the second's."""
    with kept_units(end_after=4, with_problem=PulledPlugError), pytest.raises(PulledPlugError):
        train(settings(*WORDS))
    assert len(list((tmp_path / "run" / FINAL).glob("*/*.npz"))) == 4
    return tmp_path / "run"


@pytest.fixture
def uninterrupted(settings, tmp_path):
    """uninterrupted(words) -> what such a run finds that nothing disturbed."""

    def make(*words):
        train(settings(*WORDS, *words, out="whole"))
        return accuracies(tmp_path / "whole")

    return make


def test_only_what_is_missing_is_done_and_the_result_is_the_uninterrupted_one(settings, unfinished, uninterrupted):
    with kept_units() as done:
        train(settings(*WORDS), resume=True)
    assert done == ["clean.00002", "pgd-2.00002"]
    assert accuracies(unfinished) == uninterrupted()
    assert not (unfinished / FINAL).exists()


def test_seconds_are_all_that_were_spent(settings, unfinished):
    (folder,) = (unfinished / FINAL).iterdir()
    store, unit = Files(folder), Unit(("pgd-2",), 1)
    store.save(unit, dataclasses.replace(store.load(unit), seconds=5000.0))
    seconds = {name: one["seconds"] for name, one in train(settings(*WORDS), resume=True)["test"].items()}
    assert seconds["clean"] < 5000 <= seconds["pgd-2"]


def test_another_list_of_attacks_uses_the_units_that_it_shares(settings, unfinished, uninterrupted):
    words = (*WORDS, "final=pgd-3,pgd-2")
    with kept_units() as done:
        train(settings(*words), resume=True)
    assert set(done) == {"pgd-3.00000", "pgd-3.00001", "pgd-3.00002", "clean.00002", "pgd-2.00002"}
    assert accuracies(unfinished) == uninterrupted("final=pgd-3,pgd-2")


def test_the_result_of_the_network_before_does_not_stay_beside_another(settings, tmp_path):
    train(settings(*WORDS))
    file = tmp_path / "run" / "result.json"
    for words, stays in ((WORDS, True), ((*WORDS, "max_steps=19"), False)):
        with kept_units(end_after=1, with_problem=PulledPlugError), pytest.raises(PulledPlugError):
            train(settings(*words), resume=True)
        assert file.exists() == stays


def test_another_network_is_evaluated_afresh(settings, unfinished, uninterrupted):
    with kept_units() as done:
        train(settings(*WORDS, "max_steps=36"), resume=True)
    assert set(done) == UNITS
    assert accuracies(unfinished) == uninterrupted("max_steps=36")
    assert not (unfinished / FINAL).exists()


def other_points(monkeypatch):
    load = parts.load_dataset

    def reversed_order(*given, **named):
        images = load(*given, **named)
        return dataclasses.replace(images, test=Split(images.test.x[::-1].copy(), images.test.y[::-1].copy()))

    monkeypatch.setattr(parts, "load_dataset", reversed_order)


def other_precision(monkeypatch):
    monkeypatch.setattr(outcome, "search_precision", lambda device: "tf32")


@pytest.mark.parametrize("change", [other_points, other_precision])
def test_what_the_outcomes_depend_on_changed_all_is_done_afresh(settings, unfinished, monkeypatch, change):
    change(monkeypatch)
    with kept_units() as done:
        train(settings(*WORDS), resume=True)
    assert set(done) == UNITS


def test_a_place_that_cannot_be_written_costs_the_resuming_alone(settings, uninterrupted, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FINAL).write_text("a file where a folder should be")
    train(settings(*WORDS))
    assert accuracies(tmp_path / "run") == uninterrupted()


def test_a_result_that_cannot_be_written_keeps_the_parts(settings, tmp_path):
    (tmp_path / "run" / "result.json").mkdir(parents=True)
    with pytest.raises(WorkError, match="could not write .*result.json"):
        train(settings(*WORDS))
    assert {path.stem for path in (tmp_path / "run" / FINAL).glob("*/*.npz")} == UNITS


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_a_signal_is_one_line_that_says_how_to_go_on(elle, unfinished, monkeypatch, number, code):
    words = ("train", "--out", unfinished, "--resume")
    save = Files.save

    def save_and_signal(self, unit, found):
        save(self, unit, found)
        os.kill(os.getpid(), number)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Files, "save", save_and_signal)
        ended = elle(*words)
    assert_one_line(ended, code)
    assert ended.err == (
        f"elle: stopped by {number.name} in the final evaluation; what is done is saved; "
        "the same command with --resume goes on\n"
    )
    assert "stopped" in elle("watch", "--once", unfinished).out
    with kept_units() as done:
        assert elle(*words).code == 0
    assert done == ["pgd-2.00002"]
    assert json.loads((unfinished / "events.jsonl").read_text().splitlines()[-1])["event"] == "finish"
