"""Plots of a report as inline SVG, drawn by matplotlib (the extra `bench`).

Colours are those of the page's light theme; in the finished SVG they become the page's CSS variables, so that its dark
mode changes the plots, too. Series differ in dash and marker as well as in colour.
"""

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLOURS = ("#0b6e4f", "#c2541b", "#2f5fb3", "#8a3fa0", "#a07b00", "#4d5a68")
INK, SOFT, RULE = "#16202c", "#5b6878", "#dde3ea"
VARIABLES = {colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)}
VARIABLES |= {INK: "var(--ink)", SOFT: "var(--soft)", RULE: "var(--rule)"}
STYLES = tuple(zip(COLOURS, ("-", "--", ":", "-.", (0, (1, 3)), (0, (9, 3))), "os^Dv_", strict=True))
WIDTH, HEIGHT, ROW_HEIGHT = 6.4, 3.0, 0.32  # inches
BEST = " \N{BLACK STAR}"
SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "peregrine",  # the same plot gives the same file
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans"],  # for measuring text; the page's own font is shown
    "font.size": 11,
    "axes.edgecolor": RULE,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": RULE,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}


@dataclass(frozen=True, slots=True)
class Series:
    """Values under one name, one per place of the horizontal axis; None where there is none."""

    label: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar, with the ends of its whisker."""

    label: str
    value: float
    low: float
    high: float
    note: str
    best: bool


@dataclass(frozen=True, slots=True)
class Span:
    """A step of a waterfall: how long it takes; it is drawn where the one before it ended."""

    label: str
    value: float
    colour: int


def lines(series: Sequence[Series], places: Sequence[str], x_label: str, y_label: str, top: float = 0) -> str:
    """One line per series over named places; the vertical axis reaches at least to `top`."""
    with matplotlib.rc_context(SETTINGS):
        figure, axes = place_axes(series, places, x_label, y_label, top)
        for each, (colour, dash, marker) in zip(series, itertools.cycle(STYLES), strict=False):
            draw_points(axes, each, color=colour, linestyle=dash, marker=marker)
        if len(series) > 1:
            axes.legend()
        return to_svg(figure, f"{y_label} by {x_label}")


def ranges(series: Sequence[Series], places: Sequence[str], x_label: str, y_label: str) -> str:
    """Percentiles: at each place a vertical line from the lowest of the series' values to the highest."""
    with matplotlib.rc_context(SETTINGS):
        figure, axes = place_axes(series, places, x_label, y_label)
        for place, values in enumerate(zip(*(each.values for each in series), strict=True)):
            seen = [value for value in values if value is not None]
            axes.vlines([place] if seen else [], min(seen, default=0), max(seen, default=0), color=SOFT)
        for each, (colour, _, marker) in zip(series, itertools.cycle(STYLES), strict=False):
            draw_points(axes, each, color=colour, linestyle="", marker=marker)
        axes.legend()
        return to_svg(figure, y_label)


def bars(entries: Sequence[Bar], unit: str) -> str:
    """Horizontal bars with whiskers, the best one marked."""
    with matplotlib.rc_context(SETTINGS):
        figure, axes = row_axes([entry.label for entry in entries])
        for row, entry in enumerate(entries):
            whisker = [[entry.value - entry.low], [entry.high - entry.value]]
            axes.barh(row, entry.value, 0.7, color=COLOURS[0 if entry.best else 5], alpha=1 if entry.best else 0.55)
            axes.errorbar(entry.value, row, xerr=whisker, color=INK, capsize=3)
            text = f"{short(entry.value)} {unit}{entry.note}{BEST if entry.best else ''}"
            label_row(axes, max(entry.value, entry.high), row, text)
        axes.set_xlim(0, 1.9 * max(entry.high for entry in entries))  # the text needs the rest
        return to_svg(figure, f"{unit} by shape")


def waterfall(spans: Sequence[Span], most: float, unit: str) -> str:
    """Steps below each other, each beginning where the last ended; `most` is the longest sum that is compared."""
    with matplotlib.rc_context(SETTINGS):
        figure, axes = row_axes([span.label for span in spans])
        end = 0.0
        for row, span in enumerate(spans):
            axes.barh(row, span.value, 0.7, left=end, color=COLOURS[span.colour % len(COLOURS)])
            end += max(0.0, span.value)
            label_row(axes, end, row, f"{short(span.value)} {unit}")
        axes.set_xlim(0, 1.25 * most)
        return to_svg(figure, "where a round's time goes")


def place_axes(
    series: Sequence[Series], places: Sequence[str], x_label: str, y_label: str, top: float = 0
) -> tuple[Figure, Any]:
    """Axes from 0 with a name for each place."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes: Any = figure.add_subplot()
    most = max([top, *(value for each in series for value in each.values if value is not None)]) or 1.0
    axes.set(xlabel=x_label, ylabel=y_label, xlim=(-0.5, len(places) - 0.5), ylim=(0, 1.1 * most))
    axes.set_xticks(range(len(places)), places)
    axes.grid(axis="y")
    return figure, axes


def row_axes(labels: Sequence[str]) -> tuple[Figure, Any]:
    """Axes with one named row per label, the first on top, without a scale."""
    figure = Figure(figsize=(WIDTH, 0.2 + ROW_HEIGHT * len(labels)), layout="constrained")
    axes: Any = figure.add_subplot(frameon=False)
    axes.set_yticks(range(len(labels)), labels, color=INK)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    return figure, axes


def draw_points(axes: Any, series: Series, color: str, **style: Any) -> None:
    """Draw the values there are, and write each one beside its point."""
    points = [(place, value) for place, value in enumerate(series.values) if value is not None]
    axes.plot([place for place, _ in points], [value for _, value in points], color=color, label=series.label, **style)
    for point in points:
        axes.annotate(short(point[1]), point, xytext=(6, 4), textcoords="offset points", color=color, size=8)


def label_row(axes: Any, x: float, row: int, text: str) -> None:
    """Write a row's value behind the end of its bar."""
    axes.annotate(text, (x, row), xytext=(7, 0), textcoords="offset points", verticalalignment="center")


def to_svg(figure: Figure, title: str) -> str:
    """The figure as an SVG element for an HTML page."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    _, _, svg = file.getvalue().partition("<svg ")
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return f'<svg class="plot" role="img" aria-label="{escape(title)}" {svg}'


def short(value: float) -> str:
    """A number with about three digits."""
    size = abs(value)
    digits = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2
    return f"{value:,.{digits}f}"
