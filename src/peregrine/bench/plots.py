"""Plots of a report as inline SVG, drawn by matplotlib (the extra `bench`).

Colours are those of the page's light theme; in the finished SVG they become the page's CSS variables, so that its dark
mode changes the plots, too. Series differ in dash and marker as well as in colour.
"""

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLOURS = ("#ad4a14", "#2f5fb3", "#0b6e4f", "#8a3fa0", "#a07b00", "#4d5a68")
INK, SOFT, RULE = "#22252a", "#666a71", "#e3ddd3"
VARIABLES = {colour: f"var(--c{i})" for i, colour in enumerate(COLOURS)}
VARIABLES |= {INK: "var(--ink)", SOFT: "var(--soft)", RULE: "var(--line)"}
STYLES = tuple(zip(COLOURS, ("-", "--", ":", "-.", (0, (1, 3)), (0, (9, 3))), "os^Dv_", strict=True))
WIDTH, HEIGHT, ROW_HEIGHT = 6.4, 3.0, 0.32  # inches
BEST = " \N{BLACK STAR}"
Series = Mapping[str, Sequence[float | None]]  # by name, one value per place of the horizontal axis
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
class Bar:
    """A horizontal bar, with the ends of its whisker."""

    label: str
    value: float
    low: float
    high: float
    note: str
    best: bool


def lines(series: Series, places: Sequence[str], x_label: str, y_label: str, top: float = 0) -> str:
    """One line per series over named places; the vertical axis reaches at least to `top`."""
    with matplotlib.rc_context(SETTINGS):
        figure, axes = place_axes(series, places, x_label, y_label, top)
        draw_points(axes, series)
        if len(series) > 1:
            axes.legend()
        return to_svg(figure, f"{y_label} by {x_label}")


def ranges(series: Series, places: Sequence[str], x_label: str, y_label: str) -> str:
    """Percentiles: at each place a vertical line from the lowest of the series' values to the highest."""
    with matplotlib.rc_context(SETTINGS):
        figure, axes = place_axes(series, places, x_label, y_label)
        for place, values in enumerate(zip(*series.values(), strict=True)):
            seen = [value for value in values if value is not None]
            axes.vlines([place] if seen else [], min(seen, default=0), max(seen, default=0), color=SOFT)
        draw_points(axes, series, joined=False)
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


def waterfall(steps: Mapping[str, float], most: float, unit: str) -> str:
    """Steps below each other, each beginning where the last ended; `most` is the longest sum that is compared."""
    with matplotlib.rc_context(SETTINGS):
        figure, axes = row_axes(list(steps))
        end = 0.0
        for row, (value, colour) in enumerate(zip(steps.values(), itertools.cycle(COLOURS), strict=False)):
            axes.barh(row, value, 0.7, left=end, color=colour)
            end += value
            label_row(axes, end, row, f"{short(value)} {unit}")
        axes.set_xlim(0, 1.25 * most)
        return to_svg(figure, "where a round's time goes")


def place_axes(series: Series, places: Sequence[str], x_label: str, y_label: str, top: float = 0) -> tuple[Figure, Any]:
    """Axes from 0 with a name for each place."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes: Any = figure.add_subplot()
    most = max([top, *(value for values in series.values() for value in values if value is not None)]) or 1.0
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


def draw_points(axes: Any, series: Series, joined: bool = True) -> None:
    """Draw the values there are, each beside its point, and a line through those of a series."""
    for (label, values), (colour, dash, marker) in zip(series.items(), itertools.cycle(STYLES), strict=False):
        points = [(place, value) for place, value in enumerate(values) if value is not None]
        style = {"color": colour, "marker": marker, "linestyle": dash if joined else ""}
        axes.plot([place for place, _ in points], [value for _, value in points], label=label, **style)
        for point in points:
            axes.annotate(short(point[1]), point, xytext=(6, 4), textcoords="offset points", color=colour, size=8)


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
