"""Where HBM goes, of real programs and failures that tests/aot/data keeps, and of a tiny step compiled here.

A sample is what libtpu 0.0.40 made of a step of a Llama: statistics or message, and its buffer assignment without the
fields that nobody reads.
"""

import base64
import json
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardtorch.aot._buffer_assignment import Program
from shardtorch.aot._memory import _gradients, advice_for_memory, memory_limit, memory_of, out_of_memory
from shardtorch.aot._report import Buffer, Memory
from shardtorch.engine import Argument, Engine, Lowered, Origin
from shardtorch.engine.libtpu import Compiled, OutOfMemory, compile_for
from shardtorch.mesh import Mesh, NamedSharding, P, SliceTopology

DATA = Path(__file__).parent / "data"
FITS = ["memory_fits_v5p", "memory_fits_v5e", "memory_fits_llama3_8b"]
OOM = ["memory_oom_state_v5e", "memory_oom_activations_v6e", "memory_oom_batch_v5e", "memory_oom_activations_v5p"]
TEMPORARY = ("activation", "gradient")


class Sample:
    """One file of tests/aot/data."""

    def __init__(self, name: str) -> None:
        with zipfile.ZipFile(DATA / f"{name}.zip") as archive:
            assignment = base64.b64encode(archive.read("buffer_assignment.pb")).decode()
            fields: dict[str, Any] = json.loads(archive.read("sample.json"))
        mesh = Mesh(fields["mesh"])
        self.topology = SliceTopology.parse(fields["topology"])
        self.kinds: Mapping[str, Any] = fields["kinds"]
        arguments = [
            Argument(name, tuple(shape), getattr(torch, dtype), _sharding(mesh, spec), result)
            for name, shape, dtype, spec, result in fields["arguments"]
        ]
        origins = tuple(Origin(*origin) for origin in fields["origins"])
        self.lowered = Lowered(b"", tuple(arguments), (), origins)
        self.statistics: dict[str, int] = fields["statistics"]
        self.message: str = fields["message"]
        self.assignment = assignment

    def memory(self) -> tuple[Memory, tuple[Buffer, ...]]:
        if self.statistics:
            compiled = Compiled(**({"text": "", "log": "", "buffer_assignment": self.assignment} | self.statistics))  # pyright: ignore[reportArgumentType]
            return memory_of(compiled, self.lowered, self.topology, self.kinds)
        return self.failure(self.assignment)

    def failure(self, assignment: str) -> tuple[Memory, tuple[Buffer, ...]]:
        failure = OutOfMemory(self.message, buffer_assignment=assignment, compile_s=1.0, libtpu_version="0.0.40")
        return out_of_memory(failure, self.lowered, self.topology, self.kinds)


def _sharding(mesh: Mesh, spec: list | None) -> NamedSharding | None:
    if spec is None:
        return None
    return NamedSharding(mesh, P(*(tuple(axes) if isinstance(axes, list) else axes for axes in spec)))


def shard_bytes(argument: Argument) -> int:
    if argument.sharding is None:
        return math.prod(argument.shape) * argument.dtype.itemsize
    return argument.sharding.bytes_per_device(argument.shape, argument.dtype.itemsize)


def assert_adds_up(memory: Memory, buffers: tuple[Buffer, ...]) -> None:
    by_kind = dict.fromkeys(memory.by_kind(), 0)
    for buffer in buffers:
        by_kind[buffer.kind] += buffer.bytes
    assert by_kind == memory.by_kind()
    listed = [buffer.bytes for buffer in buffers if not buffer.name.endswith(" smaller")]
    assert listed == sorted(listed, reverse=True)
    assert len(buffers) <= 106


@pytest.mark.parametrize("name", FITS)
def test_parts_are_what_the_executable_says(name: str):
    sample = Sample(name)
    memory, buffers = sample.memory()
    assert_adds_up(memory, buffers)
    lost = sum(buffer.bytes for buffer in buffers if buffer.name == "lost between buffers")
    assert memory.total - sample.statistics["code_bytes"] - lost == sample.statistics["peak_bytes"]
    arguments = memory.parameters + memory.optimizer_state + memory.batch
    results = sample.statistics["output_bytes"] - sample.statistics["alias_bytes"]
    assert abs(arguments - sample.statistics["argument_bytes"] - results) <= 512  # results may share with temporaries


@pytest.mark.parametrize("name", [*FITS, *OOM])
def test_state_takes_what_its_shards_take(name: str):
    sample = Sample(name)
    memory, buffers = sample.memory()
    sizes = {buffer.name: buffer.bytes for buffer in buffers if buffer.kind in ("parameter", "optimizer")}
    named = [argument for argument in sample.lowered.arguments if argument.name in sizes]
    assert len(named) > 20
    for argument in named:
        exact = shard_bytes(argument)
        assert exact <= sizes[argument.name] <= max(1.01 * exact, 512), argument
    parameters = sum(shard_bytes(a) for a in sample.lowered.arguments if sample.kinds.get(a.name) == "parameter")
    assert parameters <= memory.parameters <= 1.01 * parameters


@pytest.mark.parametrize("name", [*FITS, *OOM])
def test_large_values_have_an_origin(name: str):
    _, buffers = Sample(name).memory()
    large = [buffer for buffer in buffers if buffer.kind in TEMPORARY and buffer.bytes > 2**20 and buffer.shape]
    known = [buffer for buffer in large if buffer.origin.source or buffer.origin.module]
    assert len(large) > 5
    assert len(known) >= 0.95 * len(large), [buffer for buffer in large if buffer not in known]


def test_gradients_are_named_after_their_tensor():
    sample = Sample("memory_fits_v5p")
    _, buffers = sample.memory()
    shapes = {argument.name: argument.shape for argument in sample.lowered.arguments}
    gradients = [buffer for buffer in buffers if buffer.kind == "gradient" and not buffer.name.endswith(" smaller")]
    assert {"head.weight", "embed.weight", "layers.*.mlp.w_up.weight", "layers.*.attention.wq.weight"} <= {
        buffer.name for buffer in gradients
    }
    for buffer in gradients:
        assert sample.kinds[buffer.name] == "parameter"
        size = math.prod(int(dim) for dim in re.findall(r"\d+", buffer.shape.partition("[")[2]))
        assert math.prod(shapes[buffer.name]) % size == 0
        assert buffer.origin.phase != "update"


def test_gathered_weights_and_activations_are_no_gradients():
    """Though a gathered weight has the gradient's shape, and is on the way to it."""
    sample = Sample("memory_oom_activations_v6e")
    _, buffers = sample.memory()
    heads = [buffer for buffer in buffers if buffer.shape.startswith("bf16[128256,4096")]
    assert {buffer.kind for buffer in heads if buffer.name.startswith("all-gather")} == {"activation"}
    assert {buffer.kind for buffer in heads if buffer.name == "head.weight"} == {"gradient"}
    assert all(b.kind == "activation" for b in buffers if b.shape.startswith("bf16[4,8,8192,"))


def test_what_the_state_flows_into_is_no_gradient():
    sample = Sample("memory_fits_v5p")
    program = Program.parse(sample.assignment)
    gradients = _gradients(program, sample.lowered, sample.kinds)
    results = program.instructions[program.roots[program.entry]].operands
    updated = {results[a.result] for a in sample.lowered.arguments if a.result is not None and a.shape}
    assert gradients
    assert not updated & {instruction for instruction, _ in gradients}


@pytest.mark.parametrize("name", OOM)
def test_out_of_memory_adds_up_to_what_the_compiler_says(name: str):
    sample = Sample(name)
    memory, buffers = sample.memory()
    assert_adds_up(memory, buffers)
    assert memory.headroom < 0
    used, limit = (float(size) * 2**30 for size in re.findall(r"Used ([\d.]+)G of ([\d.]+)G hbm", sample.message)[0])
    assert abs(memory_limit(sample.topology) - limit) < 0.005 * 2**30 + 2**20
    if " arguments            0B" in sample.message:  # it gave up before it counted them
        used += memory.parameters + memory.optimizer_state + memory.batch
    assert abs(memory.total - used) < 0.02 * 2**30


@pytest.mark.parametrize("name", OOM)
def test_out_of_memory_by_the_message_alone(name: str):
    sample = Sample(name)
    whole, _ = sample.memory()
    memory, buffers = sample.failure("")
    assert_adds_up(memory, buffers)
    assert abs(memory.total - whole.total) < 0.01 * whole.total
    assert abs(memory.parameters - whole.parameters) < 0.01 * whole.parameters
    large = [buffer for buffer in buffers if buffer.kind == "activation" and buffer.shape]
    assert len(large) >= 10
    assert any(buffer.origin.source for buffer in large)


@pytest.mark.parametrize(
    ("topology", "gib"),
    [("v4:2x2x1", 30.5), ("v5e:2x4", 15.75), ("v5p:4x4x4", 95.74), ("v6e:16x16", 31.25), ("tpu7x:2x2x1", 189.5)],
)
def test_limit_is_of_a_chip(topology: str, gib: float):
    limit = memory_limit(SliceTopology.parse(topology))
    assert limit / 2**30 == pytest.approx(gib, abs=0.02)
    assert limit < SliceTopology.parse(topology).hbm_bytes * 1.02


def test_sizes_are_per_chip():
    sample = Sample("memory_fits_v5p")
    memory, _ = sample.memory()
    sample.topology = SliceTopology.parse("tpu7x:2x2x1")
    doubled, buffers = sample.memory()
    assert doubled.total == 2 * memory.total
    assert doubled.parameters == 2 * memory.parameters
    assert_adds_up(doubled, buffers)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("memory_oom_state_v5e", "parameters and optimizer state take 16.6 GiB"),
        ("memory_oom_activations_v6e", "what the layers keep takes"),
        ("memory_oom_batch_v5e", "other arguments and results of the step take 16.0 GiB"),
    ],
)
def test_advice_starts_with_what_dominates(name: str, first: str):
    assert advice_for_memory(*Sample(name).memory())[0].startswith(first)


def test_no_advice_when_much_is_left():
    assert advice_for_memory(*Sample("memory_fits_v5p").memory()) == ()


@pytest.mark.slow
def test_a_step_compiled_here(xla: Engine):
    from shardtorch.engine.libtpu._engine import LibtpuEngine

    topology = SliceTopology.parse("v5e:2x4")
    engine, mesh = LibtpuEngine(topology), Mesh(fsdp=8)

    def parameter(*shape: int) -> Tensor:
        return engine.zeros(shape, torch.float32, NamedSharding(mesh, P("fsdp", None))).requires_grad_()

    state = {"up": parameter(4096, 8192), "down": parameter(8192, 4096)}
    optimizer = torch.optim.SGD(state.values(), lr=0.1, momentum=0.9, foreach=False)
    for name, tensor in list(state.items()):
        moment = engine.zeros(tensor.shape, torch.float32, NamedSharding(mesh, P("fsdp", None)))
        optimizer.state[tensor]["momentum_buffer"] = state[f"{name}.momentum_buffer"] = moment

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (torch.relu(x @ state["up"]) @ state["down"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = engine.zeros((65536, 4096), torch.float32, NamedSharding(mesh, P("fsdp", None)))
    lowered = engine.lower(step, [x], state)
    compiled = compile_for(lowered, topology)
    assert isinstance(compiled, Compiled)
    kinds: dict[str, Any] = {name: "optimizer" if name.endswith("_buffer") else "parameter" for name in state}
    memory, buffers = memory_of(compiled, lowered, topology, kinds)
    assert_adds_up(memory, buffers)
    lost = sum(buffer.bytes for buffer in buffers if buffer.name == "lost between buffers")
    assert memory.total - compiled.code_bytes - lost == compiled.peak_bytes
    assert memory.parameters == memory.optimizer_state == 2 * 4096 * 8192 * 4 // 8
    assert memory.batch >= 65536 * 4096 * 4 // 8
    assert {buffer.name for buffer in buffers if buffer.kind == "gradient"} <= {"up", "down"}
