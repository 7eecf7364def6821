"""The roofline: what each operation reaches of what the chip could do, on log-log axes, as SVG."""

import math
from dataclasses import replace
from html import escape

from shardtorch.aot._quantities import bytes_text, rate_text, seconds_text, share_text
from shardtorch.aot._report import CompileReport, Operation, StepTime

_WIDTH, _HEIGHT = 760, 430
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 34, 18, 50
_NUM_LABELS = 6
_NEAR = 12  # px between dots that share a number


class _LogScale:
    """From a positive quantity to a place in the picture, whole decades on both ends."""

    def __init__(self, lowest: float, highest: float, start: float, end: float) -> None:
        self.first = math.floor(math.log10(lowest))
        self.last = max(math.ceil(math.log10(highest)), self.first + 1)
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.first) / (self.last - self.first)
        return self._start + share * (self._end - self._start)

    @property
    def decades(self) -> list[float]:
        return [10.0**exponent for exponent in range(self.first, self.last + 1)]


def render_roofline(report: CompileReport) -> str:
    """The roofs of a chip, and a dot for each operation with matrix products, as large as its time. Empty if none has.

    Its place is operational intensity (FLOP per byte of HBM) and the FLOP/s that the prediction amounts to, as in
    Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009). Times are those before
    the fitted factor: it stands for what a run does otherwise than the program, and could lift a dot above the roof.
    """
    report = _unfitted(report)
    shown = [item for item in report.operations if item.flops > 0 and item.bytes > 0 and item.seconds > 0]
    if not shown:
        return ""
    shown.sort(key=lambda item: -item.seconds)  # small dots over large ones
    peak, bandwidth = report.peak_flops, report.hbm_bandwidth
    ridge = peak / bandwidth
    intensities = [item.flops / item.bytes for item in shown]
    rates = [item.flops / item.seconds for item in shown]
    x = _LogScale(min(*intensities, ridge / 10), max(*intensities, ridge * 10), _LEFT, _WIDTH - _RIGHT)
    y = _LogScale(min(*rates, peak / 50), max(*rates, peak * 1.2), _HEIGHT - _BOTTOM, _TOP)

    parts = [_grid(x, y)]
    roof_start = max(x.decades[0], y.decades[0] / bandwidth)
    corners = [(roof_start, roof_start * bandwidth), (ridge, peak), (x.decades[-1], peak)]
    points = " ".join(f"{x(across):.1f},{y(up):.1f}" for across, up in corners)
    parts.append(f'<polyline class="roof" points="{points}"/>')
    middle = math.sqrt(roof_start * ridge)
    slope = math.degrees(math.atan2(y(ridge * bandwidth) - y(middle * bandwidth), x(ridge) - x(middle)))
    parts.append(
        f'<text class="rooflabel" text-anchor="end" x="{x(x.decades[-1]) - 4:.1f}" y="{y(peak) - 8:.1f}">'
        f"peak {rate_text(peak, 'FLOP/s')}</text>"
        f'<text class="rooflabel" text-anchor="middle" transform="translate({x(middle):.1f} '
        f'{y(middle * bandwidth):.1f}) rotate({slope:.1f}) translate(0 -8)">HBM {rate_text(bandwidth, "B/s")}</text>'
    )
    dots = [
        (
            x(item.flops / item.bytes),
            y(item.flops / item.seconds),
            3.5 + 11 * math.sqrt(item.seconds / shown[0].seconds),
        )
        for item in shown
    ]
    parts += [
        f'<circle class="c-{item.category}" cx="{across:.1f}" cy="{up:.1f}" r="{radius:.1f}">'
        f"<title>{escape(_hover(item, report))}</title></circle>"
        for item, (across, up, radius) in zip(shown, dots, strict=True)
    ]
    parts.append(_labels(shown, dots))
    return (
        f'<svg class="roofline" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="roofline">'
        f"{''.join(parts)}</svg>"
        f"{_note(report, shown)}"
    )


def _labels(shown: list[Operation], dots: list[tuple[float, float, float]]) -> str:
    """Numbers at the places of the longest operations, and below the roof, where little is, what they are.

    Dots that are near to each other share a number, since nobody could tell theirs apart.
    """
    places: list[tuple[float, float, float, list[Operation]]] = []
    for item, (x, y, radius) in zip(shown, dots, strict=True):
        near = next((place for place in places if math.dist((x, y), place[:2]) < _NEAR), None)
        if near is not None:
            near[3].append(item)
        elif len(places) < _NUM_LABELS:
            places.append((x, y, radius, [item]))
    parts = []
    for number, (x, y, radius, items) in enumerate(places, 1):
        parts.append(
            f'<text class="number" text-anchor="middle" x="{x:.1f}" y="{y + radius + 12:.1f}">{number}</text>'
            if radius < 9
            else f'<text class="number" text-anchor="middle" x="{x:.1f}" y="{y + 4.5:.1f}">{number}</text>'
        )
        names = dict.fromkeys(item.origin.module or item.name for item in items)
        name, more = next(iter(names)), f" and {len(names) - 1} more" if len(names) > 1 else ""
        name = name if len(name) <= 30 else "…" + name[-29:]
        seconds = seconds_text(sum(item.seconds for item in items))
        line = _HEIGHT - _BOTTOM - 12 - 17 * (len(places) - number)
        parts.append(
            f'<text class="dotlabel" x="{_WIDTH - _RIGHT - 10}" y="{line}" text-anchor="end">'
            f"<tspan>{number}</tspan> {escape(name)}{more} <tspan>{seconds}</tspan></text>"
        )
    return "".join(parts)


def _grid(x: _LogScale, y: _LogScale) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    lines = [
        f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{_TOP}" y2="{bottom}"/>'
        f'<text class="tick" text-anchor="middle" x="{x(value):.1f}" y="{bottom + 17}">{_decade(value)}</text>'
        for value in x.decades
    ]
    lines += [
        f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        f'<text class="tick" text-anchor="end" x="{_LEFT - 7}" y="{y(value) + 4:.1f}">{_short_rate(value)}</text>'
        for value in y.decades
    ]
    middle = (_TOP + bottom) / 2
    return "".join(lines) + (
        f'<text class="axis" text-anchor="middle" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}">'
        "operational intensity, FLOP per byte of HBM</text>"
        f'<text class="axis" text-anchor="middle" transform="translate(14 {middle}) rotate(-90)">'
        "predicted FLOP/s</text>"
    )


def _decade(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:.3g}"


def _short_rate(value: float) -> str:
    number, _, unit = rate_text(value, "").partition(" ")
    return f"{float(number.replace(',', '')):g} {unit}".strip()


def _unfitted(report: CompileReport) -> CompileReport:
    time = report.step_time
    if time is None or time.efficiency == 1:
        return report
    factor = time.efficiency
    step_time = StepTime(
        time.compute * factor,
        time.memory * factor,
        time.communication * factor,
        time.hidden_communication * factor,
        1.0,
    )
    operations = tuple(replace(item, seconds=item.seconds * factor) for item in report.operations)
    return replace(report, step_time=step_time, operations=operations)


def _hover(item: Operation, report: CompileReport) -> str:
    rate, intensity = item.flops / item.seconds, item.flops / item.bytes
    lines = [
        f"{item.origin.module or item.name} {item.origin.phase}".strip(),
        f"{item.name}, {item.category}, {item.count:,} calls, limited by {item.bound}",
        f"{rate_text(rate, 'FLOP/s')} predicted, {share_text(rate, report.peak_flops)} of peak",
        f"{intensity:,.1f} FLOP/byte, {bytes_text(item.bytes)} moved in a step",
        f"{seconds_text(item.seconds)} predicted, {share_text(item.seconds, report.predicted_step_s or 0)} of the step",
        item.origin.source,
    ]
    return "\n".join(filter(None, lines))


def _note(report: CompileReport, shown: list[Operation]) -> str:
    others = [item for item in report.operations if item not in shown]
    text = "A dot is an operation, its area the time the compiler estimates. Above it is what it could reach at most."
    if others:
        seconds, moved = sum(item.seconds for item in others), sum(item.bytes for item in others)
        rate = f", {rate_text(moved / seconds, 'B/s')} on average" if seconds else ""
        text += (
            f" {len(others)} without matrix products have no place here: they take {seconds_text(seconds)} "
            f"and move {bytes_text(moved)}{rate}."
        )
    categories = dict.fromkeys(item.category for item in shown)
    legend = "".join(f'<span><i class="c-{category}"></i>{category}</span>' for category in categories)
    return f'<div class="legend">{legend}</div><p class="note">{text}</p>'
