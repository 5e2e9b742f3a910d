"""What makes an accuracy doubtful, in plain words: each check looks at counts of one result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Entry = Mapping[str, Any]
MANY = 0.1
"""From this share of the points on, a symptom counts as one of the network."""
BLACK_BOX = "square"


def check(attacks: Mapping[str, Entry], facts: Mapping[str, int], total: int) -> list[dict[str, Any]]:
    """Each check's name, whether it passed (None: it could not look), and what it saw.

    `facts` are counts over the clean images; an empty answer of a check is a good one, None is no answer.
    """
    found = {
        "deterministic": _deterministic(facts, total),
        "gradients": _gradients(facts, total),
        "classifier": _classifier(facts, total),
        "black-box": _black_box(attacks, total),
        "single-step": _single_step(attacks),
        "inside": _inside(attacks),
    }
    return [
        {
            "check": name,
            "passed": None if words is None else not words,
            "words": NOT_RUN[name] if words is None else words or PASSED[name],
        }
        for name, words in found.items()
    ]


PASSED = {
    "deterministic": "two forwards of the same images agree",
    "gradients": "the loss has a gradient to follow",
    "classifier": "the predictions vary and are not saturated",
    "black-box": "no black-box attack does better than the white-box ones",
    "single-step": "a single step is not much weaker than many",
    "inside": "every adversarial point found is in the ball, in [0, 1] and misclassified in float32",
}
NOT_RUN = {
    "black-box": "not checked: needs square and a white-box attack, for example autoattack",
    "single-step": "not checked: needs fgsm and a multi-step attack, for example pgd-20",
    "inside": "not checked: needs an attack",
}


def _deterministic(facts: Mapping[str, int], total: int) -> str:
    if not facts.get("differ"):
        return ""
    return (
        f"two forwards of the same images differ on {facts['differ']} of {total}: the network is randomised or "
        f"non-deterministic, and an attack that does not average over its randomness overstates it; or an image's "
        f"answer depends on the others of its batch, and no accuracy is one of the network alone"
    )


def _gradients(facts: Mapping[str, int], total: int) -> str:
    # Attacks are asked about what is classified correctly, so of a weak network that is the whole.
    count, right = facts.get("zero_gradient", 0), facts.get("right", total)
    if count == 0 or count < MANY * right:
        return ""
    return (
        f"the gradient of the loss is exactly 0 on {count} of {right} correct images: gradient attacks are blind "
        f"there; trust square, and fab-t where the logits still have one, or remove what masks the gradient"
    )


def _classifier(facts: Mapping[str, int], total: int) -> str:
    if facts.get("undefined"):
        return f"the logits are not a number on {facts['undefined']} of {total} images; they count as wrong"
    predicted, labels = (
        {name: count for name, count in facts.items() if name.startswith(kind)} for kind in ("predicted_", "label_")
    )
    if predicted and len(labels) > 1 and max(predicted.values()) >= 0.95 * total > max(labels.values()):
        name = max(predicted, key=lambda key: predicted[key]).removeprefix("predicted_")
        return (
            f"the network answers class {name} on {max(predicted.values())} of {total} images: "
            f"a constant classifier cannot be attacked, and its accuracy is only that class's share"
        )
    if facts.get("probabilities", 0) == total:
        return (
            "the network gives probabilities, not logits: the cross-entropy takes their softmax once more, and attacks "
            "on it are weaker; evaluate the network without its last softmax"
        )
    if facts.get("saturated", 0) >= 0.5 * total:
        return (
            f"the network is saturated: its probability is exactly 1, or a logit infinite, on {facts['saturated']} of "
            f"{total} images, where the cross-entropy tells an attack nothing; trust apgd-t, fab-t and square"
        )
    return ""


def _black_box(attacks: Mapping[str, Entry], total: int) -> str | None:
    """Square sees the loss alone: where it finds more than the gradient does, the gradient is masked."""
    few = max(1, 0.01 * total)
    for one in attacks.values():
        for part in one.get("parts", []):
            if part["attack"] == BLACK_BOX and part["broken"] > few:
                return (
                    f"square, which sees no gradients, breaks {part['broken']} images that every white-box attack "
                    f"before it left: the gradient is masked, and the true accuracy may be lower"
                )
    white = {name: one["correct"] for name, one in attacks.items() if name not in ("clean", "autoattack", BLACK_BOX)}
    if "autoattack" not in attacks and not (white and BLACK_BOX in attacks):
        return None
    if white and BLACK_BOX in attacks and attacks[BLACK_BOX]["correct"] < min(white.values()) - few:
        return (
            f"square, which sees no gradients, leaves {attacks[BLACK_BOX]['correct']} images correct, every white-box "
            f"attack at least {min(white.values())}: the gradient is masked, and the true accuracy may be lower"
        )
    return ""


def _single_step(attacks: Mapping[str, Entry]) -> str | None:
    # Attacks on FGSM's own loss alone: a targeted one may be stronger by its loss, and many steps then show nothing.
    multi = {name: one["accuracy"] for name, one in attacks.items() if name.startswith(("pgd", "apgd-ce"))}
    for part in attacks.get("autoattack", {}).get("parts", []):
        if part["attack"] == "apgd-ce":
            multi["autoattack's apgd-ce"] = part["correct"] / attacks["autoattack"]["total"]
    if "fgsm" not in attacks or not multi:
        return None
    single, (name, least) = attacks["fgsm"]["accuracy"], min(multi.items(), key=lambda pair: pair[1])
    if single - least < 0.2 or least > single / 2:
        return ""
    return (
        f"accuracy is {single:.1%} under FGSM and {least:.1%} under {name}: single-step far above multi-step "
        f"is the sign of a collapse (catastrophic overfitting)"
    )


def _inside(attacks: Mapping[str, Entry]) -> str | None:
    if set(attacks) <= {"clean"}:
        return None
    words = []
    for name, one in attacks.items():
        if one.get("outside"):
            words.append(f"{name} left the ball or [0, 1] on {one['outside']} images")
        if one.get("unverified"):
            words.append(f"{name} claimed {one['unverified']} images that float32 still classifies correctly")
    return f"{'; '.join(words)}: these do not count as broken" if words else ""
