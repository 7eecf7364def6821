"""Budgets of a planned step as assertions, for tests of your own."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from shardtorch.aot._cost import COLLECTIVES
from shardtorch.aot._quantities import bytes_text
from shardtorch.aot._report import Buffer, Collective, CompileReport
from shardtorch.engine import Origin, running
from shardtorch.errors import ConfigError

_NUM_LINES = 5  # of contributors in a message


def assert_hbm(report: CompileReport, at_most_bytes: int) -> None:
    """The step takes at most this much HBM of a chip, in bytes.

    Raises:
      AssertionError: It takes more; the message has the largest buffers at the peak.
    """
    total = report.memory.total
    if total > at_most_bytes:
        raise AssertionError(
            f"{report.title} takes {bytes_text(total)} of HBM per chip, {bytes_text(total - at_most_bytes)} more than "
            f"the budget of {bytes_text(at_most_bytes)}.{_largest(map(_buffer, report.buffers))}"
        )


def assert_fits(report: CompileReport) -> None:
    """The step fits in the HBM of the chips that it was planned for.

    Raises:
      AssertionError: It does not; the message says by how much, with the largest buffers at the peak.
    """
    if not report.fits:
        raise AssertionError(
            f"{report.title} on {report.topology}, {report.mesh}, {report.verdict}."
            f"{_largest(map(_buffer, report.buffers))}"
        )


def assert_no_collective(
    report: CompileReport,
    kind: Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"],
    axis: str,
) -> None:
    """No collective of this kind runs along a mesh axis, nor along several axes of which it is one.

    Raises:
      AssertionError: Some does, or may: its groups are no product of axes. The message has those with most traffic.
      ConfigError: There is no such kind, or no such axis in the report's mesh.
    """
    _assert_compiled(report)
    _check_known("kind of collective", kind, COLLECTIVES)
    _check_known("mesh axis", axis, _axes(report))
    found = [c for c in report.collectives if c.kind == kind and (axis in c.axes or not c.axes)]
    if found:
        raise AssertionError(
            f"{report.title} has {sum(c.count for c in found)} {kind} per step along mesh axis {axis!r}, and should "
            f"have none.{_largest(map(_collective, found))}"
        )


def assert_traffic(
    report: CompileReport,
    at_most_bytes: int,
    *,
    network: Literal["ICI", "DCN"] | None = None,
    axis: str | None = None,
) -> None:
    """The payloads of a chip's collectives add up to at most this much per step, in bytes.

    A payload is what `Collective.bytes` says: the gathered result, or what is reduced.

    Args:
      report: What to look at.
      at_most_bytes: Over all calls of all collectives that count.
      network: Count those on this network only.
      axis: Count those along this mesh axis only, alone or with others.

    Raises:
      AssertionError: They add up to more; the message has those with most traffic.
      ConfigError: There is no such network, or no such axis in the report's mesh.
    """
    _assert_compiled(report)
    _check_known("network", network, (None, "ICI", "DCN"))
    _check_known("mesh axis", axis, (None, *_axes(report)))
    counted = [
        c for c in report.collectives if network in (None, c.network) and (axis is None or axis in c.axes or not c.axes)
    ]
    total = sum(map(_traffic, counted))
    if total > at_most_bytes:
        where = "".join([f" on {network}" if network else "", f" along mesh axis {axis!r}" if axis else ""])
        raise AssertionError(
            f"{report.title}: collectives{where} move {bytes_text(total)} per chip and step, "
            f"{bytes_text(total - at_most_bytes)} more than the budget of {bytes_text(at_most_bytes)}."
            f"{_largest(map(_collective, counted))}"
        )


def _axes(report: CompileReport) -> list[str]:
    return re.findall(r"(\w+)=", report.mesh.partition(" (")[0])


def _check_known(what: str, name: str | None, known: Sequence[str | None]) -> None:
    """A budget over something that isn't there would always hold."""
    if name not in known:
        raise ConfigError(
            f"a budget must be over a {what} that there is.",
            got=repr(name),
            fix=f"use one of {', '.join(map(repr, known))}.",
        )


@contextmanager
def assert_num_compiles(at_most: int) -> Iterator[None]:
    """What runs inside compiles at most this many graphs, on the engine that is running.

    Raises:
      AssertionError: It compiles more.
      EngineUnavailableError: No engine is running.
    """
    engine = running()
    before = engine.num_compiles()
    yield
    compiled = engine.num_compiles() - before
    if compiled > at_most:
        raise AssertionError(
            f"{compiled} graphs were compiled, more than the budget of {at_most}. A graph is compiled anew for every "
            "new shape, and for every new Python number in it that should be a tensor."
        )


def _assert_compiled(report: CompileReport) -> None:
    """A report without a program has no collectives, which must not pass for none."""
    if report.step_time is None:
        raise AssertionError(f"{report.title} was not compiled, so its collectives aren't known: it {report.verdict}.")


def _traffic(collective: Collective) -> int:
    return collective.count * collective.bytes


def _largest(contributors: Iterable[tuple[int, str]]) -> str:
    """Lines for the largest of some bytes and what they are."""
    largest = sorted(contributors, key=lambda contributor: -contributor[0])[:_NUM_LINES]
    return "".join(f"\n  {bytes_text(num_bytes)}: {text}" for num_bytes, text in largest)


def _buffer(buffer: Buffer) -> tuple[int, str]:
    return buffer.bytes, f"{buffer.kind} {buffer.name} {buffer.shape}{_place(buffer.origin)}"


def _collective(collective: Collective) -> tuple[int, str]:
    calls = f"{collective.count} x {bytes_text(collective.bytes)} {collective.kind}"
    axes = ", ".join(collective.axes) or "no product of axes"
    return _traffic(collective), f"{calls} along {axes} ({collective.network}){_place(collective.origin)}"


def _place(origin: Origin) -> str:
    found = [word for word in (origin.module, origin.source) if word]
    return f", in {' at '.join(found)}" if found else ""
