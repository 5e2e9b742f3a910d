"""Figures of every kind, drawn and written to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elle.charts.bars import Bars, draw_bars
from elle.charts.heatmap import Heatmap, draw_heatmap
from elle.charts.lines import Chart, draw
from elle.charts.stacked_bars import StackedBars, draw_stacked_bars
from elle.errors import InputError

Figure = Chart | Heatmap | Bars | StackedBars


def draw_figure(figure: Figure, names: Sequence[str]) -> str:
    """The figure as an `<svg>`; `names` fixes which name has which colour."""
    if isinstance(figure, Chart):
        return draw(figure, names)
    if isinstance(figure, Bars):
        return draw_bars(figure, names)
    return draw_stacked_bars(figure) if isinstance(figure, StackedBars) else draw_heatmap(figure)


def series_names(figures: Sequence[object]) -> list[str]:
    """The names that a colour stands for, in the order of their first figure."""
    names: list[str] = []
    for figure in figures:
        if isinstance(figure, Chart):
            names += [series.name for series in figure.series]
        elif isinstance(figure, Bars):
            names += [bar.name for bar in figure.bars]
    return list(dict.fromkeys(names))


def write_figures(folder: Path, figures: Sequence[Figure]) -> list[Path]:
    """Each figure as an SVG file, and as PNG and PDF where cairosvg is installed (pip install 'elle-at[png]')."""
    try:
        import cairosvg
    except ImportError:
        cairosvg = None
    names = series_names(figures)
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = [path for path in folder.glob("[0-9][0-9]-*") if path.suffix in (".svg", ".png", ".pdf")]
        for number, figure in enumerate(figures, 1):
            words = "".join(c if c.isalnum() else "-" for c in figure.title.lower()).strip("-")
            path = folder / f"{number:02d}-{words[:60]}.svg"
            svg = draw_figure(figure, names)
            # A PDF carries the time it was made: what is drawn already is left as it is.
            drawn = path.exists() and path.read_text(encoding="utf-8") == svg
            path.write_text(svg, encoding="utf-8")
            written.append(path)
            if cairosvg is None:
                continue
            png, pdf = path.with_suffix(".png"), path.with_suffix(".pdf")
            if not (drawn and png.exists()):
                cairosvg.svg2png(svg.encode(), write_to=str(png), scale=2, background_color="white")
            if not (drawn and pdf.exists()):
                cairosvg.svg2pdf(svg.encode(), write_to=str(pdf))
            written += [png, pdf]
        for path in before:
            if path.with_suffix(".svg") not in written:
                path.unlink()  # of an earlier report, whose numbers would stand among these
    except OSError as problem:
        raise InputError(f"cannot write figures into {folder}: {problem.strerror}") from None
    return written
