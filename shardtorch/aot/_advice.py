"""What would make a step faster, from what its report says."""

from shardtorch.aot._quantities import seconds_text
from shardtorch.aot._report import CompileReport

_MUCH = 0.1
"""A share of the step that is worth a word."""


def time_advice(report: CompileReport) -> tuple[str, ...]:
    """Advice in the order of what it would bring, in predicted seconds."""
    time = report.step_time
    if time is None:
        return ()
    found: list[tuple[float, str]] = []
    whole = f"{seconds_text(time.total)} (predicted)"
    for collective in report.collectives:
        if collective.warning and collective.exposed_seconds > 0.01 * time.total:
            found.append((collective.exposed_seconds, collective.warning))
    by_axes: dict[tuple[str, ...], float] = {}
    for collective in report.collectives:
        by_axes[collective.axes] = by_axes.get(collective.axes, 0.0) + collective.exposed_seconds
    for axes, seconds in by_axes.items():
        if seconds > _MUCH * time.total:
            names = " x ".join(axes) or "groups that are no mesh axis"
            found.append(
                (
                    seconds,
                    f"collectives over {names} take {seconds_text(seconds)} of {whole} in which nothing else runs: "
                    "give each chip more sequences, make that axis smaller, or another one larger.",
                )
            )
    if time.memory > 2 * _MUCH * time.total:
        found.append(
            (
                time.memory - _MUCH * time.total,
                f"HBM's bandwidth limits {seconds_text(time.memory)} of {whole}: see the operations that are bound by "
                "memory.",
            )
        )
    return tuple(text for _, text in sorted(found, key=lambda pair: -pair[0]))
