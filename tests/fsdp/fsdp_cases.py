"""What the tests of `fsdp` share: meshes, a model of a user's own, and what they assert of placed tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.fsdp import placement
from shardtorch.mesh import Mesh, NamedSharding, ShardingPlan
from shardtorch.models import Constant, Normal

LARGE = 64
"""Elements from which a parameter of the small models here is sharded."""


SMALL = ShardingPlan({}, large=LARGE)


class Block(nn.Module):
    """A feed-forward block with a norm, biases, a parameter of its own and a buffer."""

    def __init__(self, dim: int, number: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.gate = nn.Parameter(torch.full((dim,), 0.5))
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, dim, device="cpu") * (number + 1))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.gate * self.down(F.gelu(self.up(self.norm(x) + self.shift))) * scale


class Zoo(nn.Module):
    """A language model with what users' models have: a convolution, ties, biases, buffers, a parameter of its own."""

    def __init__(self, vocab: int = 64, dim: int = 32, num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Conv1d(dim, dim, kernel_size=3, padding=1)
        self.blocks = nn.ModuleList(Block(dim, number) for number in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("offset", torch.linspace(0.0, 1.0, vocab, device="cpu"))
        self.register_buffer("scale", torch.full((1,), 0.7, device="cpu"), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x, self.scale)
        return self.head(self.norm(x)) * self.temperature + self.offset


ZOO_INIT = {
    "embed.weight": Normal(0.5),
    "mix.weight": Normal(0.1),
    "mix.bias": Constant(0.0),
    "blocks.*.gate": Constant(0.5),
    "temperature": Constant(1.0),
}
"""Rules for what torch has no default that shardtorch knows of, and a tame embedding."""

ZOO_TENSOR_PLAN = ShardingPlan(
    {
        "embed.weight": ("tensor", None),
        "blocks.*.up.weight": ("tensor", None),
        "blocks.*.up.bias": ("tensor",),
        "blocks.*.down.weight": (None, "tensor"),
    },
    outputs={"blocks.*.up": (None, None, "tensor"), "blocks.*.down": (), "head": (None, None, "tensor")},
    large=LARGE,
)
"""Tensor parallelism, as a user would write it."""


@dataclass(frozen=True)
class Case:
    """One way to shard."""

    mesh: Mesh
    axis: str | tuple[str, ...] | None = "fsdp"
    plan: ShardingPlan = SMALL
    stack: str | None = None
    remat: bool = False

    def arguments(self) -> dict:
        return {key: value for key, value in vars(self).items() if key != "mesh"}


CASES = {
    "fsdp=8": Case(Mesh(fsdp=8)),
    "fsdp=8, stacked": Case(Mesh(fsdp=8), stack="blocks"),
    "rows=8, stacked, remat": Case(Mesh(rows=8), axis="rows", stack="blocks", remat=True),
    "data and fsdp as one axis": Case(Mesh(data=2, fsdp=4), axis=("data", "fsdp")),
    "data=2,fsdp=4, stacked": Case(Mesh(data=2, fsdp=-1), stack="blocks"),
    "fsdp=4,tensor=2": Case(Mesh(fsdp=4, tensor=2), plan=ZOO_TENSOR_PLAN),
    "data=2,fsdp=2,tensor=2, stacked, remat": Case(
        Mesh(data=2, fsdp=2, tensor=2), plan=ZOO_TENSOR_PLAN, stack="blocks", remat=True
    ),
    "tensor=8, plan only": Case(
        Mesh(tensor=8),
        axis=None,
        plan=ShardingPlan(
            {**ZOO_TENSOR_PLAN.parameters, "mix.weight": None}, outputs=ZOO_TENSOR_PLAN.outputs, large=1024
        ),
        stack="blocks",
    ),
}


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def whole(engine: Engine, x: Tensor, sharding: NamedSharding) -> Tensor:
    """A placed tensor put together from its shards. (`.cpu()` compiles a gather, each time.)"""
    result = torch.empty(x.shape, dtype=x.dtype)
    for shard in engine.local_shards(x, sharding):
        result[shard.index] = shard.data
    return result


def by_layer(tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Stacks taken apart, under the names of the single layers."""
    single = {}
    for name, tensor in tensors.items():
        layers = [tensor[layer] for layer in range(num_layers)] if "*" in name else [tensor]
        single |= {name.replace("*", str(layer)): part for layer, part in enumerate(layers)}
    return single


def parameters_of(model: nn.Module, num_layers: int) -> dict[str, Tensor]:
    """The values of a sharded model's parameters by the model's own names, ties once."""
    where = placement(model)
    tensors = {n: whole(where.engine, p, where.parameters[n]) for n, p in model.named_parameters()}
    return by_layer(tensors, num_layers)


def assert_lies_as(engine: Engine, x: Tensor, sharding: NamedSharding, name: str) -> None:
    """The runtime's own report: one shard per device, each the box that the sharding says, and none larger."""
    if engine.name == "reference":
        return  # it applies no sharding
    import torch_xla

    (shards,) = torch_xla._XLAC._get_local_shards([x])
    want = sharding.shard_shape(tuple(x.shape))
    assert [tuple(data.shape) for data, _ in shards] == [want] * sharding.mesh.size, name
    assert len(engine.local_shards(x, sharding)) == sharding.mesh.size  # which compares the boxes
    assert (engine.sharding_of(x) in ("", "{replicated}")) == (sharding.num_replicas == sharding.mesh.size), name


def assert_all_lie_as_planned(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Every parameter, every gradient that is there, and every moment."""
    where = placement(model)
    for name, parameter in model.named_parameters():
        sharding = where.parameters[name]
        assert_lies_as(where.engine, parameter, sharding, name)
        if parameter.grad is not None:
            assert_lies_as(where.engine, parameter.grad, sharding, f"gradient of {name}")
        if optimizer is not None:
            for key, value in optimizer.state[parameter].items():
                if value.ndim == parameter.ndim:
                    assert_lies_as(where.engine, value, sharding, f"{key} of {name}")
