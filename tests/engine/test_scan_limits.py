"""What a scanned layer may not do, and what it notices."""

import pytest
import torch
from torch import nn

from shardtorch.engine import Engine
from shardtorch.errors import ShardtorchError
from shardtorch.fsdp import fully_shard
from shardtorch.mesh import Mesh


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.factor


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stacked(engine: Engine, layer: type[nn.Module] = Layer, *, remat: bool = False) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Model(layer)
    mesh = Mesh(fsdp=engine.inventory().num_devices)
    return fully_shard(model, mesh, stack="layers", remat=remat, engine=engine), torch.randn(8, 8).to(engine.device)


@pytest.mark.parametrize("remat", [False, True])
def test_second_derivatives_are_refused(xla: Engine, remat: bool):
    model, x = stacked(xla, remat=remat)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        gradient.square().sum().backward()


def test_host_randomness_is_refused(xla: Engine):
    class Noisy(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.rand(8, 8).to(x.device)

    model, x = stacked(xla, Noisy)
    with pytest.raises(ShardtorchError, match="must not"):
        model(x)


def test_settings_that_change_later_are_noticed(engine: Engine):
    model, x = stacked(engine)
    run = engine.compile(model)
    first = run(x).detach().cpu()
    model.layers.get_submodule("*").factor = 0.0
    assert torch.equal(run(x).detach().cpu(), x.cpu())
    model.layers.get_submodule("*").factor = 1.0
    torch.testing.assert_close(run(x).detach().cpu(), first)


def test_inference_mode_is_refused(xla: Engine):
    model, x = stacked(xla)
    with torch.inference_mode(), pytest.raises(ShardtorchError, match=r"use torch.no_grad\(\)"):
        model(x)
