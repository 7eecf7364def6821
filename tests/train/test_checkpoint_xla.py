"""Checkpoints of tensors that 8 virtual devices hold: saved by the partitioner's shards, loaded onto another mesh."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardtorch import engine as engines
from shardtorch.engine import Engine
from shardtorch.errors import CheckpointError
from shardtorch.mesh import Mesh, NamedSharding, P
from shardtorch.train._checkpoint import Placed, load_checkpoint, read_tensors, save_checkpoint
from shardtorch.train._checkpoint_manifest import Manifest
from shardtorch.train._checkpoint_tensors import entries

SOURCES: dict[str, Callable[[torch.Generator], Tensor]] = {
    "model.embed.weight": lambda g: torch.randn(16, 8, generator=g),
    "model.norm.weight": lambda g: torch.randn(16, generator=g).bfloat16(),
    "model.head.weight": lambda g: torch.randn(8, 16, generator=g),
    "model.layers.*.w_up.weight": lambda g: torch.randn(3, 16, 8, generator=g),
    "optimizer.exp_avg.layers.*.w_up.weight": lambda g: torch.randn(3, 16, 8, generator=g).bfloat16(),
    "optimizer.step": lambda g: torch.tensor(3),
    "data.position": lambda g: torch.arange(8) + 2**31,
}
FACTORISATIONS = {
    "fully sharded, partly and fully replicated": (
        Mesh(data=2, fsdp=2, tensor=2),
        {
            "model.embed.weight": P(("tensor", "data"), "fsdp"),
            "model.norm.weight": P("fsdp"),
            "model.layers.*.w_up.weight": P(None, "tensor", "fsdp"),
            "optimizer.exp_avg.layers.*.w_up.weight": P(None, ("data", "fsdp"), "tensor"),
            "data.position": P("data"),
        },
    ),
    "one axis": (
        Mesh(fsdp=8),
        {
            "model.embed.weight": P("fsdp"),
            "model.norm.weight": P("fsdp"),
            "model.head.weight": P("fsdp"),
            "model.layers.*.w_up.weight": P(None, None, "fsdp"),
            "optimizer.exp_avg.layers.*.w_up.weight": P(None, "fsdp"),
        },
    ),
    "two axes": (
        Mesh(fsdp=4, tensor=2),
        {
            "model.embed.weight": P("tensor", "fsdp"),
            "model.head.weight": P(None, "tensor"),
            "model.layers.*.w_up.weight": P(None, "fsdp", "tensor"),
            "data.position": P(("tensor", "fsdp")),
        },
    ),
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engines.start(num_devices=8)


def on_the_cpu() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {key: make(generator) for key, make in SOURCES.items()}


def layout(name: str) -> dict[str, NamedSharding]:
    mesh, specs = FACTORISATIONS[name]
    return {key: NamedSharding(mesh, specs.get(key, P())) for key in SOURCES}


def put(engine: Engine, x: Tensor, sharding: NamedSharding) -> Placed:
    return Placed(engine.materialize(tuple(x.shape), x.dtype, sharding, lambda index: x[index]), sharding)


@pytest.mark.parametrize("target", FACTORISATIONS)
@pytest.mark.parametrize("source", FACTORISATIONS)
def test_another_factorisation_gives_equal_bits(engine: Engine, tmp_path: Path, source: str, target: str):
    want, shardings, new_shardings = on_the_cpu(), layout(source), layout(target)
    placed = {key: put(engine, want[key], sharding) for key, sharding in shardings.items()}
    path = save_checkpoint(tmp_path, 3, placed, {"mesh": source}, engine)
    for name, stored in Manifest.read(path).tensors.items():
        assert len(stored.chunks) == shardings[entries(placed)[name].key].num_shards

    wanted = {key: Placed(want[key].to("meta"), sharding) for key, sharding in new_shardings.items()}
    loaded, extra = load_checkpoint(path, wanted, engine)
    assert extra == {"mesh": source}
    for key, x in loaded.items():
        assert x.device.type == "xla"
        assert x.dtype == want[key].dtype
        assert torch.equal(x.cpu(), want[key]), key
        for shard in engine.local_shards(x, new_shardings[key]):
            assert torch.equal(shard.data, want[key][shard.index]), key


def test_what_a_step_computed_is_saved_and_goes_on_elsewhere(engine: Engine, tmp_path: Path):
    sharding = NamedSharding(Mesh(fsdp=4, tensor=2), P(None, "fsdp", "tensor"))
    start = torch.randn(3, 16, 8)
    weights = torch.nn.Parameter(put(engine, start, sharding).tensor)

    @torch.no_grad()
    def step() -> None:
        weights.mul_(2.0)
        weights.add_(1.0)

    engine.compile(step)()
    path = save_checkpoint(tmp_path, 1, {"layers.*.w": Placed(weights, sharding)}, {}, engine)
    plain = read_tensors(path)
    for layer in range(3):
        assert torch.equal(plain[f"layers.{layer}.w"], start[layer] * 2 + 1)


def test_a_pending_value_is_saved(engine: Engine, tmp_path: Path):
    sharding = NamedSharding(Mesh(fsdp=8), P("fsdp"))
    pending = engine.constrain(put(engine, torch.arange(16.0), sharding).tensor * 2, sharding)
    path = save_checkpoint(tmp_path, 1, {"x": Placed(pending, sharding)}, {}, engine)
    assert torch.equal(read_tensors(path)["x"], torch.arange(16.0) * 2)


def test_a_tensor_that_lost_its_sharding_is_not_saved(engine: Engine, tmp_path: Path):
    whole = put(engine, torch.arange(16.0), NamedSharding(Mesh(fsdp=8), P())).tensor
    with pytest.raises(CheckpointError, match="x: a tensor must lie on the devices as its sharding says"):
        save_checkpoint(tmp_path, 1, {"x": Placed(whole, NamedSharding(Mesh(fsdp=8), P("fsdp")))}, {}, engine)
    assert list(tmp_path.iterdir()) == []
