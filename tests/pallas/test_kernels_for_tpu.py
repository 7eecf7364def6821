"""The flash attention kernels, forward and backward, as libtpu compiles them for slices that aren't here."""

import re

import pytest
import torch
from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.engine.libtpu import Compiled, compile_for
from shardtorch.engine.libtpu._engine import LibtpuEngine
from shardtorch.mesh import Mesh, NamedSharding, P, SliceTopology
from shardtorch.models._llama import CausalAttention
from shardtorch.pallas import FlashAttention

F32, BF16 = torch.float32, torch.bfloat16
SLICES = {"v4": "2x2x1", "v5e": "2x4", "v5p": "2x2x2", "v6e": "2x4", "tpu7x": "2x2x1"}
"""Of 8 devices: a v4 or tpu7x chip is two."""
FSDP = Mesh(fsdp=4, tensor=2)
DATA = Mesh(data=2, fsdp=2, tensor=2)
HEADS_FIRST = Mesh(tensor=2, fsdp=4)
WIDE = Mesh(fsdp=2, tensor=4)
DATA_OVER_DCN = Mesh(data=2, fsdp=4, tensor=2, dcn={"data": 2})
FSDP_OVER_DCN = Mesh(fsdp=8, tensor=2, dcn={"fsdp": 2})
TENSOR_OVER_DCN = Mesh(tensor=4, fsdp=4, dcn={"tensor": 2})

QUERY_BYTES = 2**27
"""Of the queries on a device, about: as much as the VMEM of any generation. What lies there as a whole needs no buffers
there, so that small tensors leave the kernels room for blocks that are too large."""

# Every generation with both dtypes, and both sizes of heads in bfloat16; sequences that are cut into the largest blocks
# where most VMEM is needed.
CASES = [
    ("v4", F32, 128, FSDP, (8, 4), 4096),
    ("v4", F32, 256, DATA, (4, 2), 8192),
    ("v4", BF16, 128, WIDE, (8, 4), 2048),
    ("v4", BF16, 256, HEADS_FIRST, (4, 4), 2048),
    ("v5e", F32, 256, HEADS_FIRST, (8, 4), 2048),
    ("v5e", BF16, 128, FSDP, (4, 2), 8192),
    ("v5e", BF16, 256, WIDE, (8, 8), 4096),
    ("v5p", F32, 128, HEADS_FIRST, (4, 4), 1024),
    ("v5p", BF16, 128, DATA, (16, 2), 1024),
    ("v5p", BF16, 256, FSDP, (8, 2), 8192),
    ("v6e", F32, 256, FSDP, (4, 4), 128),
    ("v6e", BF16, 128, HEADS_FIRST, (8, 2), 4096),
    ("v6e", BF16, 256, DATA, (8, 4), 512),
    ("tpu7x", F32, 128, FSDP, (4, 2), 640),
    ("tpu7x", BF16, 128, HEADS_FIRST, (4, 4), 1024),
    ("tpu7x", BF16, 256, WIDE, (8, 4), 768),
]
OVER_DCN = [
    ("2 x v5e:2x4", BF16, 128, DATA_OVER_DCN, (8, 4), 384),
    ("2 x v5p:2x2x2", F32, 256, FSDP_OVER_DCN, (4, 2), 1024),
    ("2 x v6e:2x4", BF16, 128, TENSOR_OVER_DCN, (8, 4), 256),
]


def compiled_step(
    topology: SliceTopology,
    flash: bool,
    dtype: torch.dtype,
    head_dim: int,
    mesh: Mesh,
    heads: tuple[int, int],
    seq: int,
) -> tuple[Compiled, int]:
    """A step that leaves the output and the gradients of q, k and v where they came from, and their local bytes."""
    topology.check(mesh)
    engine = LibtpuEngine(topology)
    batch_axes = tuple(axis for axis in mesh.axis_names if axis != "tensor")
    sharding = NamedSharding(mesh, P(batch_axes, "tensor"))
    attend: nn.Module = FlashAttention(mesh, sharding.spec, engine) if flash else CausalAttention()
    num_heads, num_kv_heads = heads
    counts = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads, "grad": num_heads}
    local_bytes_per_row = num_heads // mesh.shape["tensor"] * seq * head_dim * dtype.itemsize
    batch = mesh.axis_size(batch_axes) * (QUERY_BYTES // local_bytes_per_row)
    shapes = {name: (batch, count, seq, head_dim) for name, count in counts.items()}
    state = {name: engine.zeros(shape, dtype, sharding) for name, shape in shapes.items()}

    def step() -> None:
        leaves = [state[name].detach().clone().requires_grad_() for name in "qkv"]
        out = attend(*leaves)
        assert isinstance(out, Tensor)
        for name, grad in zip("qkv", torch.autograd.grad(out, leaves, state["grad"]), strict=True):
            state[name].copy_(grad)
        state["grad"].copy_(out.detach())

    compiled = compile_for(engine.lower(step, [], state), topology)
    assert isinstance(compiled, Compiled), compiled.message
    return compiled, sum(sharding.bytes_per_device(shape, dtype.itemsize) for shape in shapes.values())


def kernels(compiled: Compiled) -> list[str]:
    """Which kernels the program calls, in order of their names."""
    calls = [line for line in compiled.text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    names = [re.search(r"splash_mha_(fwd|dkv|dq)_", line) for line in calls]
    return sorted(name[1] if name else "another" for name in names)


def square_values(compiled: Compiled, size: int) -> set[str]:
    """The shapes in a program that have two dims of a size."""
    shapes = re.findall(r"\b([a-z]+\d+|pred)\[([\d,]+)\]", compiled.text)
    return {f"{dtype}[{dims}]" for dtype, dims in shapes if dims.split(",").count(str(size)) > 1}


def num_collectives(compiled: Compiled) -> int:
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return len(re.findall(rf" (?:{kinds})(?:-start)?\(", compiled.text))


def assert_compiles(
    topology: str, dtype: torch.dtype, head_dim: int, mesh: Mesh, heads: tuple[int, int], seq: int
) -> None:
    """Into the three kernels on local pieces, and no scores."""
    compiled, state_bytes = compiled_step(SliceTopology.parse(topology), True, dtype, head_dim, mesh, heads, seq)
    assert kernels(compiled) == ["dkv", "dq", "fwd"]
    assert num_collectives(compiled) == 0
    assert compiled.alias_bytes >= state_bytes  # the step leaves results where their tensors were, and in pieces
    if seq > 128:  # where any block of a kernel's work has two dims of 128
        assert square_values(compiled, seq) == set()


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")


@pytest.mark.slow
@pytest.mark.parametrize(("generation", "dtype", "head_dim", "mesh", "heads", "seq"), CASES, ids=name_of)
def test_every_generation_compiles_the_kernels(
    xla: Engine, generation: str, dtype: torch.dtype, head_dim: int, mesh: Mesh, heads: tuple[int, int], seq: int
):
    assert_compiles(f"{generation}:{SLICES[generation]}", dtype, head_dim, mesh, heads, seq)
    xla.sync()  # which ends the process if anything of a trace is left


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "dtype", "head_dim", "mesh", "heads", "seq"), OVER_DCN, ids=name_of)
def test_the_kernels_compile_for_two_slices(
    xla: Engine, topology: str, dtype: torch.dtype, head_dim: int, mesh: Mesh, heads: tuple[int, int], seq: int
):
    assert_compiles(topology, dtype, head_dim, mesh, heads, seq)
    xla.sync()


@pytest.mark.slow
def test_torchs_attention_holds_the_scores(xla: Engine):
    compiled, _ = compiled_step(SliceTopology.parse("v5e:2x4"), False, F32, 128, FSDP, (4, 2), 512)
    assert kernels(compiled) == []
    assert square_values(compiled, 512)  # what the other tests look for
    xla.sync()


def test_the_cases_cover_what_they_should():
    kinds = {case[:3] for case in CASES}
    assert kinds >= {(generation, BF16, head_dim) for generation in SLICES for head_dim in (128, 256)}
    assert {(generation, dtype) for generation, dtype, _ in kinds} == {(g, d) for g in SLICES for d in (F32, BF16)}
    assert {(dtype, head_dim) for _, dtype, head_dim in kinds} == {(d, h) for d in (F32, BF16) for h in (128, 256)}
    assert {mesh for _, _, _, mesh, _, _ in CASES} == {FSDP, DATA, HEADS_FIRST, WIDE}
    assert {128, 8192} <= {seq for *_, seq in CASES}
