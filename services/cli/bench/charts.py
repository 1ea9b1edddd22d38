"""What does a comparison look like? Bars in SVG, one panel for each measure."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, Final

from baton.cli.bench.load_specs import Level
from baton.cli.bench.measures import Measure

COLOURS: Final = ("#0b6e4f", "#c84630", "#e3a72f", "#4a6fa5", "#7d5ba6", "#5d5d5d")
PANEL_WIDTH: Final = 440
"""Of few bars; of many as much as they take."""
PANEL_HEIGHT: Final = 230
COLUMNS: Final = 2
BAR_MIN: Final = 30
BAR_MAX: Final = 46
BARS_SHARE: Final = 0.86
"""Of a group's width."""
MARGIN: Final = 16
LEGEND_LINE: Final = 20
PLOT_TOP: Final = 34
PLOT_BOTTOM: Final = 34


def chart(names: Sequence[str], measures: Sequence[Measure], levels: Sequence[dict[str, Any]]) -> str:
    """`levels` as `verdicts.judged` tells them."""
    top = MARGIN + LEGEND_LINE * len(names)
    panel = max(PANEL_WIDTH, MARGIN + math.ceil(BAR_MIN / BARS_SHARE * len(names)) * len(levels))
    columns = COLUMNS if panel == PANEL_WIDTH else 1
    lines = -(-len(measures) // columns)
    width, height = MARGIN + columns * panel, top + lines * PANEL_HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12"',
        f' width="{width}" height="{height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, name in enumerate(names):
        y = MARGIN + LEGEND_LINE * index
        parts.append(f'<rect x="{MARGIN}" y="{y}" width="12" height="12" fill="{_colour(index)}"/>')
        parts.append(f'<text x="{MARGIN + 18}" y="{y + 11}">{escape(name)}</text>')
    for index, measure in enumerate(measures):
        x = MARGIN + (index % columns) * panel
        y = top + (index // columns) * PANEL_HEIGHT
        parts += [f'<g transform="translate({x},{y})">', *_panel(measure, names, levels, panel), "</g>"]
    return "\n".join((*parts, "</svg>", ""))


def _panel(measure: Measure, names: Sequence[str], levels: Sequence[dict[str, Any]], width: int) -> list[str]:
    """A system that has no such figure has no bar."""
    values = [[measure.of(level["medians"][name]) for name in names] for level in levels]
    highest = max((value for each in values for value in each if value), default=1.0)
    better = "more is better" if measure.more_is_better else "less is better"
    floor = PANEL_HEIGHT - PLOT_BOTTOM
    parts = [f'<text x="0" y="18" font-weight="bold">{measure.title} ({measure.unit}; {better})</text>']
    group = (width - MARGIN) / len(levels)
    bar = min(BAR_MAX, group * BARS_SHARE / len(names))
    for place, level in enumerate(levels):
        start = place * group + (group - bar * len(names)) / 2
        for index, value in enumerate(values[place]):
            if value is None:
                continue
            tall = (floor - PLOT_TOP) * value / highest
            x, y = start + index * bar, floor - tall
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar - 2:.1f}" height="{tall:.1f}" '
                f'fill="{_colour(index)}"/>'
            )
            parts.append(
                f'<text x="{x + bar / 2 - 1:.1f}" y="{y - 3:.1f}" text-anchor="middle" font-size="10">'
                f"{_short(value)}</text>"
            )
        told = escape(Level(level["load"], level.get("concurrency")).told)
        parts.append(
            f'<text x="{place * group + group / 2:.1f}" y="{floor + 16}" text-anchor="middle" '
            f'font-size="10">{told}</text>'
        )
    parts.append(f'<line x1="0" y1="{floor}" x2="{width - MARGIN}" y2="{floor}" stroke="#888888"/>')
    return parts


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
