"""Layers run as one: any way a model calls them, what may differ between them, and what a stack refuses."""

import copy
import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from fsdp_cases import SMALL, assert_all_lie_as_planned
from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.errors import ShardingError, ShardtorchError
from shardtorch.fsdp import StackedLayers, fully_shard
from shardtorch.fsdp._stack import check_alike
from shardtorch.mesh import Mesh, NamedSharding, P

MESH = Mesh(fsdp=8)


class Layer(nn.Module):
    """Takes what layers of all kinds take."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor, tables=None, power: int = 1, *, options=None, mask: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.proj(x)) ** power
        if tables is not None:
            y = y * tables[0] + tables[1]
        if options is not None:
            y = y * options["scale"] if options["on"] else y
        return x + (y if mask is None else y.masked_fill(mask, 0.0))


class Model(nn.Module):
    def __init__(self, layer=Layer, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


def put(engine: Engine, x: Tensor) -> Tensor:
    return engine.put(x, NamedSharding(MESH, P()), tuple(x.shape))


def stacked(model: nn.Module, engine: Engine, **arguments) -> nn.Module:
    return fully_shard(copy.deepcopy(model), MESH, plan=SMALL, stack="layers", engine=engine, **arguments)


def everywhere(engine: Engine, value):
    """The same argument with its tensors on the engine's device."""
    return torch.utils._pytree.tree_map(lambda leaf: put(engine, leaf) if isinstance(leaf, Tensor) else leaf, value)


A, B = torch.linspace(0.5, 1.5, 16), torch.linspace(-1, 1, 16)
MASK = torch.arange(16) % 3 == 0
CALLS = {
    "nothing": ((), {}),
    "None": ((None, 1), {}),
    "a number": ((None, 2), {}),
    "a tuple of tensors": (((A, B),), {}),
    "a list of tensors, by name": ((), {"tables": [A, B]}),
    "a dict": ((), {"options": {"scale": A, "on": True}}),
    "a dict, otherwise": ((), {"options": {"scale": A, "on": False}}),
    "a mask and more": (((A, B),), {"power": 3, "mask": MASK, "options": {"scale": 2.0, "on": True}}),
}


@pytest.mark.parametrize("remat", [False, True], ids=["saved", "remat"])
def test_layers_get_whatever_the_model_passes(engine: Engine, remat: bool):
    torch.manual_seed(0)
    plain = Model()
    model = stacked(plain, engine, remat=remat)
    x = torch.randn(4, 16)
    for what, (args, kwargs) in CALLS.items():
        run = engine.compile(model)
        y = run(put(engine, x), *everywhere(engine, args), **everywhere(engine, kwargs))
        torch.testing.assert_close(y.detach().cpu(), plain(x, *args, **kwargs), rtol=1e-5, atol=1e-5, msg=what)


def test_equal_arguments_are_traced_once(xla: Engine):
    model = stacked(Model(), xla)
    run = xla.compile(model)
    for _ in range(2):
        run(put(xla, torch.randn(4, 16)), (put(xla, A), put(xla, B)), power=2)
        before = xla.num_compiles()
    run(put(xla, torch.randn(4, 16)), (put(xla, B), put(xla, A)), power=2)
    assert xla.num_compiles() == before
    assert len(model.layers._bodies) == 1


def test_arguments_that_are_equal_but_of_other_types_are_told_apart(reference: Engine):
    class Typed(nn.Linear):
        def forward(self, x: Tensor, n) -> Tensor:
            return super().forward(x) * (2 if isinstance(n, bool) else 3)

    plain = Model(lambda: Typed(16, 16))
    model = stacked(plain, reference)
    x = torch.randn(4, 16)
    for n in (1, True, 1.0):
        torch.testing.assert_close(model(x, n), plain(x, n))


def test_an_argument_that_is_no_constant_of_the_code_is_an_error(reference: Engine):
    model = stacked(Model(), reference)
    with pytest.raises(
        ShardingError, match=r"(?s)layers: an argument of stacked layers must be a tensor or hashable.*set"
    ):
        model(torch.randn(4, 16), power={1})


def test_layers_cannot_be_told_apart(reference: Engine):
    model = stacked(Model(), reference)
    for pick in (lambda m: m.layers[0], lambda m: m.layers[-1], lambda m: m.layers[:2]):
        with pytest.raises(ShardingError, match=r"(?s)layers: stacked layers run together.*for layer in layers"):
            pick(model)
    assert isinstance(model.layers, StackedLayers)


class Looping(Model):
    """A model that loops over its layers in a way of its own."""

    def __init__(self, loop) -> None:
        super().__init__()
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self.layers, x)


def residual_around(layers, x: Tensor) -> Tensor:
    for layer in layers:
        x = x + layer(x)
    return x


def in_place_between(layers, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
        x.mul_(2)
    return x


def same_input(layers, x: Tensor) -> Tensor:
    return sum(layer(x) for layer in layers)


def arguments_per_layer(layers, x: Tensor) -> Tensor:
    for number, layer in enumerate(layers):
        x = layer(x, None, number + 1)
    return x


def tensors_per_layer(layers, x: Tensor) -> Tensor:
    for layer, scale in zip(layers, torch.ones(3, device=x.device), strict=True):
        x = layer(x, options={"scale": scale, "on": True})
    return x


def in_place_on_an_argument(layers, x: Tensor) -> Tensor:
    scale = torch.ones(16, device=x.device)
    for layer in layers:
        x = layer(x, (scale, 0))
        scale.mul_(0.5)
    return x


def other_structure(layers, x: Tensor) -> Tensor:
    for number, layer in enumerate(layers):
        x = layer(x) if number == 0 else layer(x, power=1)
    return x


def drop_first(layers, x: Tensor) -> Tensor:
    for number, layer in enumerate(layers):
        x = layer(x) if number else x
    return x


def drop_middle(layers, x: Tensor) -> Tensor:
    for number, layer in enumerate(layers):
        x = x if number == 1 else layer(x)
    return x


def drop_last(layers, x: Tensor) -> Tensor:
    for number, layer in enumerate(layers):
        x = layer(x) if number < 2 else x
    return x


def one_twice(layers, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(layer(x))
    return x


def backwards(layers, x: Tensor) -> Tensor:
    for layer in list(layers)[::-1]:
        x = layer(x)
    return x


def enumerated(layers, x: Tensor) -> Tensor:
    for _, layer in enumerate(layers):
        x = layer(x, None, 2)
    return x


def zipped_with_equal_arguments(layers, x: Tensor) -> Tensor:
    for layer, power in zip(layers, [2, 2, 2], strict=True):
        x = layer(x, power=power, options={"scale": 0.5, "on": True})
    return x


def kept_and_run_twice(layers, x: Tensor) -> Tensor:
    kept = list(layers)
    for _ in range(2):
        for layer in kept:
            x = layer(x)
    return x


def two_loops(layers, x: Tensor) -> Tensor:
    for _ in range(2):
        for layer in layers:
            x = layer(x)
    return x


def none_called(layers, x: Tensor) -> Tensor:
    return x * sum(1 for _ in layers)


class TestLoops:
    """A stack runs as a whole; a loop that means something else than that is refused, and never wrong."""

    @pytest.mark.parametrize(
        "loop", [enumerated, zipped_with_equal_arguments, kept_and_run_twice, two_loops, none_called]
    )
    def test_loops_that_mean_a_scan(self, engine: Engine, loop):
        plain, x = Looping(loop), torch.randn(4, 16)
        model = stacked(plain, engine)
        y = engine.compile(model)(put(engine, x))
        torch.testing.assert_close(y.detach().cpu(), plain(x), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("loop", "got"),
        [
            (residual_around, "layer 1 called with another input than layer 0 returned"),
            (in_place_between, "layer 1 called with another input than layer 0 returned"),
            (same_input, "layer 1 called with another input than layer 0 returned"),
            (arguments_per_layer, "layer 1 called with other arguments than layer 0"),
            (tensors_per_layer, "layer 1 called with other arguments than layer 0"),
            (in_place_on_an_argument, "layer 1 called with other arguments than layer 0"),
            (other_structure, "layer 1 called with other arguments than layer 0"),
            (drop_first, "a call of layer 1 where layer 0 is next"),
            (drop_middle, "a call of layer 2 where layer 1 is next"),
            (drop_last, "a loop that called 2 of 3 layers"),
            (one_twice, "a call of layer 0 where layer 1 is next"),
            (backwards, "a call of layer 2 where layer 0 is next"),
        ],
    )
    def test_other_loops_are_refused(self, engine: Engine, loop, got: str):
        model = stacked(Looping(loop), engine)
        with pytest.raises(ShardingError, match=rf"(?s)layers: stacked layers run together.*got: {got}.*stack=None"):
            engine.compile(model)(put(engine, torch.randn(4, 16)))

    def test_in_inference_mode_too(self, reference: Engine):
        """Where tensors do not count their changes."""
        plain, x = Model(), torch.randn(4, 16)
        with torch.inference_mode():
            torch.testing.assert_close(stacked(plain, reference)(x), plain(x))
            with pytest.raises(ShardingError, match="another input than layer 0 returned"):
                stacked(Looping(residual_around), reference)(x)

    def test_the_stack_itself_runs_all(self, engine: Engine):
        plain, x = Model(), torch.randn(4, 16)
        model = stacked(plain, engine)
        y = engine.compile(model.layers)(put(engine, x))
        torch.testing.assert_close(y.detach().cpu(), plain(x), rtol=1e-5, atol=1e-5)
        assert len(model.layers) == len(list(model.layers)) == 3

    @pytest.mark.parametrize(("args", "got"), [((), "x, power by keyword"), ((3,), "int")])
    def test_an_input_that_is_no_positional_tensor(self, reference: Engine, args: tuple, got: str):
        model = stacked(Model(), reference)
        for call in (model.layers, next(iter(model.layers))):
            with pytest.raises(
                ShardingError, match=rf"(?s)layers: stacked layers take their input.* first positional.*got: {got}"
            ):
                call(*args, **({} if args else {"x": torch.randn(4, 16), "power": 2}))


class TestBuffers:
    def test_each_layer_has_its_own(self, engine: Engine):
        class Norm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(16)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(x)

        plain = Model(Norm).eval()
        for number, layer in enumerate(plain.layers):
            layer.norm.running_mean.fill_(number)
            layer.norm.running_var.fill_(number + 1)
        model = stacked(plain, engine)
        x = torch.randn(4, 16)
        y = engine.compile(torch.no_grad()(model))(put(engine, x))
        torch.testing.assert_close(y.cpu(), plain(x), rtol=1e-5, atol=1e-5)

    def test_a_change_to_one_is_an_error_and_not_lost(self, engine: Engine):
        class Counting(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return super().forward(x)

        for layer in (Counting, lambda: nn.BatchNorm1d(16)):
            model = stacked(Model(layer), engine)
            with pytest.raises(ShardingError, match=r"layers\.\*\.\w+: a stacked layer must not change its buffers"):
                engine.compile(model)(put(engine, torch.randn(4, 16)))


class TestAlike:
    """One layer stands for all, so all must be what it is."""

    @staticmethod
    def differs(change, got: str, layer=Layer) -> None:
        layers = nn.ModuleList(layer() for _ in range(3))
        check_alike(layers, "layers")
        change(layers[1])
        with pytest.raises(ShardingError, match=rf"(?s)layers: layers that are stacked must be alike.*{got}"):
            check_alike(layers, "layers")

    def test_shapes(self):
        self.differs(lambda m: setattr(m, "proj", nn.Linear(16, 16, bias=False)), "layers.1 has no proj.bias")
        self.differs(lambda m: setattr(m, "proj", nn.Linear(8, 16)), r"proj.in_features = 8; layers.0 .* = 16")

    def test_dtypes_and_frozen_parameters(self):
        self.differs(lambda m: m.half(), "float16")
        self.differs(lambda m: m.requires_grad_(False), "False")

    def test_classes_and_modules(self):
        self.differs(lambda m: setattr(m, "proj", nn.Sequential(m.proj)), "proj.class = 'Sequential'")
        self.differs(lambda m: setattr(m, "more", nn.ReLU()), "more.class")

    def test_buffers(self):
        self.differs(lambda m: m.register_buffer("extra", torch.ones(2)), "layers.1 has extra")

    def test_training(self):
        self.differs(lambda m: m.eval(), "training = False")

    @pytest.mark.parametrize(
        ("here", "there"),
        [
            (1, 2),
            (1.0, None),
            ("a", "b"),
            ([1], [2]),
            ({"window": 4}, {"window": 8}),
            (F.relu, F.gelu),
            (torch.float32, torch.bfloat16),
            (dataclasses.make_dataclass("C", ["window"])(4), dataclasses.make_dataclass("C", ["window"])(8)),
            (torch.tensor(0.5), torch.tensor(0.25)),
            (torch.tensor(0.5), 0.5),
            (True, 1),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("name", ["setting", "_setting"])
    def test_settings_of_any_type(self, here: object, there: object, name: str):
        def build() -> nn.Module:
            layer = Layer()
            setattr(layer.proj, name, copy.deepcopy(here))
            return layer

        self.differs(lambda m: setattr(m.proj, name, there), f"proj.{name} = ", build)

    def test_hooks(self):
        self.differs(lambda m: m.register_forward_hook(lambda *_: None), "_forward_hooks")
        self.differs(lambda m: m.proj.register_forward_pre_hook(print), "proj._forward_pre_hooks")

    def test_the_same_hook_everywhere_runs(self, engine: Engine):
        def double(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
            return out * 2

        def build() -> nn.Module:
            layer = Layer()
            layer.proj.register_forward_hook(double)
            return layer

        plain, x = Model(build), torch.randn(4, 16)
        model = stacked(plain, engine)
        y = engine.compile(model)(put(engine, x))
        torch.testing.assert_close(y.detach().cpu(), plain(x), rtol=1e-5, atol=1e-5)

    def test_settings_that_are_equal_by_value_are_alike(self):
        def build() -> nn.Module:
            layer = Layer()
            layer.config = {"window": (4, 8), "act": F.silu, "table": [1.0, 2.0]}
            layer.scale = torch.tensor([0.5, 1.0])
            return layer

        check_alike(nn.ModuleList(build() for _ in range(3)), "layers")


class TestRandomNumbers:
    def test_dropout_is_fine_where_it_does_nothing(self, engine: Engine):
        plain, x = Model(lambda: nn.Sequential(Layer(), nn.Dropout(0.5))).eval(), torch.randn(4, 16)
        y = engine.compile(stacked(plain, engine))(put(engine, x))
        torch.testing.assert_close(y.detach().cpu(), plain(x), rtol=1e-5, atol=1e-5)

    def test_and_an_error_where_every_layer_would_draw_the_same(self, xla: Engine):
        model = stacked(Model(lambda: nn.Sequential(Layer(), nn.Dropout(0.5))), xla)
        with pytest.raises(ShardtorchError, match="a scanned layer must not draw random numbers"):
            xla.compile(model)(put(xla, torch.randn(4, 16)))


def test_after_an_error_in_a_layer_the_engine_goes_on(xla: Engine):
    """What the trace of a layer leaves behind has no data; running it would be the end of the process."""

    class Broken(Layer):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("from the layer")

    model = stacked(Model(Broken), xla)
    with pytest.raises(KeyError, match="from the layer") as kept:
        xla.compile(model)(put(xla, torch.randn(4, 16)))
    xla.sync()
    assert kept.traceback
    good = stacked(Model(), xla)
    xla.compile(good)(put(xla, torch.randn(4, 16)))
    assert_all_lie_as_planned(good)


def test_a_path_within_the_model(engine: Engine):
    plain = nn.Sequential(nn.Linear(16, 16), Model(functools.partial(nn.Linear, 16, 16)))
    model = fully_shard(copy.deepcopy(plain), MESH, plan=SMALL, stack="1.layers", engine=engine)
    x = torch.randn(4, 16)
    y = engine.compile(model)(put(engine, x))
    torch.testing.assert_close(y.detach().cpu(), plain(x), rtol=1e-5, atol=1e-5)
    assert_all_lie_as_planned(model)
