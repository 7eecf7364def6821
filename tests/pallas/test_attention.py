"""The flash attention kernel, interpreted on virtual CPU devices, against torch's own attention in float64."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_lies_as
from jax._src.lib import xla_client
from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.engine._reference import ReferenceEngine
from shardtorch.engine.libtpu._engine import LibtpuEngine
from shardtorch.errors import ConfigError, EngineUnavailableError, ShardingError
from shardtorch.fsdp import fully_shard
from shardtorch.mesh import Mesh, NamedSharding, P, SliceTopology
from shardtorch.models import LlamaConfig
from shardtorch.pallas import FlashAttention, why_not_flash
from shardtorch.run._model import build_model, fit_to_engine

HEAD_DIM = 128
FULL = Mesh(fsdp=8)
MIXED = Mesh(fsdp=4, tensor=2)
TWO_BATCH_AXES = Mesh(data=2, fsdp=2, tensor=2)
HEADS_FIRST = Mesh(tensor=2, fsdp=4)
SLICES = Mesh(data=4, fsdp=2, dcn={"data": 2})
SLICES_OF_THE_LAST_AXIS = Mesh(data=2, fsdp=4, dcn={"fsdp": 2})
"""Devices 0, 1, 4, 5 along its first row: not in row-major order."""
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
"""Largest error over the largest value: some roundings of float32; a few of bfloat16, which has 8 bits."""


def spec_of(mesh: Mesh) -> P:
    batch = tuple(axis for axis in mesh.axis_names if axis in ("data", "fsdp"))
    return P(batch, "tensor") if "tensor" in mesh.axis_names else P(batch)


def inputs(heads: int, kv_heads: int, seq: int, dtype: torch.dtype = torch.float32, batch: int = 8) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(heads + kv_heads + seq)
    return [
        torch.randn(batch, count, seq, HEAD_DIM, generator=generator).to(dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize(
    ("mesh", "heads", "kv_heads", "seq", "dtype"),
    [
        (MIXED, 4, 2, 128, torch.float32),
        (MIXED, 8, 2, 256, torch.bfloat16),
        (SLICES_OF_THE_LAST_AXIS, 4, 4, 128, torch.float32),
        pytest.param(FULL, 8, 1, 128, torch.float32, marks=pytest.mark.slow),
        pytest.param(FULL, 8, 1, 256, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(TWO_BATCH_AXES, 4, 4, 256, torch.float32, marks=pytest.mark.slow),
        pytest.param(TWO_BATCH_AXES, 4, 2, 384, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(HEADS_FIRST, 4, 2, 384, torch.float32, marks=pytest.mark.slow),
        pytest.param(HEADS_FIRST, 4, 4, 128, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(SLICES, 4, 2, 128, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(SLICES_OF_THE_LAST_AXIS, 8, 1, 256, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_attention_in_float64(xla: Engine, mesh: Mesh, heads: int, kv_heads: int, seq: int, dtype: torch.dtype):
    sharding = NamedSharding(mesh, spec_of(mesh))
    plain = inputs(heads, kv_heads, seq, dtype)
    placed = [xla.put(x, sharding, x.shape) for x in plain]
    step = xla.compile(lambda *xs: with_gradients(FlashAttention(mesh, sharding.spec, xla), *xs))
    found = step(*placed)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    wanted = with_gradients(exact, *(x.double() for x in plain))
    for name, x, want in zip(("out", "q", "k", "v"), found, wanted, strict=True):
        assert x.dtype == dtype
        assert_lies_as(x, sharding, x.cpu(), xla)  # it stays where it was
        error = (x.cpu().double() - want).abs().max() / want.abs().max()
        assert error < TOLERANCES[dtype], (name, error)


# In a model

CONFIG = LlamaConfig(
    vocab_size=64, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=128, mlp_dim=64, max_seq_len=128
)
TOKENS = torch.arange(8 * 128).reshape(8, 128) * 7 % 64


def loss_and_gradients(engine: Engine, mesh: Mesh, attention: str, *, remat: bool) -> list[Tensor]:
    """Of a Llama with stacked layers."""
    model, plan = build_model(CONFIG, mesh)
    fit_to_engine(model, mesh, engine, 128, attention)  # type: ignore
    fully_shard(model, mesh, plan=plan, init=model.initializers(), stack="layers", remat=remat, engine=engine)
    parameters = list(model.parameters())
    batch = NamedSharding(mesh, P(("fsdp",)))
    tokens = engine.put(TOKENS, batch, TOKENS.shape)

    def step(tokens: Tensor) -> list[Tensor]:
        loss = model(tokens, targets=tokens, loss_chunks=2)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return [x.cpu() for x in engine.compile(step)(tokens)]


@pytest.mark.slow
@pytest.mark.parametrize("remat", [True, False], ids=["remat", "save"])
def test_a_model_of_stacked_layers_equals_torch(xla: Engine, reference: Engine, remat: bool):
    found = loss_and_gradients(xla, MIXED, "flash", remat=remat)
    wanted = loss_and_gradients(reference, MIXED, "torch", remat=False)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
    assert all(bool(x.abs().max() > 1e-3) for x in wanted)


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")


def calls_by_place(text: str, called: str) -> list[str]:
    """The computation that each matching instruction stands in, without its number."""
    found, place = [], ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            place = match[1].rpartition(".")[0]
        elif re.search(called, line):
            found.append(place)
    return sorted(found)


def lowered_text(mesh: Mesh, *, remat: bool) -> str:
    engine = LibtpuEngine(SliceTopology.parse("v5e:2x4"))
    model, plan = build_model(CONFIG, mesh)
    fit_to_engine(model, mesh, engine, 128, "auto")
    fully_shard(model, mesh, plan=plan, init=model.initializers(), stack="layers", remat=remat, engine=engine)
    tokens = engine.put(TOKENS, NamedSharding(mesh, P(("fsdp",))), TOKENS.shape)

    def step(tokens: Tensor) -> list[Tensor]:
        loss = model(tokens, targets=tokens, loss_chunks=2)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    lowered = engine.lower(step, [tokens], dict(model.named_parameters()))
    return xla_client.XlaComputation(lowered.hlo).get_hlo_module().to_string()


@pytest.mark.parametrize("remat", [True, False], ids=["remat", "save"])
def test_how_often_a_layer_runs_the_kernels(xla: Engine, remat: bool):
    text = lowered_text(MIXED, remat=remat)
    forward = calls_by_place(text, r" call\(.*flash_attention_forward")
    assert forward == (["scan_backward_body", "scan_body"] if remat else ["scan_body"])
    assert calls_by_place(text, r" call\(.*flash_attention_backward") == ["scan_backward_body"]
    # Backward are two kernels of their own, for q and for k with v.
    assert text.count('custom_call_target="tpu_custom_call"') == len(forward) + 2
    xla.sync()


# What it does not take


@pytest.mark.parametrize(
    ("seq", "head_dim", "num_kv_heads", "mesh", "spec", "reason"),
    [
        (128, 128, 4, MIXED, P("fsdp", "tensor"), None),
        (8192, 256, 1, FULL, P("fsdp"), None),
        (384, 128, 1, Mesh(fsdp=8, tensor=1), P("fsdp", "tensor"), None),
        (128, 128, 4, Mesh(fsdp=8, context=1), P("fsdp", None, "context"), None),
        (100, 128, 4, FULL, P("fsdp"), "the sequence length, 100, is no multiple of 128"),
        (128, 64, 4, FULL, P("fsdp"), "head_dim, 64, is no multiple of 128"),
        (128, 192, 4, FULL, P("fsdp"), "head_dim, 192, is no multiple of 128"),
        (
            256, 128, 4, Mesh(fsdp=4, context=2), P("fsdp", None, "context"),
            "the sequence or head_dim is cut up, P('fsdp', None, 'context') on Mesh(fsdp=4, context=2)",
        ),
        (256, 256, 4, MIXED, P("fsdp", None, None, "tensor"), "the sequence or head_dim is cut up"),
        (128, 128, 1, MIXED, P("fsdp", "tensor"), "1 key heads can't be shared out evenly"),
        (128, 128, 6, Mesh(fsdp=2, tensor=4), P("fsdp", "tensor"), "6 key heads can't be shared out evenly"),
    ],
)  # fmt: skip
def test_why_not(seq: int, head_dim: int, num_kv_heads: int, mesh: Mesh, spec: P, reason: str | None):
    found = why_not_flash(seq, head_dim, num_kv_heads, mesh, spec)
    assert found == reason if reason is None else found is not None and found.startswith(reason)


LAW = "flash attention takes queries, keys and values of one length, a multiple of 128, one dtype, and whole heads"


@pytest.mark.parametrize(
    ("shapes", "mesh", "spec", "got"),
    [
        (((8, 4, 100, 128),) * 3, FULL, P("fsdp"), "the sequence length, 100, is no multiple of 128"),
        (((8, 4, 128, 64),) * 3, FULL, P("fsdp"), "head_dim, 64, is no multiple of 128"),
        (
            ((8, 4, 256, 128),) * 3,
            Mesh(fsdp=4, context=2),
            P("fsdp", None, "context"),
            "the sequence or head_dim is cut up",
        ),
        (((8, 4, 128, 128), (8, 1, 128, 128), (8, 1, 128, 128)), MIXED, P("fsdp", "tensor"), "1 key heads can't be"),
        (((8, 4, 128, 128), (8, 4, 256, 128), (8, 4, 256, 128)), FULL, P("fsdp"), r"k \(8, 4, 256, 128\)"),
        (((8, 4, 128, 128), (8, 4, 128, 128), (8, 2, 128, 128)), FULL, P("fsdp"), r"v \(8, 2, 128, 128\)"),
        (((8, 4, 128, 128), (8, 3, 128, 128), (8, 3, 128, 128)), FULL, P("fsdp"), r"k \(8, 3, 128, 128\)"),
    ],
)
def test_shapes_that_do_not_fit(xla: Engine, shapes, mesh: Mesh, spec: P, got: str):
    q, k, v = (torch.zeros(shape, device="xla") for shape in shapes)
    with pytest.raises(ShardingError, match=rf"{LAW}(.|\n)*got: .*{got}(.|\n)*CausalAttention in its place"):
        FlashAttention(mesh, spec, xla)(q, k, v)


def test_dtypes_and_devices_that_do_not_fit(xla: Engine):
    attend = FlashAttention(FULL, P("fsdp"), xla)
    q = torch.zeros(8, 2, 128, 128)
    with pytest.raises(
        ShardingError, match=r"tensors on the engine's device(.|\n)*got: argument 0: torch.float32 on cpu"
    ):
        attend(q, q, q)
    q = q.to("xla")
    with pytest.raises(ShardingError, match=rf"{LAW}(.|\n)*got: q .* torch.float32, k .* torch.bfloat16"):
        attend(q, q.bfloat16(), q.bfloat16())
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(ShardingError, match=rf"of float32, bfloat16, int32, bool(.|\n)*got: argument 0: {dtype}"):
            attend(*[q.to(dtype)] * 3)


def test_a_batch_that_the_mesh_does_not_divide(xla: Engine):
    q = torch.zeros(12, 2, 128, 128, device="xla")
    with pytest.raises(ShardingError, match=r"flash_attention_forward: argument 0: dim 0 has size 12, not divisible"):
        FlashAttention(FULL, P("fsdp"), xla)(q, q, q)


def test_the_reference_engine_has_no_kernels():
    q = torch.zeros(8, 2, 128, 128)
    with pytest.raises(EngineUnavailableError, match=r"no kernels(.|\n)*the kernel flash_attention_forward"):
        FlashAttention(FULL, P("fsdp"), ReferenceEngine())(q, q, q)


# What a run chooses


def build(mesh: Mesh, engine: Engine, how: str, seq_len: int = 128, **changes: int) -> tuple[str, set[str]]:
    """What `fit_to_engine` says, and the classes that attend in the layers."""
    model, _ = build_model(replace(CONFIG, **changes), mesh)
    said = fit_to_engine(model, mesh, engine, seq_len, how)  # type: ignore
    assert model.loss.in_order == engine.in_order
    layers: list[nn.Module] = list(model.layers)
    return said, {type(layer.attention.attend).__name__ for layer in layers}  # type: ignore


def test_auto_is_torch_on_cpu_and_the_kernel_on_tpus(xla: Engine):
    tpu = LibtpuEngine(SliceTopology.parse("v5e:2x4"))
    assert build(MIXED, xla, "auto") == ("torch's attention: kernels are for TPUs", {"CausalAttention"})
    assert build(MIXED, tpu, "auto") == ("the flash attention kernel", {"FlashAttention"})
    assert build(MIXED, tpu, "torch") == ("torch's attention, as asked", {"CausalAttention"})
    said, kinds = build(MIXED, tpu, "auto", head_dim=64)
    assert (said, kinds) == ("torch's attention, as head_dim, 64, is no multiple of 128", {"CausalAttention"})
    said, kinds = build(MIXED, tpu, "auto", num_kv_heads=1)
    assert said.startswith("torch's attention, as 1 key heads can't be shared out evenly")
    assert kinds == {"CausalAttention"}
    said, kinds = build(Mesh(fsdp=4, context=2), tpu, "auto", seq_len=256)
    assert said.startswith("torch's attention, as the sequence or head_dim is cut up")
    assert kinds == {"CausalAttention"}


def test_flash_that_is_asked_for_fits_or_is_an_error(xla: Engine):
    assert build(FULL, xla, "flash") == ("the flash attention kernel", {"FlashAttention"})
    with pytest.raises(ConfigError, match=r"must fit the model and the mesh(.|\n)*got: head_dim, 16, is no multiple"):
        build(FULL, xla, "flash", head_dim=16)
    with pytest.raises(
        ConfigError, match=r"got: the sequence length, 64, is no multiple(.|\n)*fix: use --attention auto"
    ):
        build(FULL, xla, "flash", seq_len=64)


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "context": 2}, {"tensor": 8}])
def test_the_loss_has_a_group_per_part_of_the_batch(axes: dict[str, int]):
    model, _ = build_model(CONFIG, Mesh(axes))
    assert model.loss.num_groups == (axes.get("data", 1) * axes.get("fsdp", 1), axes.get("context", 1))
