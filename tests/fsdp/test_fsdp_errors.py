"""Every way to be refused: what is said, and that the model is then as it was."""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from fsdp_cases import SMALL, Zoo, on_meta
from torch import Tensor, nn

from shardtorch.engine import Engine, _start
from shardtorch.errors import EngineUnavailableError, ShardingError
from shardtorch.fsdp import fully_shard, placement
from shardtorch.mesh import Mesh, NamedSharding, P, ShardingPlan
from shardtorch.models import Constant

MESH = Mesh(fsdp=4, tensor=2)


def mlp(*dims: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(dims)))


def layers(*modules: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(modules), "head": nn.Linear(8, 8)})


def shared_between_layers() -> nn.Module:
    model = layers(nn.Linear(8, 8), nn.Linear(8, 8))
    model["layers"][1].weight = model["layers"][0].weight
    return model


def shared_within_a_layer() -> nn.Module:
    model = layers(mlp(8, 8, 8), mlp(8, 8, 8))
    for layer in model["layers"]:
        layer[1].weight = layer[0].weight
    return model


def shared_with_the_outside() -> nn.Module:
    model = layers(nn.Linear(8, 8), nn.Linear(8, 8))
    model["head"].weight = model["layers"][0].weight
    return model


def with_meta_buffer() -> nn.Module:
    model = mlp(8, 8)
    model.register_buffer("table", torch.empty(3, device="meta"))
    return model


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(8, 8))


class ListWithMore(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = 2 * layer(x)
        return x


@dataclass(frozen=True)
class Refusal:
    build: Callable[[], nn.Module]
    law: str
    """What must be said, with what came and what to do, as a pattern over all of the message."""
    arguments: dict = field(default_factory=dict)


def plan(**kinds) -> dict:
    return {"plan": ShardingPlan(kinds.pop("parameters", {}), **kinds)}


REFUSALS = {
    "unknown axis": Refusal(lambda: mlp(8, 8), r"'fsdq'.*got: .*did you mean 'fsdp'", {"axis": "fsdq"}),
    "unknown axis of several": Refusal(lambda: mlp(8, 8), r"'rows'.*fix:", {"axis": ("fsdp", "rows")}),
    "an axis twice": Refusal(lambda: mlp(8, 8), r"'fsdp' comes twice.*fix:", {"axis": ("fsdp", "fsdp"), "plan": SMALL}),
    "unknown axis of the plan": Refusal(
        lambda: mlp(8, 8), r"0\.weight: .*'tensr'", plan(parameters={"0.weight": ("tensr",)})
    ),
    "no dim divides": Refusal(
        lambda: mlp(9, 11),
        r"0\.weight: no dim can be divided by mesh axis fsdp of size 4.*shape \(11, 9\)"
        r".*fix: replicate it on purpose with '0\.weight': None in the plan",
        {"plan": SMALL},
    ),
    "a dim of the plan does not divide": Refusal(
        lambda: mlp(8, 9),
        r"0\.weight: dim 0 has size 9, not divisible by mesh axis 'tensor'",
        plan(parameters={"0.weight": ("tensor",)}),
    ),
    "a spec of more dims": Refusal(
        lambda: mlp(8, 8), r"0\.bias: .*1 dims.*2 entries", plan(parameters={"0.bias": (None, "tensor")})
    ),
    "a pattern matches nothing": Refusal(
        lambda: mlp(8, 8),
        r"parameters pattern '0.weigth' matches nothing.*did you mean '0.weight'",
        plan(parameters={"0.weigth": ()}),
    ),
    "a pattern is shadowed": Refusal(
        lambda: mlp(8, 8),
        r"'0.weight' decides nothing: an earlier pattern.*'\*\*\.weight'",
        plan(parameters={"**.weight": (), "0.weight": ()}),
    ),
    "an output pattern matches nothing": Refusal(
        lambda: mlp(8, 8), r"outputs pattern 'head' matches nothing", plan(outputs={"head": ()})
    ),
    "an input pattern matches nothing": Refusal(
        lambda: mlp(8, 8), r"inputs pattern 'head' matches nothing", plan(inputs={"head": ()})
    ),
    "an unknown axis of an output": Refusal(
        lambda: mlp(8, 8), r"outputs of 0: .*'tensr'", plan(outputs={"0": ("tensr",)})
    ),
    "a large parameter without a spec or an axis": Refusal(
        lambda: mlp(8, 8),
        r"0\.weight: no pattern of the plan matches this large parameter",
        {"axis": None, "plan": SMALL},
    ),
    "a rule for no parameter": Refusal(
        lambda: mlp(8, 8),
        r"init pattern '0.wieght' matches nothing.*did you mean '0.weight'",
        {"init": {"0.wieght": Constant(1)}},
    ),
    "a rule that is a function": Refusal(
        lambda: layers(nn.Linear(8, 8)).to("meta"),
        r"init pattern '\*\*': an initial value is an object with a method fill_.*zeros_.*fsdp\.Normal",
        {"init": {"**": torch.nn.init.zeros_}, "stack": "layers"},
    ),
    "a rule that is a class": Refusal(
        lambda: mlp(8, 8).to("meta"), r"init pattern '\*\*': .*got: .*Constant", {"init": {"**": Constant}}
    ),
    "a rule that is a tensor": Refusal(
        lambda: mlp(8, 8).to("meta"), r"init pattern '0\.bias': .*got: tensor", {"init": {"0.bias": torch.zeros(8)}}
    ),
    "a rule for a parameter with values": Refusal(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to("meta")),
        r"0\.weight: only a parameter on the meta device takes an initial value.*got: init pattern '\*\*\.weight'.*cpu",
        {"init": {"**.weight": Constant(1.0)}},
    ),
    "rules that are no mapping": Refusal(
        lambda: mlp(8, 8).to("meta"), r"init must be a mapping.*got: Constant", {"init": Constant(1.0)}
    ),
    "a dict for a plan": Refusal(
        lambda: mlp(8, 8),
        r"the plan must be a ShardingPlan.*0\.weight.*fix: .*ShardingPlan\(",
        {"plan": {"0.weight": P()}},
    ),
    "no rule for a parameter on meta": Refusal(
        lambda: nn.Sequential(on_meta(Custom)),
        r"0\.w: a parameter on the meta device needs a rule.*got: .*Custom.*fix: pass init=\{'0\.w'",
    ),
    "a buffer on meta": Refusal(with_meta_buffer, r"table: a buffer must have its values.*fix: .*device='cpu'"),
    "remat without a stack": Refusal(
        lambda: mlp(8, 8), r"remat applies to stacked layers.*fix: .*stack='layers'", {"remat": True}
    ),
    "a stack that is not there": Refusal(
        lambda: layers(nn.Linear(8, 8)),
        r"stack must be the path of a ModuleList.*got: 'layer'.*use one of \['layers'\]",
        {"stack": "layer"},
    ),
    "a stack where there are no lists": Refusal(
        lambda: mlp(8, 8), r"the model has no ModuleList; pass stack=None", {"stack": "layers"}
    ),
    "a stack that is no list": Refusal(
        lambda: layers(nn.Linear(8, 8)),
        r"head: only a ModuleList of layers can be stacked.*got: Linear",
        {"stack": "head"},
    ),
    "a stack of a list that does more": Refusal(
        lambda: nn.ModuleDict({"layers": ListWithMore([nn.Linear(8, 8)])}),
        r"layers: only a ModuleList.*got: ListWithMore of 1",
        {"stack": "layers"},
    ),
    "a stack of nothing": Refusal(
        lambda: layers(), r"layers: only a ModuleList of layers.*got: ModuleList of 0", {"stack": "layers"}
    ),
    "layers of other shapes": Refusal(
        lambda: layers(nn.Linear(8, 8), nn.Linear(8, 16)),
        r"layers: layers that are stacked must be alike.*got: "
        r"layers\.1 has out_features = 16; layers\.0 has out_features = 8.*stack=None",
        {"stack": "layers"},
    ),
    "a parameter of two layers": Refusal(
        shared_between_layers,
        r"must not share parameters.*got: layers\.1\.weight is layers\.0\.weight",
        {"stack": "layers"},
    ),
    "a parameter twice in a layer": Refusal(
        shared_within_a_layer,
        r"must not share parameters.*got: layers\.0\.1\.weight is layers\.0\.0\.weight",
        {"stack": "layers"},
    ),
    "a parameter of a layer and another module": Refusal(
        shared_with_the_outside,
        r"must not share parameters.*got: head\.weight is layers\.0\.weight",
        {"stack": "layers"},
    ),
    "a pattern for one layer of a stack": Refusal(
        lambda: layers(nn.Linear(8, 8)),
        r"'layers.0.weight' matches nothing.*'layers\.\*\.weight'",
        {"stack": "layers"} | plan(parameters={"layers.0.weight": ()}),
    ),
}


def picture(model: nn.Module) -> list[object]:
    """The objects that a model is made of, by name, and what hangs on its modules."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    modules = [
        (name, id(module), type(module), [len(value) for key, value in vars(module).items() if key.endswith("_hooks")])
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    gradients = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    return [[(name, id(tensor)) for name, tensor in tensors], modules, gradients]


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_fit_is_refused_and_the_model_is_as_it_was(reference: Engine, refusal: Refusal):
    model = refusal.build()
    before = picture(model)
    with pytest.raises(ShardingError) as caught:
        fully_shard(model, MESH, engine=reference, **refusal.arguments)
    assert re.search(refusal.law, str(caught.value), re.DOTALL), caught.value
    assert re.search(r"\n  got: .+\n  fix: .+", str(caught.value), re.DOTALL)
    assert picture(model) == before
    with pytest.raises(ShardingError, match="the model must be sharded first"):
        placement(model)


def test_a_picture_sees_what_sharding_changes(reference: Engine):
    """The test above can fail."""
    for stack in (None, "blocks"):
        model = Zoo()
        before = picture(model)
        fully_shard(model, MESH, plan=SMALL, stack=stack, engine=reference)
        assert all(now != then for now, then in zip(picture(model), before, strict=True))


def test_after_a_refusal_the_model_can_be_sharded(reference: Engine):
    model = layers(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ShardingError, match="matches nothing"):
        fully_shard(model, MESH, stack="layers", engine=reference, **plan(outputs={"nothing": ()}))
    fully_shard(model, MESH, stack="layers", engine=reference)
    assert placement(model).mesh == MESH


@pytest.mark.parametrize("mesh", [{"fsdp": 4}, None, "fsdp=4"], ids=repr)
def test_a_mesh_that_is_none(reference: Engine, mesh):
    model = mlp(8, 8)
    before = picture(model)
    with pytest.raises(ShardingError, match=r"(?s)the mesh must be a shardtorch.Mesh.*fix: write Mesh\(fsdp=4\)"):
        fully_shard(model, mesh, engine=reference)
    assert picture(model) == before


def test_a_mesh_of_other_devices(xla: Engine):
    model = mlp(8, 8)
    before = picture(model)
    with pytest.raises(ShardingError, match=r"(?s)16.*8"):
        fully_shard(model, Mesh(fsdp=16), engine=xla)
    assert picture(model) == before


def test_no_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_start, "_running", None)
    with pytest.raises(EngineUnavailableError, match=r"(?s)an engine must run.*fix: call shardtorch.start"):
        fully_shard(mlp(8, 8), MESH)


class TestTwice:
    def test_the_model(self, reference: Engine):
        model = fully_shard(mlp(8, 8), MESH, engine=reference)
        with pytest.raises(ShardingError, match=r"(?s)a model is sharded once.*the model \(Sequential\)"):
            fully_shard(model, MESH, engine=reference)

    def test_a_part_first_as_one_does_elsewhere(self, reference: Engine):
        model = mlp(8, 8, 8)
        fully_shard(model[1], MESH, engine=reference)
        before = picture(model)
        with pytest.raises(
            ShardingError, match=r"(?s)a model is sharded once.*got: 1 \(Linear\).*on the whole model only"
        ):
            fully_shard(model, MESH, engine=reference)
        assert picture(model) == before

    def test_a_part_afterwards(self, reference: Engine):
        model = fully_shard(mlp(8, 8, 8), MESH, engine=reference)
        with pytest.raises(ShardingError, match="a model is sharded once"):
            fully_shard(model[0], MESH, engine=reference)


class TestWhileItRuns:
    """What only a call can show."""

    @staticmethod
    def run(engine: Engine, model: nn.Module, *args, **kwargs):
        def put(x: Tensor) -> Tensor:
            return engine.put(x, NamedSharding(MESH, P()), tuple(x.shape))

        return engine.compile(model)(*map(put, args), **{key: put(x) for key, x in kwargs.items()})

    def test_a_module_that_returns_no_tensor(self, engine: Engine):
        class Pair(nn.Module):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                return x, x

        model = fully_shard(nn.Sequential(Pair()), MESH, engine=engine, **plan(outputs={"0": ()}))
        with pytest.raises(
            ShardingError, match=r"(?s)output of 0: a plan shards modules that .* a tensor.*got: tuple.*mark_sharding"
        ):
            self.run(engine, model, torch.ones(8, 8))

    def test_an_input_by_name(self, engine: Engine):
        class Named(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(input=x)

        model = fully_shard(Named(), MESH, engine=engine, **plan(inputs={"inner": ("fsdp",)}))
        with pytest.raises(
            ShardingError, match=r"(?s)input of inner: the plan shards the first positional argument.*got: none"
        ):
            self.run(engine, model, torch.ones(8, 8))

    @pytest.mark.parametrize("kind", ["inputs", "outputs"])
    def test_an_activation_that_does_not_divide(self, engine: Engine, kind: str):
        model = fully_shard(mlp(8, 8), MESH, engine=engine, **plan(**{kind: {"0": ("fsdp",)}}))
        with pytest.raises(
            ShardingError, match=rf"(?s){kind[:-1]} of 0: dim 0 has size 6, not divisible by mesh axis 'fsdp' of size 4"
        ):
            self.run(engine, model, torch.ones(6, 8))

    def test_an_activation_of_a_stacked_layer_that_does_not_divide(self, engine: Engine):
        class Stacked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

            def forward(self, x: Tensor) -> Tensor:
                for layer in self.layers:
                    x = layer(x)
                return x

        model = fully_shard(Stacked(), MESH, stack="layers", engine=engine, **plan(outputs={"layers.*": ("fsdp",)}))
        with pytest.raises(ShardingError, match=r"output of layers\.\*: dim 0 has size 6"):
            self.run(engine, model, torch.ones(6, 8))
        assert self.run(engine, model, torch.ones(8, 8)).shape == (8, 8)

    def test_an_initial_value_that_fails_is_the_users_own_error(self, reference: Engine):
        class Failing:
            def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            fully_shard(on_meta(Custom), MESH, init={"w": Failing()}, engine=reference)
