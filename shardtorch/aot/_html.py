"""A `CompileReport` as one HTML page that needs nothing but itself."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from html import escape
from typing import NamedTuple

from shardtorch.aot._html_icicle import KIND_NAMES, render_icicle
from shardtorch.aot._html_mesh import Shardings, render_mesh
from shardtorch.aot._html_roofline import render_roofline
from shardtorch.aot._html_style import SCRIPT, STYLE
from shardtorch.aot._quantities import bytes_text, rate_text, seconds_text, share_text
from shardtorch.aot._report import Collective, CompileReport, Operation
from shardtorch.engine import Origin

_MAX_ROWS = 100  # of a table
_MAX_MODULES = 14  # of the bars of time by module
_TIMES = {
    "compute": "compute",
    "memory": "memory",
    "communication": "exposed communication",
    "hidden": "hidden communication",
}


def to_html(report: CompileReport, shardings: Shardings | None = None) -> str:
    """The report as a page: headline, HBM icicle, step time, roofline, mesh, tables, advice, assumptions.

    It fetches nothing, and forbids itself to. Every text of the report is escaped.

    Args:
      report: What to show. Without predicted times the parts about time are left out.
      shardings: Global shape and sharding of parameters by name, for the picture of the mesh; without them it is left
        out.

    Raises:
      ShardingError: The shardings are on several meshes, or one does not fit its shape.
    """
    sections = [
        _section("HBM of a chip at the step's peak", render_icicle(report)),
        _section("Advice", _list("ol", report.advice)) if report.advice else "",
        _section("Predicted time of a step", _step_time(report)) if report.step_time is not None else "",
    ]
    if roofline := render_roofline(report):
        sections.append(_section("Predicted roofline of a chip", roofline))
    layout = _list("ul", report.layout) if report.layout else ""
    if shardings or layout:
        sections.append(_section("What each device holds", f"{render_mesh(shardings) if shardings else ''}{layout}"))
    if report.collectives:
        sections.append(_section("Collectives", _collectives(report)))
    if report.buffers:
        sections.append(_section("Largest buffers at the peak", _buffers(report)))
    if report.operations:
        sections.append(_section("Operations", _operations(report)))
    if report.assumptions:
        sections.append(_section("What the predictions assume", _list("ul", report.assumptions)))
    title = f"{report.title} on {report.topology}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escape(title)}: predicted</title><style>{STYLE}</style></head>\n<body><main>"
        f"{_header(report)}{''.join(filter(None, sections))}"
        f"<footer>Bytes are the compiler's. Times are predicted, not measured. libtpu {escape(report.libtpu_version)}."
        f"</footer></main><script>{SCRIPT}</script></body></html>\n"
    )


def _header(report: CompileReport) -> str:
    memory = report.memory
    name = "good" if report.fits else "bad"
    amount = bytes_text(abs(memory.headroom))
    if memory.headroom >= 0:
        room = f"{amount} free" if report.fits else f"{amount} free, not in one piece"
    else:
        room = f"{amount} too much"
    cards = [
        _card(
            "HBM per chip", "Fits" if report.fits else "Does not fit", f"{room}, limit {bytes_text(memory.limit)}", name
        )
    ]
    if not report.fits:
        kind, most = max(memory.by_kind().items(), key=lambda part: part[1])
        share = f"{bytes_text(most)}, {share_text(most, memory.total)} of what is needed"
        cards.append(_card("largest part", KIND_NAMES[kind].partition(",")[0], share))
    if report.step_time is None:
        cards.append(_card("predicted step time", "none", "there is no program to predict it from"))
    else:
        shares = f"{share_text(report.step_time.communication, report.step_time.total)} exposed communication"
        cards.append(_card("predicted step time", seconds_text(report.step_time.total), shares))
    if report.tokens_per_s_per_chip is not None:
        rate, tokens = report.tokens_per_s_per_chip, report.tokens_per_step or 0
        cards.append(_card("predicted tokens/s/chip", f"{rate:,.0f}", f"{tokens:,} tokens in a step"))
    causal, full = report.mfu(), report.mfu(causal=False)
    if causal is not None:
        other = f"{full:.1%} counting full attention" if full is not None else ""
        cards.append(_card("predicted MFU, causal attention", f"{causal:.1%}", other))
    elif full is not None:
        cards.append(_card("predicted MFU, full attention", f"{full:.1%}", ""))
    return (
        f"<header><h1>{escape(report.title)} on {escape(report.topology)}</h1>"
        f'<p class="sub">{report.num_chips:,} chips, mesh <span class="mono">{escape(report.mesh)}</span>. '
        f"Compiled for it with libtpu {escape(report.libtpu_version)}, without a TPU: traced in "
        f"{seconds_text(report.trace_s)}, compiled in {seconds_text(report.compile_s)}.</p></header>"
        f'<div class="cards">{"".join(cards)}</div>'
    )


def _card(label: str, value: str, more: str, name: str = "") -> str:
    return f'<div class="card {name}"><small>{label}</small><strong>{value}</strong><small>{more}</small></div>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>\n"


def _list(tag: str, lines: Iterable[str]) -> str:
    return f"<{tag}>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</{tag}>"


def _step_time(report: CompileReport) -> str:
    time = report.step_time
    assert time is not None
    parts = {"compute": time.compute, "memory": time.memory, "communication": time.communication}
    legend = "".join(
        f'<span><i class="t-{kind}"></i>{_TIMES[kind]} <b>{seconds_text(seconds)}</b> '
        f"{share_text(seconds, time.total)}</span>"
        for kind, seconds in parts.items()
    )
    legend += (
        f'<span><i class="t-hidden"></i>{_TIMES["hidden"]}, beside the rest '
        f"<b>{seconds_text(time.hidden_communication)}</b></span>"
    )
    fitted = ""
    if time.efficiency != 1:
        fitted = f'<p class="note">The times are divided by {time.efficiency:.2f}, fitted on published step times.</p>'
    modules = sorted(_times_by(report, lambda item: item.origin.module or "outside of modules"), key=_row_time)
    rows, rest = modules[-_MAX_MODULES:][::-1], modules[:-_MAX_MODULES]
    if rest:
        rows.append((f"others ({len(rest)})", {kind: sum(times[kind] for _, times in rest) for kind in parts}))
    order = ["forward", "backward", "update", ""]
    phases = sorted(_times_by(report, lambda item: item.origin.phase), key=lambda row: order.index(row[0]))
    phases = [(name or "not known", times) for name, times in phases if sum(times.values()) > _LEAST * time.total]
    kinds = _times_by(report, lambda item: item.kind if isinstance(item, Collective) else item.category)
    return (
        f'<div class="legend">{legend}</div>{_bar(parts, time.total)}{fitted}'
        f'<div class="two"><div><h3>by module</h3>{_bars(rows, time.total)}</div>'
        f"<div><h3>by phase</h3>{_bars(phases, time.total)}"
        f"<h3>by kind of operation</h3>{_bars(sorted(kinds, key=_row_time)[::-1], time.total)}</div></div>"
    )


_LEAST = 1e-6
"""A share of the step that is worth a bar."""
_Row = tuple[str, dict[str, float]]
"""A name, and the seconds that it adds to the step by kind of time."""


def _times_by(report: CompileReport, name: Callable[[Operation | Collective], str]) -> list[_Row]:
    times: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("compute", "memory", "communication"), 0.0))
    for operation in report.operations:
        times[name(operation)][operation.bound] += operation.seconds
    for collective in report.collectives:
        if collective.exposed_seconds:
            times[name(collective)]["communication"] += collective.exposed_seconds
    return list(times.items())


def _row_time(row: _Row) -> float:
    return sum(row[1].values())


def _bar(parts: dict[str, float], whole: float) -> str:
    """A bar whose parts are shares of the whole; a part that is wide enough says how much it is."""
    pieces = []
    for kind, seconds in parts.items():
        share = seconds / whole if whole else 0
        text = share_text(seconds, whole) if share > 0.07 else ""
        pieces.append(
            f'<i class="t-{kind}" style="width:{100 * share:.3f}%" '
            f'title="{_TIMES[kind]}: {seconds_text(seconds)} predicted">{text}</i>'
        )
    return f'<div class="bar">{"".join(pieces)}</div>'


def _bars(rows: list[_Row], whole: float) -> str:
    longest = max(map(_row_time, rows), default=0.0) or 1.0
    cells = []
    for name, times in rows:
        seconds = sum(times.values())
        pieces = "".join(
            f'<i class="t-{kind}" style="width:{100 * part / longest:.3f}%" '
            f'title="{_TIMES[kind]}: {seconds_text(part)} predicted"></i>'
            for kind, part in times.items()
            if part
        )
        cells.append(
            f'<span class="name mono" title="{escape(name)}">{escape(_short(name))}</span>'
            f'<div class="bar">{pieces}</div>'
            f"<span>{seconds_text(seconds)} <span class='sub'>{share_text(seconds, whole)}</span></span>"
        )
    return f'<div class="bars">{"".join(cells)}</div>'


def _short(path: str, longest: int = 30) -> str:
    """A path cut in front, since its end says more."""
    return path if len(path) <= longest else "…" + path[-longest + 1 :]


class _Cell(NamedTuple):
    html: str
    value: float | None = None
    """What the column sorts by, if not by its text; such a cell is aligned to the right."""
    style: str = ""


def _table(columns: Iterable[tuple[str, bool]], rows: list[list[_Cell]], note: str = "") -> str:
    """A table that the page's script sorts; of each column its name and whether it holds numbers."""
    head = "".join(f"<th{' class=num' * is_number}>{name}</th>" for name, is_number in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    more = f'<p class="note">{note}</p>' if note else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'


def _cell(cell: _Cell) -> str:
    if cell.value is not None:
        return f'<td class="num" data-value="{cell.value:.6g}">{cell.html}</td>'
    return f'<td class="{cell.style}">{cell.html}</td>'


def _number(text: str, value: float) -> _Cell:
    return _Cell(text, value)


def _origin(origin: Origin) -> list[_Cell]:
    phase = f' <span class="tag">{origin.phase}</span>' if origin.phase else ""
    return [_Cell(escape(origin.module) + phase, style="mono path"), _Cell(escape(origin.source), style="mono path")]


def _left_out(num_rows: int, rest: str) -> str:
    return f"The {_MAX_ROWS} largest of {num_rows:,}. {rest}" if num_rows > _MAX_ROWS else ""


def _collectives(report: CompileReport) -> str:
    items = sorted(report.collectives, key=lambda item: -item.seconds)
    # One that should not be there is shown however small it is.
    shown = [item for number, item in enumerate(items) if number < _MAX_ROWS or item.warning]
    longest = max((item.seconds for item in shown), default=0.0) or 1.0
    rows = [
        [
            _Cell(_collective_name(item)),
            _Cell(_axes(item)),
            _number(f"{item.count:,}", item.count),
            _number(bytes_text(item.bytes * item.count), item.bytes * item.count),
            _number(seconds_text(item.seconds), item.seconds),
            _number(seconds_text(item.exposed_seconds), item.exposed_seconds),
            _Cell(_exposed_bar(item, longest)),
            *_origin(item.origin),
        ]
        for item in shown
    ]
    warned = [item for item in items if item.warning]
    intro = '<p class="sub">The plan asks for all of them.</p>'
    if warned:
        exposed = sum(item.exposed_seconds for item in warned)
        intro = (
            f'<p class="sub"><b class="bad">{len(warned)}</b> of {len(items)} should not be there; '
            f"{seconds_text(exposed)} predicted exposed.</p>"
        )
    legend = (
        '<div class="legend"><span><i class="t-communication"></i>exposed</span>'
        '<span><i class="t-hidden"></i>hidden behind the core\'s work</span></div>'
    )
    columns = [("kind", False), ("mesh axes", False), ("calls", True), ("bytes in a step", True), ("predicted", True),
               ("exposed", True), ("", False), ("module", False), ("source", False)]  # fmt: skip
    rest = sum(item.seconds for item in items) - sum(item.seconds for item in shown)
    return intro + legend + _table(columns, rows, _left_out(len(items), f"The others take {seconds_text(rest)}."))


def _collective_name(item: Collective) -> str:
    warning = f'<div class="warning">{escape(item.warning)}</div>' if item.warning else ""
    return f'{item.kind} <span class="tag mono">{escape(item.name)}</span>{warning}'


def _axes(item: Collective) -> str:
    axes = escape(", ".join(item.axes)) or "some chips"
    return f'{axes} <span class="tag">{item.network}, {item.group_size:,}</span>'


def _exposed_bar(item: Collective, longest: float) -> str:
    exposed, hidden = item.exposed_seconds, max(item.seconds - item.exposed_seconds, 0)
    return (
        f'<div class="pair"><i class="t-communication" style="width:{100 * exposed / longest:.2f}%"></i>'
        f'<i class="t-hidden" style="width:{100 * hidden / longest:.2f}%"></i></div>'
    )


def _buffers(report: CompileReport) -> str:
    shown = report.buffers[:_MAX_ROWS]
    rows = [
        [
            _Cell(escape(item.name), style="mono path"),
            _Cell(f'<i class="k-{item.kind}"></i>{item.kind}'),
            _number(bytes_text(item.bytes), item.bytes),
            _number(share_text(item.bytes, report.memory.total), item.bytes),
            _Cell(escape(item.shape), style="mono"),
            *_origin(item.origin),
        ]
        for item in shown
    ]
    columns = [("buffer", False), ("kind", False), ("bytes", True), ("share", True), ("shape on a chip", False),
               ("module", False), ("source", False)]  # fmt: skip
    rest = bytes_text(sum(item.bytes for item in report.buffers[_MAX_ROWS:]))
    return _table(columns, rows, _left_out(len(report.buffers), f"The others hold {rest}."))


def _operations(report: CompileReport) -> str:
    items = sorted(report.operations, key=lambda item: -item.seconds)
    step_s = report.predicted_step_s or 0
    rows = [
        [
            _Cell(f'<i class="c-{item.category}"></i>{item.category}'),
            _Cell(escape(item.name), style="mono path"),
            _number(f"{item.count:,}", item.count),
            _number(seconds_text(item.seconds), item.seconds),
            _number(share_text(item.seconds, step_s), item.seconds),
            _number(rate_text(item.flops / item.seconds, "FLOP/s") if item.seconds and item.flops else "", item.flops),
            _number(bytes_text(item.bytes), item.bytes),
            _Cell(item.bound),
            *_origin(item.origin),
        ]
        for item in items[:_MAX_ROWS]
    ]
    columns = [("category", False), ("name", False), ("calls", True), ("predicted", True), ("of the step", True),
               ("reaches", True), ("HBM traffic", True), ("limit", False),
               ("module", False), ("source", False)]  # fmt: skip
    rest = seconds_text(sum(item.seconds for item in items[_MAX_ROWS:]))
    return _table(columns, rows, _left_out(len(items), f"The others take {rest}."))
