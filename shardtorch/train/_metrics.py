"""What a run measures, and the files that keep it.

`metrics.jsonl` and `eval.jsonl` hold one JSON object a line and read as one uninterrupted run, however often the run
was stopped and resumed. TensorBoard gets the same numbers (as float32) in `tensorboard/`.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from shardtorch.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True)
class StepMetrics:
    """The measurements of one training step, as plain Python numbers."""

    step: int
    """Step k is the state after k updates, so the first line of a run is step 1."""
    loss: float
    """Mean over the tokens of the step's global batch, in nats per token, before the update."""
    grad_norm: float
    """Global L2 norm of the gradient, before clipping."""
    lr: float
    """Learning rate of this update."""
    tokens_per_s: float
    """Tokens of the global batch over `step_s`, on all devices together."""
    step_s: float
    """Wall time of the step, in seconds. The first one contains compilation."""
    mfu: float | None = None
    """Model FLOPs utilisation, from 0 to 1: model FLOP/s over the devices' peak. None if the peak is unknown (CPU)."""


class MetricsLog:
    """Writes a run's metrics to `out_dir`; a context manager.

    Entering opens the files, and on resume first removes what lies beyond the checkpoint. Each line reaches the
    operating system before the call that wrote it returns.

    `metrics.jsonl` has the fields of `StepMetrics`; `mfu` is left out when it is None. `eval.jsonl` has `step`,
    `eval_loss` and `eval_bits_per_byte`. Floats are written so that they read back exactly. JSON has no NaN and no
    infinity: they are written as null (TensorBoard keeps the value).

    Args:
      out_dir: The run's folder; it is made if missing.
      resume_step: Step of the checkpoint that the run goes on from: later lines, and a last line that a crash
        left torn, are removed. Lines up to it are kept, however many there are. None starts afresh.
      writes: False in all processes of a run but one: then no file is opened, and what comes is dropped.

    Raises:
      ConfigError: On entering: the run is fresh but `out_dir` already holds metrics, or a line that is not the
        last can't be read. At any time: a file can't be written, such as on a full disk.

    >>> import tempfile
    >>> out_dir = Path(tempfile.mkdtemp())
    >>> with MetricsLog(out_dir) as log:
    ...     log.step(StepMetrics(step=1, loss=9.5, grad_norm=1.25, lr=3e-4, tokens_per_s=4096.0, step_s=1.0))
    >>> print((out_dir / "metrics.jsonl").read_text(), end="")
    {"step": 1, "loss": 9.5, "grad_norm": 1.25, "lr": 0.0003, "tokens_per_s": 4096.0, "step_s": 1.0}
    """

    def __init__(self, out_dir: Path, resume_step: int | None = None, *, writes: bool = True) -> None:
        self.out_dir = Path(out_dir)
        self.resume_step = resume_step
        self.writes = writes
        self._steps = _JsonLines(self.out_dir / "metrics.jsonl")
        self._evals = _JsonLines(self.out_dir / "eval.jsonl")
        self._tensorboard: SummaryWriter | None = None
        self._resources = ExitStack()

    def __enter__(self) -> "MetricsLog":
        if not self.writes:
            return self
        with ExitStack() as resources:  # closes what was opened when a later opening fails
            for lines in (self._steps, self._evals):
                if self.resume_step is None:
                    lines.require_absent()
            with _explain_os_error(self.out_dir):
                self.out_dir.mkdir(parents=True, exist_ok=True)
            for lines in (self._steps, self._evals):
                if self.resume_step is not None:
                    lines.truncate_after(self.resume_step)
                lines.open()
                resources.callback(lines.close)
            self._tensorboard = self._open_tensorboard()
            resources.callback(self._close_tensorboard)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, error, traceback)

    def step(self, metrics: StepMetrics) -> None:
        """Append one step. Steps come in rising order."""
        if not self.writes:
            return
        assert metrics.step > self._steps.last_step, f"step {metrics.step} after step {self._steps.last_step}"
        fields = {name: value for name, value in asdict(metrics).items() if value is not None}
        self._steps.append(fields)
        self._add_scalars("train", fields)

    def eval(self, step: int, loss: float, bits_per_byte: float) -> None:
        """Append one evaluation on held-out text.

        A run that is resumed evaluates the state that it starts from, which the run before may have done: there is
        one line a step, the first.

        Args:
          step: Number of updates of the evaluated state.
          loss: Mean in nats per token.
          bits_per_byte: The same loss per byte of text, in bits.
        """
        if not self.writes or step <= self._evals.last_step:
            return
        fields = {"step": step, "eval_loss": loss, "eval_bits_per_byte": bits_per_byte}
        self._evals.append(fields)
        self._add_scalars("eval", fields)

    def _open_tensorboard(self) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if self.resume_step is None else self.resume_step + 1
        folder = self.out_dir / "tensorboard"
        with _explain_os_error(folder):
            return SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def _close_tensorboard(self) -> None:
        assert self._tensorboard is not None
        with _explain_os_error(self.out_dir / "tensorboard"):
            self._tensorboard.close()

    def _add_scalars(self, group: str, fields: Mapping[str, float]) -> None:
        assert self._tensorboard is not None, "enter the MetricsLog before writing to it"
        with _explain_os_error(self.out_dir / "tensorboard"):
            for name, value in fields.items():
                if name != "step":
                    self._tensorboard.add_scalar(f"{group}/{name}", value, int(fields["step"]))


class _JsonLines:
    """A file of JSON objects, one a line, each with an integer `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_step = -1

    def require_absent(self) -> None:
        """Raise unless there is nothing in the file yet."""
        with _explain_os_error(self.path):
            holds_something = self.path.exists() and self.path.stat().st_size > 0
        if holds_something:
            raise ConfigError(
                "a new run needs a folder that holds no metrics of another run.",
                got=f"{self.path} exists",
                fix="continue that run with --resume, or choose another --out.",
            )

    def truncate_after(self, step: int) -> None:
        """Keep the lines up to `step`, in one atomic replacement of the file."""
        with _explain_os_error(self.path):
            if not self.path.exists():
                return
            before = self.path.read_bytes()
        lines = before.splitlines()
        kept: list[bytes] = []
        for number, line in enumerate(lines, start=1):
            line_step = _step_of(line)
            if line_step is None and number < len(lines):
                raise ConfigError(
                    "every line of a metrics file but the last must be a JSON object with an integer step.",
                    got=f"{self.path}, line {number}: {line[:80].decode(errors='replace')!r}",
                    fix="correct that line, or move the file away: the run then goes on with a new one.",
                )
            if line_step is not None and line_step <= step:
                kept.append(line)
                self.last_step = line_step
        after = b"".join(line + b"\n" for line in kept)
        if after != before:
            with _explain_os_error(self.path):
                _replace_file(self.path, after)

    def open(self) -> None:
        with _explain_os_error(self.path):
            # Unbuffered: a failed write leaves nothing behind that would fail again, or be lost, on closing.
            self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        with _explain_os_error(self.path):
            self._file.close()

    def append(self, fields: Mapping[str, float]) -> None:
        self.last_step = int(fields["step"])
        finite = {name: value if math.isfinite(value) else None for name, value in fields.items()}
        rest = json.dumps(finite, allow_nan=False).encode() + b"\n"
        with _explain_os_error(self.path):
            while rest:  # a raw write may take only a part
                rest = rest[self._file.write(rest) :]


def _step_of(line: bytes) -> int | None:
    """The `step` of a line, or None if the line is no whole JSON object with one."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    step = fields.get("step") if isinstance(fields, dict) else None
    return step if isinstance(step, int) else None


def _replace_file(path: Path, content: bytes) -> None:
    """Replace a file such that a crash leaves either the old content or the new."""
    replacement = path.with_name(path.name + ".tmp")
    with replacement.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(replacement, path)


@contextmanager
def _explain_os_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: a run must be able to write its metrics.",
            got=f"{type(error).__name__}: {error.strerror or error}",
            fix="free some disk space or make the folder writable and continue with --resume, or choose another --out.",
        ) from error
