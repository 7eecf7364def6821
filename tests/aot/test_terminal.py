"""A report in a terminal."""

import dataclasses
import io
import re

import pytest
from hypothesis import given, settings
from report_examples import huge, llama_8b_fits, llama_70b_out_of_memory, reports
from rich.console import Console

from shardtorch.aot._report import CompileReport
from shardtorch.aot._terminal import show


def shown(report: CompileReport, width: int = 80) -> str:
    out = io.StringIO()
    show(report, Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140, 220])
@pytest.mark.parametrize("report", [llama_8b_fits(), llama_70b_out_of_memory(), huge()], ids=["fits", "oom", "huge"])
def test_a_page_within_the_width(report: CompileReport, width: int) -> None:
    lines = shown(report, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 75


def test_headline() -> None:
    text = " ".join(shown(llama_8b_fits()).split())
    assert text.startswith("llama3-8b on v5p:4x4x4 (64 chips), mesh fsdp=64 fits: 84.3 GiB of 94.7 GiB")
    assert "predicted: 1.83 s per step, 4,488 tokens/s/chip" in text
    assert "MFU 53.3% (causal attention), 59.5% (full attention)" in text
    assert "libtpu 0.0.40" in text


@pytest.mark.parametrize("width", [80, 140])
def test_columns_of_a_collective_are_whole(width: int) -> None:
    report = llama_8b_fits()
    text = shown(dataclasses.replace(report, collectives=report.collectives[8:9]), width)
    expected = (
        "all-gather",
        "fsdp",
        "ICI",
        "4.00 GiB",
        "31.2 ms",
        "exposed",
        "embed",
        "llama.py:244",
        "annotate its output",
    )
    assert [part for part in expected if part not in " ".join(text.split())] == []


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("report", [llama_8b_fits(), huge()], ids=["fits", "huge"])
def test_last_columns_are_not_cut(report: CompileReport, width: int) -> None:
    text = shown(report, width)
    assert re.search(r"bf16\[32,1,32,8192,128\]", text)
    assert re.search(r"fusion\.104\S* matmul +32 +272 ms +14\.9 % +compute", text)


def test_largest_come_first() -> None:
    text = shown(llama_8b_fits(), 140)
    assert text.index("fusion.104 matmul") < text.index("custom-call.153 kernel")
    assert text.index("while.12 activation") < text.index("all-gather.31 activation")


def test_out_of_memory_says_so_and_predicts_nothing() -> None:
    text = shown(llama_70b_out_of_memory())
    assert "does not fit: 18.2 GiB over the limit of 15.7 GiB" in text
    assert "no predicted time" in text
    assert "per step" not in text


def test_many_warnings_are_counted() -> None:
    assert "and 76 more" in shown(huge())


@settings(max_examples=40)
@given(reports())
def test_names_are_text_and_never_markup(report: CompileReport) -> None:
    """Any names, even `[bold]` or control characters of a markup, are printed; none is an error."""
    assert "[/oops]" in shown(dataclasses.replace(report, title="[/oops]"))
