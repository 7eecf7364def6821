"""What is planned is what is trained: a lowered step against the graph that 8 virtual devices run."""

import base64
import re

import pytest
import torch
import torch_xla
from jax._src.lib import xla_client
from torch import Tensor

from shardtorch.engine import Engine, Kernel, Lowered
from shardtorch.engine._splash import SplashForward
from shardtorch.engine.libtpu import graph_text
from shardtorch.engine.libtpu._engine import LibtpuEngine
from shardtorch.engine.torch_xla._annotate import _reported
from shardtorch.engine.torch_xla._ops import PartitionedOps
from shardtorch.errors import EngineUnavailableError, ShardingError, ShardtorchError
from shardtorch.fsdp import fully_shard
from shardtorch.mesh import Mesh, NamedSharding, P, SliceTopology
from shardtorch.models import preset
from shardtorch.run._model import batch_spec, build_model
from shardtorch.train import adamw, make_step

XLAC = torch_xla._XLAC
TOPOLOGY = SliceTopology.parse("v5e:2x4")


def build(mesh: Mesh, engine: Engine, *, remat: bool):
    """A step of llama-tiny, its state by name, and its arguments."""
    model, plan = build_model(preset("llama-tiny"), mesh)
    fully_shard(
        model, mesh, plan=plan, init=model.initializers(), stack="layers", remat=remat, engine=engine,
        compute_dtype=torch.bfloat16,
    )  # fmt: skip
    optimizer = adamw(model)
    step = make_step(model, optimizer, clip_norm=1.0, loss_chunks=2)
    state: dict[str, Tensor] = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        state |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    tokens = NamedSharding(mesh, batch_spec(mesh))
    arguments = [
        engine.put(torch.zeros(8, 64, dtype=torch.int64), tokens, (8, 64)),
        engine.put(torch.zeros(8, 64, dtype=torch.int64), tokens, (8, 64)),
        engine.put(torch.tensor(1e-3), NamedSharding(mesh, P()), ()),
    ]
    return model, step, state, arguments


def text_of(hlo: bytes) -> tuple[str, dict[int, str]]:
    """A module without names and metadata, and the shardings of its parameters, which a planned one has beside it.

    torch_xla also repeats `{replicated}` on some operations over a replicated parameter; there it says nothing.
    """
    options = xla_client._xla.HloPrintOptions.canonical()
    options.print_metadata = False
    options.canonicalize_instruction_names = True
    options.print_ids = False
    text = xla_client.XlaComputation(hlo).get_hlo_module().to_string(options)
    shardings: dict[int, str] = {}
    for number, found in re.findall(r"parameter\((\d+)\), sharding=(\{.*\})", text[text.index("ENTRY") :]):
        shardings.setdefault(int(number), found)  # computations that are printed within it come later
    text = re.sub(r"(parameter\(\d+\)), sharding=\{.*\}", r"\1", text)
    return re.sub(r", sharding=\{replicated\}$", "", text, flags=re.MULTILINE), shardings


def planned(mesh: Mesh, *, remat: bool) -> Lowered:
    engine = LibtpuEngine(TOPOLOGY)
    model, step, state, arguments = build(mesh, engine, remat=remat)
    return engine.lower(step, arguments, state, {m: n for n, m in model.named_modules()})


@pytest.mark.slow
@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("axes", [{"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_the_planned_graph_is_the_trained_graph(xla: Engine, axes: dict[str, int], remat: bool):
    mesh = Mesh(axes)
    lowered = planned(mesh, remat=remat)
    _, step, state, arguments = build(mesh, xla, remat=remat)
    xla.sync()
    with PartitionedOps():
        out = step(*arguments)
    changed = [name for name, x in state.items() if XLAC._check_tensor_need_materialization([x])[0]]
    results = [out, *(state[name] for name in changed)]
    trained = XLAC._get_xla_tensors_hlo_proto(results)
    xla.sync()
    assert {a.name for a in lowered.arguments if a.result is not None} == set(changed)
    (planned_text, _), (trained_text, shardings) = text_of(lowered.hlo), text_of(trained)
    assert planned_text.splitlines() == trained_text.splitlines()
    named = [(number, a) for number, a in enumerate(lowered.arguments) if a.sharding is not None]
    assert len(named) > 40
    for number, argument in named:
        assert argument.sharding is not None
        assert shardings[number] == _reported(argument.sharding.tile_assignment(len(argument.shape))), argument.name


@pytest.mark.slow
def test_a_step_lowered_again_is_the_same_graph(xla: Engine):
    """Though torch_xla numbers its scopes on and on; another graph is another one."""
    first, again = (planned(Mesh(fsdp=8), remat=True) for _ in range(2))
    assert first.hlo != again.hlo
    assert graph_text(first) == graph_text(again)
    assert "~3~" in graph_text(first)  # what says where an operation comes from is part of what is compiled
    assert graph_text(planned(Mesh(fsdp=8), remat=False)) != graph_text(first)


def test_a_kernel_does_not_carry_where_it_was_traced(xla: Engine):
    """So that it is the same in another checkout, and from another line."""
    mesh, spec = Mesh(fsdp=8), P("fsdp")
    engine = LibtpuEngine(TOPOLOGY)
    kernel = Kernel("attention", SplashForward(128, interpret=False), mesh, (spec, spec, spec), (spec, spec))
    x = engine.zeros((8, 2, 128, 128), torch.bfloat16, NamedSharding(mesh, spec))
    text = graph_text(engine.lower(lambda x: engine.call_kernel(kernel, [x, x, x]), [x], {}))
    (body,) = re.findall(r"[A-Za-z0-9+/=]{1000,}", text)
    assert b".py" not in base64.b64decode(body)


def test_a_lowered_step_leaves_its_state_as_it_was(xla: Engine):
    mesh = Mesh(fsdp=8)
    engine = LibtpuEngine(TOPOLOGY)
    model, step, state, arguments = build(mesh, engine, remat=True)
    modules = {m: n for n, m in model.named_modules()}
    first, second = (engine.lower(step, arguments, state, modules) for _ in range(2))
    assert text_of(first.hlo) == text_of(second.hlo)
    assert first.arguments == second.arguments
    assert all(parameter.grad is None for parameter in model.parameters())
    xla.sync()  # which ends the process if anything of a trace is left


def test_operations_know_where_they_come_from(xla: Engine):
    lowered = planned(Mesh(fsdp=8), remat=True)
    found = {(o.module, o.phase) for o in lowered.origins}
    for phase in ("forward", "backward"):
        assert {("layers.*.mlp.w_up", phase), ("layers.*.attention.wq", phase), ("embed", phase)} <= found
    assert ("", "update") in found
    assert any(
        o.module == "layers.*.mlp" and o.source.startswith("shardtorch/models/_llama.py:") for o in lowered.origins
    )


def engine_and_state() -> tuple[LibtpuEngine, dict[str, Tensor]]:
    engine = LibtpuEngine(TOPOLOGY)
    return engine, {"w": engine.zeros((8, 8), torch.float32, NamedSharding(Mesh(fsdp=8), P("fsdp")))}


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.sum().item(),
        lambda w: bool(w[0, 0] > 0),
        lambda w: w.sum().cpu(),
        lambda w: w.nonzero(),
        lambda w: w[w > 0],
        lambda w: torch.equal(w, w + 1),
        lambda w: print(w),
        lambda w: w.tolist(),
        lambda w: w.to("cpu", torch.float64),
    ],
)
def test_a_step_that_reads_a_value(xla: Engine, read):
    engine, state = engine_and_state()

    def step():
        read(state["w"])
        return state["w"].sum()

    with pytest.raises(ShardtorchError, match=r"must not depend on the values of its tensors"):
        engine.lower(step, [], state)
    xla.sync()


def test_what_a_planned_step_may_not_work_on(xla: Engine):
    engine, state = engine_and_state()
    with pytest.raises(ShardingError, match=r"argument 0: what a planned step works on must be made by its engine"):
        engine.lower(lambda x: x, [torch.zeros(2)], state)
    with pytest.raises(ShardingError, match="argument 0: what a planned step"):
        engine.lower(lambda x: x, [torch.zeros(2).to("xla")], state)
    with pytest.raises(ShardtorchError, match="must return a tensor, or update its state"):
        engine.lower(lambda: None, [], state)
    for verb in (engine.sync, lambda: engine.compile(print), lambda: engine.local_shards(state["w"], None)):  # type: ignore
        with pytest.raises(EngineUnavailableError, match=r"v5e:2x4 is planned for: there are no devices"):
            verb()
    xla.sync()
