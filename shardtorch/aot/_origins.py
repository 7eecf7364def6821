"""Where an operation of a compiled program comes from in the user's code."""

from collections.abc import Sequence

from shardtorch.aot._hlo import Computation, Instruction, Module
from shardtorch.engine import Origin

_FAR = 4


class Origins:
    """Looks up origins by instruction.

    One that the compiler made itself has none of its own: it takes that of what it works on, or of what uses it.

    Args:
      module: The program.
      origins: What the numbers in its `op_name`s mean.
    """

    def __init__(self, module: Module, origins: Sequence[Origin]) -> None:
        self._module, self._origins = module, origins
        self._home: dict[str, Computation] = {}
        self._users: dict[str, list[Instruction]] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions:
                self._home[instruction.name] = computation
                for operand in instruction.operands:
                    self._users.setdefault(operand, []).append(instruction)
        self._found: dict[str, Origin] = {}

    def of(self, instruction: Instruction) -> Origin:
        """The origin of an instruction; an empty one if nothing near it has any."""
        name = instruction.name
        if name not in self._found:
            number = self._number(instruction)
            self._found[name] = self._origins[number] if number is not None else Origin()
        return self._found[name]

    def _number(self, instruction: Instruction) -> int | None:
        """Breadth first: itself, what is fused into it, then its users and operands, up to a few steps away."""
        seen, now = {instruction.name}, [instruction]
        for _ in range(_FAR):
            following: list[Instruction] = []
            for each in now:
                for part in [each, *self._module.inner(each)]:
                    if part.scope is not None and part.scope < len(self._origins):
                        return part.scope
                by_name = self._home[each.name].by_name if each.name in self._home else {}
                operands = [by_name[name] for name in each.operands if name in by_name]
                following += [*self._users.get(each.name, []), *operands]
            now = [each for each in following if each.name not in seen and not seen.add(each.name)]
        return None
