"""Line charts as inline SVG, with the standard library only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elle.charts.axis import Axis, linear_axis, log_axis
from elle.charts.svg import COLOURS, GLYPH, ROW, WIDTH, escape, picture, rule, text_at

DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "4 2")
MARKERS = (
    "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0z",  # disc
    "M-3.1-3.1h6.2v6.2h-6.2z",  # square
    "M0-4.1L3.9 2.9H-3.9z",  # triangle
    "M0-4.4L4.4 0L0 4.4L-4.4 0z",  # diamond
    "M0 4.1L3.9-2.9H-3.9z",  # triangle, point down
    "M-1.3-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z",  # plus
    "M-2-4.2H2L4.2 0L2 4.2H-2L-4.2 0z",  # hexagon
)

PLOT_HEIGHT = 225.0
MAX_NAME, MAX_NAMES = 14, 7  # names up to this length and number are written beside their lines
MAX_POINTS = 1200  # a longer line is thinned: no screen shows more
HUGE, TINY = 1e140, 1e-140  # beyond these a value is off the scale, or zero: differences and ratios stay finite


@dataclass(frozen=True)
class Series:
    """One named line; a y of None or NaN is a gap; around it a band of +- `spread`, where that is given."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    spread: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.spread) not in (0, len(self.y)):
            counts = f"{len(self.x)} x values, {len(self.y)} y values, {len(self.spread)} spreads"
            raise ValueError(f"series {self.name!r}: {counts}")


@dataclass(frozen=True)
class Chart:
    """A chart of lines; with `percent` the y values are fractions, with `log` the y axis is logarithmic.

    With `log_x` the x axis is, too, and every x is positive.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log: bool = False
    percent: bool = False
    note: str = ""
    marks: Sequence[tuple[float, str]] = ()
    log_x: bool = False


Point = tuple[float, float]
Edge = tuple[float, float, float]  # x, and a band's lower and upper end there
Runs = list[list[Point]]  # the stretches of a line between its gaps
Labels = dict[str, tuple[int, Runs]]  # what the legend says -> the style and the line it speaks of


@dataclass(frozen=True)
class Plot:
    """The rectangle the lines are drawn in, and how values are placed there."""

    x_axis: Axis
    y_axis: Axis
    left: float
    right: float
    top: float

    @property
    def bottom(self) -> float:
        return self.top + PLOT_HEIGHT

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * self.x_axis.place(value)

    def y(self, value: float) -> float:
        return self.bottom - PLOT_HEIGHT * self.y_axis.place(value)


def draw(chart: Chart, names: Sequence[str] = ()) -> str:
    """The chart as an `<svg>`; `names` fixes which name has which colour, in the order of a whole page."""
    order = list(dict.fromkeys([*names, *(series.name for series in chart.series)]))
    lines = [(order.index(series.name), series.name, _runs(series, chart.log)) for series in chart.series]
    marks = [(x, label) for at, label in chart.marks if (x := _number(at)) is not None]
    bands = [
        (order.index(series.name), edges)
        for series in chart.series
        if series.spread and not chart.log
        for edges in _edges(series, chart.percent)
    ]
    labels: Labels = {}
    for index, name, runs in lines:
        labels.setdefault(name if runs else f"{name} (none)", (index, runs))
    longest = max(map(len, labels), default=0)
    direct = longest <= MAX_NAME and len(labels) <= MAX_NAMES

    points = [point for _, _, runs in lines for run in runs for point in run]
    x_axis, y_axis = _axes(chart, points, [edge for _, edges in bands for edge in edges], [x for x, _ in marks])
    left = max(map(len, y_axis.labels)) * GLYPH + 12
    right = WIDTH - (longest * GLYPH + 26 if direct and labels else 24)
    y_label = _axis_label(chart.y_label, y_axis)
    placed, rows = _place_marks(marks, Plot(x_axis, y_axis, left, right, 0.0), len(y_label) * GLYPH)
    plot = Plot(x_axis, y_axis, left, right, rows * ROW + 12)

    legend, height = (_direct_legend if direct else _row_legend)(labels, plot)
    body = [text_at(0, plot.top - 16, y_label, kind="soft"), *_frame(plot), *_marks(placed, plot)]
    body.append(text_at((left + right) / 2, plot.bottom + 38, _axis_label(chart.x_label, x_axis), "middle", "soft"))
    body += [_band(index, [(plot.x(x), plot.y(low), plot.y(high)) for x, low, high in edges]) for index, edges in bands]
    body += [_line(index, [(plot.x(x), plot.y(y)) for x, y in _thin(r)]) for index, _, rs in lines for r in rs]
    body += [dot for index, name, runs in lines for dot in _dots(chart, plot, index, name, runs)]
    body += legend
    if not points:
        body.append(text_at((left + right) / 2, plot.bottom - PLOT_HEIGHT / 2, "no values", "middle", "soft"))
    described = "; ".join(_summary(chart, name, runs) for _, name, runs in lines)
    return picture(chart.title, described, height, filter(None, body))


def _axes(chart: Chart, points: Sequence[Point], edges: Sequence[Edge], marks: Sequence[float]) -> tuple[Axis, Axis]:
    """Both axes, with room for lines, bands and marks."""
    xs = [*(x for x, _ in points), *marks]
    ys = [*(y for _, y in points), *(y for _, low, high in edges for y in (low, high))]
    y_axis = log_axis(ys, chart.percent) if chart.log else linear_axis(ys, percent=chart.percent)
    x_axis = log_axis(xs) if chart.log_x else linear_axis(xs, tight=True, whole=all(x.is_integer() for x in xs))
    return x_axis, y_axis


def _number(value: float | None) -> float | None:
    """A float that can be drawn, or None."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return None
    if not abs(number) <= HUGE:
        return None
    return 0.0 if abs(number) < TINY else number


def _runs(series: Series, log: bool) -> Runs:
    """The points that can be drawn, cut at the gaps."""
    runs: Runs = [[]]
    for raw_x, raw_y in zip(series.x, series.y, strict=True):
        x, y = _number(raw_x), _number(raw_y)
        if x is None or y is None or (log and y <= 0):
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def _edges(series: Series, percent: bool) -> list[list[Edge]]:
    """The band around a line, cut where either is not known.

    There is no accuracy above 1, and nothing below 0 where the line is not: no weight, error or loss.
    """
    runs: list[list[Edge]] = [[]]
    least = 0.0 if all(y is None or not y < 0 for y in series.y) else -math.inf
    for raw_x, raw_y, raw_spread in zip(series.x, series.y, series.spread, strict=True):
        x, y, spread = _number(raw_x), _number(raw_y), _number(raw_spread)
        if x is None or y is None or spread is None:
            runs.append([])
        else:
            low, high = max(y - spread, least), y + spread
            runs[-1].append((x, low, min(high, 1.0) if percent else high))
    return runs


def _band(index: int, edges: Sequence[Edge]) -> str:
    """A shade between the edges of a band."""
    if len(edges) < 2:
        return ""
    outline = [(x, high) for x, _, high in edges] + [(x, low) for x, low, _ in reversed(edges)]
    colour = index % len(COLOURS)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
    return f'<polygon class="band c{colour}" fill="{COLOURS[colour][0]}" fill-opacity="0.16" points="{path}"/>'


def _thin(points: list[Point]) -> list[Point]:
    """A long line with fewer points: of each stretch its first, lowest, highest and last."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(4 * len(points) / MAX_POINTS)
    kept: list[int] = []
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        low = min(stretch, key=lambda i: points[i][1])
        high = max(stretch, key=lambda i: points[i][1])
        kept += sorted({stretch[0], low, high, stretch[-1]})
    return [points[i] for i in kept]


def _value(chart: Chart, value: float) -> str:
    return f"{100 * value:.1f}%" if chart.percent else f"{value:.3g}"


def _summary(chart: Chart, name: str, runs: Runs) -> str:
    if not runs:
        return f"{name}: no values"
    values = [y for run in runs for _, y in run]
    low, high, last = (_value(chart, value) for value in (min(values), max(values), values[-1]))
    return f"{name}: lowest {low}, highest {high}, last {last}"


def _fit(text: str, width: float) -> str:
    room = max(1, int(width / GLYPH))
    return text if len(text) <= room else text[: room - 1].rstrip() + "\u2026"


def _line(index: int, points: Sequence[Point]) -> str:
    """One unbroken stretch; a lone point is left to its marker."""
    colour, dash = index % len(COLOURS), DASHES[(index + index // len(COLOURS)) % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'stroke="{COLOURS[colour][0]}" stroke-width="2" stroke-linejoin="round"{dashes}'
    return f'<polyline class="line c{colour}" fill="none" {style} points="{path}"/>' if len(points) > 1 else ""


def _dot(index: int, x: float, y: float, title: str = "") -> str:
    colour, shape = index % len(COLOURS), MARKERS[index % len(MARKERS)]
    where = f'transform="translate({x:.1f} {y:.1f})" d="{shape}"'
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<path class="dot c{colour}" fill="{COLOURS[colour][0]}" {where}>{inner}</path>'


def _dots(chart: Chart, plot: Plot, index: int, name: str, runs: Runs) -> list[str]:
    """Markers on some ten points, the last and the lone ones; pointed at, they tell their values."""
    points = [point for run in runs for point in run]
    stride = max(1, math.ceil(len(points) / 10))
    chosen = {*points[(index * stride // 3) % stride :: stride], *points[-1:]}
    chosen |= {run[0] for run in runs if len(run) == 1}
    return [
        _dot(index, plot.x(x), plot.y(y), f"{name}, {chart.x_label} {x:g}: {_value(chart, y)}")
        for x, y in dict.fromkeys(point for point in points if point in chosen)
    ]


def _axis_label(label: str, axis: Axis) -> str:
    return _fit(axis.titled(label), WIDTH - 8)


def _frame(plot: Plot) -> list[str]:
    """Grid and ticks."""
    parts = []
    for tick, label in zip(plot.y_axis.ticks, plot.y_axis.labels, strict=True):
        parts.append(rule("grid", f"M{plot.left:.1f} {plot.y(tick):.1f}H{plot.right:.1f}"))
        parts.append(text_at(plot.left - 7, plot.y(tick) + 4.5, label, "end", "soft"))
    for tick, label in zip(plot.x_axis.ticks, plot.x_axis.labels, strict=True):
        parts.append(rule("axis", f"M{plot.x(tick):.1f} {plot.bottom:.1f}v5"))
        parts.append(text_at(plot.x(tick), plot.bottom + 19, label, "middle", "soft"))
    parts.append(rule("axis", f"M{plot.left:.1f} {plot.bottom:.1f}H{plot.right:.1f}"))
    return parts


Mark = tuple[float, float, int, str]  # x, the label's centre, its row counted from below, its text


def _place_marks(marks: Sequence[tuple[float, str]], plot: Plot, taken: float) -> tuple[list[Mark], int]:
    """Marks in rows such that no labels overlap, nor the y axis's, `taken` wide; and the number of rows."""
    ends = [taken + GLYPH]
    placed = []
    for at, text in sorted(marks):
        label = _fit(text, WIDTH - 16)
        half = len(label) * GLYPH / 2
        centre = min(max(plot.x(at), half + 4), WIDTH - half - 4)
        row = next((i for i, end in enumerate(ends) if end <= centre - half), len(ends))
        ends[row : row + 1] = [centre + half + GLYPH]
        placed.append((plot.x(at), centre, row, label))
    return placed, len(ends)


def _marks(placed: Sequence[Mark], plot: Plot) -> list[str]:
    """The rules first: a label hides the rule behind it."""
    rules, texts = [], []
    for x, centre, row, label in placed:
        y = plot.top - 16 - row * ROW
        rules.append(rule("mark", f"M{x:.1f} {y + 5:.1f}V{plot.bottom:.1f}", ' stroke-dasharray="3 3"'))
        texts.append(text_at(centre, y, label, "middle", "mark"))
    return rules + texts


def _direct_legend(labels: Labels, plot: Plot) -> tuple[list[str], float]:
    """Each name beside the end of its line, moved apart where they would overlap; and the chart's height."""
    ends = {name: runs[-1][-1] for name, (_, runs) in labels.items() if runs}
    wanted = sorted((plot.y(ends[name][1]) if name in ends else plot.bottom, name) for name in labels)
    places: list[float] = []
    for y, _ in wanted:
        places.append(max(y, places[-1] + ROW) if places else y)
    limit = plot.bottom
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - ROW
    parts = []
    for (_, name), y in zip(wanted, places, strict=True):
        index = labels[name][0]
        if name in ends:
            start = plot.x(ends[name][0]), plot.y(ends[name][1])
            if math.dist(start, (plot.right, y)) > 2:
                parts.append(_leader(index, start, (plot.right + 9, y), over_the_plot=start[0] < plot.right - 2))
            parts.append(_dot(index, plot.right + 14, y))
        parts.append(text_at(plot.right + 24, y + 4.5, name))
    return parts, plot.bottom + 2 * ROW + 8


def _leader(index: int, start: Point, end: Point, over_the_plot: bool) -> str:
    """From the end of a line to its name; over the plot in dots, or it would pass for more of the line."""
    colour = index % len(COLOURS)
    path = f"M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"
    dots = ' stroke-dasharray="1 5"' if over_the_plot else ""
    style = f'stroke="{COLOURS[colour][0]}" stroke-opacity="0.5"{dots}'
    return f'<path class="leader c{colour}" fill="none" {style} d="{path}"/>'


def _row_legend(labels: Labels, plot: Plot) -> tuple[list[str], float]:
    """Samples of the lines with their names in rows below the chart; and the chart's height."""
    x, y = 8.0, plot.bottom + 3 * ROW + 8
    parts = []
    for name, (index, _) in labels.items():
        label = _fit(name, WIDTH - 64)
        width = 42 + len(label) * GLYPH
        if x > 8 and x + width > WIDTH:
            x, y = 8.0, y + ROW + 3
        parts.append(_line(index, [(x, y - 4.5), (x + 28, y - 4.5)]))
        parts += [_dot(index, x + 14, y - 4.5), text_at(x + 34, y, label)]
        x += width + 10
    return parts, y + 10
