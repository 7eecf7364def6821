"""`mark_sharding` on everything a user has: leaves, values, layers of a scan; and what it says to mistakes."""

import re
from collections.abc import Callable

import pytest
import torch
from assertions import assert_lies_as
from meshes import MESHES
from torch import Tensor, nn

from shardtorch import engine as engines
from shardtorch import mark_sharding
from shardtorch.engine import Engine, _start
from shardtorch.errors import EngineUnavailableError, ShardingError
from shardtorch.mesh import Mesh, NamedSharding, P

MESH = Mesh(fsdp=4, tensor=2)
SHARDING = NamedSharding(MESH, P("fsdp", "tensor"))
VALUES = torch.arange(32.0).reshape(8, 4)


@pytest.fixture(autouse=True)
def running(xla: Engine) -> Engine:
    """The engine that `mark_sharding` finds, whatever other tests have started."""
    assert engines.running() is xla
    return xla


# Leaves


@pytest.mark.parametrize("spec", [P("fsdp", "tensor"), ("fsdp", "tensor"), ["fsdp", ["tensor"]]], ids=repr)
def test_a_spec_is_a_p_a_tuple_or_a_list(xla: Engine, spec: object):
    x = VALUES.to("xla")
    assert mark_sharding(x, MESH, spec) is x
    assert_lies_as(x, SHARDING, VALUES, xla)


@pytest.mark.parametrize("spec", [None, (), [], P(), P(None, None)], ids=repr)
def test_a_spec_that_replicates(xla: Engine, spec: object):
    x = mark_sharding(VALUES.to("xla"), MESH, spec)
    assert xla.sharding_of(x) == "{replicated}"
    assert_lies_as(x, NamedSharding(MESH, P()), VALUES, xla)


@pytest.mark.parametrize("mesh", [*MESHES, Mesh(fsdp=-1, tensor=2), Mesh(data=-1)], ids=str)
def test_every_mesh_and_inferred_axes(xla: Engine, mesh: Mesh):
    x = mark_sharding(VALUES.to("xla"), mesh, P(mesh.axis_names))
    assert_lies_as(x, NamedSharding(mesh.bind(8), P(mesh.axis_names)), VALUES, xla)


LEAVES: dict[str, Callable[[], Tensor]] = {
    "data": lambda: VALUES.to("xla"),
    "data that requires a gradient": lambda: VALUES.to("xla").requires_grad_(),
    "a parameter": lambda: nn.Parameter(VALUES.to("xla")),
    "a parameter made on the device": lambda: nn.Parameter(torch.arange(32.0, device="xla").reshape(8, 4)),
    "a frozen parameter made on the device": lambda: nn.Parameter(
        torch.arange(32.0, device="xla").reshape(8, 4), requires_grad=False
    ),
    "a buffer made on the device": lambda: torch.arange(32.0, device="xla").reshape(8, 4),
    "integers": lambda: VALUES.long().to("xla"),
}


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
def test_leaves_are_cut_up_in_place(xla: Engine, make: Callable[[], Tensor]):
    x = make()
    assert mark_sharding(x, MESH, P("fsdp", "tensor")) is x
    assert_lies_as(x, SHARDING, VALUES.to(x.dtype), xla)


def test_data_is_never_whole_on_a_device(xla: Engine):
    """It goes up by shards: no graph runs, and the runtime reports the sharding before anything was computed."""
    xla.sync()  # what other tests left pending
    before = xla.num_compiles()
    x = mark_sharding(VALUES.to("xla"), MESH, P("fsdp", "tensor"))
    assert xla.sharding_of(x) == "{devices=[4,2]0,1,2,3,4,5,6,7}"
    assert_lies_as(x, SHARDING, VALUES, xla)
    assert xla.num_compiles() == before


def test_a_leaf_can_be_marked_again(xla: Engine):
    x = nn.Parameter(VALUES.to("xla"))
    for spec in (P("fsdp"), P("fsdp"), P(None, "tensor"), P(), P("tensor", "fsdp")):
        assert mark_sharding(x, MESH, spec) is x
        assert_lies_as(x, NamedSharding(MESH, spec), VALUES, xla)


def test_a_module_stays_the_users_own(xla: Engine):
    """Marked in the loop over parameters that users write, and trained by an optimizer that knows nothing of it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    model.load_state_dict(plain.state_dict())
    model.to("xla")
    specs = {2: P("fsdp", "tensor"), 1: P("tensor")}
    for name, parameter in model.named_parameters():
        mark_sharding(parameter, MESH, specs[parameter.ndim], name=name)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1), foreach=False) for m in (plain, model)]
    x = torch.randn(16, 8)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    sharded_step = xla.compile(step)
    for _ in range(3):
        want = step(plain, optimizers[0], x)
        got = sharded_step(model, optimizers[1], mark_sharding(x.to("xla"), MESH, P("fsdp")))
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        sharding = NamedSharding(MESH, specs[parameter.ndim])
        assert parameter.grad is not None
        for tensor in (parameter, parameter.grad, optimizers[1].state[parameter]["exp_avg"]):
            assert xla.local_shards(tensor.detach(), sharding)[0].data.shape == sharding.shard_shape(tensor.shape), name
        torch.testing.assert_close(parameter.detach().cpu(), plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)


def test_gradients_that_accumulate_keep_the_sharding(xla: Engine):
    x = mark_sharding(nn.Parameter(VALUES.to("xla")), MESH, P("fsdp", "tensor"))
    for times in (1, 2):
        (x * VALUES.to("xla")).sum().backward()
        assert x.grad is not None
        assert_lies_as(x.grad, SHARDING, times * VALUES, xla)
    mark_sharding(x, MESH, P("tensor"))
    x.grad = None
    (x * VALUES.to("xla")).sum().backward()
    assert x.grad is not None
    assert_lies_as(x.grad, NamedSharding(MESH, P("tensor")), VALUES, xla)


# Values in a graph


def test_a_value_and_its_gradient_are_constrained(xla: Engine):
    x = mark_sharding(VALUES.to("xla"), MESH, P()).requires_grad_()
    value = x * 2
    y = mark_sharding(value, MESH, P("fsdp", "tensor"))
    assert y is not value
    (y * y).sum().backward()
    assert x.grad is not None
    assert_lies_as(y.detach(), SHARDING, 2 * VALUES, xla)
    assert xla.sharding_of(x.grad) == "{devices=[4,2]0,1,2,3,4,5,6,7}"
    assert_lies_as(x.grad, SHARDING, 8 * VALUES, xla)


def test_a_value_that_was_computed_already_still_constrains_its_gradient(xla: Engine):
    x = mark_sharding(VALUES.to("xla"), MESH, P()).requires_grad_()
    value = x * 2
    xla.sync()
    y = mark_sharding(value, MESH, P("fsdp", "tensor"))
    (y * y).sum().backward()
    assert x.grad is not None
    assert_lies_as(x.grad, SHARDING, 8 * VALUES, xla)


@pytest.mark.parametrize("remat", [False, True], ids=["save", "remat"])
def test_inside_scanned_layers(xla: Engine, remat: bool):
    def layer(x: Tensor, weights: dict[str, Tensor], scale: Tensor) -> Tensor:
        w = mark_sharding(weights["w"], MESH, ("fsdp", "tensor"))
        x = mark_sharding(x, MESH, P("fsdp"), name="x")
        return mark_sharding(torch.tanh(x @ w) * scale, MESH, P("fsdp", "tensor"))

    stack = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    x = mark_sharding(VALUES.to("xla"), MESH, P("fsdp")).requires_grad_()
    w = mark_sharding(nn.Parameter(stack.to("xla")), MESH, P(None, "fsdp", "tensor"))
    scale = torch.tensor(0.5).to("xla")
    y = xla.scan(layer, x, {"w": w}, (scale,), remat=remat)
    y.square().sum().backward()

    plain_x, plain_w = VALUES.clone().requires_grad_(), stack.clone().requires_grad_()
    want = plain_x
    for i in range(3):
        want = torch.tanh(want @ plain_w[i]) * 0.5
    want.square().sum().backward()
    for got, expected in ((y, want), (x.grad, plain_x.grad), (w.grad, plain_w.grad)):
        torch.testing.assert_close(got.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    xla.local_shards(y.detach(), SHARDING)  # raises unless it lies there
    xla.local_shards(w.grad, NamedSharding(MESH, P(None, "fsdp", "tensor")))


# Mistakes


def cpu() -> Tensor:
    return VALUES


def on_device() -> Tensor:
    return VALUES.to("xla")


MISTAKES = {
    "an axis the mesh lacks": (
        (on_device, MESH, P("fdsp")),
        "w_up: the mesh has no axis 'fdsp'; its axes are 'fsdp', 'tensor'.",
        "Mesh(fsdp=4, tensor=2)",
        "did you mean 'fsdp'?",
    ),
    "more entries than dims": (
        (on_device, MESH, P("fsdp", "tensor", None)),
        "w_up: the tensor has 2 dims, and its spec 3 entries.",
        "spec P('fsdp', 'tensor', None), mesh Mesh(fsdp=4, tensor=2)",
        "give the spec at most one entry per dim.",
    ),
    "a dim that does not divide": (
        (lambda: torch.zeros(6, 4).to("xla"), MESH, P("fsdp")),
        "w_up: dim 0 has size 6, not divisible by mesh axis 'fsdp' of size 4.",
        "shape (6, 4), spec P('fsdp'), mesh Mesh(fsdp=4, tensor=2)",
        "use a fsdp size that divides 6 (such as 2 or 3), or replicate this dim with None.",
    ),
    "a dim that does not divide by several axes": (
        (lambda: torch.zeros(4, 12).to("xla"), MESH, P(None, ("fsdp", "tensor"))),
        "w_up: dim 1 has size 12, not divisible by mesh axes ('fsdp', 'tensor') of sizes 4 x 2 = 8.",
        "shape (4, 12), spec P(None, ('fsdp', 'tensor')), mesh Mesh(fsdp=4, tensor=2)",
        "use sizes of fsdp, tensor whose product divides 12 (such as 4 or 6), or replicate this dim with None.",
    ),
    "empty shards": (
        (lambda: torch.zeros(2, 4).to("xla"), MESH, P("fsdp")),
        "w_up: dim 0 has size 2, fewer than mesh axis 'fsdp' of size 4: some devices would hold nothing.",
        "shape (2, 4), spec P('fsdp'), mesh Mesh(fsdp=4, tensor=2)",
        "or replicate this dim with None.",
    ),
    "a repeated axis": (
        (on_device, MESH, ("fsdp", "fsdp")),
        "w_up: mesh axis 'fsdp' comes twice in a spec, and can split a tensor once.",
        "P('fsdp', 'fsdp')",
        "leave it in one place; put None or another axis in the other.",
    ),
    "an entry that is no axis": (
        (on_device, MESH, ["fsdp", 2]),
        "w_up: an entry of a spec is None, the name of a mesh axis, or a tuple of names.",
        "2 in P('fsdp', 2)",
        "write it like P('fsdp', None, ('data', 'tensor')).",
    ),
    "a bare name": (
        (on_device, MESH, "fsdp"),
        "w_up: a spec is a P, a tuple or a list with one entry per dim, or None.",
        "'fsdp'",
        "write P('fsdp').",
    ),
    "a sharding for a spec": (
        (on_device, MESH, SHARDING),
        "w_up: a spec is a P, a tuple or a list with one entry per dim, or None.",
        "NamedSharding(",
        "write it like P('fsdp', None).",
    ),
    "arguments swapped": (
        (on_device, P("fsdp"), MESH),
        "w_up: tensors are sharded over a shardtorch.Mesh.",
        "a PartitionSpec in its place",
        "call mark_sharding(x, Mesh(fsdp=8), P('fsdp')).",
    ),
    "a mesh as a tuple": (
        (on_device, (4, 2), P("fsdp")),
        "w_up: tensors are sharded over a shardtorch.Mesh.",
        "a tuple in its place",
        "call mark_sharding(x, Mesh(fsdp=8), P('fsdp')).",
    ),
    "no tensor": (
        (VALUES.tolist, MESH, P("fsdp")),
        "w_up: only tensors can be sharded.",
        "a list",
        "pass a torch.Tensor.",
    ),
    "a module": (
        (lambda: nn.Linear(8, 8), MESH, P("fsdp")),
        "w_up: only tensors can be sharded.",
        "a Linear",
        "pass a torch.Tensor.",
    ),
    "a meta tensor": (
        (lambda: torch.zeros(8, 4, device="meta"), MESH, P("fsdp")),
        "w_up: a tensor on the meta device has no data to shard.",
        "shape (8, 4) on meta",
        "use fully_shard(model, mesh, init=...), which makes the data shard by shard.",
    ),
    "a CPU tensor": (
        (cpu, MESH, P("fsdp")),
        "w_up: only a tensor on the engine's device can be annotated.",
        "a tensor on cpu",
        "move it with .to('xla') first, or use fully_shard for a whole module.",
    ),
    "a CPU parameter": (
        (lambda: nn.Parameter(VALUES), MESH, P("fsdp")),
        "w_up: only a tensor on the engine's device can be annotated.",
        "a tensor on cpu",
        "move it with .to('xla') first, or use fully_shard for a whole module.",
    ),
    "a mesh for more devices": (
        (on_device, Mesh(fsdp=16), P("fsdp")),
        "w_up: Mesh(fsdp=16) needs 16 devices.",
        "8 devices",
        "use Mesh(fsdp=8).",
    ),
    "a mesh for fewer devices": (
        (on_device, Mesh(fsdp=2, tensor=2), P("fsdp")),
        "w_up: Mesh(fsdp=2, tensor=2) needs 4 devices.",
        "8 devices",
        "use Mesh(fsdp=2, tensor=4) or Mesh(fsdp=4, tensor=2)",
    ),
    "an axis that can't be inferred": (
        (on_device, Mesh(fsdp=-1, tensor=3), P("fsdp")),
        "w_up: Mesh(fsdp=-1, tensor=3) needs a multiple of 3 devices.",
        "8 devices",
        "use Mesh(fsdp=",
    ),
}


@pytest.mark.parametrize(("arguments", "law", "got", "fix"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(arguments: tuple, law: str, got: str, fix: str):
    make, mesh, spec = arguments
    with pytest.raises(ShardingError, match=re.escape(law)) as error:
        mark_sharding(make(), mesh, spec, name="w_up")
    assert error.value.law == law
    assert got in error.value.got
    assert fix in error.value.fix


def test_the_name_is_optional():
    with pytest.raises(ShardingError, match=r"^dim 1 has size 4, fewer than mesh axis 'fsdp' of size 8"):
        mark_sharding(on_device(), Mesh(fsdp=8), P(None, "fsdp"))


def test_mistakes_inside_a_layer_are_the_same_errors(xla: Engine):
    def layer(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        return mark_sharding(x * weights["w"], MESH, P(None, None, "fsdp"), name="hidden")

    for requires_grad in (False, True):
        w = torch.ones(3, 4).to("xla").requires_grad_(requires_grad)
        with pytest.raises(ShardingError, match="hidden: the tensor has 2 dims, and its spec 3 entries"):
            xla.scan(layer, on_device(), {"w": w}, (), remat=False)


def test_a_mistake_changes_nothing(xla: Engine):
    x = mark_sharding(nn.Parameter(on_device()), MESH, P("fsdp", "tensor"))
    with pytest.raises(ShardingError):
        mark_sharding(x, MESH, P("data"))
    assert_lies_as(x, SHARDING, VALUES, xla)


def test_no_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_start, "_running", None)
    with pytest.raises(EngineUnavailableError, match="an engine must run before tensors can be sharded") as error:
        mark_sharding(cpu(), MESH, P("fsdp"))
    assert error.value.got == "no engine in this process"
    assert error.value.fix == "call shardtorch.start(num_devices=...) at the top of the program."


# The reference engine


def test_with_the_reference_engine_it_only_checks(monkeypatch: pytest.MonkeyPatch, reference: Engine):
    monkeypatch.setattr(_start, "_running", reference)
    x = nn.Parameter(VALUES.clone())
    assert mark_sharding(x, MESH, P("fsdp", "tensor")) is x
    mark_sharding(x, Mesh(fsdp=-1), P("fsdp"))
    mark_sharding(x * 2, Mesh(fsdp=1024), P()).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((8, 4), 2.0))
    with pytest.raises(ShardingError, match="dim 1 has size 4, not divisible by mesh axis 'fsdp' of size 3"):
        mark_sharding(x, Mesh(fsdp=3), P(None, "fsdp"))
    with pytest.raises(ShardingError, match=r"got: a tensor on xla:0\n  fix: move it to the CPU"):
        mark_sharding(on_device(), MESH, P("fsdp"))
