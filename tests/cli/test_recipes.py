"""recipes, show-schedule and tune as a user meets them."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from elle.core.schedules import SCHEDULES

from ..conftest import QUICK


def test_recipes_are_listed_with_their_runs_and_hours(elle):
    rows = {row["name"]: row for row in json.loads(elle("recipes", "--json").out)}
    assert rows["table-2"]["runs"] == 576
    assert rows["table-2"]["expected"] == 192
    assert 20 < rows["table-2"]["gpu_hours"] < 200
    listed = elle("recipes")
    assert listed.code == 0
    assert all(row["title"][:30] in listed.out for row in rows.values())
    assert list(rows).index("figure-2") < list(rows).index("figure-11")


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_drawn_and_told(elle, tmp_path, name):
    outcome = elle("show-schedule", name, "--out", "drawn.svg")
    assert outcome.code == 0
    assert f"{SCHEDULES[name].epochs} epochs" in outcome.out
    assert "rate" in "".join(ElementTree.parse(tmp_path / "drawn.svg").getroot().itertext())
    values = json.loads(elle("show-schedule", name, "--json").out)
    assert max(values["rate"]) == pytest.approx(values["lr"], rel=1e-3)
    assert values["epoch"][-1] == SCHEDULES[name].epochs


def test_tuning_tries_each_value_and_names_the_best(elle):
    words = [*QUICK, "method=elle-a", "max_steps=3"]
    outcome = elle("tune", *words, "--weights", "20,100,20", "--json")
    assert outcome.code == 0, outcome
    (result,) = json.loads(outcome.out)
    assert [trial["weight"] for trial in result["trials"]] == [20, 100]
    assert all(0 <= trial["scores"][0] <= 1 for trial in result["trials"])
    told = elle("tune", *words, "--weights", "20,100")
    assert f"chosen: weight={result['weight']:g}" in told.out
    assert "epoch" not in told.out  # what was trained is read, not trained again


def test_the_chosen_value_is_told_as_exactly_as_it_was_tried(elle):
    told = elle("tune", *QUICK, "method=elle-a", "max_steps=1", "--weights", "15.6551163334")
    assert "chosen: weight=15.6551163334\n" in told.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tune", "method=fgsm"], "no ELLE penalty"),
        (["tune", "table-9"], "no recipe 'table-9', did you mean"),
        (["tune", "method=elle", "--weights", "1,x"], "write numbers with commas"),
        (["tune", "method=elle", "--weights", "0,1"], "greater than 0"),
        (["tune", "method=elle", "--search", "best"], "--search best does not exist; choose from grid, optuna"),
        (["show-schedule", "shrt"], "no schedule 'shrt', did you mean 'short'"),
        (["show-schedule", "short", "--out", "short.png"], "is no .svg; name a .svg file"),
        (["tune", "method=elle", "data=digits", "out=here"], "name it with --out here"),
        (["tune", "method=elle", "data=digits", "--trials", "3"], "--trials is of a search with Optuna"),
        (["tune", "method=elle", "data=digits", "--storage", "x"], "--storage is of a search with Optuna"),
        (["tune", "method=elle", "weight=3"], "give values with --weights instead"),
        (["tune", "method=elle", "--search", "optuna", "--storage", "no://x"], "cannot use no://x to keep the trials"),
    ],
)
def test_a_mistake_is_told_in_one_line(elle, words, told):
    outcome = elle(*words)
    assert outcome.code == 2
    assert told in outcome.err
    assert outcome.err.count("\n") == 1
