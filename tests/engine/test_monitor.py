"""Numbers in, verdict out: which traces are a collapse, and since when; what else can be the matter."""

import json

import numpy as np
import pytest

from elle.engine.monitor import Monitor

from .traces import readings


def reading(step, multi, single=None, error=1e-5, **other):
    """A look at the probe; by default a healthy one, with the single-step accuracy a little above the multi-step."""
    single = multi + 0.05 if single is None else single
    usual = {"clean": single + 0.2, "chance": 0.1, "loss": 1.5, "accuracy": single, "rate": 0.1}
    return {"step": step, "single": single, "multi": multi, "error": error} | usual | other


def judged(readings, per_epoch=2):
    """The verdicts of a trace of readings, a look every 10 steps."""
    monitor = Monitor(per_epoch)
    for k, one in enumerate(readings):
        monitor.observe(one | {"step": 10 * (k + 1)})
    return [(verdict.kind, verdict.step, verdict.since) for verdict in monitor.verdicts]


def fallen(multi=0.01):
    return reading(0, multi, single=0.9, error=3e-2)


def straight(multi):
    """A low accuracy whose network bends no more than usual."""
    return reading(0, multi, single=0.9)


def fooled(multi=0.05, clean=0.15, error=3e-2):
    """Early in training: the labels are read off the attack."""
    return reading(0, multi, single=0.4, clean=clean, error=error)


RISING = [reading(0, level) for level in (0.1, 0.2, 0.25, 0.3, 0.33, 0.36)]
PROBED = {
    "a fall to 0": ([*RISING, fallen(), fallen(), fallen()], [("collapse", 80, 70)]),
    "a fall to 0 and back": (
        [*RISING, *[fallen()] * 3, *RISING[3:]],
        [("collapse", 80, 70), ("recovery", 110, 100)],
    ),
    "a fall to 0 and back to just above half": (
        [*RISING, *[fallen()] * 3, *[straight(0.2)] * 3],
        [("collapse", 80, 70)],
    ),
    "a fall to 0 and back to just above two thirds": (
        [*RISING, *[fallen()] * 3, *[straight(0.25)] * 3],
        [("collapse", 80, 70), ("recovery", 110, 100)],
    ),
    "two falls": (
        [*RISING, *[fallen()] * 2, *RISING[3:], *[fallen()] * 2],
        [("collapse", 80, 70), ("recovery", 100, 90), ("collapse", 130, 120)],
    ),
    "a fall before anything is learnt": (
        [*[reading(0, 0.4, accuracy=0.0)] * 3, *[reading(0, 0.0, single=0.0, accuracy=0.0, error=1e-3)] * 3],
        [],
    ),
    "a dip of half an epoch": ([*RISING, fallen(), *RISING[3:]], []),
    "many dips": ([*RISING, *[fallen(), RISING[-1]] * 5], []),
    "many dips, never back above two thirds": ([*RISING, *[fallen(), fallen(0.2)] * 5], [("collapse", 90, 70)]),
    "many dips, an epoch apart": ([*RISING, *[fallen(), *RISING[-2:]] * 5], []),
    "many dips to just above half": ([*RISING, *[fallen(0.2), RISING[-1]] * 5], []),
    "a fall in which training stumbles once": (
        [*RISING, fallen(), reading(0, 0.01, single=0.3, error=3e-2), fallen()],
        [("collapse", 90, 70)],
    ),
    "a fall at the third look": ([RISING[1], RISING[2], fallen(), fallen()], [("collapse", 40, 30)]),
    "a fall by less than half": ([*RISING, *[reading(0, 0.19, single=0.9)] * 6], []),
    "forgetting both": ([*RISING, *[reading(0, 0.1, single=0.12)] * 6], []),
    "accuracy at chance": ([reading(0, level, error=1e-7) for level in (0.1, 0.14, 0.02, 0.01, 0.0, 0.03)], []),
    "a high training accuracy alone": ([*RISING, *[reading(0, 0.36, accuracy=0.99)] * 6], []),
    "a collapse that only the training attack hides": (
        [*RISING, *[reading(0, 0.02, single=0.05, accuracy=0.9)] * 2],
        [("collapse", 80, 70)],
    ),
    "E_lin alone": ([*RISING, *[reading(0, 0.36, error=1.0)] * 6], []),
    "a fall from little, E_lin as usual": (
        [*RISING[:3], *[reading(0, 0.01, single=0.9, error=4e-5)] * 6],
        [],
    ),
    "a dip and a look just above half": ([*RISING, fallen(), fallen(0.2), RISING[-1]], []),
    "a fall with looks just above half": (
        [*RISING, fallen(0.2), fallen(), fallen(0.2), fallen()],
        [("collapse", 100, 80)],
    ),
    "a fall with a look just above two thirds": ([*RISING, fallen(), fallen(0.25), fallen()], []),
    "all looks between half and two thirds": ([*RISING, *[fallen(0.2)] * 6], []),
    "attacked images answered best, never robust": (
        [RISING[0], *[fooled()] * 5],
        [("collapse", 30, 20)],
    ),
    "the same for half an epoch": ([RISING[0], fooled(), *RISING], []),
    "attacked images answered best, E_lin as usual": ([RISING[0], *[fooled(error=2e-4)] * 6], []),
    "as good as the clean ones": ([RISING[0], *[fooled(clean=0.35)] * 6], []),
    "most attacked images answered, never robust": (
        [RISING[0], *[reading(0, 0.05, single=0.8, clean=0.9, error=3e-2)] * 5],
        [("collapse", 30, 20)],
    ),
    "half of them answered": ([RISING[0], *[reading(0, 0.05, single=0.6, clean=0.9, error=3e-2)] * 6], []),
    "most of them answered, E_lin as usual": ([RISING[0], *[reading(0, 0.05, single=0.8, clean=0.9)] * 6], []),
    "attacked images answered best, and robust": ([*RISING, *[fooled(multi=0.36)] * 6], []),
    "a network that was fooled and becomes robust": (
        [RISING[0], *[fooled()] * 3, *RISING[1:]],
        [("collapse", 30, 20), ("recovery", 60, 50)],
    ),
    "a network that was fooled and becomes accurate but stays bent": (
        [RISING[0], *[fooled()] * 3, *[one | {"error": 1e-2} for one in RISING[1:]]],
        [("collapse", 30, 20)],
    ),
    "a network that was fooled and becomes hardly better than chance": (
        [RISING[0], *[fooled()] * 3, *[straight(0.17)] * 4],
        [("collapse", 30, 20)],
    ),
    "a network that was fooled and becomes a little better than chance": (
        [RISING[0], *[fooled()] * 3, *[straight(0.19)] * 4],
        [("collapse", 30, 20), ("recovery", 60, 50)],
    ),
    "a fall and back, hardly bent": (
        [*RISING, *[fallen()] * 2, *[RISING[-1] | {"error": 1.9e-3}] * 3],
        [("collapse", 80, 70), ("recovery", 100, 90)],
    ),
    "a fall and back, still bent": (
        [*RISING, *[fallen()] * 2, *[RISING[-1] | {"error": 2.1e-3}] * 3],
        [("collapse", 80, 70)],
    ),
    "a fall and back, of a network that always was bent": (
        [*[one | {"error": 1e-3} for one in RISING], *[fallen()] * 2, *[one | {"error": 5e-3} for one in RISING[3:]]],
        [("collapse", 80, 70), ("recovery", 100, 90)],
    ),
    "noise around the chance of a hundred classes": (
        [reading(0, count / 128, single=0.05, error=1e-3, chance=0.01) for count in (1, 5, 0, 1, 2, 6, 1, 0)],
        [],
    ),
    "two looks": ([RISING[0], fallen()], []),
    "one look": ([fallen()], []),
    "a constant network": (
        [reading(0, 0.1, single=0.1, error=0.0, clean=0.1)] * 7,
        [("constant", 60, 10)],
    ),
    "a network that is constant for two epochs": (
        [*[reading(0, 0.1, single=0.1, error=0.0, clean=0.1)] * 4, *RISING],
        [],
    ),
    "a constant network that begins to learn": (
        [*[reading(0, 0.1, single=0.1, error=0.0, clean=0.1)] * 6, *RISING[1:]],
        [("constant", 60, 10), ("recovery", 70, 70)],
    ),
    "a constant network whose error is rounding": (
        [reading(0, 0.1, single=0.1, error=error, clean=0.1) for error in [*[5e-10] * 6, 1.1e-9, 5e-10, 3e-9]],
        [("constant", 60, 10)],
    ),
    "a look that is not finite": ([*RISING, *[reading(0, 0.0, error=None)] * 3], [("divergence", 70, 70)]),
    "a look that is not finite, and finite ones": (
        [*RISING, RISING[-1] | {"error": None}, *RISING[-2:], *[fallen()] * 4],
        [("divergence", 70, 70), ("recovery", 90, 80), ("collapse", 110, 100)],
    ),
    "a look that is not finite, and a fall": (
        [*RISING, RISING[-1] | {"error": None}, *[fallen()] * 3],
        [("divergence", 70, 70), ("collapse", 90, 80)],
    ),
    "a fall, and a look that is not finite": (
        [*RISING, *[fallen()] * 2, RISING[-1] | {"error": None}],
        [("collapse", 80, 70)],
    ),
    "a slow decline after the rate has dropped": (
        [*[reading(0, 0.45)] * 12, *[reading(0, 0.45 - k / 99, accuracy=0.55 + k / 50, rate=0.01) for k in range(15)]],
        [("robust overfitting", 250, 100)],
    ),
    "a slow decline at the full rate": (
        [*[reading(0, 0.45)] * 12, *[reading(0, 0.45 - k / 99, accuracy=0.55 + k / 50) for k in range(15)]],
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("readings", "expected"), PROBED.values(), ids=PROBED)
def test_a_monitor_says_of(readings, expected):
    assert judged(readings) == expected


def test_a_state_after_one_look_that_was_not_finite_is_again_one_to_go_back_to():
    monitor = Monitor()
    seen = []
    for k, one in enumerate([*RISING, RISING[-1] | {"error": None}, *RISING[-3:]]):
        monitor.observe(one | {"step": k})
        seen.append(monitor.healthy)
    assert seen == [True] * 6 + [False, False, True, True]


@pytest.mark.parametrize("name", ["a fall to 0", "most attacked images answered, never robust"])
def test_training_without_an_attack_never_collapses(name):
    monitor = Monitor()
    monitor.attacked = False
    assert [monitor.observe(one) for one in PROBED[name][0]] == [None] * len(PROBED[name][0])
    assert monitor.collapsed_since is None


REAL = {
    "FGSM at 16/255": [("collapse", 30, 20)],
    "FGSM at 8/255": [("collapse", 390, 380)],
    # On 1,024 images PGD-10 was below half of its best at look 22, and not yet at look 20.
    "SLAT at 8/255": [("collapse", 240, 230)],
    "NuAT at 8/255": [],
    "GAT at 8/255": [],
    "ELLE at 8/255": [],
    "single-step TRADES at 8/255": [],
    # PGD-20 on 500 test images fell below half of its best at look 15, for good; look 16 is just above half.
    "FGSM on MNIST at 0.32": [("collapse", 170, 150)],
    "ELLE-A on MNIST at 0.28": [],
}


@pytest.mark.parametrize(("name", "expected"), REAL.items(), ids=REAL)
def test_a_monitor_says_of_the_real_run(name, expected):
    assert judged(readings(name)) == expected


WITHOUT = {
    # A look later: on the probe itself single-step accuracy stumbles at the fall.
    "FGSM at 8/255": [("collapse", 400, 390)],
    # For that epoch PGD-20 on test images was at 4 % and 7 %; that training stumbled as well is not to be seen.
    "ELLE-A on MNIST at 0.28": [("collapse", 230, 220), ("recovery", 250, 240)],
}


@pytest.mark.parametrize("name", REAL)
def test_a_monitor_without_the_accuracy_of_training_says_of_the_real_run(name):
    seen = [one | {"accuracy": None} for one in readings(name)]
    assert judged([*seen, seen[-1]]) == WITHOUT.get(name, REAL[name])


def test_a_network_that_knows_nothing_in_eval_mode_yet_is_not_fooled():
    """SLAT's first epochs: chance on every image of the probe, 36 % in training; E_lin is larger in a larger ball."""
    assert judged([one | {"error": 20 * one["error"]} for one in readings("SLAT at 8/255")[:9]]) == []


def test_a_collapse_before_any_robustness_is_explained_by_its_own_evidence():
    monitor = Monitor()
    for one in readings("FGSM at 16/255"):
        monitor.observe(one)
    (verdict,) = monitor.verdicts
    assert "35.7% under the single-step attack but 11.7% without any and 10.9% under the multi-step" in verdict.evidence


def test_no_state_of_a_run_that_collapses_at_once_is_one_to_go_back_to():
    monitor = Monitor()
    for one in readings("FGSM at 16/255"):
        monitor.observe(one)
        assert not monitor.healthy


def test_a_collapse_is_not_robust_overfitting_however_long_it_lasts():
    last = [
        one | {"accuracy": 0.9 + k / 999, "rate": 0.01} for k, one in enumerate(readings("FGSM at 16/255")[-2:] * 20)
    ]
    assert judged([*readings("FGSM at 16/255"), *last]) == [("collapse", 30, 20)]


@pytest.mark.parametrize(("per_epoch", "looks"), [(1, 2), (2, 2), (3, 3), (8, 8)])
@pytest.mark.parametrize("error", [3e-2, 1e-5])
def test_a_collapse_is_reported_when_it_has_lasted_an_epoch(per_epoch, looks, error):
    readings = [*RISING, *[fallen() | {"error": error}] * looks]
    assert judged(readings[:-1], per_epoch) == []
    assert judged(readings, per_epoch) == [("collapse", 10 * (6 + looks), 70)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("best", [0.25, 0.5])
def test_noise_on_128_images_neither_hides_a_collapse_nor_makes_one(best, seed):
    draw = np.random.default_rng(seed)

    def noisy(level):
        return float(draw.binomial(128, level)) / 128

    rising = [noisy(best * min(1, 0.2 + k / 10)) for k in range(100)]
    healthy = [reading(0, level, error=10 ** draw.normal(-5, 0.3)) for level in rising]
    assert judged(healthy) == []
    after = [reading(0, noisy(0.02), single=noisy(0.85), error=10 ** draw.normal(-2, 0.5)) for _ in range(10)]
    assert judged(healthy[:30] + after) == [("collapse", 320, 310)]


def test_a_verdict_tells_its_reasons_in_numbers():
    monitor = Monitor()
    for k, one in enumerate([*RISING, fallen(), fallen()]):
        monitor.observe(one | {"step": k})
    verdict = monitor.verdicts[0]
    assert verdict.confidence == "high"
    for part in ("collapse at step 7", "from 36.0% to 1.0%", "90.0%", "3.0e-02, 3e+03 times its usual 1.0e-05"):
        assert part in str(verdict)


@pytest.mark.parametrize(
    ("loss", "words"), [(32.30424118, "not finite; the training loss is 32.3"), (None, "not finite")]
)
def test_a_divergence_says_what_is_not_finite(loss, words):
    verdict = Monitor(2).observe(reading(10, 0.3, error=None, loss=loss))
    assert verdict.evidence.startswith("E_lin is not finite")
    assert verdict.evidence.endswith(words)


def test_a_collapse_without_a_jump_of_the_error_is_told_with_less_confidence():
    monitor = Monitor()
    for one in [*RISING, *[reading(0, 0.01, single=0.9)] * 2]:
        monitor.observe(one)
    assert [verdict.confidence for verdict in monitor.verdicts] == ["medium"]


@pytest.mark.parametrize("name", PROBED)
@pytest.mark.parametrize("cut", [1, 7])
def test_a_monitor_restored_from_json_goes_on_as_if_nothing_had_happened(name, cut):
    whole, first = Monitor(), Monitor()
    readings = [one | {"step": k} for k, one in enumerate(PROBED[name][0])]
    for one in readings:
        whole.observe(one)
    for one in readings[:cut]:
        first.observe(one)
    second = Monitor()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for one in readings[cut:]:
        second.observe(one)
    assert second.state_dict() == whole.state_dict()


def test_what_a_rollback_has_undone_is_forgotten_but_not_the_verdict():
    monitor = Monitor()
    for k, one in enumerate([*RISING, fallen(), fallen()]):
        monitor.observe(one | {"step": k})
    assert [one["step"] for one in monitor.forget(5)] == [6, 7]
    assert (len(monitor.readings), monitor.condition, len(monitor.verdicts)) == (6, None, 1)
    assert monitor.healthy


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (reading(0, 0.36), True),
        (reading(0, 0.28), True),
        (reading(0, 0.26), False),  # three quarters of the best are 0.27
        (reading(0, 0.36, error=2.9e-5), True),
        (reading(0, 0.36, error=3.1e-5), False),
        (reading(0, 0.36, error=None), False),
    ],
)
def test_a_state_to_go_back_to_has_its_accuracy_and_its_usual_error(last, expected):
    monitor = Monitor()
    for one in [*RISING, last]:
        monitor.observe(one)
    assert monitor.healthy is expected


@pytest.mark.parametrize(("multi", "error", "expected"), [(0.31, 1e-3, True), (0.29, 1e-3, False), (0.29, 4e-4, True)])
def test_a_state_to_go_back_to_is_robust_or_straight(multi, error, expected):
    monitor = Monitor()
    for _ in range(3):
        monitor.observe(reading(0, multi, error=error))
    assert monitor.healthy is expected


@pytest.mark.parametrize(("last", "expected"), [(2.9e-5, True), (3.1e-5, False)])
@pytest.mark.parametrize(("early", "late"), [(0, 1), (4, 6), (20, 6), (20, 9)])
def test_the_usual_error_of_a_state_to_go_back_to_is_the_median_of_the_ten_looks_before_it(early, late, last, expected):
    """Errors grow and shrink with the rate: those of long ago, and the look's own, are no measure of this one."""
    monitor = Monitor()
    for error in [*[1e-3] * early, *[1e-5] * late, last]:
        monitor.observe(reading(0, 0.4, error=error))
    assert monitor.healthy is expected


@pytest.mark.parametrize(("early", "late"), [(20, 6), (4, 6)])
def test_the_usual_error_of_a_verdict_is_the_median_of_the_ten_looks_before_the_fall(early, late):
    """Not of those in the fall, of which an epoch may have many."""
    monitor = Monitor(per_epoch=12)
    before = [reading(0, 0.4, error=error) for error in [*[1e-3] * early, *[1e-5] * late]]
    for k, one in enumerate([*before, *[reading(0, 0.01, single=0.9, error=1.2e-4)] * 12]):
        monitor.observe(one | {"step": k})
    (verdict,) = monitor.verdicts
    assert verdict.confidence == "high"
    assert "E_lin is 1.2e-04, 12 times its usual 1.0e-05" in verdict.evidence


def test_accuracy_that_comes_back_alone_is_no_recovery():
    """A few steps of attack find less and less against a collapsed network; its bent loss gives it away."""
    healthy, collapsed = [reading(0, 0.45)] * 6, [reading(0, 0.03, single=0.8, error=5e-2)] * 3
    bent = [reading(0, 0.44, single=0.7, error=5e-2)] * 6
    straight = [reading(0, 0.44, error=2e-5)] * 3
    assert [kind for kind, _, _ in judged(healthy + collapsed + bent)] == ["collapse"]
    assert [kind for kind, _, _ in judged(healthy + collapsed + bent + straight)] == ["collapse", "recovery"]


def test_a_network_that_bent_slowly_and_never_was_robust_has_no_usual_error_to_come_back_to():
    bending = [reading(0, 0.05, single=0.3 + 0.02 * k, clean=0.6, error=4e-3 * 1.25**k) for k in range(12)]
    collapsed = [reading(0, 0.02, single=0.8, clean=0.7, error=6e-2)] * 3
    found_less = [reading(0, 0.28, single=0.9, clean=0.9, error=1e-1)] * 6
    assert [kind for kind, _, _ in judged(bending + collapsed + found_less)] == ["collapse"]
