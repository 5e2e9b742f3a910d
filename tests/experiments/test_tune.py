"""Tuning lambda: which values are tried, what is held against a run, and which value is chosen."""

import logging
import re
from pathlib import Path

import pytest

from elle.config import load_config
from elle.errors import InputError, Interrupted, WorkError
from elle.experiments.tune import Setting, Trial, chosen, grid_search, optuna_search, settings, try_weight

from .runs import run_directory

WORDS = ("data=digits", "method=elle-a", "eps=0.2")


class Trainer:
    """Writes the run that a weight leads to: collapsed below 50, otherwise best at 200."""

    def __init__(self):
        self.trained = []

    def __call__(self, config):
        self.trained.append((config.weight, config.seed))
        path = Path(config.out)
        words = [f"weight={config.weight}", f"seed={config.seed}", "method=elle-a", "track=clean,pgd-20"]
        if config.weight < 50:
            run_directory(path, *words, fall=3, finished=False)
            raise WorkError("stopped: it collapsed")
        run_directory(path, *words)
        accuracy = 0.5 - abs(config.weight - 200) / 1000 + config.seed / 100
        metrics = path / "metrics.jsonl"
        before = metrics.read_text().replace('"pgd-10": 0.4', f'"pgd-20": {1 - accuracy}', 5)  # of six epochs
        metrics.write_text(before.replace('"pgd-10": 0.4', f'"pgd-20": {accuracy}'))


def digits(*weights):
    (setting,) = settings(WORDS)
    return Setting(setting.config, weights)


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        (["data=cifar10", "method=elle"], (100, 1_000, 5_000, 10_000, 100_000)),
        (["data=svhn", "method=elle"], (200, 2_000, 10_000, 20_000, 200_000)),
        (["data=cifar10", "method=elle-a"], (1_000, 2_000, 3_000, 4_000, 5_000)),
        (["data=svhn", "method=n-fgsm+elle-a"], (5_000, 10_000, 15_000, 20_000)),
        (["data=digits", "method=elle"], (2, 20, 100, 200, 2_000)),
        (["data=digits", "method=elle-a"], (25, 50, 75, 100, 125)),
    ],
)
def test_the_grid_is_the_paper_s_and_elsewhere_the_same_multiples_of_the_default(words, weights):
    (setting,) = settings(words)
    assert setting.weights == pytest.approx(weights)


def test_a_recipe_is_tuned_setting_by_setting_with_its_own_values():
    found = settings(["figure-8", "data=svhn"])
    assert [round(255 * one.config.eps) for one in found] == [2, 4, 6, 8, 10, 12]
    assert {one.weights for one in found} == {(5_000, 10_000, 15_000, 20_000)}


def test_words_choose_among_a_recipe_s_runs_as_they_do_for_a_sweep():
    """Of a key given twice the first value was dropped, a method's field fitted no run, and a weight chose nothing."""
    both = settings(["figure-8", "data=svhn", "data=cifar10", "eps=8/255"])
    assert {one.config.data for one in both} == {"svhn", "cifar10"}
    assert len(settings(["figure-18b", "eps=8/255", "method.regulariser.form=2p"])) == 1
    with pytest.raises(InputError, match="leave weight out.*--weights"):
        settings(["figure-8", "data=svhn", "weight=5000"])


def test_runs_are_judged_once_on_images_that_are_not_trained_on():
    (setting,) = settings([*WORDS, "epochs=7"])
    whole = setting.config.resolved()
    assert (whole.validation, whole.eval_every, whole.on_collapse) == (256, 7, "stop")
    assert "pgd-20" in whole.track
    assert settings(["data=cifar10", "method=elle"])[0].config.validation == 1024


@pytest.mark.parametrize("words", [["method=fgsm"], ["figure-19"]])
def test_what_has_no_penalty_is_refused(words):
    with pytest.raises(InputError, match="no ELLE penalty to weigh"):
        settings(words)


def test_a_set_that_is_to_hold_nothing_out_is_refused():
    with pytest.raises(InputError, match="validation=0: values are compared by held-out images"):
        settings(["method=elle", "data=digits", "validation=0"])


def test_the_best_that_held_is_chosen_and_nothing_is_trained_twice(tmp_path):
    train = Trainer()
    trials = grid_search(digits(20.0, 100.0, 200.0, 400.0), 2, tmp_path, train)
    assert [trial.verdict for trial in trials] == ["collapsed", "", "", ""]
    assert trials[2].scores == pytest.approx((0.5, 0.51))
    assert chosen(trials).weight == 200
    assert (20.0, 1) not in train.trained  # a value whose first run collapsed needs no second
    again = Trainer()
    assert grid_search(digits(20.0, 100.0, 200.0, 400.0), 2, tmp_path, again) == trials
    assert again.trained == []


def test_the_seeds_begin_with_the_one_given_and_their_mean_counts(tmp_path):
    (setting,) = settings([*WORDS, "seed=5"])
    train = Trainer()
    trial = try_weight(setting, 200.0, 3, tmp_path, train)
    assert train.trained == [(200.0, 5), (200.0, 6), (200.0, 7)]
    assert trial.scores == pytest.approx((0.55, 0.56, 0.57))
    assert Trial(1, (0.1, 0.2, 0.9)).score == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        # What `on_collapse=stop` leaves: the run went back to before the collapse, and ended there.
        (({"event": "collapse", "step": 25, "since": 20}, {"event": "rollback", "step": 10, "goes_on": False}),
         "collapsed"),
        (({"event": "divergence", "step": 30},), "diverged"),
    ],
)  # fmt: skip
def test_what_a_run_failed_by_is_held_against_its_weight(tmp_path, events, verdict):
    def train(config):
        run_directory(Path(config.out), "method=elle-a", finished=False, events=events)
        raise WorkError("it ended")

    assert try_weight(digits(100.0), 100.0, 2, tmp_path, train) == Trial(100.0, (), verdict)


def test_a_run_that_was_interrupted_is_continued(tmp_path):
    def trained_to(config, accuracy):
        if not Path(config.out).exists():
            run_directory(Path(config.out), "method=elle-a", finished=False)
        metrics = Path(config.out) / "metrics.jsonl"
        metrics.write_text(re.sub(r'"pgd-.0": 0..', f'"pgd-20": {accuracy}', metrics.read_text()))

    def interrupted(config):
        trained_to(config, 0.1)
        raise WorkError("stopped by SIGTERM")

    def resumed(config):
        trained_to(config, 0.3)
        (Path(config.out) / "result.json").write_text("{}")

    with pytest.raises(WorkError, match="SIGTERM"):
        try_weight(digits(200.0), 200.0, 1, tmp_path, interrupted)
    assert try_weight(digits(200.0), 200.0, 1, tmp_path, resumed) == Trial(200.0, (0.3,))


def test_where_nothing_held_it_says_so():
    with pytest.raises(WorkError, match="no weight held .1, 2.; give larger ones"):
        chosen([Trial(1, (), "collapsed"), Trial(2, (), "diverged")])


def test_of_two_alike_the_smaller_weight_is_chosen():
    assert chosen([Trial(5, (0.4,)), Trial(3, (0.4,)), Trial(9, (0.3,))]).weight == 3


def test_a_run_that_failed_for_another_reason_ends_the_search(tmp_path):
    def interrupted(config):
        raise Interrupted("stopped by SIGINT; continue with: elle train --out it --resume")

    with pytest.raises(Interrupted, match="--out it --resume; the same `elle tune` goes on from there"):
        try_weight(digits(5.0), 5.0, 1, tmp_path, interrupted)


def test_workers_share_what_they_have_found_in_one_database(tmp_path):
    optuna = pytest.importorskip("optuna")
    setting, trains = digits(1000.0, 10.0, 100.0), [Trainer(), Trainer()]
    first = optuna_search(setting, 1, tmp_path, trains[0], trials=5)
    both = optuna_search(setting, 1, tmp_path, trains[1], trials=5)
    assert (len(first), len(both)) == (5, 10)
    assert all(len(train.trained) == 5 for train in trains)
    assert all(10 <= trial.weight <= 1000 for trial in both)
    assert {trial.verdict for trial in both if trial.weight < 50} <= {"collapsed"}
    (summary,) = optuna.get_all_study_summaries(f"sqlite:///{tmp_path / 'tune.db'}")
    assert summary.direction == optuna.study.StudyDirection.MAXIMIZE
    (weight,) = summary.best_trial.distributions.values()
    assert weight == optuna.distributions.FloatDistribution(10, 1000, log=True)


def test_a_worker_that_meets_another_while_the_database_is_made_asks_again(tmp_path, monkeypatch):
    """Of four that were started together three ended with: table studies already exists; choose another."""
    optuna = pytest.importorskip("optuna")
    create, refusals = optuna.create_study, [RuntimeError("table studies already exists")]

    def create_study(**settings):
        if refusals:
            raise refusals.pop()
        return create(**settings)

    monkeypatch.setattr(optuna, "create_study", create_study)
    assert len(optuna_search(digits(10.0, 1000.0), 1, tmp_path, Trainer(), trials=2)) == 2


def test_a_search_that_is_interrupted_goes_on_with_the_same_weight(tmp_path):
    pytest.importorskip("optuna")
    tried = []

    def interrupted(config):
        tried.append(config.weight)
        raise WorkError("stopped by SIGINT")

    with pytest.raises(WorkError, match="SIGINT"):
        optuna_search(digits(100.0, 1000.0), 1, tmp_path, interrupted, trials=3)
    found = optuna_search(digits(100.0, 1000.0), 1, tmp_path, Trainer(), trials=1)
    assert [trial.weight for trial in found] == tried


def test_means_over_different_numbers_of_seeds_are_not_compared(tmp_path):
    pytest.importorskip("optuna")
    setting = digits(100.0, 1000.0)
    optuna_search(setting, 1, tmp_path, Trainer(), trials=2)
    found = optuna_search(setting, 2, tmp_path, Trainer(), trials=3)
    assert [len(trial.scores) for trial in found] == [2, 2, 2]


def test_a_search_that_ends_in_an_error_shows_no_traceback(tmp_path, caplog, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(logging.getLogger("optuna"), "propagate", True)

    def no_data(config):
        raise InputError("no CIFAR-10 found")

    with pytest.raises(InputError, match="no CIFAR-10 found"):
        optuna_search(digits(10.0, 1000.0), 1, tmp_path, no_data, trials=1)
    assert caplog.text == ""


def test_a_search_between_a_value_and_itself_is_refused(tmp_path):
    """It would be one run, shown as often as there are trials."""
    pytest.importorskip("optuna")
    with pytest.raises(InputError, match="has 100 alone to choose from; give two values"):
        optuna_search(digits(100.0), 1, tmp_path, Trainer(), trials=3)
    assert not list(tmp_path.iterdir())


def test_without_optuna_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(InputError, match=r"pip install 'elle-at\[tune\]'"):
        optuna_search(digits(1.0, 2.0), 1, tmp_path, Trainer(), trials=1)


def test_the_words_of_a_setting_are_checked_before_anything_is_trained():
    with pytest.raises(InputError, match="unknown key"):
        settings(["methd=elle"])
    assert load_config(WORDS).weight is None


def test_a_folder_whose_epochs_are_not_known_yet_is_looked_at_in_the_end():
    (setting,) = settings(["data=folder", "root=photos", "method=elle-a"])
    whole = setting.config.resolved()
    assert whole.epochs is None
    assert whole.eval_every > 1_000
