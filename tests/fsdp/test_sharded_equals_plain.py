"""A sharded run equals the same run in plain torch: values, gradients, three updates, and what lies where after them.

Tolerances are for float32 and relative to the largest element of a tensor, since the partitioner sums in another order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from fsdp_cases import CASES, ZOO_INIT, Case, Zoo, assert_all_lie_as_planned, by_layer, on_meta, whole
from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.fsdp import fully_shard, placement, shard_optimizer
from shardtorch.mesh import NamedSharding, P

LOGITS, GRADIENTS = 1e-5, 5e-5
NUM_LAYERS, NUM_STEPS = 3, 3
LR = 1e-2


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        tokens = torch.randint(0, 64, (8, 17), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer):
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        optimizer.step()
        return logits.detach()

    return step


@dataclass
class Trained:
    """What a run of some steps leaves, on the CPU and by the model's own names."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    logits: list[Tensor]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    num_compiles: list[int]
    """Of each step."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, put, read) -> Trained:
    step = engine.compile(make_step(model, optimizer))
    logits, gradients, num_compiles = [], [], []
    for tokens, targets in batches():
        optimizer.zero_grad(set_to_none=True)
        tokens, targets = put(tokens), put(targets)
        before = engine.num_compiles()
        y = step(tokens, targets)
        num_compiles.append(engine.num_compiles() - before)
        logits.append(y.cpu())
        gradients.append(read({n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    return Trained(model, optimizer, logits, gradients, read(dict(model.named_parameters())), num_compiles)


def adamw(model: nn.Module, **settings) -> torch.optim.Optimizer:
    # A large eps: where a gradient is almost zero, the division would make an update of its rounding.
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-5, foreach=False, **settings)


@pytest.fixture(scope="module")
def start(reference: Engine) -> dict[str, Tensor]:
    """Initial values: those of a model on meta, by the engine that shards nothing."""
    model = fully_shard(on_meta(Zoo), next(iter(CASES.values())).mesh, init=ZOO_INIT, engine=reference)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def plain(start: dict[str, Tensor], reference: Engine) -> Trained:
    model = Zoo()
    model.load_state_dict(start)
    return train(model, adamw(model), reference, lambda x: x, lambda xs: {n: x.detach().clone() for n, x in xs.items()})


@pytest.fixture(scope="module", params=CASES)
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def sharded(case: Case, engine: Engine) -> Trained:
    model = fully_shard(on_meta(Zoo), case.mesh.bind(8), init=ZOO_INIT, engine=engine, **case.arguments())
    optimizer = shard_optimizer(adamw(model, capturable=engine.name != "reference"), model)
    batch = NamedSharding(case.mesh.bind(8), P(tuple(axis for axis in case.mesh.axis_names if axis != "tensor")))
    shardings = placement(model).parameters
    return train(
        model,
        optimizer,
        engine,
        lambda x: engine.put(x, batch, tuple(x.shape)),
        lambda xs: by_layer({name: whole(engine, x.detach(), shardings[name]) for name, x in xs.items()}, NUM_LAYERS),
    )


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance * expected.abs().max().item(), msg=lambda text: f"{name}: {text}"
    )


@pytest.mark.slow
class TestEveryMesh:
    def test_values(self, sharded: Trained, plain: Trained):
        for step, (actual, expected) in enumerate(zip(sharded.logits, plain.logits, strict=True)):
            assert_near(actual, expected, LOGITS, f"logits of step {step}")

    def test_gradients(self, sharded: Trained, plain: Trained):
        for actual, expected in zip(sharded.gradients, plain.gradients, strict=True):
            assert actual.keys() == expected.keys()
            for name in expected:
                assert_near(actual[name], expected[name], GRADIENTS, name)

    def test_parameters_after_the_updates(self, sharded: Trained, plain: Trained):
        assert sharded.parameters.keys() == plain.parameters.keys()
        for name, expected in plain.parameters.items():
            assert_near(sharded.parameters[name], expected, GRADIENTS, name)

    def test_parameters_gradients_and_moments_lie_as_planned(self, sharded: Trained):
        assert_all_lie_as_planned(sharded.model, sharded.optimizer)

    def test_the_step_is_compiled_once(self, sharded: Trained):
        first, *later = sharded.num_compiles
        assert first <= 1  # 0 if another mesh has given the same graph
        assert later == [0, 0]
