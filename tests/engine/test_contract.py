"""What every engine does, the reference first. Values are compared with plain eager torch on the CPU."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from assertions import assert_lies_as, assert_read_once_per_box
from meshes import MESHES
from torch import Tensor

from shardtorch.engine import Engine, Index, Kernel
from shardtorch.errors import EngineUnavailableError, ShardingError, ShardtorchError
from shardtorch.mesh import Mesh, NamedSharding, P

MESH = Mesh(fsdp=4, tensor=2)
PLACED = {
    "sharded over every axis": ((8, 6), P("fsdp", "tensor")),
    "several axes on one dim": ((3, 16), P(None, ("tensor", "fsdp"))),
    "partly replicated": ((4, 6), P("fsdp")),
    "whole on every device": ((3, 5), P()),
    "0-d": ((), P()),
    "one dim": ((8,), P("fsdp")),
    "a stack of layers": ((3, 8, 4), P(None, "fsdp", "tensor")),
    "a stack that is whole on every device": ((3, 2, 2), P()),
    "a stack of rank 4": ((2, 2, 8, 3), P(None, None, "fsdp")),
    "a stack of vectors": ((3, 8), P(None, "fsdp")),
    "a stack with sharded layers": ((4, 2, 3), P("fsdp", "tensor")),
    "no elements": ((0, 4), P(None, "fsdp")),
}


def numbers(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """All different, and not too large for bfloat16."""
    return torch.arange(torch.Size(shape).numel()).reshape(tuple(shape)).to(dtype)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def place(engine: Engine, x: Tensor, mesh: Mesh = MESH, spec: P | None = None) -> Tensor:
    """The same on the engine's device, requiring a gradient if `x` does."""
    sharding = NamedSharding(mesh, spec or P())
    placed = engine.materialize(tuple(x.shape), x.dtype, sharding, lambda index: x.detach()[index])
    return placed.requires_grad_(x.requires_grad)


def test_inventory(engine: Engine):
    inventory = engine.inventory()
    assert (inventory.platform, inventory.device_kind) == ("cpu", "cpu")
    assert inventory.num_devices == (8 if engine.name == "torch_xla" else 1)
    assert (inventory.process_index, inventory.process_count) == (0, 1)


# materialize and zeros


@pytest.mark.parametrize(("shape", "spec"), PLACED.values(), ids=PLACED)
def test_materialize(engine: Engine, shape: tuple[int, ...], spec: P):
    sharding, want, boxes = NamedSharding(MESH, spec), numbers(shape), []

    def read(index: Index) -> Tensor:
        boxes.append(index)
        return want[index]

    x = engine.materialize(shape, want.dtype, sharding, read)
    assert x.device.type == engine.device.type
    assert torch.equal(x.cpu(), want)
    assert_lies_as(x, sharding, want, engine)
    assert_read_once_per_box(boxes, shape)


@pytest.mark.parametrize("spec", [P(None, "fsdp", "tensor"), P(None, "fsdp"), P()], ids=str)
def test_a_stack_is_read_layer_by_layer(engine: Engine, spec: P):
    layers, want = [], numbers((3, 8, 4))

    def read(index: Index) -> Tensor:
        layers.extend(range(index[0].start, index[0].stop))
        assert index[0].stop - index[0].start == 1
        return want[index]

    engine.materialize((3, 8, 4), torch.float32, NamedSharding(MESH, spec), read)
    assert layers == sorted(layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.int32, torch.bool], ids=str)
def test_materialize_keeps_the_dtype(engine: Engine, dtype: torch.dtype):
    sharding = NamedSharding(MESH, P("fsdp", "tensor"))
    want = numbers((8, 6)) % 2 == 0 if dtype == torch.bool else numbers((8, 6), dtype)
    if dtype == torch.int64:
        want = want + 2**40
    assert_lies_as(engine.materialize(want.shape, dtype, sharding, want.__getitem__), sharding, want, engine)


def test_materialize_converts_what_is_read(engine: Engine):
    want = randn(8, 4).requires_grad_()
    x = engine.materialize((8, 4), torch.bfloat16, NamedSharding(MESH, P("fsdp")), want.__getitem__)
    assert not x.requires_grad
    assert torch.equal(x.cpu(), want.bfloat16())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_materialize_on_every_mesh(engine: Engine, mesh: Mesh):
    sharding, want = NamedSharding(mesh, P(None, mesh.axis_names)), numbers((3, 16))
    assert_lies_as(engine.materialize((3, 16), want.dtype, sharding, want.__getitem__), sharding, want, engine)


@pytest.mark.parametrize(("shape", "spec"), PLACED.values(), ids=PLACED)
def test_zeros(engine: Engine, shape: tuple[int, ...], spec: P):
    sharding = NamedSharding(MESH, spec)
    x = engine.zeros(shape, torch.bfloat16, sharding)
    assert_lies_as(x, sharding, torch.zeros(shape, dtype=torch.bfloat16), engine)


@pytest.mark.parametrize(
    "make",
    [
        lambda engine, shape, sharding: engine.materialize(
            shape, torch.float32, sharding, torch.zeros(shape).__getitem__
        ),
        lambda engine, shape, sharding: engine.zeros(shape, torch.float32, sharding),
        lambda engine, shape, sharding: engine.put(torch.zeros(shape), sharding, shape),
        lambda engine, shape, sharding: engine.constrain(torch.zeros(shape, device=engine.device), sharding),
        lambda engine, shape, sharding: engine.annotate(torch.zeros(shape, device=engine.device), sharding),
    ],
    ids=["materialize", "zeros", "put", "constrain", "annotate"],
)
def test_every_verb_checks_the_sharding(engine: Engine, make: Callable):
    with pytest.raises(ShardingError, match=r"dim 1 has size 6, not divisible by mesh axis 'fsdp' of size 4"):
        make(engine, (8, 6), NamedSharding(MESH, P(None, "fsdp")))
    with pytest.raises(ShardingError, match=r"dim 0 has size 2, fewer than mesh axis 'fsdp' of size 4"):
        make(engine, (2, 6), NamedSharding(MESH, P("fsdp")))
    with pytest.raises(ShardingError, match=r"the tensor has 1 dims, and its spec 2 entries"):
        make(engine, (8,), NamedSharding(MESH, P("fsdp", None)))


# constrain and annotate


@pytest.mark.parametrize("verb", ["constrain", "annotate"])
def test_constraints_change_no_value_and_no_gradient(engine: Engine, verb: str):
    sharding, values = NamedSharding(MESH, P("fsdp", "tensor")), randn(8, 4)
    x = place(engine, values.clone().requires_grad_())
    y = getattr(engine, verb)(x * 3, sharding)
    (y * y).sum().backward()
    assert x.grad is not None
    assert_lies_as(y.detach(), sharding, values * 3, engine)
    torch.testing.assert_close(x.grad.cpu(), 18 * values)


def test_annotate_shards_leaves_in_place(engine: Engine):
    sharding, values = NamedSharding(MESH, P("tensor", "fsdp")), randn(8, 4)
    x = torch.nn.Parameter(values.to(engine.device))
    assert engine.annotate(x, sharding) is x
    assert_lies_as(x, sharding, values, engine)


@pytest.mark.parametrize("verb", ["constrain", "annotate"])
def test_only_tensors_on_the_device_are_annotated(engine: Engine, verb: str):
    with pytest.raises(ShardingError, match=r"only a tensor on the engine's device can be annotated"):
        getattr(engine, verb)(torch.zeros(8, device="meta"), NamedSharding(MESH, P("fsdp")))


# put


@pytest.mark.parametrize("spec", [P("fsdp"), P(("fsdp", "tensor")), P(None, "tensor"), P()], ids=str)
def test_put(engine: Engine, spec: P):
    sharding, want = NamedSharding(MESH, spec), numbers((8, 6), torch.int64)
    assert_lies_as(engine.put(want, sharding, (8, 6)), sharding, want, engine)


def test_put_of_a_scalar(engine: Engine):
    assert engine.put(torch.tensor(2.5), NamedSharding(MESH, P()), ()).item() == 2.5


def test_put_copies(engine: Engine):
    part = torch.ones(8, 1024)
    x = engine.put(part, NamedSharding(MESH, P("fsdp")), (8, 1024))
    part.zero_()
    assert bool((x == 1).all())


@pytest.mark.parametrize(
    "part",
    [torch.zeros(4, 6), torch.zeros(8, 5), torch.zeros(8), torch.zeros(8, 6, 1), torch.zeros(8, 6, device="meta")],
)
def test_put_wants_the_shape_it_is_told(engine: Engine, part: Tensor):
    with pytest.raises(ShardingError, match=r"each of 1 processes must give its equal share") as error:
        engine.put(part, NamedSharding(MESH, P("fsdp")), (8, 6))
    assert error.value.got == f"a part of shape {tuple(part.shape)} on {part.device}"
    assert error.value.fix == "give a part of shape (8, 6) on the CPU."


# scan


def mlp(x, weights):
    return x + F.linear(torch.tanh(F.linear(x, weights["up"], weights["bias"])), weights["down"])


def attention(x, weights, cos, scale):
    """Norm, grouped-query attention and an einsum, with constants of several ranks."""
    h = F.rms_norm(x, (x.shape[-1],), weights["norm"]) * scale
    q = F.linear(h, weights["q"]).unflatten(-1, (4, 2)).transpose(1, 2) * cos
    k = F.linear(h, weights["k"]).unflatten(-1, (2, 2)).transpose(1, 2) * cos
    v = F.linear(h, weights["v"]).unflatten(-1, (2, 2)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    return x + torch.einsum("bse,ed->bsd", out, weights["o"])


def choices(x, weights):
    y = torch.relu(x * weights["a"]).masked_fill(x > 1.0, 0.5) + torch.where(x > 0, x, -x) - x.amax(-1, keepdim=True)
    return y / (1 + y.detach().abs())


def own_constants(x, weights):
    scale = torch.tensor(0.5, device=x.device)
    return (
        torch.tanh(x * weights["a"]) * scale
        + x.new_tensor([1.0, 2.0, 3.0, 4.0]) * 0.1
        + torch.arange(4, device="xla" if x.device.type == "xla" else "cpu")
    )


def without_gradient(x, weights):
    with torch.no_grad():
        norm = x.norm(dim=-1, keepdim=True)
    return torch.tanh(x / norm * weights["a"])


@dataclass(frozen=True)
class Layer:
    body: Callable[..., Tensor]
    weights: dict[str, tuple[int, ...]]
    """Shapes of one layer."""
    frozen: dict[str, Tensor] | None = None
    """Stacked weights that require no gradient."""
    constants: tuple[Tensor, ...] = ()
    x: tuple[int, ...] = (4, 4)


LAYERS = {
    "linear with bias": Layer(mlp, {"up": (6, 4), "bias": (6,), "down": (4, 6)}, x=(2, 3, 4)),
    "attention": Layer(
        attention,
        {"norm": (8,), "q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)},
        constants=(randn(5, 2), torch.tensor(0.7)),
        x=(2, 5, 8),
    ),
    "scalars per layer": Layer(lambda x, w: torch.tanh(x * w["a"] + w["b"]), {"a": (), "b": ()}),
    "a weight of the output's shape": Layer(lambda x, w: x + w["a"], {"a": (4, 4)}),
    "a weight used twice": Layer(lambda x, w: x @ w["a"] @ w["a"].T, {"a": (4, 6)}),
    "a weight not used": Layer(lambda x, w: torch.tanh(x * w["a"]), {"a": (4,), "b": (4,)}),
    "the input not used": Layer(lambda x, w: torch.tanh(w["a"]), {"a": (4, 4)}),
    "the input returned": Layer(lambda x, w: x, {"a": (4,)}),
    "the input returned as a view": Layer(lambda x, w: x.view(2, 8).view(4, 4), {"a": (4,)}),
    "the output transposed": Layer(lambda x, w: (x * w["a"]).T, {"a": (4,)}),
    "weights without a gradient": Layer(
        lambda x, w: torch.tanh(x * w["a"] * w["scale"] + w["shift"]),
        {"a": (4,)},
        frozen={"scale": randn(3, 4), "shift": torch.arange(3)},
    ),
    "constants": Layer(
        lambda x, w, a, b, c: torch.tanh(x * w["a"] * a + b) * c,
        {"a": (4,)},
        constants=(randn(4, 4), torch.arange(4), torch.tensor(0.7)),
    ),
    "choices": Layer(choices, {"a": (4,)}),
    "constants of its own": Layer(own_constants, {"a": (4,)}),
    "a part without gradient": Layer(without_gradient, {"a": (4,)}),
}


def by_loop(layer: Layer, x: Tensor, weights: dict[str, Tensor], constants: Sequence[Tensor]) -> Tensor:
    for i in range(len(next(iter(weights.values())))):
        x = layer.body(x, {name: w[i] for name, w in weights.items()}, *constants)
    return x


def inputs(layer: Layer, num_layers: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    weights = {
        name: (0.5 * randn(num_layers, *shape, seed=seed)).requires_grad_()
        for seed, (name, shape) in enumerate(layer.weights.items())
    }
    return randn(*layer.x, seed=100).requires_grad_(), weights | (layer.frozen or {})


def backward(y: Tensor) -> None:
    """From a loss in which every element counts differently."""
    slope = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    (y * slope.to(y.device)).sum().backward()


def gradient(x: Tensor) -> Tensor | None:
    """On the CPU; zeros for none where torch might give either."""
    if not x.requires_grad:
        assert x.grad is None
        return None
    return torch.zeros(x.shape, dtype=x.dtype) if x.grad is None else x.grad.cpu()


def assert_scan_equals_loop(
    engine: Engine,
    layer: Layer,
    x: Tensor,
    weights: dict[str, Tensor],
    *,
    remat: bool,
    body: Callable[..., Tensor] | None = None,
    mesh: Mesh = MESH,
    spec: P | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Value and every gradient.

    Args:
      body: The layer with constraints; the layer itself if not given.
      spec: How `x` lies.
    """
    want = by_loop(layer, x, weights, layer.constants)
    placed_x, placed = place(engine, x, mesh, spec), {name: place(engine, w, mesh) for name, w in weights.items()}
    constants = [place(engine, constant, mesh) for constant in layer.constants]
    y = engine.scan(body or layer.body, placed_x, placed, constants, remat=remat)
    assert y.requires_grad == want.requires_grad
    if y.requires_grad:
        backward(want)
        backward(y)
    torch.testing.assert_close(y.detach().cpu(), want.detach(), rtol=tolerance, atol=tolerance)
    for name, plain, mine in [("x", x, placed_x), *((name, w, placed[name]) for name, w in weights.items())]:
        close = partial(torch.testing.assert_close, msg=f"gradient of {name}".__add__)
        close(gradient(mine), gradient(plain), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("remat", [False, True], ids=["save", "remat"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_scan_equals_a_loop(engine: Engine, layer: Layer, remat: bool):
    assert_scan_equals_loop(engine, layer, *inputs(layer), remat=remat)


@pytest.mark.parametrize("remat", [False, True], ids=["save", "remat"])
def test_scan_of_one_layer(engine: Engine, remat: bool):
    layer = LAYERS["linear with bias"]
    assert_scan_equals_loop(engine, layer, *inputs(layer, num_layers=1), remat=remat)


@pytest.mark.parametrize("remat", [False, True], ids=["save", "remat"])
def test_scan_in_bfloat16(engine: Engine, remat: bool):
    layer = LAYERS["linear with bias"]
    x, weights = inputs(layer)
    x, weights = (
        x.detach().bfloat16().requires_grad_(),
        {n: w.detach().bfloat16().requires_grad_() for n, w in weights.items()},
    )
    assert_scan_equals_loop(engine, layer, x, weights, remat=remat, tolerance=0.05)


@pytest.mark.parametrize("remat", [False, True], ids=["save", "remat"])
@pytest.mark.parametrize("frozen", ["x", "weights", "both"])
def test_scan_without_some_gradients(engine: Engine, frozen: str, remat: bool):
    layer = LAYERS["linear with bias"]
    x, weights = inputs(layer)
    if frozen != "weights":
        x = x.detach()
    if frozen != "x":
        weights = {name: w.detach() for name, w in weights.items()}
    assert_scan_equals_loop(engine, layer, x, weights, remat=remat)


@pytest.mark.parametrize("remat", [False, True], ids=["save", "remat"])
def test_scan_without_grad_mode(engine: Engine, remat: bool):
    layer = LAYERS["attention"]
    with torch.no_grad():
        assert_scan_equals_loop(engine, layer, *inputs(layer), remat=remat)


@pytest.mark.parametrize("remat", [False, True], ids=["save", "remat"])
def test_scan_twice_over_the_same_weights(engine: Engine, remat: bool):
    layer = LAYERS["scalars per layer"]
    x, weights = inputs(layer)
    want = by_loop(layer, by_loop(layer, x, weights, ()).sin(), weights, ())
    backward(want)
    placed, placed_weights = place(engine, x), {name: place(engine, w) for name, w in weights.items()}
    y = engine.scan(layer.body, placed, placed_weights, (), remat=remat).sin()
    backward(engine.scan(layer.body, y, placed_weights, (), remat=remat))
    for plain, mine in [(x, placed), *((w, placed_weights[name]) for name, w in weights.items())]:
        torch.testing.assert_close(gradient(mine), gradient(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("remat", [False, True], ids=["save", "remat"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_scan_with_constraints_on_every_mesh(engine: Engine, mesh: Mesh, remat: bool):
    sharding = NamedSharding(mesh, P(mesh.axis_names))

    def body(x, weights):
        return engine.constrain(mlp(engine.constrain(x, sharding), weights), sharding)

    layer = Layer(mlp, LAYERS["linear with bias"].weights, x=(8, 4))
    x, weights = inputs(layer)
    assert_scan_equals_loop(engine, layer, x, weights, remat=remat, body=body, mesh=mesh, spec=sharding.spec)


@pytest.mark.parametrize("remat", [False, True], ids=["save", "remat"])
@pytest.mark.parametrize(
    ("body", "got"),
    [
        (lambda x, w: (x * w["a"]).bfloat16(), r"input \(4, 4\) torch.float32, output \(4, 4\) torch.bfloat16"),
        (lambda x, w: (x * w["a"])[:2], r"input \(4, 4\) torch.float32, output \(2, 4\) torch.float32"),
    ],
    ids=["dtype", "shape"],
)
def test_the_output_of_a_layer_is_like_its_input(engine: Engine, body: Callable, got: str, remat: bool):
    x, weights = inputs(Layer(body, {"a": (4,)}))
    with pytest.raises(
        ShardtorchError, match=rf"must return a tensor of the shape and dtype of its input.\n  got: {got}"
    ):
        engine.scan(body, place(engine, x), {"a": place(engine, weights["a"])}, (), remat=remat)


@pytest.mark.parametrize(
    ("shapes", "got"),
    [
        ({"a": (3, 4), "b": (2, 4)}, r"a \(3, 4\), b \(2, 4\)"),
        ({"a": (0, 4)}, r"a \(0, 4\)"),
        ({"a": ()}, r"a \(\)"),
        ({}, "no weights"),
    ],
    ids=["different", "zero", "0-d", "none"],
)
def test_weights_agree_on_the_number_of_layers(engine: Engine, shapes: dict, got: str):
    weights = {name: torch.ones(shape, device=engine.device) for name, shape in shapes.items()}
    with pytest.raises(
        ShardtorchError, match=rf"the same number of layers, at least one, as their dim 0.\n  got: {got}"
    ):
        engine.scan(lambda x, w: x, torch.ones(4, 4, device=engine.device), weights, (), remat=False)


def test_no_gradient_flows_to_constants(engine: Engine):
    layer = LAYERS["constants"]
    x, weights = inputs(layer)
    constants = [
        place(engine, layer.constants[0]).requires_grad_() * 2,
        *(place(engine, c) for c in layer.constants[1:]),
    ]
    with pytest.raises(ShardtorchError, match="a constant of a scan must not require a gradient"):
        engine.scan(layer.body, place(engine, x), {"a": place(engine, weights["a"])}, constants, remat=False)


# call_kernel

KERNEL_MESHES = [*MESHES, Mesh(data=2, fsdp=4, dcn={"fsdp": 2})]
"""The last one's devices are 0, 1, 4, 5 along its first row: not in row-major order."""


@dataclass(frozen=True)
class Product:
    """Of rows and columns, and a number that tells which pieces a device had."""

    scale: float = 1.0

    def __call__(self, x, w):
        return self.scale * (x @ w), (x.sum() + 1000 * w.sum()).reshape(1)


def product_kernel(mesh: Mesh, scale: float = 1.0) -> Kernel:
    """`x` cut into rows over all axes but the last, `w` into columns over the last."""
    rows, columns = mesh.axis_names[:-1] or None, mesh.axis_names[-1]
    specs = (P(rows), P(None, columns))
    return Kernel("product", Product(scale), mesh, specs, (P(rows, columns), P(mesh.axis_names)))


def placed_factors(engine: Engine, mesh: Mesh, *, as_specified: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole numbers that float32 adds exactly, and the same on the mesh, as the kernel wants them or another way."""
    x, w = numbers((8, 8)), numbers((8, 16)) % 7
    wanted = product_kernel(mesh).in_specs
    specs = wanted if as_specified else (P(None, mesh.axis_names), P(mesh.axis_names))
    return x, w, place(engine, x, mesh, specs[0]), place(engine, w, mesh, specs[1])


def assert_is_product(found: Sequence[Tensor], x: Tensor, w: Tensor, mesh: Mesh, engine: Engine, scale: float) -> None:
    """Value and sharding, and each device has worked on the pieces that the specs give it."""
    kernel = product_kernel(mesh)
    pieces = torch.zeros(8)
    x_of, w_of, place_of = (
        NamedSharding(mesh, spec).index_ranges(shape)
        for spec, shape in zip((*kernel.in_specs, kernel.out_specs[1]), ((8, 8), (8, 16), (8,)), strict=True)
    )
    for device, index in place_of.items():
        pieces[index] = x[x_of[device]].sum() + 1000 * w[w_of[device]].sum()
    assert len(found) == 2
    for y, want, spec in zip(found, (scale * (x @ w), pieces), kernel.out_specs, strict=True):
        assert_lies_as(y, NamedSharding(mesh, spec), want, engine)


@pytest.mark.parametrize("mesh", KERNEL_MESHES, ids=str)
def test_a_kernel_gets_the_pieces_of_its_specs(xla: Engine, mesh: Mesh):
    x, w, *placed = placed_factors(xla, mesh)
    assert_is_product(xla.call_kernel(product_kernel(mesh), placed), x, w, mesh, xla, 1.0)


@pytest.mark.parametrize("mesh", [KERNEL_MESHES[1], KERNEL_MESHES[-1]], ids=str)
def test_what_lies_another_way_is_moved_to_where_a_kernel_wants_it(xla: Engine, mesh: Mesh):
    x, w, *placed = placed_factors(xla, mesh, as_specified=False)
    assert_is_product(xla.call_kernel(product_kernel(mesh), placed), x, w, mesh, xla, 1.0)


@pytest.mark.parametrize("mesh", [KERNEL_MESHES[1], KERNEL_MESHES[-1]], ids=str)
def test_a_kernel_in_a_compiled_step(xla: Engine, mesh: Mesh):
    x, w, *placed = placed_factors(xla, mesh)

    @xla.compile
    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        (y, _), (_, pieces) = (xla.call_kernel(product_kernel(mesh, scale), [x, w]) for scale in (2.0, 3.0))
        return [y + 1 - 1, pieces]

    assert_is_product(step(*placed), x, w, mesh, xla, 2.0)
    num_compiles = xla.num_compiles()
    assert_is_product(step(*placed), x, w, mesh, xla, 2.0)
    assert xla.num_compiles() == num_compiles


def test_equal_kernels_are_traced_once(xla: Engine):
    traced = []

    @dataclass(frozen=True)
    class Double:
        def __call__(self, x):
            traced.append(x.shape)
            return (x + x,)

    def call(x: Tensor) -> None:
        kernel = Kernel("double", Double(), MESH, (P("fsdp"),), (P("fsdp"),))
        (y,) = xla.call_kernel(kernel, [x])
        assert torch.equal(y.cpu(), 2 * x.cpu())

    for rows in (8, 8, 16, 8):
        call(place(xla, numbers((rows, 2))))
    assert set(traced) == {(2, 2), (4, 2)}
    num_traced = len(traced)
    call(place(xla, numbers((8, 2))))
    assert len(traced) == num_traced


class _Multiply(torch.autograd.Function):
    """`x @ w` by a kernel, and backward by two more."""

    @staticmethod
    def forward(ctx, engine: Engine, mesh: Mesh, x: Tensor, w: Tensor) -> Tensor:
        ctx.engine, ctx.mesh = engine, mesh
        ctx.save_for_backward(x, w)
        return engine.call_kernel(product_kernel(mesh), [x, w])[0]

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore
        x, w = ctx.saved_tensors
        kernel = product_kernel(ctx.mesh)
        x_grad, _ = ctx.engine.call_kernel(kernel, [grad, w.T])
        w_grad, _ = ctx.engine.call_kernel(kernel, [x.T, grad])
        return None, None, x_grad, w_grad


@pytest.mark.parametrize("remat", [False, True], ids=["save", "remat"])
@pytest.mark.parametrize("mesh", [KERNEL_MESHES[1], KERNEL_MESHES[6], KERNEL_MESHES[-1]], ids=str)
def test_kernels_in_a_scan(xla: Engine, mesh: Mesh, remat: bool):
    layer = Layer(lambda x, w: torch.tanh(x @ w["a"]), {"a": (8, 8)}, x=(8, 8))

    def body(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        y = _Multiply.apply(xla, mesh, x, weights["a"])
        assert isinstance(y, Tensor)
        return torch.tanh(y)

    assert_scan_equals_loop(xla, layer, *inputs(layer), remat=remat, body=body, mesh=mesh, spec=P(mesh.axis_names))


@dataclass(frozen=True)
class Keep:
    def __call__(self, x, chosen):
        return x * chosen.astype(x.dtype), chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_the_dtypes_of_kernels(xla: Engine, dtype: torch.dtype):
    x, chosen = (numbers((8, 2)) % 3).to(dtype), numbers((8,)) % 2 == 0
    rows = NamedSharding(MESH, P("fsdp"))
    kernel = Kernel("keep", Keep(), MESH, (P("fsdp"), P()), (P("fsdp"), P()))
    found, same = xla.call_kernel(kernel, [place(xla, x, spec=P("fsdp")), place(xla, chosen[:2])])
    want = x * chosen[:2].to(dtype)
    assert_lies_as(found, rows, want, xla)
    assert_lies_as(same, NamedSharding(MESH, P()), chosen[:2], xla)


LAW = "product: a kernel takes"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x, w: [x],
            rf"{LAW} one tensor per spec, and at least one.\n  got: 1 tensors, 2 specs\n  fix: pass as many",
        ),
        (lambda x, w: [], rf"{LAW} one tensor per spec, and at least one.\n  got: 0 tensors, 2 specs"),
        (lambda x, w: [x, 2.0], rf"{LAW} tensors on the engine's device(.|\n)*got: argument 1: 2.0\n"),
        (lambda x, w: [x, w, w], rf"{LAW} one tensor per spec, and at least one.\n  got: 3 tensors, 2 specs"),
        (
            lambda x, w: [x[:6], w],
            r"product: argument 0: dim 0 has size 6, not divisible by mesh axis 'fsdp' of size 4",
        ),
        (lambda x, w: [x, w[:, :3]], r"product: argument 1: dim 1 has size 3, not divisible by mesh axis 'tensor' of"),
        (lambda x, w: [x, w[0]], r"product: argument 1: the tensor has 1 dims, and its spec 2 entries"),
        (
            lambda x, w: [x, w.cpu()],
            rf"{LAW} tensors on the engine's device(.|\n)*got: argument 1: torch.float32 on cpu",
        ),
        (lambda x, w: [x.to("meta"), w], rf"{LAW} tensors on the engine's device(.|\n)*got: argument 0: .* on meta"),
        (lambda x, w: [x, w.long()], r"of float32, bfloat16, int32, bool.\n  got: argument 1: torch.int64 on xla"),
    ],
    ids=["too few", "none", "no tensor", "too many", "rows", "columns", "rank", "on the CPU", "meta", "dtype"],
)
def test_what_a_kernel_does_not_take(xla: Engine, make: Callable[..., list[Tensor]], message: str):
    _, _, x, w = placed_factors(xla, MESH)
    with pytest.raises(ShardingError, match=message):
        xla.call_kernel(product_kernel(MESH), make(x, w))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: (x @ w,),
        lambda x, w: x @ w,
        lambda x, w: (x @ w, x.sum()),
        lambda x, w: (x @ w, x.sum(0, keepdims=True).astype("float16")),
    ],
    ids=["too few", "no tuple", "rank", "dtype"],
)
def test_a_kernel_returns_what_its_specs_say(xla: Engine, fn: Callable):
    _, _, x, w = placed_factors(xla, MESH)
    specs = product_kernel(MESH)
    message = (
        r"product: a kernel returns a tuple with an array for each of its out_specs(.|\n)*fix: make fn and out_specs"
    )
    with pytest.raises(ShardingError, match=message):
        xla.call_kernel(Kernel("product", fn, MESH, specs.in_specs, specs.out_specs), [x, w])
    assert_is_product(xla.call_kernel(specs, [x, w]), x.cpu(), w.cpu(), MESH, xla, 1.0)  # and nothing is left of it


def test_what_a_kernel_raises_is_raised(xla: Engine):
    def fn(x):
        raise KeyError("block")

    with pytest.raises(KeyError, match="block"):
        xla.call_kernel(Kernel("broken", fn, MESH, (P(),), (P(),)), [place(xla, numbers((8, 2)))])


def test_no_gradient_flows_through_a_kernel(xla: Engine):
    _, _, x, w = placed_factors(xla, MESH)
    y, _ = xla.call_kernel(product_kernel(MESH), [x.requires_grad_(), w])
    with pytest.raises(RuntimeError, match=r"backward through shardtorch.kernel"):
        y.sum().backward()


def test_the_reference_engine_runs_no_kernels(reference: Engine):
    _, _, x, w = placed_factors(reference, MESH)
    with pytest.raises(EngineUnavailableError, match=r"plain torch, and no kernels(.|\n)*got: the kernel product"):
        reference.call_kernel(product_kernel(MESH), [x, w])


# in_order


def test_in_order_gives_the_same_values(engine: Engine):
    sharding, want = NamedSharding(MESH, P("fsdp", "tensor")), numbers((8, 4))
    x = place(engine, want, spec=sharding.spec)
    others = [numbers((3,), torch.int32), torch.tensor(True), numbers((2, 3), torch.bfloat16), torch.tensor(0.5)]
    found = engine.in_order([x, *(place(engine, other) for other in others), x])
    assert len(found) == 6
    for y in (found[0], found[-1]):
        assert_lies_as(y, sharding, want, engine)
    for y, other in zip(found[1:-1], others, strict=True):
        assert y.dtype == other.dtype
        assert torch.equal(y.cpu(), other)
    assert engine.in_order([]) == []


def test_in_order_leaves_its_tensors_as_they_are(engine: Engine):
    @engine.compile
    def step(x: Tensor) -> list[Tensor]:
        first = x * 2
        (later, _) = engine.in_order([x, first])
        return [x + later, first]

    x = place(engine, numbers((8, 4)), spec=P("fsdp"))
    found = step(x)
    assert torch.equal(found[0].cpu(), 2 * numbers((8, 4)))
    assert torch.equal(found[1].cpu(), 2 * numbers((8, 4)))
    assert torch.equal(x.cpu(), numbers((8, 4)))


def test_in_order_within_a_function_of_autograd(engine: Engine):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            (x, *_) = engine.in_order([x, x + 1])
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore
            (x, grad) = engine.in_order([*ctx.saved_tensors, grad])
            return 2 * x * grad

    values = randn(8, 4)
    x = place(engine, values.clone().requires_grad_(), spec=P("fsdp"))
    y = Square.apply(x)
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), 2 * values)


def operands(text: str) -> dict[str, tuple[str, list[str]]]:
    """The operation and operands of each value of an HLO text, by name."""
    found = {}
    for name, kind, rest in re.findall(
        r"^ *(?:ROOT )?(%[\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)$", text, re.MULTILINE
    ):
        found[name] = kind, re.findall(r"%[\w.\-]+", rest)
    return found


def test_no_gradient_flows_through_in_order(engine: Engine):
    (x,) = engine.in_order([place(engine, randn(8, 4).requires_grad_())])
    assert not x.requires_grad


def test_in_order_takes_what_is_on_the_devices(xla: Engine):
    with pytest.raises(
        ShardingError, match=r"on the engine's device.\n  got: tensor 1: shape \(2,\) on cpu\n  fix: move"
    ):
        xla.in_order([place(xla, randn(8, 4)), torch.ones(2)])


def test_what_follows_in_order_waits_for_what_came_before(xla: Engine):
    """In the graph, a product comes after a sine that it does not use."""
    x = place(xla, randn(8, 4), spec=P("fsdp"))

    def depends_on(y: Tensor, kind: str) -> bool:
        values = operands(torch_xla._XLAC._get_xla_tensors_hlo([y]))
        (start,) = (name for name, (found, _) in values.items() if found == "cosine")
        reached, ahead = set(), [start]
        while ahead:
            name = ahead.pop()
            reached.add(values[name][0])
            ahead += values[name][1]
        assert "parameter" in reached
        return kind in reached

    first = x.sin()
    later, first = xla.in_order([x, first])
    assert depends_on(later.cos() + first, "sine")
    assert not depends_on(x.cos() + x.sin(), "sine")  # where nothing was put in order
    xla.sync()


# compile, local_shards, sync


def test_compile_runs_the_same_function(engine: Engine):
    sharding = NamedSharding(MESH, P("fsdp"))

    def step(x: Tensor, *, scale: float) -> tuple[Tensor, str]:
        """Scales."""
        return engine.constrain(x * scale, sharding), "metrics"

    run = engine.compile(step)
    assert (run.__name__, run.__doc__) == ("step", "Scales.")
    y, word = run(place(engine, numbers((8, 2))), scale=3.0)
    assert word == "metrics"
    assert_lies_as(y, sharding, numbers((8, 2)) * 3, engine)


def test_compiled_steps_update_in_place(engine: Engine):
    sharding = NamedSharding(MESH, P("fsdp", "tensor"))
    w = place(engine, numbers((8, 4)).requires_grad_(), spec=P("fsdp", "tensor"))

    @engine.compile
    def step() -> Tensor:
        loss = (w * w).sum()
        (grad,) = torch.autograd.grad(loss, [w])
        with torch.no_grad():
            w.sub_(0.25 * grad)
        return loss

    assert step().item() == (numbers((8, 4)) ** 2).sum().item()
    step()
    assert_lies_as(w, sharding, numbers((8, 4)) / 4, engine)


def test_what_is_raised_in_a_step_is_raised_by_it(engine: Engine):
    def step() -> None:
        raise KeyError("batch")

    with pytest.raises(KeyError, match="batch"):
        engine.compile(step)()


def test_local_shards_are_copies(engine: Engine):
    sharding = NamedSharding(MESH, P("fsdp"))
    x = place(engine, numbers((8, 2)), spec=P("fsdp"))
    shards = engine.local_shards(x, sharding)
    x.add_(100)
    engine.sync()
    assert torch.equal(shards[0].data, numbers((8, 2))[:2])
    assert_lies_as(x, sharding, numbers((8, 2)) + 100, engine)


def test_local_shards_of_a_pending_value(engine: Engine):
    sharding = NamedSharding(MESH, P("fsdp"))
    x = engine.constrain(place(engine, numbers((8, 2))) * 2, sharding)
    assert_lies_as(x, sharding, numbers((8, 2)) * 2, engine)


def test_sync_waits_for_what_is_pending(engine: Engine):
    x = place(engine, numbers((8, 2))) + 1
    before = engine.num_compiles()
    engine.sync()
    assert torch.equal(x.cpu(), numbers((8, 2)) + 1)
    assert engine.num_compiles() in (before, before + 1)
