"""Budgets hold at the figure itself, break one byte below it, and say what takes most."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import report_examples
from hypothesis import given

from shardtorch.aot import (
    CompileReport,
    assert_fits,
    assert_hbm,
    assert_no_collective,
    assert_num_compiles,
    assert_traffic,
)
from shardtorch.engine import Engine, _start
from shardtorch.errors import ConfigError, EngineUnavailableError

FITS, TOO_LARGE = report_examples.llama_8b_fits(), report_examples.llama_70b_out_of_memory()


@given(report_examples.reports())
def test_hbm_is_the_total(report: CompileReport):
    assert_hbm(report, report.memory.total)
    with pytest.raises(AssertionError, match="more than the budget"):
        assert_hbm(report, report.memory.total - 1)


def test_hbm_names_the_largest_buffers():
    with pytest.raises(AssertionError) as failed:
        assert_hbm(FITS, 2**30)
    first, *lines = str(failed.value).splitlines()
    assert first.startswith("llama3-8b takes ")
    assert [buffer.name in line for buffer, line in zip(FITS.buffers, lines, strict=False)] == [True] * 5
    assert "in layers.* at models/llama.py:248" in str(failed.value)


def test_fits():
    assert_fits(FITS)
    with pytest.raises(AssertionError, match=r"(?s)llama3-70b on v5e:4x8, data=2,.* does not fit: .* over.*optimizer "):
        assert_fits(TOO_LARGE)
    with pytest.raises(AssertionError, match="not in one piece"):
        assert_fits(replace(FITS, fits=False))


@given(report_examples.reports())
def test_traffic_is_every_call_of_every_collective(report: CompileReport):
    if report.step_time is None:
        with pytest.raises(AssertionError, match="was not compiled"):
            assert_traffic(report, 2**100)
        return
    for network in ("ICI", "DCN", None):
        total = sum(c.count * c.bytes for c in report.collectives if network in (c.network, None))
        assert_traffic(report, total, network=network)
        with pytest.raises(AssertionError, match="more than the budget"):
            assert_traffic(report, total - 1, network=network)


def test_traffic_along_an_axis():
    along_fsdp = sum(c.count * c.bytes for c in FITS.collectives)
    both = replace(FITS.collectives[0], axes=("data", "fsdp"))
    neither = replace(FITS.collectives[0], axes=("data",))
    report = replace(FITS, mesh="data=2,fsdp=32", collectives=(*FITS.collectives, both, neither))
    one = both.count * both.bytes
    assert_traffic(report, along_fsdp + one, axis="fsdp")
    assert_traffic(report, 2 * one, axis="data")
    with pytest.raises(AssertionError, match=r"along mesh axis 'data' move .*\n  .*64 x .* all-gather along data"):
        assert_traffic(report, 2 * one - 1, axis="data")
    unknown = replace(report, collectives=(replace(both, axes=()),))
    with pytest.raises(AssertionError, match="no product of axes"):
        assert_traffic(unknown, 0, axis="data")


def test_no_collective_along_an_axis():
    report = replace(FITS, mesh="fsdp=32,tensor=2 (DCN: fsdp=2)")
    assert_no_collective(report, "all-gather", "tensor")
    assert_no_collective(FITS, "collective-permute", "fsdp")
    with pytest.raises(
        AssertionError, match=r"32 all-to-all per step along mesh axis 'fsdp'.*\n.*layers\.\*\.attention at"
    ):
        assert_no_collective(FITS, "all-to-all", "fsdp")
    unknown = replace(report, collectives=(replace(FITS.collectives[0], axes=()),))
    with pytest.raises(AssertionError, match="no product of axes"):
        assert_no_collective(unknown, "all-gather", "tensor")
    with pytest.raises(AssertionError, match="its collectives aren't known"):
        assert_no_collective(TOO_LARGE, "all-gather", "tensor")


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (
            lambda: assert_no_collective(FITS, "all_gather", "fsdp"),
            r"a kind of collective that there is.\n  got: 'all_",
        ),  # type: ignore
        (
            lambda: assert_no_collective(FITS, "all-gather", "fdsp"),
            r"a mesh axis that there is.\n  got: 'fdsp'\n  fix: use",
        ),
        (lambda: assert_traffic(FITS, 0, axis="DCN"), r"a mesh axis that there is.\n  got: 'DCN'"),
        (lambda: assert_traffic(FITS, 0, network="ici"), r"a network that there is.\n  got: 'ici'"),  # type: ignore
    ],
)
def test_a_budget_over_something_that_is_not_there_would_always_hold(budget: Callable[[], None], message: str):
    with pytest.raises(ConfigError, match=message):
        budget()


def test_number_of_compiles(reference: Engine, monkeypatch: pytest.MonkeyPatch):
    counts = iter([5, 7, 5, 8])
    monkeypatch.setattr(reference, "num_compiles", lambda: next(counts), raising=False)
    monkeypatch.setattr(_start, "_running", reference)
    with assert_num_compiles(2):
        pass
    with (
        pytest.raises(AssertionError, match="3 graphs were compiled, more than the budget of 2"),
        assert_num_compiles(2),
    ):
        pass
    monkeypatch.setattr(_start, "_running", None)
    with pytest.raises(EngineUnavailableError), assert_num_compiles(2):
        pass
