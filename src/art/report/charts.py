"""The drawings of a report as SVG, with the page's own colours and fonts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from art.report.estimates import Estimate
from art.report.parts import Curve

_WIDTH, _HEIGHT = 440, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 12, 34
WINDOW = 5
"""Number of steps in a running mean."""


def draw_curve(curve: Curve) -> str:
    """Draw a measure by training step as SVG: its points and their running mean. Without points the text is empty."""
    points = [(step, value) for step, value in curve.points if math.isfinite(value)]
    if not points:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = curve.bounds or _rounded(min(values), max(values))
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in ticks(low, high):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(first, last, whole=True):
        parts.append(f'<text x="{x(tick):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 2}" text-anchor="end">training step</text>')
    parts += [f'<circle class="point" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3"/>' for s, v in points]
    line = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in zip(steps, running_mean(values), strict=True))
    parts.append(f'<polyline class="line" points="{line}"/>')
    return _svg(_WIDTH, _HEIGHT, curve.title, parts)


def draw_intervals(before: Estimate, after: Estimate) -> str:
    """Draw two means on an axis from 0 to 1, each with its interval."""
    width, height, left, right = 440, 96, 60, 16

    def x(value: float) -> float:
        return left + min(max(value, 0.0), 1.0) * (width - left - right)

    parts = []
    for tick in ticks(0.0, 1.0):
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="8" y2="70"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="88" text-anchor="middle">{tick:g}</text>')
    for name, value, y in (("before", before, 24), ("after", after, 54)):
        parts.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{name}</text>')
        if math.isfinite(value.low):
            ends = f'x1="{x(value.low):.1f}" x2="{x(value.high):.1f}"'
            parts.append(f'<line class="interval {name}" {ends} y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="{name}" cx="{x(value.mean):.1f}" cy="{y}" r="7"/>')
    return _svg(width, height, f"before {before.text()}, after {after.text()}", parts)


def draw_pair(before: float, after: float) -> str:
    """Draw the change of one scenario's score on a track from 0 to 1."""
    width, height, margin = 160, 18, 8

    def x(value: float) -> float:
        return margin + min(max(value, 0.0), 1.0) * (width - 2 * margin)

    middle, kind = height / 2, "after" if after >= before else "worse"
    start, end = f"{x(before):.1f}", f"{x(after):.1f}"
    parts = [
        f'<line class="grid" x1="{margin}" x2="{width - margin}" y1="{middle}" y2="{middle}"/>',
        f'<line class="interval {kind}" x1="{start}" x2="{end}" y1="{middle}" y2="{middle}"/>',
        f'<circle class="before" cx="{start}" cy="{middle}" r="5"/>',
        f'<circle class="{kind}" cx="{end}" cy="{middle}" r="5"/>',
    ]
    return _svg(width, height, f"from {before:.2f} to {after:.2f}", parts)


def running_mean(values: Sequence[float]) -> list[float]:
    """Return for each value the mean of the last `WINDOW` values up to it, or of fewer at the start."""
    windows = [values[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Choose up to six round numbers from `low` to `high`: ticks(0, 1) is [0, 0.2, 0.4, 0.6, 0.8, 1]."""
    step = _tick_step(low, high)
    if whole:
        step = max(1, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _tick_step(low: float, high: float) -> float:
    span = (high - low) / 5
    power: float = 10 ** math.floor(math.log10(span))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= span * (1 - 1e-9))


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis for values from `low` to `high`: the closest ticks outside them."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    step = _tick_step(low, high)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join(parts)}</svg>"
    )
