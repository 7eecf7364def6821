"""The learning rate's laws, and which parameters decay."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardtorch.engine._reference import ReferenceEngine
from shardtorch.errors import ConfigError
from shardtorch.fsdp import fully_shard
from shardtorch.mesh import Mesh
from shardtorch.models import Llama, preset
from shardtorch.train import Schedule, adamw, make_step

SMALL = replace(preset("llama-tiny"), num_layers=2, embed_dim=32, num_heads=2, num_kv_heads=2, mlp_dim=64)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    decay_steps = draw(st.integers(1, 500))
    return Schedule(
        peak=draw(st.floats(1e-6, 1.0)),
        warmup_steps=draw(st.integers(0, decay_steps - 1)),
        decay_steps=decay_steps,
        final_fraction=draw(st.floats(0, 1)),
    )


@given(schedules())
def test_climbs_to_the_peak_and_falls_to_its_fraction(schedule: Schedule):
    rates = [schedule(step) for step in range(1, schedule.decay_steps + 1)]
    peak_at = max(schedule.warmup_steps, 1) - 1
    assert all(a < b for a, b in pairwise(rates[: peak_at + 1]))
    assert all(a >= b for a, b in pairwise(rates[peak_at:]))
    assert max(rates) <= schedule.peak * (1 + 1e-12)
    if schedule.warmup_steps:
        assert rates[schedule.warmup_steps - 1] == schedule.peak
    assert rates[-1] == pytest.approx(schedule.peak * schedule.final_fraction, abs=1e-12)


@pytest.mark.parametrize(
    "wrong", [{"warmup_steps": 10}, {"peak": 0.0}, {"final_fraction": 1.5}, {"warmup_steps": -1}], ids=str
)
def test_impossible_schedules(wrong: dict):
    with pytest.raises(ConfigError, match="the warm-up must be shorter than the schedule"):
        Schedule(**({"peak": 1.0, "warmup_steps": 1, "decay_steps": 10} | wrong))


def small_model(stack: str | None) -> Llama:
    with torch.device("meta"):
        model = Llama(SMALL)
    fully_shard(model, Mesh(fsdp=1), init=model.initializers(), stack=stack, engine=ReferenceEngine())
    return model


@pytest.mark.parametrize("stack", [None, "layers"])
def test_vectors_do_not_decay_even_if_stacked(stack: str | None):
    model = small_model(stack)
    names = {id(p): name for name, p in model.named_parameters()}
    decaying, others = ([names[id(p)] for p in group["params"]] for group in adamw(model).param_groups)
    assert all("norm" in name for name in others)
    assert not any("norm" in name for name in decaying)
    assert len(decaying) + len(others) == len(names)


def test_a_frozen_parameter_stays_and_the_rest_learns():
    model = small_model("layers")
    model.embed.requires_grad_(False)
    before = model.embed.weight.clone()
    step = make_step(model, adamw(model), clip_norm=1.0, loss_chunks=1)
    tokens = torch.randint(0, 2048, (2, 17), generator=torch.Generator().manual_seed(0))
    losses = [step(tokens[:, :-1], tokens[:, 1:], torch.tensor(1e-2))[0].item() for _ in range(3)]
    assert losses[-1] < losses[0]
    assert torch.equal(model.embed.weight, before)
