"""Collectives over several slices, as libtpu compiles them: transfers that the host carries out.

A program for several slices is that of one slice, with as many partitions as the slice has devices. What it exchanges
with others is a `send` and a `recv` with attributes of the Megascale runtime. Seen with libtpu 0.0.40.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from shardtorch.aot._hlo import Instruction
from shardtorch.errors import ShardtorchError

_KINDS = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_FIRST_ID = 100_000
"""A device of slice 0 has this id and its number in the slice, one of slice 1 twice this, and so on."""


def collective_over_slices(recv: Instruction, slice_size: int) -> Instruction | None:
    """The collective that a `recv` ends, in the form of one within a slice and with our device ids; None for a transfer
    that does not go to another slice.

    Args:
      recv: The instruction.
      slice_size: Devices in a slice.

    Raises:
      ShardtorchError: It goes to another slice in a way that is not known here.
    """
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', recv.attributes)
    if kind is None:
        return None
    target = re.search(r'_xla_megascale_target="?([^"}]*\}[^"_]*)', recv.attributes)
    groups = [] if target is None else _groups(target[1], slice_size)
    if kind[1] not in _KINDS or not groups:
        raise ShardtorchError(
            "a transfer between slices must be of a kind that can be read.",
            got=f"{kind[1]} to {target[1] if target else 'nowhere'}",
            fix="use the libtpu that the extra 'plan' pins.",
        )
    listed = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    key = "source_target_pairs" if kind[1] == "ONE_TO_ONE" else "replica_groups"
    return replace(recv, opcode=_KINDS[kind[1]], operands=(), attributes=f"{key}={{{listed}}}, {recv.attributes}")


def _groups(target: str, slice_size: int) -> list[Sequence[int]]:
    """Device ids of each group: `{1,2}x{0:3}` are devices 0 to 3 of slices 1 and 2, each with its like; `{{100000,
    200000},...}` lists ids, and `{{100000->200000},...}` senders and receivers."""
    if product := re.match(r"\{([\d,]+)\}x\{(\d+):(\d+)\}", target):
        slices = [int(number) - 1 for number in product[1].split(",")]
        return [[n * slice_size + device for n in slices] for device in range(int(product[2]), int(product[3]) + 1)]
    listed = [re.findall(r"\d+", group) for group in re.findall(r"\{([\d,>-]+)\}", target)]
    return [[(int(id) // _FIRST_ID - 1) * slice_size + int(id) % _FIRST_ID for id in group] for group in listed]
