"""The predicted step as a trace that ui.perfetto.dev and chrome://tracing open."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from shardtorch.aot._report import CompileReport, Event

_PROCESS = 0
_LANES = ("core", "network")
_MAX_EVENTS = 60_000
"""With more, loops show their first and last iterations only."""


def to_perfetto(report: CompileReport) -> str:
    """The report's events in Chrome's trace-event format: one process for a chip that stands for all of them.

    Every iteration of a loop is drawn, unless there are very many; then the first two and the last. Its threads are
    `core` and `network`. Events of a lane that overlap, such as two collectives under way at once, go to threads
    `network 2` and so on: in one thread the format can hold nested events, but no others that overlap.

    Args:
      report: Without events the trace holds names only.

    Returns:
      JSON text. Times are in microseconds, to a nanosecond.

    The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    name = f"predicted: {report.title} on {report.topology}, one of {report.num_chips:,} chips"
    trace: list[dict[str, Any]] = [_named("process_name", 0, name=name)]
    thread = 0
    total = sum(math.prod(count for count, _ in event.repeats) for event in report.events)
    shown = [each for event in report.events for each in _iterations(event, whole=total <= _MAX_EVENTS)]
    for lane in _LANES:
        for number, events in enumerate(_threads(shown, lane), 1):
            thread += 1
            suffix = f" {number}" if number > 1 else ""
            trace.append(_named("thread_name", thread, name=f"{lane}{suffix} (predicted)"))
            trace.append(_named("thread_sort_index", thread, sort_index=thread))
            trace += [_complete(event, thread) for event in events]
    about = {
        "predicted": True,
        "title": report.title,
        "topology": report.topology,
        "mesh": report.mesh,
        "libtpu_version": report.libtpu_version,
        "predicted_step_s": report.predicted_step_s,
        "assumptions": list(report.assumptions),
    }
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": trace}, separators=(",", ":"))


def _named(kind: str, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": arguments}


def _complete(event: Event, thread: int) -> dict[str, Any]:
    start, end = _nanoseconds(event)
    arguments = {
        "predicted": True,
        "category": event.category,
        "module": event.origin.module,
        "source": event.origin.source,
        "phase": event.origin.phase,
    }
    return {
        "ph": "X",
        "name": event.origin.module or event.name,
        "cat": f"{event.category},predicted",
        "pid": _PROCESS,
        "tid": thread,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": {"operation": event.name, **{name: value for name, value in arguments.items() if value != ""}},
    }


def _iterations(event: Event, *, whole: bool) -> Iterator[Event]:
    """The event in every iteration of the loops around it; in the first two and the last if not `whole`."""
    if not event.repeats:
        yield event
        return
    (count, period), *inner = event.repeats
    numbers = range(count) if whole or count <= 3 else (0, 1, count - 1)
    for number in numbers:
        yield from _iterations(replace(event, start=event.start + number * period, repeats=tuple(inner)), whole=whole)


def _threads(shown: Iterable[Event], lane: str) -> list[list[Event]]:
    """The lane's events by start, in as few threads as hold them without overlap; one thread if there are none."""
    threads: list[list[Event]] = [[]]
    busy_until = [0]
    for event in sorted((event for event in shown if event.lane == lane), key=_nanoseconds):
        start, end = _nanoseconds(event)
        thread = next((number for number, busy in enumerate(busy_until) if busy <= start), len(threads))
        if thread == len(threads):
            threads.append([])
            busy_until.append(0)
        threads[thread].append(event)
        busy_until[thread] = end
    return threads


def _nanoseconds(event: Event) -> tuple[int, int]:
    """Start and end. Whole numbers, so that an event that starts when another ends does not overlap it by rounding."""
    return round(event.start * 1e9), round((event.start + event.duration) * 1e9)
