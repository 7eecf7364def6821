"""A scheduled HLO module, read from its text.

What is read is what this package needs: instructions in the order in which a computation runs them, their shapes with
memory spaces, which computations they call, and the compiler's notes on them.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

_BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
         "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f8e4m3fn": 8,
         "f8e5m2": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8, "f8e3m4": 8, "f4e2m1fn": 4, "f8e8m0fnu": 8, "f8e4m3fnuz": 8,
         "f8e5m2fnuz": 8, "token": 0, "opaque": 0}  # fmt: skip
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)((?::[^}]*)?)\})?")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(calls|condition|body|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SCOPE = re.compile(r"~(\d+)~")


@dataclass(frozen=True)
class Array:
    """One array of a shape."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int
    """0 is HBM; 1 is the vector memory on the chip; others are smaller."""

    @property
    def bytes(self) -> int:
        """Without padding."""
        return math.prod(self.dims) * _BITS[self.dtype] // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """Of the result; several for a tuple, which nested ones are part of."""
    operands: tuple[str, ...]
    arguments: str
    """What stands between the parentheses: operands, or the value of a constant."""
    attributes: str
    """The rest of the line."""

    @property
    def bytes(self) -> int:
        """Of the result, without padding."""
        return sum(array.bytes for array in self.arrays)

    @cached_property
    def called(self) -> Mapping[str, str]:
        """Computations that it runs, by role: `calls`, `condition`, `body`, `to_apply`, `branch 0`..."""
        found = dict(_CALLED.findall(self.attributes))
        if match := _BRANCHES.search(self.attributes):
            found |= {f"branch {n}": name for n, name in enumerate(_NAME.findall(match[1]))}
        return found

    @cached_property
    def backend_config(self) -> Mapping[str, Any]:
        """The compiler's notes."""
        _, found, rest = self.attributes.partition("backend_config=")
        if not found or not rest.startswith("{"):
            return {}
        config, _ = json.JSONDecoder().raw_decode(rest)
        return config

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's own estimate; None if it has none."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match[1]) if match else None

    @property
    def op_name(self) -> str:
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ""

    @property
    def scope(self) -> int | None:
        """The number of where it comes from, that `Lowered.origins` explains; None if it has none."""
        numbers = _SCOPE.findall(self.op_name)
        return int(numbers[-1]) if numbers else None


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]
    """In the order in which they run."""
    root: Instruction
    """What it returns, which need not be the last to run."""

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}


@dataclass(frozen=True)
class Module:
    """A scheduled module: the program of one device."""

    computations: Mapping[str, Computation]
    entry: Computation
    num_partitions: int
    """Devices that its own ids number: those of one slice."""

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Reads the text of a module, one instruction a line, as `HloModule.to_string` writes it.

        Raises:
          ValueError: It has no entry computation.
        """
        computations: dict[str, Computation] = {}
        entry = name = None
        lines: list[Instruction] = []
        root = -1
        for line in text.splitlines():
            if (match := _COMPUTATION.match(line)) is not None:
                name, lines, root = match[2], [], -1
                entry = name if match[1] else entry
            elif line.startswith("}") and name is not None:
                computations[name] = Computation(name, tuple(lines), lines[root])
                name = None
            elif name is not None and (match := _INSTRUCTION.match(line)) is not None:
                root = len(lines) if match[1] else root
                lines.append(_instruction(match[2], match[3]))
        if entry is None:
            raise ValueError("an HLO module has an entry computation")
        partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text)
        return cls(computations, computations[entry], int(partitions[1]) if partitions else 1)

    def trip_count(self, loop: Instruction) -> int | None:
        """How often a while loop runs: the constant that its condition compares with, over what its body adds to the
        counter; None if there is no such constant.

        The loops of a step count up from 0, by 1, or by 2 where the compiler unrolled a product that it overlaps with
        its own communication.
        """
        condition, body = self.computations[loop.called["condition"]], self.computations[loop.called["body"]]
        limit = max(_integers(self._all(condition)), default=None)
        if limit is None:
            return None
        counter = next((part for part in condition.instructions if part.opcode == "get-tuple-element"), None)
        index = None if counter is None else re.search(r"index=(\d+)", counter.attributes)
        if index is None or body.root.opcode != "tuple":
            return limit
        update = body.by_name[body.root.operands[int(index[1])]]
        addends = [body.by_name[name] for name in update.operands] + self.inner(update)
        step = max(_integers(addends), default=1) if update.opcode in ("add", "fusion") else 1
        return math.ceil(limit / step)

    def inner(self, instruction: Instruction) -> list[Instruction]:
        """Every instruction of what a fusion, or an asynchronous call, runs."""
        called = instruction.called.get("to_apply" if instruction.opcode == "call-start" else "calls")
        return self._all(self.computations[called]) if called else []

    def _all(self, computation: Computation) -> list[Instruction]:
        found = []
        for instruction in computation.instructions:
            found.append(instruction)
            if (called := instruction.called.get("calls")) is not None:
                found += self._all(self.computations[called])
        return found


def parse_shape(text: str) -> tuple[Array, ...]:
    """Every array of a shape, such as `(f32[2,3]{1,0:T(8,128)S(1)}, s32[])`."""
    arrays = []
    for dtype, dims, _, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        arrays.append(Array(dtype, tuple(map(int, filter(None, dims.split(",")))), int(space[1]) if space else 0))
    return tuple(arrays)


def _integers(instructions: Sequence[Instruction]) -> list[int]:
    """The positive integer constants among instructions."""
    return [
        int(instruction.arguments)
        for instruction in instructions
        if instruction.opcode == "constant" and re.fullmatch("[1-9]\\d*", instruction.arguments)
        and instruction.arrays[0].dtype in ("s32", "u32", "s64", "u64")
    ]  # fmt: skip


def _instruction(name: str, text: str) -> Instruction:
    shape, rest = _split_parenthesis(text) if text.startswith("(") else text.split(" ", 1)
    opcode, _, rest = rest.strip().partition("(")
    arguments, attributes = _split_parenthesis(f"({rest}")
    return Instruction(
        name,
        opcode,
        parse_shape(shape),
        tuple(_NAME.findall(arguments)),
        arguments[1:-1],
        attributes.lstrip(", "),
    )


def _split_parenthesis(text: str) -> tuple[str, str]:
    """The text up to the parenthesis that closes the first one, and the rest."""
    depth = 0
    for match in re.finditer(r'[()]|"(?:[^"\\]|\\.)*"', text):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return text[: match.end()], text[match.end() :]
    raise ValueError(f"unbalanced parentheses: {text[:200]}")


def replica_groups(instruction: Instruction) -> list[Sequence[int]] | None:
    """The devices of each group of a collective; None if all take part in one group.

    Reads lists, `{{0,1},{2,3}}`, and iotas, `[2,4]<=[4,2]T(1,0)`.
    """
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", instruction.attributes):
        return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1])]
    match = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.attributes)
    if match is None:
        return None
    shape = tuple(map(int, match[3].split(",")))
    ids = np.arange(math.prod(shape)).reshape(shape)
    if match[4]:
        ids = ids.transpose(tuple(map(int, match[4].split(","))))
    return list(ids.reshape(int(match[1]), int(match[2])).tolist())
