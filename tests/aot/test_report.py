"""What a report says of itself, and its JSON."""

import dataclasses
import json

import pytest
from hypothesis import given
from report_examples import llama_8b_fits, llama_70b_out_of_memory, reports

from shardtorch.aot._report import CompileReport
from shardtorch.errors import ConfigError


@given(reports())
def test_json_gives_the_report_back(report: CompileReport) -> None:
    assert CompileReport.from_json(report.to_json()) == report


@given(reports())
def test_parts_of_memory_add_up(report: CompileReport) -> None:
    memory = report.memory
    assert sum(memory.by_kind().values()) == memory.total == memory.limit - memory.headroom
    assert set(memory.by_kind()) >= {buffer.kind for buffer in report.buffers}


def test_json_begins_with_the_headline() -> None:
    report = llama_8b_fits()
    data = json.loads(report.to_json())
    assert list(data)[:4] == ["fits", "hbm_bytes_per_chip", "hbm_limit_bytes", "predicted_step_s"]
    assert data["hbm_bytes_per_chip"] == report.memory.total
    assert data["predicted_step_s"] == report.predicted_step_s
    assert data["collectives"][0]["axes"] == ["fsdp"]


def test_throughput_and_utilisation_follow_from_the_step_time() -> None:
    report = llama_8b_fits()
    assert report.step_time is not None
    step_s = report.step_time.compute + report.step_time.memory + report.step_time.communication
    assert report.tokens_per_s_per_chip == pytest.approx(8192 / step_s)
    assert report.mfu() == pytest.approx(2.858e16 / (64 * 459e12 * step_s))
    assert report.mfu(causal=False) == pytest.approx(3.19e16 / (64 * 459e12 * step_s))


def test_nothing_is_predicted_for_what_does_not_fit() -> None:
    report = llama_70b_out_of_memory()
    predicted = (report.predicted_step_s, report.tokens_per_s_per_chip, report.mfu(), report.mfu(causal=False))
    assert predicted == (None, None, None, None)


def test_verdict_says_by_how_much() -> None:
    fits, fails = llama_8b_fits(), llama_70b_out_of_memory()
    assert fits.verdict == "fits: 84.3 GiB of 94.7 GiB HBM per chip left"
    assert fails.verdict == "does not fit: 18.2 GiB over the limit of 15.7 GiB HBM per chip"
    assert "but not in one piece" in dataclasses.replace(fits, fits=False).verdict


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data.pop("mesh"), "KeyError: 'mesh'"),
        (lambda data: data["memory"].pop("code"), "KeyError: 'code'"),
        (lambda data: data.update(num_chips="64"), "'64' is not of type"),
        (lambda data: data.update(num_chips=True), "True is not of type"),
        (lambda data: data.update(advice="more chips"), "'more chips' is not of type"),
        (lambda data: data.update(memory=[]), r"\[\] is not of type"),
        (lambda data: data["buffers"][0].update(kind="cache"), "'cache' is none of 'parameter'"),
    ],
)
def test_other_json_is_an_error(change, what: str) -> None:
    data = json.loads(llama_8b_fits().to_json())
    change(data)
    with pytest.raises(ConfigError, match=rf"a report must be JSON.*\n  got: .*{what}"):
        CompileReport.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
def test_other_text_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="a report must be JSON"):
        CompileReport.from_json(text)
