"""The collectives of a compiled program, and which of them nobody asked for."""

from shardtorch.aot._origins import Origins
from shardtorch.aot._report import Collective
from shardtorch.aot._schedule import NetworkUse, Schedule
from shardtorch.engine import Origin

_MOVES = ("all-gather", "all-to-all", "collective-permute")
"""Kinds that change where a value lies. A sum over devices, in contrast, is part of what was computed."""


def collectives_of(
    schedule: Schedule, origins: Origins, efficiency: float, devices_per_chip: int
) -> tuple[Collective, ...]:
    """Every collective of a step, those that take longest first; alike ones of one origin are one entry."""
    alike: dict[tuple, list[NetworkUse]] = {}
    for use in schedule.network.values():
        origin = origins.of(use.instruction)
        key = (use.kind, use.route.axes, use.route.num_slices > 1, use.bytes, origin, _warning(use, origin))
        alike.setdefault(key, []).append(use)
    found = [
        Collective(
            kind=kind,
            name=uses[0].instruction.name,
            axes=axes,
            network="DCN" if crosses else "ICI",
            group_size=uses[0].route.group_size,
            count=sum(use.count for use in uses),
            bytes=num_bytes * devices_per_chip,
            seconds=sum(use.seconds for use in uses) / efficiency,
            exposed_seconds=sum(use.exposed for use in uses) / efficiency,
            origin=origin,
            warning=warning,
        )
        for (kind, axes, crosses, num_bytes, origin, warning), uses in alike.items()
    ]
    return tuple(sorted(found, key=lambda collective: -collective.seconds))


def _warning(use: NetworkUse, origin: Origin) -> str:
    """Whether the partitioner moved a value on its own: the operation that a move belongs to is no annotation."""
    operation = use.instruction.op_name.rpartition("/")[2]
    if use.kind not in _MOVES or not operation.startswith("aten__") or _is_windowed(use):
        return ""
    what = operation.removeprefix("aten__")
    where = " at ".join(filter(None, (origin.module, origin.source))) or "the step"
    return (
        f"the partitioner seems to move a value between devices for {what!r} in {where} on its own: "
        f"annotate what goes into it with mark_sharding, or its module's input or output in the plan."
    )


def _is_windowed(use: NetworkUse) -> bool:
    """Whether a permute is a step of a matrix product that the compiler overlaps with its own communication."""
    return use.kind == "collective-permute" and use.instruction.op_name.rpartition("/")[2] in (
        "aten__einsum",
        "aten__mm",
        "aten__matmul",
        "aten__bmm",
    )
