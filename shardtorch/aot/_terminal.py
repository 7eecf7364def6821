"""A `CompileReport` in a terminal: about a page, from 80 columns on."""

from collections.abc import Iterable

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardtorch.aot._quantities import bytes_text, seconds_text, share_text
from shardtorch.aot._report import CompileReport, Origin

_WIDE = 116  # columns from which a table has room for the source beside the module
_NUM_LINES = 4  # of warnings, advice, layout and assumptions, each
_PARTS = {
    "parameter": ("parameters", "blue"),
    "gradient": ("gradients", "cyan"),
    "optimizer": ("optimizer state", "magenta"),
    "batch": ("batch, metrics", "yellow"),
    "activation": ("activations, temporaries", "green"),
    "code": ("program", "white"),
}
_CATEGORIES = {"compute": "blue", "memory": "green", "exposed communication": "red"}


def show(report: CompileReport, console: Console) -> None:
    """Prints a report: headline, memory, step time, largest of everything, warnings, advice, layout,
    assumptions.

    Args:
      report: What to show.
      console: Where to; its width decides how much a row says. Below 80 columns rows wrap.
    """
    console.print(_headline(report))
    _section(console, "HBM per chip at the step's peak", _memory(report, console.width))
    if report.step_time is not None:
        _section(console, "predicted step time", *_step_time(report, console.width))
    if report.collectives:
        title = f"collectives, largest predicted time of {len(report.collectives)}"
        _section(console, title, _collectives(report, console.width))
    if report.buffers:
        title = f"buffers at the peak, largest of {len(report.buffers)}"
        _section(console, title, _buffers(report, console.width))
    if report.operations:
        title = f"operations, largest predicted time of {len(report.operations)}"
        _section(console, title, _operations(report, console.width))
    warnings = [
        f"{c.kind} {_axes(c.axes)}, {seconds_text(c.seconds)} predicted: {c.warning}"
        for c in report.collectives
        if c.warning
    ]
    _list(console, "warnings", "yellow", warnings)
    _list(console, "advice", "green", report.advice)
    _list(console, "how parameters lie", "cyan", report.layout)
    _list(console, "the predictions assume", "dim", report.assumptions)


def _headline(report: CompileReport) -> Text:
    text = Text()
    text.append(report.title, style="bold")
    text.append(f" on {report.topology} ({report.num_chips:,} chips), mesh {report.mesh}\n")
    text.append(f"{report.verdict}\n", style="bold green" if report.fits else "bold red")
    if report.predicted_step_s is None:
        text.append("no predicted time: there is no program to predict it from\n")
    else:
        text.append(f"predicted: {seconds_text(report.predicted_step_s)} per step")
        if report.tokens_per_s_per_chip is not None:
            text.append(f", {report.tokens_per_s_per_chip:,.0f} tokens/s/chip")
        causal, full = report.mfu(), report.mfu(causal=False)
        if causal is not None:
            text.append(f", MFU {causal:.1%} (causal attention)")
        if full is not None:
            text.append(
                f", {full:.1%} (full attention)" if causal is not None else f", MFU {full:.1%} (full attention)"
            )
        text.append("\n")
    text.append(
        f"libtpu {report.libtpu_version}; traced in {seconds_text(report.trace_s)}, "
        f"compiled in {seconds_text(report.compile_s)} on this machine",
        style="dim",
    )
    return text


def _memory(report: CompileReport, width: int) -> Table:
    memory = report.memory
    scale = max(memory.limit, memory.total)
    table = _table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    bar_width = max(10, min(width, 140) - 49)
    start = 0
    for kind, num_bytes in memory.by_kind().items():
        name, colour = _PARTS[kind]
        bar = _placed_bar(start / scale, (start + num_bytes) / scale, bar_width, colour, memory.limit / scale)
        table.add_row(name, bytes_text(num_bytes), share_text(num_bytes, memory.limit), bar)
        start += num_bytes
    colour = "green" if report.fits else "red"
    total_bar = _placed_bar(0, memory.total / scale, bar_width, colour, memory.limit / scale)
    used = share_text(memory.total, memory.limit)
    table.add_row("total", bytes_text(memory.total), used, total_bar, style="bold")
    table.add_row(
        f"of a limit of {bytes_text(memory.limit)}",
        bytes_text(abs(memory.headroom)),
        Text("left" if memory.headroom >= 0 else "over", style=colour),
        "",
    )
    return table


def _placed_bar(start: float, end: float, width: int, colour: str, limit: float) -> Text:
    """A bar from `start` to `end`, both 0 to 1, red beyond the limit; never empty unless it has no length."""
    first = min(round(start * width), width - 1)
    last = max(round(end * width), first + (end > start))
    wall = round(limit * width)
    text = Text("·" * first, style="bright_black")
    inside = max(0, min(last, max(wall, first)) - first)
    text.append("█" * inside, style=colour)
    text.append("█" * (last - first - inside), style="red")
    text.append("·" * (width - last), style="bright_black")
    return text


def _step_time(report: CompileReport, width: int) -> Iterable[RenderableType]:
    time = report.step_time
    assert time is not None
    parts = dict(zip(_CATEGORIES, (time.compute, time.memory, time.communication), strict=True))
    bar_width = min(width, 140) - 4
    bar, start = Text(), 0.0
    for name, seconds in parts.items():
        cells = round((start + seconds) / time.total * bar_width) - round(start / time.total * bar_width)
        bar.append("█" * cells, style=_CATEGORIES[name])
        start += seconds
    yield bar
    legend = [
        Text.assemble(("█ ", _CATEGORIES[name]), f"{name} {seconds_text(seconds)} ({share_text(seconds, time.total)})")
        for name, seconds in parts.items()
    ]
    legend.append(Text(f"hidden communication {seconds_text(time.hidden_communication)}", style="dim"))
    if time.efficiency != 1:
        legend.append(Text(f"divided by {time.efficiency:.2f}, as fitted", style="dim"))
    yield Columns(legend, padding=(0, 3))


def _collectives(report: CompileReport, width: int) -> Table:
    table = _table_of("collective", ("calls", "bytes/step", "predicted", "exposed"), width)
    for item in sorted(report.collectives, key=lambda item: -item.seconds)[: _num_rows(width)]:
        name = Text.assemble(item.kind, (f" {_axes(item.axes)} {item.network}", "dim"))
        if item.warning:
            name.append(" !", style="yellow")
        cells = (f"{item.count:,}", bytes_text(item.bytes * item.count), seconds_text(item.seconds))
        exposed = Text(seconds_text(item.exposed_seconds), "red" if item.exposed_seconds > item.seconds / 2 else "")
        _add_row(table, name, (*cells, exposed), item.origin, width)
    return table


def _buffers(report: CompileReport, width: int) -> Table:
    table = _table_of("buffer", ("bytes", "shape on a chip"), width)
    for item in report.buffers[: _num_rows(width)]:
        cells = (bytes_text(item.bytes), _path(item.shape, 24))
        name = Text.assemble(_path(item.name, 26 if width < _WIDE else 36), (f" {item.kind}", "dim"))
        _add_row(table, name, cells, item.origin, width)
    return table


def _operations(report: CompileReport, width: int) -> Table:
    table = _table_of("operation", ("calls", "predicted", "of step", "limit"), width)
    for item in sorted(report.operations, key=lambda item: -item.seconds)[: _num_rows(width)]:
        share = share_text(item.seconds, report.predicted_step_s or 0)
        cells = (f"{item.count:,}", seconds_text(item.seconds), share, item.bound)
        name = Text.assemble(_path(item.name, 26), (f" {item.category}", "dim"))
        _add_row(table, name, cells, item.origin, width)
    return table


def _num_rows(width: int) -> int:
    return 5 if width >= _WIDE else 3  # of one line each, or of two


def _table_of(noun: str, columns: Iterable[str], width: int) -> Table:
    table = _table()
    table.add_column(noun)
    for column in columns:
        table.add_column(column, justify="right")
    if width >= _WIDE:
        table.add_column("module")
        table.add_column("source")
    return table


def _add_row(table: Table, name: Text, cells: Iterable[str | Text], origin: Origin, width: int) -> None:
    """A row; what it comes from stands in columns of its own if there is room, and under the name if not."""
    texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]  # not markup: names hold brackets
    if width >= _WIDE:
        module = Text.assemble(_path(origin.module, 32), (f" {origin.phase}", "dim"))
        table.add_row(name, *texts, module, Text(_path(origin.source, 28)))
        return
    file = origin.source.rpartition("/")[2]
    where = " ".join(filter(None, (_path(origin.module, 20), _path(file, 16))))
    table.add_row(Text.assemble(name, (f"\n{where}" if where else "", "dim")), *texts)


def _path(path: str, longest: int) -> str:
    """A module's or a file's path, cut in front: its end says more."""
    return path if len(path) <= longest else "…" + path[-longest + 1 :]


def _axes(axes: tuple[str, ...]) -> str:
    return ",".join(axes) or "some chips"


def _table(*, show_header: bool = True) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=show_header)


def _section(console: Console, title: str, *parts: RenderableType) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    for part in parts:
        console.print(Padding(part, (0, 0, 0, 2)))


def _list(console: Console, title: str, style: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if lines:
        rows = Table.grid(padding=(0, 1))
        for line in lines[:_NUM_LINES]:
            rows.add_row(Text("-", style=style), Text(line, style="dim" if style == "dim" else ""))
        if len(lines) > _NUM_LINES:
            rows.add_row("", Text(f"and {len(lines) - _NUM_LINES} more in the page and the JSON", style="dim"))
        _section(console, title, rows)
