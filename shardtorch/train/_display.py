"""What a run shows while it trains: a live panel in a terminal, plain lines everywhere else."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import TracebackType

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from shardtorch.train._metrics import StepMetrics


class Display:
    """Shows a run; a context manager that leaves the terminal as it found it, whatever is raised inside.

    In a terminal it is a panel that refreshes itself: header, progress, numbers, loss curve. The last state stays on
    the screen. Elsewhere (a pipe, a CI log) it prints lines without control characters: the header, then the first
    step, every `line_every_steps`-th and the last, and each evaluation and message.

    Args:
      console: Where to show it.
      total_steps: Number of the run's last step.
      start_step: Step that the run starts from: 0, or the checkpoint's on resume.
      header: Names and values that say what runs (model, mesh, parameters, devices), in order.
      live: Whether to show the panel. None decides by the console: only if its file is an interactive terminal, so
        that FORCE_COLOR doesn't fill a log with cursor movements.
      line_every_steps: How often a step gets a line when there is no panel, in steps.

    >>> with Display(Console(), total_steps=2, start_step=0, header={"model": "llama-tiny"}, live=False) as display:
    ...     display.step(StepMetrics(step=1, loss=9.5, grad_norm=1.25, lr=3e-4, tokens_per_s=4096.0, step_s=0.5))
    model: llama-tiny
    step 1/2  loss 9.5000  grad norm 1.25  lr 3.00e-04  4,096 tokens/s  0.500 s/step
    """

    def __init__(
        self,
        console: Console,
        total_steps: int,
        start_step: int,
        header: Mapping[str, str],
        *,
        live: bool | None = None,
        line_every_steps: int = 10,
    ) -> None:
        self.console = console
        self.total_steps = total_steps
        self.line_every_steps = line_every_steps
        self._header = dict(header)
        self._live = console.is_interactive and console.file.isatty() if live is None else live
        self._first_step = start_step + 1
        self._last: StepMetrics | None = None
        self._last_eval: tuple[int, float, float] | None = None
        self._curve = LossCurve()
        self._spinner: Spinner | None = None
        self._progress = Progress(
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("steps", start=False, total=total_steps, completed=start_step)
        self._resources = ExitStack()

    def __enter__(self) -> "Display":
        self._progress.start_task(self._task)
        if self._live:
            # Live restores the cursor, stdout and stderr when it exits.
            self._resources.enter_context(Live(console=self.console, get_renderable=self._render))
        else:
            for name, value in self._header.items():
                self._print(f"{name}: {value}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, error, traceback)

    def step(self, metrics: StepMetrics) -> None:
        """Show a finished step."""
        self._last = metrics
        self._curve.append(metrics.loss)
        self._progress.update(self._task, completed=metrics.step)
        edge = metrics.step in (self._first_step, self.total_steps)
        if not self._live and (edge or metrics.step % self.line_every_steps == 0):
            mfu = "" if metrics.mfu is None else f"  MFU {metrics.mfu:.1%}"
            self._print(
                f"step {metrics.step}/{self.total_steps}  loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.4g}"
                f"  lr {metrics.lr:.2e}  {metrics.tokens_per_s:,.0f} tokens/s  {metrics.step_s:.3f} s/step{mfu}"
            )

    def eval(self, step: int, bits_per_byte: float, reference_bits_per_byte: float) -> None:
        """Show an evaluation on held-out text.

        Args:
          step: Number of updates of the evaluated state.
          bits_per_byte: What the model needs for the text.
          reference_bits_per_byte: What `zlib -9` needs for the same text.
        """
        self._last_eval = (step, bits_per_byte, reference_bits_per_byte)
        if not self._live:
            self._print(
                f"step {step}/{self.total_steps}  held-out text: {bits_per_byte:.4f} bits/byte"
                f" (zlib -9: {reference_bits_per_byte:.4f})"
            )

    def message(self, text: str) -> None:
        """Print a line that stays, above the panel."""
        self._print(text)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Say what the run is busy with while the block runs, and how long it took once it is done.

        Args:
          text: What is done, such as "compiling the train step".
        """
        outer = self._spinner
        started = time.monotonic()
        if self._live:
            # The "dots" spinner is drawn in braille.
            self._spinner = Spinner("line" if self.console.options.ascii_only else "dots", text=Text(text))
        else:
            self._print(f"{text} ...")
        try:
            yield
        finally:
            self._spinner = outer
        self._print(f"{text}: {time.monotonic() - started:.1f} s")

    def _print(self, line: str) -> None:
        self.console.out(line, highlight=False)

    def _render(self) -> RenderableType:
        rows: list[RenderableType] = [self._render_header(), self._progress]
        if self._last is not None:
            rows += [self._render_numbers(self._last), self._curve]
        if self._spinner is not None:
            rows.append(self._spinner)
        return Panel(Group(*rows), title="shardtorch", title_align="left", border_style="cyan")

    def _render_header(self) -> Table:
        table = _grid(2)
        cells = [Text.assemble((f"{name} ", "dim"), value) for name, value in self._header.items()]
        for left in range(0, len(cells), 2):
            table.add_row(*cells[left : left + 2])
        return table

    def _render_numbers(self, last: StepMetrics) -> Table:
        table = _grid(3)
        cells = [
            _number("loss", f"{last.loss:.4f}", "bold" if math.isfinite(last.loss) else "bold red"),
            _number("grad norm", f"{last.grad_norm:.4g}", "bold" if math.isfinite(last.grad_norm) else "bold red"),
            _number("lr", f"{last.lr:.2e}"),
            _number("tokens/s", f"{last.tokens_per_s:,.0f}"),
            _number("step time", f"{last.step_s:.3f} s"),
            _number("MFU", f"{last.mfu:.1%}") if last.mfu is not None else Text(),
        ]
        if self._last_eval is not None:
            step, bits_per_byte, reference = self._last_eval
            cells += [
                _number("bits/byte", f"{bits_per_byte:.4f}", "bold green" if bits_per_byte < reference else "bold"),
                _number("zlib -9", f"{reference:.4f}"),
                _number("at step", f"{step:,}"),
            ]
        for left in range(0, len(cells), 3):
            table.add_row(*cells[left : left + 3])
        return table


class LossCurve:
    """The losses of a run as a bar plot, which takes the console's width and as many points as a run may have.

    Losses are averaged in buckets of equal numbers of steps. When the buckets are used up, neighbours are merged, so a
    refresh costs the same at step 100 and at step 1,000,000. A bucket with a loss that is not finite leaves a gap.

    Args:
      num_rows: Height of the plot, in lines.
      max_buckets: Largest number of buckets to keep; even.

    >>> curve = LossCurve(num_rows=2)
    >>> for loss in (3.0, 2.0, 1.0, 1.0):
    ...     curve.append(loss)
    >>> Console(width=40).print(curve)
    3.00 █▁
    1.00 ██▁▁
    """

    def __init__(self, num_rows: int = 5, max_buckets: int = 512) -> None:
        self.num_rows = num_rows
        self.max_buckets = max_buckets
        self.bucket_size = 1
        self._buckets: list[tuple[float, int]] = []  # sum of losses, number of losses; the last one may be filling

    @property
    def means(self) -> list[float]:
        """Mean loss of each bucket, oldest first."""
        return [total / count for total, count in self._buckets]

    def append(self, loss: float) -> None:
        """Add the next step's loss."""
        # The list is replaced, not changed in place, where it shrinks: the refreshing thread may be reading it.
        if self._buckets and self._buckets[-1][1] < self.bucket_size:
            total, count = self._buckets[-1]
            self._buckets[-1] = (total + loss, count + 1)
            return
        if len(self._buckets) == self.max_buckets:
            self._buckets = _merged(self._buckets, self.max_buckets // 2)
            self.bucket_size *= 2
        self._buckets.append((loss, 1))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        levels = " .:#" if options.ascii_only else " ▁▂▃▄▅▆▇█"
        buckets = list(self._buckets)
        # Means of merged buckets lie between the extremes of the buckets, so their labels need no more room.
        label_width = max((len(f"{mean:.2f}") for mean in _finite_means(buckets)), default=0)
        num_columns = min(len(buckets), max(1, options.max_width - label_width - 1))
        columns = _merged(buckets, num_columns)
        means = _finite_means(columns)
        if not means:
            return
        low, high = min(means), max(means)
        labels = [f"{high:.2f}", *[""] * (self.num_rows - 2), f"{low:.2f}"]
        per_row = len(levels) - 1
        span = (high - low) or 1.0
        # The lowest loss still shows one level: an empty column means that there is no number.
        heights = [
            1 + round((total / count - low) / span * (self.num_rows * per_row - 1)) if math.isfinite(total) else 0
            for total, count in columns
        ]
        for row in range(self.num_rows):
            base = (self.num_rows - 1 - row) * per_row
            bars = "".join(levels[min(max(height - base, 0), per_row)] for height in heights).rstrip()
            yield Text.assemble((f"{labels[row]:>{label_width}} ", "dim"), (bars, "cyan"))


def _finite_means(buckets: list[tuple[float, int]]) -> list[float]:
    return [total / count for total, count in buckets if math.isfinite(total)]


def _merged(buckets: list[tuple[float, int]], num_groups: int) -> list[tuple[float, int]]:
    """Merge neighbours into `num_groups` groups, at most as many as there are buckets, of nearly equal sizes."""
    if not buckets:
        return []
    edges = [group * len(buckets) // num_groups for group in range(num_groups + 1)]
    groups = [buckets[start:end] for start, end in pairwise(edges)]
    return [(sum(total for total, _ in group), sum(count for _, count in group)) for group in groups]


def _number(name: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))


def _grid(num_columns: int) -> Table:
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in range(num_columns):
        table.add_column(ratio=1)
    return table
