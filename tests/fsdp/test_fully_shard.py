"""What `fully_shard` makes of a model: where its tensors lie, how little is asked for at once, what it keeps."""

import copy
import dataclasses
import weakref
from collections import Counter

import pytest
import torch
from fsdp_cases import (
    CASES,
    LARGE,
    SMALL,
    ZOO_INIT,
    ZOO_TENSOR_PLAN,
    Case,
    Zoo,
    assert_all_lie_as_planned,
    assert_lies_as,
    on_meta,
    parameters_of,
    whole,
)
from torch import Tensor, nn

from shardtorch.engine import Engine, Index
from shardtorch.fsdp import StackedLayers, fully_shard, layer_ndim, placement, shard_optimizer
from shardtorch.mesh import Mesh, NamedSharding, P, ShardingPlan
from shardtorch.models import PRESETS, Llama, preset
from shardtorch.run._model import build_model
from shardtorch.train import adamw

SMALL_LLAMA = dataclasses.replace(preset("llama-tiny"), num_layers=2, vocab_size=512, embed_dim=128, mlp_dim=256)


class Recording:
    """An engine that keeps what it was asked to place."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.asked: list[tuple[tuple[int, ...], NamedSharding, list[Index]]] = []
        self.live_bytes = self.peak_bytes = 0

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def materialize(self, shape, dtype, sharding, read) -> Tensor:
        boxes: list[Index] = []
        self.asked.append((tuple(shape), sharding, boxes))

        def recorded(index: Index) -> Tensor:
            boxes.append(index)
            array = read(index).float().numpy().copy()  # an owner of memory whose end can be seen
            self.live_bytes += array.nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(array, self._freed, array.nbytes)
            return torch.from_numpy(array)

        return self._engine.materialize(shape, dtype, sharding, recorded)

    def _freed(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


class Planning(Recording):
    """An engine that places nothing: for models that fit nowhere here."""

    def materialize(self, shape, dtype, sharding, read) -> Tensor:
        self.asked.append((tuple(shape), sharding, []))
        return torch.empty(shape, dtype=dtype, device="meta")


class CountingRows:
    """An initializer that counts what it was asked to fill."""

    def __init__(self) -> None:
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        self.shapes[tuple(x.shape)] += 1
        return x.zero_()


def as_key(index: Index) -> tuple[tuple[int, int], ...]:
    return tuple((s.start, s.stop) for s in index)


class TestNeverWhole:
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_only_the_boxes_of_shards_are_read_each_once(self, xla: Engine, case: Case):
        recording = Recording(xla)
        fully_shard(on_meta(Zoo), case.mesh, init=ZOO_INIT, engine=recording, **case.arguments())
        assert len(recording.asked) > 10
        for shape, sharding, boxes in recording.asked:
            shards = {as_key(index) for index in sharding.index_ranges(shape).values()}
            if len(shape) >= 3 and sharding.shard_shape(shape)[0] == shape[0]:  # a stack: one index of dim 0 at a time
                shards = {((i, i + 1), *box[1:]) for box in shards for i in range(shape[0])}
            assert Counter(map(as_key, boxes)) == Counter(shards), shape

    def test_a_stack_is_never_in_memory_as_a_whole(self, xla: Engine):
        """Of 16 layers the host never holds more than two: one that is read, one that is on its way to the devices."""

        class Deep(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(16))

        recording, init = Recording(xla), CountingRows()
        fully_shard(on_meta(Deep), Mesh(fsdp=8), stack="layers", init={"**": init}, engine=recording)
        layer_bytes = 256 * 256 * 4
        assert recording.peak_bytes <= 2 * layer_bytes
        assert recording.peak_bytes >= layer_bytes // 8  # it has been measured
        assert init.shapes == {(256,): 16 * 256}  # and no row was drawn besides those that were placed

    def test_an_initializer_fills_rows(self, engine: Engine):
        init = CountingRows()
        fully_shard(on_meta(lambda: nn.Linear(16, 24)), Mesh(fsdp=8), init={"**": init}, plan=SMALL, engine=engine)
        assert init.shapes == {(16,): 24, (24,): 1}

    def test_the_largest_model_is_planned_without_a_read(self, reference: Engine):
        """On 512 devices: 405 billion parameters, of which a device holds what the specs say."""
        config, mesh = PRESETS["llama3-405b"], Mesh(fsdp=64, tensor=8)
        model, plan = build_model(config, mesh)
        engine = Planning(reference)
        fully_shard(model, mesh, plan=plan, init=model.initializers(), stack="layers", engine=engine)
        assert sum(p.numel() for p in model.parameters()) == config.num_parameters
        assert len(engine.asked) == len(list(model.parameters())) == 12
        held = sum(
            NamedSharding.bytes_per_device(placement(model).parameters[name], tuple(p.shape), 1)
            for name, p in model.named_parameters()
        )
        norms = (2 * config.num_layers + 1) * config.embed_dim  # replicated
        assert held == (config.num_parameters - norms) // 512 + norms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "stack", "remat"),
    [
        (Mesh(fsdp=8), None, False),
        (Mesh(data=2, fsdp=2, tensor=2), "layers", False),
        (Mesh(fsdp=2, tensor=4), "layers", True),
    ],
    ids=lambda value: str(value),
)
def test_a_llama_lies_as_planned_after_a_step(xla: Engine, mesh: Mesh, stack: str | None, remat: bool):
    model, plan = build_model(SMALL_LLAMA, mesh)
    fully_shard(model, mesh, plan=plan, init=model.initializers(), stack=stack, remat=remat, engine=xla)
    shardings = {name.replace(".*.", ".0."): s for name, s in placement(model).parameters.items()}
    if mesh.shape.get("tensor", 1) > 1:
        assert shardings["layers.0.mlp.w_down.weight"].spec.axes[-2:] == ("fsdp", "tensor")
    optimizer = adamw(model)
    batch = NamedSharding(mesh, P(("data", "fsdp") if "data" in mesh.axis_names else "fsdp"))
    tokens = xla.put(torch.randint(0, 512, (8, 32)), batch, (8, 32))

    def step(tokens: Tensor, lr: Tensor) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        model(tokens, tokens, loss_chunks=2).backward()
        optimizer.step()

    before = xla.num_compiles()
    xla.compile(step)(tokens, xla.put(torch.tensor(1e-3), NamedSharding(mesh, P()), ()))
    assert xla.num_compiles() == before + 1
    assert all(p.grad is not None for p in model.parameters())
    assert_all_lie_as_planned(model, optimizer)


class TestShardings:
    """Which sharding each parameter gets."""

    @staticmethod
    def specs(reference: Engine, model: nn.Module, mesh: Mesh, **arguments) -> dict[str, P]:
        fully_shard(model, mesh, engine=reference, **arguments)
        return {name: sharding.spec for name, sharding in placement(model).parameters.items()}

    def test_the_largest_dim_that_divides_and_small_parameters_whole(self, reference: Engine):
        model = nn.ModuleDict({"wide": nn.Linear(64, 8), "odd": nn.Linear(8, 63), "small": nn.Linear(4, 4)})
        specs = self.specs(reference, model, Mesh(fsdp=8), plan=SMALL)
        assert specs["wide.weight"] == P(None, "fsdp")
        assert specs["odd.weight"] == P(None, "fsdp")
        assert specs["odd.bias"] == specs["small.weight"] == P()

    def test_the_plan_comes_first_and_the_axis_takes_a_dim_that_it_leaves(self, reference: Engine):
        plan = ShardingPlan(
            {"0.weight": ("tensor", None), "1.weight": (None, "tensor"), "1.bias": ("tensor",)}, large=8
        )
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))
        specs = self.specs(reference, model, Mesh(fsdp=2, tensor=2), plan=plan)
        assert specs["0.weight"] == P("tensor", "fsdp")
        assert specs["1.weight"] == P("fsdp", "tensor")
        assert specs["1.bias"] == P(("tensor", "fsdp"))  # none is left: they share one
        assert specs["0.bias"] == P("fsdp")

    def test_what_the_plan_shards_over_the_axis_stays_so(self, reference: Engine):
        plan = ShardingPlan({"weight": ("fsdp", None)}, large=8)
        assert self.specs(reference, nn.Linear(16, 8), Mesh(fsdp=2), plan=plan)["weight"] == P("fsdp", None)

    def test_several_axes_are_taken_together(self, reference: Engine):
        plan = ShardingPlan({"bias": ("fsdp",)}, large=8)
        specs = self.specs(reference, nn.Linear(16, 8), Mesh(data=2, fsdp=2), axis=("data", "fsdp"), plan=plan)
        assert specs["weight"] == P(None, ("data", "fsdp"))
        assert specs["bias"] == P(("fsdp", "data"))

    def test_without_an_axis_the_plan_is_all(self, reference: Engine):
        plan = ShardingPlan({"weight": (None, "rows")}, large=16)
        specs = self.specs(reference, nn.Linear(16, 8), Mesh(rows=8), axis=None, plan=plan)
        assert specs == {"weight": P(None, "rows"), "bias": P()}

    @pytest.mark.parametrize("spec", [None, P(), ()], ids=repr)
    def test_what_the_plan_replicates_on_purpose_stays_whole(self, reference: Engine, spec):
        plan = ShardingPlan({"0.weight": spec, "layers.*.weight": spec}, large=8)
        model = nn.ModuleDict(
            {"0": nn.Linear(16, 8), "1": nn.Linear(16, 8), "layers": nn.ModuleList([nn.Linear(8, 8)])}
        )
        specs = self.specs(reference, model, Mesh(data=2), axis="data", plan=plan, stack="layers")
        assert (specs["0.weight"], specs["layers.*.weight"]) == (P(), P(None))
        assert specs["1.weight"] == P(None, "data")

    def test_one_odd_parameter_does_not_cost_the_others_their_sharding(self, reference: Engine):
        model = nn.Sequential(nn.Linear(9, 7), nn.Linear(8, 8))
        plan = ShardingPlan({"0.weight": None}, large=LARGE - 1)
        specs = self.specs(reference, model, Mesh(fsdp=8), plan=plan)
        assert (specs["0.weight"], specs["1.weight"]) == (P(), P("fsdp", None))

    def test_an_axis_of_size_one_shards_nothing(self, reference: Engine):
        specs = self.specs(reference, nn.Linear(17, 13), Mesh(fsdp=1), plan=SMALL)
        assert set(specs.values()) == {P()}

    def test_a_stack_is_large_or_not_by_its_layer(self, reference: Engine):
        model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(64))})
        specs = self.specs(reference, model, Mesh(fsdp=4), stack="layers", plan=SMALL)
        assert specs["layers.*.weight"] == P(None)
        assert {name: layer_ndim(name, p) for name, p in model.named_parameters()} == {
            "layers.*.weight": 2,
            "layers.*.bias": 1,
        }


class TestWhatIsKept:
    def test_ties_are_one_parameter_whose_gradient_is_the_sum(self, engine: Engine):
        def build() -> nn.Module:
            model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
            model[2].weight = model[0].weight
            return model

        torch.manual_seed(0)
        plain = build()
        model = fully_shard(copy.deepcopy(plain), Mesh(fsdp=8), plan=SMALL, engine=engine)
        assert model[2]._parameters["weight"] is model[0]._parameters["weight"]
        assert list(placement(model).parameters) == ["0.weight", "1.weight", "1.bias"]
        tokens = torch.arange(16).reshape(2, 8)
        plain(tokens).square().mean().backward()

        def step(tokens: Tensor) -> None:
            model(tokens).square().mean().backward()

        engine.compile(step)(engine.put(tokens, NamedSharding(Mesh(fsdp=8), P()), (2, 8)))
        parameter = model[0]._parameters["weight"]
        gradient = whole(engine, parameter.grad, placement(model).parameters["0.weight"])
        torch.testing.assert_close(gradient, plain[0].weight.grad, rtol=1e-5, atol=1e-6)

    def test_a_module_at_two_places(self, engine: Engine):
        torch.manual_seed(0)
        shared = nn.Linear(8, 8)
        shared.register_buffer("scale", torch.tensor([2.0]))
        plain = nn.Sequential(shared, nn.ReLU(), shared)
        model = fully_shard(copy.deepcopy(plain), Mesh(fsdp=8), plan=SMALL, engine=engine)
        assert model[0] is model[2]
        assert len(list(model.parameters())) == 2
        x = torch.randn(8, 8)
        y = model(engine.put(x, NamedSharding(Mesh(fsdp=8), P("fsdp")), (8, 8))).cpu()
        torch.testing.assert_close(y, plain(x), rtol=1e-5, atol=1e-6)

    def test_buffers_that_are_shared_stay_so_and_each_owner_has_its_values(self, engine: Engine):
        class Layer(nn.Module):
            def __init__(self, table: Tensor) -> None:
                super().__init__()
                self.register_buffer("table", table)
                self.proj = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return self.proj(x) + self.table

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("table", torch.arange(8.0))
                self.first = Layer(self.table)
                self.layers = nn.ModuleList(Layer(self.table) for _ in range(2))

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x * self.table)
                for layer in self.layers:
                    x = layer(x)
                return x

        torch.manual_seed(0)
        plain = Model()
        model = fully_shard(copy.deepcopy(plain), Mesh(fsdp=8), stack="layers", plan=SMALL, engine=engine)
        assert model.table is model.first.table
        assert all(buffer.device == engine.device for buffer in model.buffers())
        x = torch.randn(8, 8)
        y = model(engine.put(x, NamedSharding(Mesh(fsdp=8), P("fsdp")), (8, 8))).cpu()
        torch.testing.assert_close(y, plain(x), rtol=1e-5, atol=1e-5)
        assert list(model.state_dict()) == list(plain.state_dict())

    def test_frozen_parameters_get_no_gradient_until_they_are_thawed(self, engine: Engine):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        fully_shard(model, Mesh(fsdp=8), plan=SMALL, engine=engine)
        x = engine.put(torch.randn(8, 8), NamedSharding(Mesh(fsdp=8), P("fsdp")), (8, 8))

        def step(x: Tensor) -> None:
            model(x).sum().backward()

        frozen, trained = (list(model[i]._parameters.values()) for i in range(2))
        engine.compile(step)(x)
        assert [p.requires_grad for p in frozen] == [False, False]
        assert all(p.grad is None for p in frozen)
        assert all(p.grad is not None for p in trained)
        model[0].requires_grad_(True)
        engine.compile(step)(x)
        assert all(p.grad is not None for p in frozen)
        assert_all_lie_as_planned(model)

    def test_integer_parameters(self, engine: Engine):
        model = nn.Module()
        model.ids = nn.Parameter(torch.arange(128).reshape(16, 8), requires_grad=False)
        fully_shard(model, Mesh(fsdp=8), plan=SMALL, engine=engine)
        assert torch.equal(parameters_of(model, 1)["ids"], torch.arange(128).reshape(16, 8))

    @pytest.mark.parametrize("stack", [None, "blocks"])
    def test_compute_dtype_leaves_storage_and_gradients_in_float32(self, engine: Engine, stack: str | None):
        seen = []

        class Spy(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                seen.append((self.weight.dtype, x.dtype))
                return super().forward(x)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(Spy(16, 16) for _ in range(2))

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = block(x)
                return x

        model = fully_shard(Model(), Mesh(fsdp=8), plan=SMALL, stack=stack, compute_dtype=torch.bfloat16, engine=engine)
        batch = NamedSharding(Mesh(fsdp=8), P("fsdp"))
        x = engine.put(torch.randn(8, 16, dtype=torch.bfloat16), batch, (8, 16))

        def step(x: Tensor) -> Tensor:
            y = model(x)
            y.float().sum().backward()
            return y

        assert engine.compile(step)(x).dtype == torch.bfloat16
        assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
        assert_all_lie_as_planned(model)

    def test_the_stack_stands_where_the_list_was(self, reference: Engine):
        model = fully_shard(Llama(SMALL_LLAMA), Mesh(fsdp=8), stack="layers", engine=reference)
        assert list(dict(model.named_children())) == ["embed", "layers", "norm", "head", "loss"]
        assert isinstance(model.layers, StackedLayers)
        assert len(model.layers) == 2


class TestParametersOutsideOfForward:
    """`module.weight` is the stored parameter, and what is done to it is done to the model."""

    MESH = Mesh(fsdp=8)

    def model(self, engine: Engine, **arguments) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        return fully_shard(model, self.MESH, plan=SMALL, engine=engine, **arguments)

    def batch(self, engine: Engine) -> Tensor:
        return engine.put(torch.ones(8, 8), NamedSharding(self.MESH, P("fsdp")), (8, 8))

    def test_it_is_the_parameter(self, engine: Engine):
        model = self.model(engine, compute_dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            assert model.get_parameter(name) is parameter
        assert isinstance(model[0].weight, nn.Parameter)
        assert model[0].weight.dtype == torch.float32
        assert model[0].weight.grad is None

        def step(x: Tensor) -> None:
            model(x.bfloat16()).float().sum().backward()

        engine.compile(step)(self.batch(engine))
        assert model[0].weight.grad is not None
        assert_lies_as(engine, model[0].weight.grad, placement(model).parameters["0.weight"], "gradient")

    def test_changes_in_place_are_the_models_and_stay_sharded(self, engine: Engine):
        model = self.model(engine)
        nn.init.constant_(model[0].weight, 2.0)
        nn.init.normal_(model[2].weight)
        with torch.no_grad():
            model[0].weight.mul_(3.0)
            model[0].bias.copy_(torch.full((8,), 1.0))
            model[2].weight.zero_().add_(torch.eye(8, device=engine.device))
            model[2].bias.zero_()
        engine.sync()
        assert_all_lie_as_planned(model)
        assert torch.equal(parameters_of(model, 1)["0.weight"], torch.full((8, 8), 6.0))
        y = engine.compile(model)(self.batch(engine))
        assert torch.equal(y.detach().cpu(), torch.full((8, 8), 49.0))
        assert_all_lie_as_planned(model)

    @pytest.mark.parametrize("pending", [True, False], ids=["in the step's graph", "before it"])
    def test_changes_through_views_are_sharded_again_by_the_next_forward(self, engine: Engine, pending: bool):
        """torch_xla loses the sharding of what is changed through a view."""
        model = self.model(engine)
        weights = [model[0].weight, model[2].weight]
        for _ in range(2):  # kept by the user over a forward
            with torch.no_grad():
                weights[0].zero_().fill_diagonal_(2.0)
                weights[1][1] = 0.0
            if not pending:
                engine.sync()
            engine.compile(model)(self.batch(engine))
            assert_all_lie_as_planned(model)
        assert torch.equal(parameters_of(model, 1)["0.weight"], 2 * torch.eye(8))
        assert (parameters_of(model, 1)["2.weight"] == 0).all(dim=1).nonzero().tolist() == [[1]]

    def test_an_optimizer_takes_one(self, engine: Engine):
        model = self.model(engine)
        optimizer = torch.optim.AdamW([model[0].weight], capturable=engine.name != "reference", foreach=False)
        before = parameters_of(model, 1)

        def step(x: Tensor) -> None:
            model(x).square().sum().backward()
            optimizer.step()

        shard_optimizer(optimizer, model)
        engine.compile(step)(self.batch(engine))
        changed = {name for name, p in parameters_of(model, 1).items() if not torch.equal(p, before[name])}
        assert changed == {"0.weight"}
        assert_lies_as(engine, model[0].weight, placement(model).parameters["0.weight"], "weight")

    def test_a_state_dict_is_saved_and_loaded(self, engine: Engine, tmp_path):
        model, other = self.model(engine), self.model(engine)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        other.load_state_dict(torch.load(tmp_path / "model.pt", map_location="cpu", weights_only=True))
        want, found = parameters_of(model, 1), parameters_of(other, 1)
        assert all(torch.equal(found[name], want[name]) for name in want)

    def test_in_a_forward_of_any_part_it_is_what_is_used(self, reference: Engine):
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Module()
                self.inner.head = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                seen.append(self.inner.head.weight.dtype)
                return x @ self.inner.head.weight.T

        seen: list[torch.dtype] = []
        model = fully_shard(
            nn.Sequential(Tied()), self.MESH, plan=SMALL, compute_dtype=torch.bfloat16, engine=reference
        )
        other = self.model(reference, compute_dtype=torch.bfloat16)
        model.register_forward_hook(lambda *_: seen.append(other[0].weight.dtype))
        x = torch.ones(8, 8, dtype=torch.bfloat16)
        model(x)
        model[0](x)
        assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]  # another model's forward is not its own

    def test_after_an_error_in_a_forward_it_is_the_parameter(self, reference: Engine):
        model = self.model(reference)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(8, 9))
        assert isinstance(model[0].weight, nn.Parameter)

    def test_a_module_that_is_computed_again_in_backward(self, reference: Engine):
        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

        model = fully_shard(Checkpointed(), self.MESH, plan=SMALL, compute_dtype=torch.bfloat16, engine=reference)
        model(torch.ones(8, 8, dtype=torch.bfloat16)).sum().backward()
        assert torch.equal(model.inner.weight.grad, torch.full((8, 8), 8.0))


def test_placing_compiles_a_bounded_number_of_graphs(xla: Engine):
    """One for each shape that a stack is made of, and none for the second model of the same shapes."""

    def place() -> int:
        before = xla.num_compiles()
        model = on_meta(lambda: Zoo(vocab=128, dim=48))
        fully_shard(model, Mesh(fsdp=4, tensor=2), plan=ZOO_TENSOR_PLAN, init=ZOO_INIT, stack="blocks", engine=xla)
        return xla.num_compiles() - before

    assert place() <= 8
    assert place() == 0


def test_an_engine_is_found(xla: Engine):
    """The running one is the default."""
    model = fully_shard(nn.Linear(8, 8), Mesh(fsdp=-1), plan=SMALL, init={}, seed=3)
    assert placement(model).engine is xla
    assert placement(model).mesh == Mesh(fsdp=8)
