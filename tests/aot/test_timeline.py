"""The predicted step as a trace."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from report_examples import huge, llama_8b_fits, llama_70b_out_of_memory, reports

from shardtorch.aot import _timeline
from shardtorch.aot._report import CompileReport, Event
from shardtorch.aot._timeline import to_perfetto


def of_phase(report: CompileReport, phase: str) -> list[dict]:
    return [event for event in json.loads(to_perfetto(report))["traceEvents"] if event["ph"] == phase]


def starts_of(event: Event) -> list[float]:
    """When each iteration of an event starts."""
    starts = [event.start]
    for count, period in event.repeats:
        starts = [start + number * period for start in starts for number in range(count)]
    return starts


@given(reports())
def test_every_iteration_is_there_once_where_it_belongs(report: CompileReport) -> None:
    lanes = {e["tid"]: e["args"]["name"].split()[0] for e in of_phase(report, "M") if e["name"] == "thread_name"}
    drawn = sorted((lanes[e["tid"]], e["args"]["operation"], e["ts"]) for e in of_phase(report, "X"))
    expected = sorted((e.lane, e.name, round(start * 1e9) / 1000) for e in report.events for start in starts_of(e))
    assert [d[:2] for d in drawn] == [e[:2] for e in expected]
    assert [d[2] for d in drawn] == pytest.approx([e[2] for e in expected], abs=2e-3)


def test_of_very_many_iterations_the_first_two_and_the_last_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    report = replace(llama_8b_fits(), events=(Event("fusion", "core", "matmul", 1.0, 0.5, ((100, 2.0),)),))
    assert len(of_phase(report, "X")) == 100
    monkeypatch.setattr(_timeline, "_MAX_EVENTS", 99)
    assert [event["ts"] for event in of_phase(report, "X")] == [1e6, 3e6, 199e6]


@given(reports())
def test_no_two_events_of_a_thread_overlap(report: CompileReport) -> None:
    threads = defaultdict(list)
    for event in of_phase(report, "X"):
        threads[event["tid"]].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
    for spans in threads.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_chip_has_a_core_and_a_network_in_microseconds() -> None:
    report = llama_8b_fits()
    names = [e["args"]["name"] for e in of_phase(report, "M") if e["name"] in ("process_name", "thread_name")]
    assert names == [
        "predicted: llama3-8b on v5p:4x4x4, one of 64 chips",
        "core (predicted)",
        "network (predicted)",
        "network 2 (predicted)",  # the example's collectives overlap
        "network 3 (predicted)",
    ]
    first = of_phase(report, "X")[0]
    assert first["dur"] == pytest.approx(report.events[0].duration * 1e6, abs=1e-3)
    assert first["args"] == {
        "operation": "fusion.104",
        "predicted": True,
        "category": "matmul",
        "module": "layers.*.mlp.w_gate",
        "source": "models/llama.py:172",
        "phase": "backward",
    }


@pytest.mark.parametrize("report", [llama_8b_fits(), huge()], ids=["fits", "huge"])
def test_everything_is_marked_as_predicted(report: CompileReport) -> None:
    assert all("predicted" in event["cat"] and event["args"]["predicted"] for event in of_phase(report, "X"))
    assert json.loads(to_perfetto(report))["otherData"]["libtpu_version"] == "0.0.40"


def test_a_report_without_times_has_a_trace_without_events() -> None:
    assert of_phase(llama_70b_out_of_memory(), "X") == []
