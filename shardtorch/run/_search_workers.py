"""Compilations in processes of their own: a few at a time, until a deadline, and none that outlives the search."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardtorch.aot import CompileReport
from shardtorch.config import PlanConfig, typed_settings
from shardtorch.errors import ShardtorchError
from shardtorch.run._search_space import Candidate

Compile = Callable[[PlanConfig], CompileReport]
"""A function of a module, which a process can import by its name."""

_MAX_RUNNING = 2
_WORKER_BYTES = 6 * 2**30
"""Memory of this machine that planning a step may take: a step of 8B took up to 5 GiB."""
_POLL_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """What became of a configuration."""

    candidate: Candidate
    report: CompileReport | None
    reason: str = ""
    """Why there is no report, in words."""
    seconds: float = 0.0
    """How long it took, with starting its process."""


@dataclass
class Exploration:
    """How far a search is."""

    queue: deque[Candidate]
    """Not begun, best first."""
    deadline: float
    """By `time.monotonic`."""
    running: list["Worker"] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    """In the order in which they came."""
    num_hopeless: int = 0
    """Left out because they need no less than one that did not fit."""
    interrupted: bool = False

    @property
    def plans(self) -> list[Outcome]:
        """Those that were compiled."""
        return [outcome for outcome in self.outcomes if outcome.report is not None]


class Worker:
    """A process that compiles one configuration. It ends when this process does, however that ends."""

    def __init__(self, candidate: Candidate, config: PlanConfig, compile: Compile, folder: Path) -> None:
        self.candidate = candidate
        self._started = time.monotonic()
        self._result = folder / f"{id(self)}-{self._started}.json"
        self._messages = self._result.with_suffix(".txt")
        with self._messages.open("wb") as messages:
            # A session of its own, so that Ctrl-C comes to the search alone, which then ends its workers.
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from shardtorch.run._search_workers import work; work()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=messages,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # if it has ended already, `outcome` says how
            task = [compile.__module__, compile.__qualname__, asdict(candidate.applied_to(config)), self._result]
            self._process.stdin.write(json.dumps(task, default=str).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def resident_bytes(self) -> int:
        """Memory that it takes now; 0 if it has ended."""
        try:
            return int(Path(f"/proc/{self.process_id}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def outcome(self) -> Outcome | None:
        """What came of it; None while it is running."""
        code = self._process.poll()
        if code is None:
            return None
        seconds = time.monotonic() - self._started
        report = CompileReport.from_json(self._result.read_text()) if code == 0 else None
        reason = "" if report is not None else self._reason(code)
        self.end()
        return Outcome(self.candidate, report, reason, seconds)

    def end(self) -> None:
        """Ends the process, if it is running, and waits until it has."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died before it had read everything
            self._process.stdin.close()

    def _reason(self, code: int) -> str:
        lines = [line for line in self._messages.read_text(errors="replace").splitlines() if line.strip()]
        if code < 0 and not lines:
            return f"its process was ended by signal {-code}, as for lack of memory on this machine"
        return lines[-1].strip() if lines else f"its process ended with code {code}"


def explore(
    candidates: Sequence[Candidate],
    config: PlanConfig,
    compile: Compile,
    deadline: float,
    on_change: Callable[[Exploration], None],
) -> Exploration:
    """Compiles configurations, first ones first, until all are done, the deadline comes or Ctrl-C.

    Args:
      candidates: What to compile.
      config: Everything else that they share.
      compile: What a worker calls; whatever it raises is an outcome.
      deadline: By `time.monotonic`. What is running then is ended.
      on_change: Called ten times a second, and after the last change. It may move the deadline.

    Returns:
      What was found; no process is left running.
    """
    search = Exploration(deque(candidates), deadline)
    with tempfile.TemporaryDirectory() as folder:
        try:
            while (search.queue or search.running) and time.monotonic() < search.deadline:
                while search.queue and _has_room(search.running):
                    candidate = search.queue.popleft()
                    if _is_hopeless(candidate, search.plans):
                        search.num_hopeless += 1
                    else:
                        search.running.append(Worker(candidate, config, compile, Path(folder)))
                on_change(search)
                time.sleep(_POLL_S)
                for worker in list(search.running):
                    if (outcome := worker.outcome()) is not None:
                        search.running.remove(worker)
                        search.outcomes.append(outcome)
        except KeyboardInterrupt:
            search.interrupted = True
        finally:
            for worker in search.running:
                worker.end()
        stopped = "interrupted" if search.interrupted else "stopped at the end of the time"
        search.outcomes += [Outcome(worker.candidate, None, stopped) for worker in search.running]
        search.running.clear()
    on_change(search)
    return search


def work() -> None:
    """The program of a worker: reads a function's name, its argument and a path from standard input; writes the
    result."""
    module, name, settings, path = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = PlanConfig(**typed_settings(PlanConfig, settings, "standard input"))
    try:
        report: CompileReport = getattr(importlib.import_module(module), name)(config)
    except ShardtorchError as error:
        print(f"{type(error).__name__}: {error.law} {error.got}", file=sys.stderr)
        sys.exit(2)
    Path(path).write_text(report.to_json())


def _end_with_parent() -> None:
    while os.read(0, 2**16):  # ends when the other side of standard input is closed, if only by the kernel
        pass
    os._exit(1)


def _has_room(running: Sequence[Worker]) -> bool:
    """Whether another worker can run, if all grow as large as one may. One always can."""
    if not running:
        return True
    free = _free_bytes()
    taken = sum(worker.resident_bytes() for worker in running)
    return len(running) < _MAX_RUNNING and free + taken >= (len(running) + 1) * _WORKER_BYTES


def _free_bytes() -> int:
    """Memory of this machine that programs can still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:"))


def _is_hopeless(candidate: Candidate, plans: Sequence[Outcome]) -> bool:
    """Whether it needs no less memory than one that did not fit."""
    too_large = (o.candidate for o in plans if o.report is not None and not o.report.fits)
    return any(candidate.needs_no_less_than(other) for other in too_large)
