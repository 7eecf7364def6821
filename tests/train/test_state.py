"""A state that was saved comes back, stacked or not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shardtorch.engine._reference import ReferenceEngine
from shardtorch.errors import CheckpointError
from shardtorch.fsdp import fully_shard
from shardtorch.mesh import Mesh, ShardingPlan
from shardtorch.models import Llama, preset
from shardtorch.train import TrainState, adamw, latest_checkpoint, make_step

SMALL = replace(
    preset("llama-tiny"), num_layers=3, vocab_size=128, embed_dim=32, num_heads=2, num_kv_heads=2, mlp_dim=64
)


def state_of(stack: str | None, mesh: Mesh, seed: int = 0) -> TrainState:
    with torch.device("meta"):
        model = Llama(SMALL)
    plan = ShardingPlan({}, large=1000)
    fully_shard(model, mesh, plan=plan, init=model.initializers(), stack=stack, seed=seed, engine=ReferenceEngine())
    return TrainState(0, model, adamw(model))


def train(state: TrainState, steps: int) -> list[float]:
    step = make_step(state.model, state.optimizer, clip_norm=1.0, loss_chunks=1)
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(state.step)
        tokens = torch.randint(0, 128, (2, 17), generator=generator)
        losses.append(step(tokens[:, :-1], tokens[:, 1:], torch.tensor(1e-2))[0].item())
        state.step += 1
    return losses


@pytest.mark.parametrize("before", [None, "layers"])
@pytest.mark.parametrize("after", [None, "layers"])
def test_goes_on_as_if_uninterrupted(before: str | None, after: str | None, tmp_path: Path):
    whole = state_of(before, Mesh(fsdp=4, tensor=2))
    train(whole, 2)
    whole.save(tmp_path, {"note": "mine"})
    expected = train(whole, 2)

    resumed = state_of(after, Mesh(fsdp=8), seed=1)
    path = latest_checkpoint(tmp_path)
    assert path is not None
    assert resumed.restore(path)["note"] == "mine"
    assert resumed.step == 2
    got = train(resumed, 2)
    assert got == (expected if before == after else pytest.approx(expected, rel=1e-5))


def test_buffers_are_part_of_it(tmp_path: Path):
    def build(value: float) -> TrainState:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].running_mean.fill_(value)
        fully_shard(model, Mesh(fsdp=2), engine=ReferenceEngine())
        return TrainState(0, model, adamw(model))

    build(3.0).save(tmp_path, {})
    state = build(0.0)
    path = latest_checkpoint(tmp_path)
    assert path is not None
    state.restore(path)
    assert torch.equal(state.model.get_buffer("1.running_mean"), torch.full((4,), 3.0))


def test_another_model_is_refused(tmp_path: Path):
    state_of(None, Mesh(fsdp=1)).save(tmp_path, {})
    path = latest_checkpoint(tmp_path)
    assert path is not None
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, Mesh(fsdp=1), engine=ReferenceEngine())
    with pytest.raises(CheckpointError):
        TrainState(0, model, adamw(model)).restore(path)
