"""A named schedule as a chart: rate and eps over the epochs."""

from __future__ import annotations

from typing import Any

from elle.charts.lines import Chart, Series
from elle.core.schedules import SCHEDULES
from elle.errors import InputError, nearest

POINTS = 240


def schedule_values(name: str) -> dict[str, Any]:
    """The schedule's settings and its course: rate, and eps as a share of its value."""
    if name not in SCHEDULES:
        raise InputError(f"no schedule {name!r}{nearest(name, SCHEDULES)}; there are {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[name]
    fractions = [k / POINTS for k in range(POINTS + 1)]
    return {
        "name": name,
        "epochs": schedule.epochs,
        "lr": schedule.lr,
        "batch": schedule.batch,
        "epoch": [schedule.epochs * at for at in fractions],
        "rate": [schedule.lr * schedule.rate(at) for at in fractions],
        "eps": [schedule.eps(at) for at in fractions],
    }


def schedule_chart(name: str) -> Chart:
    """Both as shares of their highest value, so that one axis serves them."""
    values = schedule_values(name)
    title = f"{name}: {values['epochs']} epochs, batches of {values['batch']}, rate up to {values['lr']:g}"
    rates = [rate / values["lr"] for rate in values["rate"]]
    series = [Series("rate", values["epoch"], rates), Series("eps", values["epoch"], values["eps"])]
    return Chart(title, "epoch", "share of the highest value", series, percent=True)
