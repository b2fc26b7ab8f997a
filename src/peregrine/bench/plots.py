"""Plots as inline SVG: no library, no script, colours by CSS classes so that a page's dark mode reaches them.

Series differ in shape as well as in colour: lines by dash and marker, bars by what is written on them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 14, 50
NUM_COLOURS = 6
BEST = " \N{BLACK STAR}"
DASHES = ("", "7 4", "2 4", "9 3 2 3", "1 3", "12 4")


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
    """A step of a waterfall: how long it takes, drawn where the one before it ended."""

    label: str
    value: float
    colour: int


def lines(series: Sequence[Series], places: Sequence[str], x_label: str, y_label: str, top: float = 0) -> str:
    """One line per series over named places; `top` is the least upper end of the vertical axis."""
    most = max([top, *(value for each in series for value in each.values if value is not None)])
    scale = Scale(most, TOP, HEIGHT - BOTTOM)
    parts = [vertical_axis(scale, y_label), *place_names(places, x_label)]
    for index, each in enumerate(series):
        points = [
            (place_x(i, len(places)), scale.y(value), value) for i, value in enumerate(each.values) if value is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        colour = index % NUM_COLOURS
        parts.append(f'<polyline class="line s{colour}" stroke-dasharray="{DASHES[colour]}" points="{path}"/>')
        parts += [marker(colour, x, y, f"{each.label}: {short(value)}") for x, y, value in points]
    return frame(HEIGHT, parts, f"{y_label} by {x_label}") + legend([each.label for each in series])


def ranges(series: Sequence[Series], places: Sequence[str], x_label: str, y_label: str) -> str:
    """Percentiles: at each place the series' values on one upright, lowest to highest."""
    most = max((value for each in series for value in each.values if value is not None), default=0.0)
    scale = Scale(most, TOP, HEIGHT - BOTTOM)
    parts = [vertical_axis(scale, y_label), *place_names(places, x_label)]
    for i, values in enumerate(zip(*(each.values for each in series), strict=True)):
        seen = [value for value in values if value is not None]
        if not seen:
            continue
        x, low, high = place_x(i, len(places)), scale.y(min(seen)), scale.y(max(seen))
        parts.append(f'<path class="upright" d="M{x:.1f},{low:.1f}V{high:.1f}"/>')
        for colour, (each, value) in enumerate(zip(series, values, strict=True)):
            if value is not None:
                parts.append(marker(colour, x, scale.y(value), f"{each.label}: {short(value)}"))
    return frame(HEIGHT, parts, y_label)


def bars(entries: Sequence[Bar], unit: str) -> str:
    """Horizontal bars with whiskers, the best one marked."""
    step, left, room = 32, 112, 300  # what is written behind the longest bar needs the rest
    height = TOP + step * len(entries) + 10
    most = max(entry.high for entry in entries)
    parts = []
    for index, entry in enumerate(entries):
        y = TOP + step * index
        middle = y + step / 2 - 3
        width, low, high = (room * value / most for value in (entry.value, entry.low, entry.high))
        parts += [
            f'<text class="name" x="{left - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(entry.label)}</text>',
            f'<rect class="bar{" best" if entry.best else ""}" x="{left}" y="{y + 2}" width="{width:.1f}" '
            f'height="{step - 10}" rx="3"><title>{escape(entry.label)}: {short(entry.value)} {unit}</title></rect>',
            f'<path class="whisker" d="M{left + low:.1f},{middle:.1f}H{left + high:.1f}'
            f"M{left + low:.1f},{middle - 4:.1f}v8M{left + high:.1f},{middle - 4:.1f}v8" + '"/>',
            f'<text class="value" x="{left + max(width, high) + 9:.1f}" y="{middle + 4:.1f}">'
            f"{short(entry.value)} {unit}{escape(entry.note)}{BEST if entry.best else ''}</text>",
        ]
    return frame(height, parts, f"{unit} by shape")


def waterfall(spans: Sequence[Span], most: float, unit: str) -> str:
    """Steps one below the other, each beginning where the last ended; `most` is the axis' end."""
    step, left = 30, 178
    height = TOP + step * len(spans) + 6
    room = WIDTH - left - 92
    parts, begun = [], 0.0
    for index, span in enumerate(spans):
        y, x = TOP + step * index, left + room * begun / most
        width = max(1.5, room * span.value / most)
        parts += [
            f'<text class="name" x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(span.label)}</text>',
            f'<rect class="fill f{span.colour}" x="{x:.1f}" y="{y + 1}" width="{width:.1f}" height="{step - 8}" rx="2">'
            f"<title>{escape(span.label)}: {short(span.value)} {unit}</title></rect>",
            f'<text class="value" x="{x + width + 7:.1f}" y="{y + 15}">{short(span.value)} {unit}</text>',
        ]
        begun += max(0.0, span.value)
    return frame(height, parts, "where a round's time goes")


@dataclass(frozen=True, slots=True)
class Scale:
    """From 0 to a round number at or above `most`, drawn from `low` up to `high` (pixels grow downward)."""

    most: float
    high: float
    low: float

    @property
    def ticks(self) -> list[float]:
        rough = (self.most or 1.0) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
        return [step * i for i in range(math.ceil((self.most or 1.0) / step - 1e-9) + 1)]

    def y(self, value: float) -> float:
        return self.low - (self.low - self.high) * value / self.ticks[-1]


def vertical_axis(scale: Scale, label: str) -> str:
    """Grid lines with their values, and what they measure."""
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale.y(tick):.1f}" y2="{scale.y(tick):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{scale.y(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        for tick in scale.ticks
    ]
    middle = (scale.low + scale.high) / 2
    turned = f'<text class="axis" transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
    return "".join(parts) + f"{turned}{escape(label)}</text>"


def place_names(places: Sequence[str], label: str) -> list[str]:
    """The names under a plot, and what they are."""
    written = [
        f'<text class="tick" x="{place_x(i, len(places)):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">'
        f"{escape(name)}</text>"
        for i, name in enumerate(places)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*written, f'<text class="axis" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{escape(label)}</text>']


def place_x(index: int, count: int) -> float:
    """The middle of a place."""
    return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / max(1, count)


def marker(colour: int, x: float, y: float, title: str) -> str:
    """A point; its shape belongs to its colour."""
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"',
        f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"',
        f'<path d="M{x:.1f},{y - 6:.1f}l5.5,9.5h-11z"',
        f'<path d="M{x:.1f},{y - 6:.1f}l6,6l-6,6l-6,-6z"',
        f'<path d="M{x:.1f},{y + 6:.1f}l5.5,-9.5h-11z"',
        f'<path d="M{x - 5:.1f},{y - 2:.1f}h10v4h-10z"',
    )
    return f'{shapes[colour]} class="fill f{colour}"><title>{escape(title)}</title></{shapes[colour][1:].split()[0]}>'


def legend(labels: Sequence[str]) -> str:
    """Which line is which, below a plot; nothing for a single one."""
    if len(labels) < 2:
        return ""
    entries = "".join(
        f'<span><svg viewBox="0 0 34 14" width="34" height="14" aria-hidden="true">'
        f'<path class="line s{i % NUM_COLOURS}" stroke-dasharray="{DASHES[i % NUM_COLOURS]}" d="M1,7H33"/>'
        f"{marker(i % NUM_COLOURS, 17, 7, label)}</svg>{escape(label)}</span>"
        for i, label in enumerate(labels)
    )
    return f'<p class="legend">{entries}</p>'


def frame(height: float, parts: Sequence[str], title: str) -> str:
    """The picture around its parts."""
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def short(value: float) -> str:
    """A number as one would say it."""
    size = abs(value)
    digits = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2
    return f"{value:,.{digits}f}"
