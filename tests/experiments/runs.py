"""Run directories made by hand: what `elle train` would have written, without the training."""

import json

from elle.config import load_config

STEPS = 10  # an epoch


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def run_directory(path, *words, epochs=6, fall=None, finished=True, events=(), weight=None):
    """A run whose monitor looks twice an epoch; from epoch `fall` on it has collapsed."""
    path.mkdir(parents=True)
    config = load_config(["data=digits", "track=clean,pgd-10", f"epochs={epochs}", *words]).resolved()
    (path / "config.toml").write_text(config.to_toml())

    def level(epoch):
        fell = fall is not None and epoch >= fall
        return {"multi": 0.01, "single": 0.9, "error": 0.1} if fell else {"multi": 0.4, "single": 0.5, "error": 1e-5}

    records = []
    for epoch in range(1, epochs + 1):
        seen = level(epoch)
        record = {"epoch": epoch, "step": epoch * STEPS, "loss": 1.0, "accuracy": seen["single"], "seconds": 1.0}
        records.append(record | {"error": None, "weight": weight, "clean": 0.7, "pgd-10": seen["multi"]})
    write_lines(path / "metrics.jsonl", records)
    probes = [{"step": k * STEPS // 2, "clean": 0.7, "chance": 0.1} | level(k / 2) for k in range(1, 2 * epochs + 1)]
    write_lines(path / "probes.jsonl", probes)
    steps = [{"epoch": k + 1, "step": k * STEPS + 1, "loss": [1.0] * STEPS, "accuracy": [0.5] * STEPS}
             for k in range(epochs)]  # fmt: skip
    if weight is not None:
        for line in steps:
            line |= {"error": [1e-5] * STEPS, "threshold": [None, *[2e-5] * (STEPS - 1)], "weight": [weight] * STEPS}
    write_lines(path / "steps.jsonl", steps)
    told = list(events)
    if fall is not None:
        since = fall * STEPS
        told.append(
            {"event": "collapse", "step": since + 5, "since": since, "evidence": "it fell", "confidence": "high"}
        )
    write_lines(path / "events.jsonl", told)
    if finished:
        (path / "result.json").write_text(json.dumps({"collapse_epoch": None, "steps": epochs * STEPS}))
    return path
