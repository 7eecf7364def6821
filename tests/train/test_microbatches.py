"""A batch in parts, one after the other, trains as the whole batch does."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from shardtorch.engine import Engine
from shardtorch.fsdp import fully_shard, placement
from shardtorch.mesh import AxisRules, Mesh, NamedSharding, P, ShardingPlan
from shardtorch.models import DEFAULT_RULES, Llama, preset
from shardtorch.train import adamw, make_step

SMALL = replace(
    preset("llama-tiny"), num_layers=2, vocab_size=64, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64
)
NUM_STEPS, BATCH, SEQ = 3, 32, 16
TOLERANCE = 1e-5  # relative, of the loss, and of a parameter's largest element: float32 sums in another order


@pytest.fixture(scope="module")
def trained(xla: Engine):
    """Losses of three steps, and the parameters after them, by mesh and number of microbatches."""

    @cache
    def train(mesh: Mesh, microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
        with torch.device("meta"):
            model = Llama(SMALL)
        rules = AxisRules(DEFAULT_RULES)
        plan = ShardingPlan.from_logical(model.parameter_axes(), model.activation_axes(), rules, mesh)
        fully_shard(model, mesh, plan=plan, init=model.initializers(), stack="layers", engine=xla)
        # A large eps: where a gradient is almost zero, the division would make an update of its rounding.
        optimizer = adamw(model, eps=1e-5)
        step = xla.compile(make_step(model, optimizer, clip_norm=1.0, loss_chunks=1, microbatches=microbatches))
        batch, whole = NamedSharding(mesh, rules.spec(("batch", "seq"), mesh)), NamedSharding(mesh, P())
        generator = torch.Generator().manual_seed(0)
        losses = []
        for _ in range(NUM_STEPS):
            text = torch.randint(0, SMALL.vocab_size, (BATCH, SEQ + 1), generator=generator)
            tokens, targets = (xla.put(x.contiguous(), batch, (BATCH, SEQ)) for x in (text[:, :-1], text[:, 1:]))
            metrics = step(tokens, targets, xla.put(torch.tensor(1e-2), whole, ()))
            losses.append(metrics.cpu()[0].item())
        parameters = {}
        for name, parameter in model.named_parameters():
            value = torch.empty(parameter.shape)
            for shard in xla.local_shards(parameter.detach(), placement(model).parameters[name]):
                value[shard.index] = shard.data
            parameters[name] = value
        return losses, parameters

    return train


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("mesh", [Mesh(fsdp=8), Mesh(data=2, fsdp=2, tensor=2)], ids=str)
def test_parts_train_as_the_whole(trained, mesh: Mesh, microbatches: int):
    losses, parameters = trained(mesh, microbatches)
    expected_losses, expected = trained(mesh, 1)
    assert expected_losses[0] != pytest.approx(expected_losses[-1], rel=1e-3)  # it moves
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    for name, value in expected.items():
        difference = (parameters[name] - value).abs().max().item()
        assert difference <= TOLERANCE * value.abs().max().item(), name
