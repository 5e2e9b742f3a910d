"""What every figure is made of: colours, measures, text, and the `<svg>` around it; the standard library only."""

import html
import re
from collections.abc import Iterable

# (light, dark) pairs after Okabe and Ito, told apart by colour-blind readers; at least 3:1 against the page.
COLOURS = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff8c42"),
    ("#00805c", "#35c99a"),
    ("#a8508a", "#e79bc6"),
    ("#8f6b00", "#e8c33a"),
    ("#5a5fb8", "#a7aaf5"),
    ("#555555", "#bdbdbd"),
    ("#9b2226", "#f28b82"),
)
INKS = {"ink": "#1f2328", "soft": "#59636e", "grid": "#d8dee4", "axis": "#818b98", "mark": "#cf222e"}

WIDTH = 440.0
ROW = 18.0  # the height of a line of text
GLYPH = 8.6  # a generous width for one character at the size used on phones (15 units)


def escape(text: str) -> str:
    """Text for HTML and XML alike: markup is escaped, what neither may contain is replaced."""
    return html.escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]", "\ufffd", text))


def text_at(x: float, y: float, text: str, anchor: str = "start", kind: str = "ink") -> str:
    """A line of text in one of the inks."""
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {where} fill="{INKS[kind]}">{escape(text)}</text>'


def rule(kind: str, path: str, extra: str = "") -> str:
    """A line in one of the inks."""
    return f'<path class="{kind}" stroke="{INKS[kind]}" d="{path}"{extra}/>'


def short(value: float) -> str:
    """A number of three digits or more, zeros at its end too: 1.40 beside 1.43."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def picture(title: str, described: str, height: float, body: Iterable[str]) -> str:
    """An `<svg>` of the common width, with words for those who do not see it."""
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" class="chart" role="img"'
    return "\n".join(
        [
            f'<svg {head} aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12.5">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(described)}</desc>",
            *body,
            "</svg>",
        ]
    )
