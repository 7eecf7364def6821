"""Values that the partitioner could only reshard by making them whole on every device, as it says in its log."""

import re
from collections.abc import Sequence

from shardtorch.engine import Origin

_REPLICATED = re.compile(
    r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from sharding (\{[^}]*\}) to "
    r"(\{[^}]*\}).*?for HLO operation %?\S+ = (\S+?)(?:\{[\d,]*\})? .*?op_name=\"([^\"]*)\""
)
_SCOPE = re.compile(r"~(\d+)~")


def involuntary_replications(log: str, origins: Sequence[Origin]) -> tuple[str, ...]:
    """What the log says of them, in the user's names, each once.

    Args:
      log: What the compiler wrote.
      origins: What the numbers in an `op_name` mean.
    """
    found: dict[str, None] = {}
    for before, after, shape, op_name in _REPLICATED.findall(log):
        numbers = [int(number) for number in _SCOPE.findall(op_name) if int(number) < len(origins)]
        origin = origins[numbers[-1]] if numbers else Origin()
        where = " at ".join(filter(None, (origin.module, origin.source))) or "the step"
        found[
            f"{shape} in {where} is made whole on every device, to go from {before} to {after}: annotate it, with "
            "mark_sharding or as an input or output in the plan, so that one of its dims keeps its mesh axes on the "
            "way, or go through a sharding in between."
        ] = None
    return tuple(found)
