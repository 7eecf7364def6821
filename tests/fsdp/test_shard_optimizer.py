"""Moments that are there, and sharded, before the first step."""

import copy

import pytest
import torch
from fsdp_cases import SMALL, assert_all_lie_as_planned, parameters_of, whole
from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.errors import ShardingError
from shardtorch.fsdp import fully_shard, placement, shard_optimizer
from shardtorch.mesh import Mesh, NamedSharding, P

MESH = Mesh(fsdp=4, tensor=2)
KINDS = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "Adam, decay": (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "Adam, amsgrad, maximize": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def sharded(engine: Engine) -> nn.Module:
    return fully_shard(build(), MESH, plan=SMALL, engine=engine)


def settings(engine: Engine) -> dict:
    return {"lr": 1e-2, "foreach": False, "capturable": engine.name != "reference"}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_state_equals_that_of_an_unsharded_run(engine: Engine, kind):
    cls, options = kind
    plain, model = build(), sharded(engine)
    reference = cls(plain.parameters(), lr=1e-2, foreach=False, **options)
    optimizer = cls(model.parameters(), **settings(engine), **options)
    assert shard_optimizer(optimizer, model) is optimizer
    assert_all_lie_as_planned(model, optimizer)
    states = [set(state) for state in optimizer.state.values()]

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run, num_compiles = engine.compile(step), []
    for number in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        x_sharded = engine.put(x, NamedSharding(MESH, P("fsdp")), (8, 16))
        before = engine.num_compiles()
        run(x_sharded)
        num_compiles.append(engine.num_compiles() - before)
        reference.zero_grad()
        plain(x).square().mean().backward()
        reference.step()
    assert num_compiles[1:] == [0, 0]
    assert_all_lie_as_planned(model, optimizer)

    for name, parameter in parameters_of(model, 1).items():
        torch.testing.assert_close(parameter, plain.get_parameter(name).detach(), rtol=0, atol=1e-5)
    where = placement(model)
    for (name, parameter), keys in zip(model.named_parameters(), states, strict=True):
        expected, found = reference.state[plain.get_parameter(name)], optimizer.state[parameter]
        assert set(found) == set(expected) == keys  # nothing was added by a step
        assert found["step"].item() == 3
        for key in keys - {"step"}:
            value = whole(engine, found[key], where.parameters[name])
            torch.testing.assert_close(value, expected[key], rtol=0, atol=5e-5 * expected[key].abs().max().item())


def test_moments_have_the_dtype_of_their_parameter(engine: Engine):
    model = fully_shard(build().bfloat16(), MESH, plan=SMALL, engine=engine)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), **settings(engine)), model)
    for state in optimizer.state.values():
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.bfloat16)
        assert state["step"].dtype == torch.float32


def test_a_stack_has_one_state_with_a_moment_per_layer(engine: Engine):
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(16, 16) for _ in range(3))})
    fully_shard(model, MESH, plan=SMALL, stack="layers", engine=engine)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), **settings(engine)), model)
    assert [tuple(state["exp_avg"].shape) for state in optimizer.state.values()] == [(3, 16, 16), (3, 16)]
    assert_all_lie_as_planned(model, optimizer)


def test_groups_keep_their_settings(engine: Engine):
    model = sharded(engine)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "amsgrad": True}, {"params": vectors, "weight_decay": 0.0}], **settings(engine)
    )
    shard_optimizer(optimizer, model)
    assert ["max_exp_avg_sq" in optimizer.state[p] for p in (*matrices, *vectors)] == [True, True, False, False]


class TestLoading:
    """`optimizer.load_state_dict` keeps the sharding, whatever it loads from."""

    @staticmethod
    def trained(seed: int = 0, amsgrad: bool = False) -> torch.optim.AdamW:
        """A plain optimizer that has stepped twice."""
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, amsgrad=amsgrad)
        for number in range(2):
            optimizer.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed + number))
            model(x).square().mean().backward()
            optimizer.step()
        return optimizer

    @staticmethod
    def assert_holds(optimizer: torch.optim.Optimizer, model: nn.Module, want: dict) -> None:
        where = placement(model)
        assert_all_lie_as_planned(model, optimizer)
        for number, (name, parameter) in enumerate(model.named_parameters()):
            state = optimizer.state[parameter]
            assert state.keys() == want[number].keys()
            for key, value in want[number].items():
                sharding = where.parameters[name] if value.ndim else NamedSharding(MESH, P())
                assert torch.equal(whole(where.engine, state[key], sharding), value), (name, key)
                assert state[key].device.type == where.engine.device.type

    @pytest.mark.parametrize("amsgrad", [False, True])
    def test_from_a_plain_run(self, engine: Engine, amsgrad: bool):
        model, source = sharded(engine), self.trained(amsgrad=amsgrad)
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), **settings(engine)), model)
        optimizer.load_state_dict(source.state_dict())
        self.assert_holds(optimizer, model, source.state_dict()["state"])
        (group,) = optimizer.param_groups
        assert (group["lr"], group["amsgrad"]) == (3e-3, amsgrad)
        assert group["capturable"] == (engine.name != "reference")  # and so the count stays in the graph

        def step(x: Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        engine.compile(step)(engine.put(torch.randn(8, 16), NamedSharding(MESH, P("fsdp")), (8, 16)))
        assert_all_lie_as_planned(model, optimizer)
        assert all(state["step"].item() == 3 for state in optimizer.state.values())

    def test_from_another_mesh(self, xla: Engine):
        source_model = fully_shard(build(), Mesh(fsdp=8), plan=SMALL, engine=xla)
        source = shard_optimizer(torch.optim.AdamW(source_model.parameters(), **settings(xla)), source_model)
        want = self.trained().state_dict()
        source.load_state_dict(want)
        model = sharded(xla)
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), **settings(xla)), model)
        optimizer.load_state_dict(source.state_dict())
        self.assert_holds(optimizer, model, want["state"])

    def test_nothing_whole_is_put_on_a_device(self, reference: Engine, monkeypatch: pytest.MonkeyPatch):
        model, asked = sharded(reference), []
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        materialize = type(reference).materialize

        def recorded(self, shape, dtype, sharding, read) -> Tensor:
            asked.append((tuple(shape), sharding.spec))
            return materialize(self, shape, dtype, sharding, read)

        monkeypatch.setattr(type(reference), "materialize", recorded)
        source = self.trained().state_dict()
        optimizer.load_state_dict(source)
        shardings = placement(model).parameters
        want = [(tuple(p.shape), shardings[name].spec) for name, p in model.named_parameters()]
        assert [entry for entry in asked if entry[0]] == [entry for entry in want for _ in range(2)]
        for number, parameter in enumerate(model.parameters()):  # and what is loaded is a copy
            assert optimizer.state[parameter]["exp_avg"].data_ptr() != source["state"][number]["exp_avg"].data_ptr()

    def test_from_one_that_has_not_stepped(self, engine: Engine):
        model = sharded(engine)
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), **settings(engine)), model)
        optimizer.load_state_dict(torch.optim.AdamW(build().parameters()).state_dict())
        assert_all_lie_as_planned(model, optimizer)
        assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values())

    @pytest.mark.parametrize(
        ("key", "value", "got"),
        [
            ("exp_avg", torch.zeros(3), r"exp_avg of shape \(3,\) for a parameter of shape \(32, 16\)"),
            ("momentum_buffer", torch.zeros(32, 16), "momentum_buffer of shape"),
        ],
    )
    def test_what_does_not_fit(self, reference: Engine, key: str, value: Tensor, got: str):
        model, state = sharded(reference), self.trained().state_dict()
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        before = [dict(entry) for entry in optimizer.state.values()]
        state["state"][0][key] = value
        with pytest.raises(ShardingError, match=rf"(?s)the state that is loaded must be.*got: {got}"):
            optimizer.load_state_dict(state)
        after = list(optimizer.state.values())
        assert all(now[k] is then[k] for now, then in zip(after, before, strict=True) for k in then)

    def test_other_groups_are_torchs_own_error(self, reference: Engine):
        model = sharded(reference)
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
            optimizer.load_state_dict(torch.optim.AdamW(nn.Linear(4, 4).parameters()).state_dict())


class TestRefusals:
    @staticmethod
    def assert_untouched(optimizer: torch.optim.Optimizer, num_states: int = 0) -> None:
        assert len([state for state in optimizer.state.values() if state]) == num_states

    def test_a_model_that_is_not_sharded(self):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ShardingError, match=r"(?s)the model must be sharded first.*fix: call model = fully_shard"):
            shard_optimizer(optimizer, model)
        self.assert_untouched(optimizer)

    @pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam, torch.optim.Adafactor])
    def test_another_optimizer(self, reference: Engine, kind):
        model = sharded(reference)
        with pytest.raises(ShardingError, match=rf"(?s)state is known before.*got: {kind.__name__}.*AdamW or"):
            shard_optimizer(kind(model.parameters(), lr=0.1), model)

    def test_one_whose_count_is_not_in_the_graph(self, xla: Engine):
        model = sharded(xla)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ShardingError, match=r"(?s)step count must be a tensor.*capturable=False.*fix: use AdamW\("):
            shard_optimizer(optimizer, model)
        self.assert_untouched(optimizer)

    def test_parameters_of_before(self, reference: Engine):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        fully_shard(model, MESH, engine=reference)
        with pytest.raises(ShardingError, match=r"(?s)must be one of the sharded model.*\(32, 16\).*after fully_shard"):
            shard_optimizer(optimizer, model)
        self.assert_untouched(optimizer)

    def test_one_foreign_parameter_among_the_models_leaves_the_optimizer_fresh(self, reference: Engine):
        model = sharded(reference)
        foreign = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([*model.parameters(), foreign])
        with pytest.raises(ShardingError, match=r"a parameter of shape \(3,\) that is not"):
            shard_optimizer(optimizer, model)
        self.assert_untouched(optimizer)

    def test_one_that_has_stepped(self, reference: Engine):
        model = sharded(reference)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()
        moments = copy.deepcopy(optimizer.state_dict()["state"])
        with pytest.raises(ShardingError, match=r"(?s)must be fresh.*before its first step"):
            shard_optimizer(optimizer, model)
        for number, state in optimizer.state_dict()["state"].items():
            assert torch.equal(state["exp_avg"], moments[number]["exp_avg"])

    def test_one_that_is_sharded(self, reference: Engine):
        model = sharded(reference)
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
        with pytest.raises(ShardingError, match="the optimizer must be fresh"):
            shard_optimizer(optimizer, model)
        self.assert_untouched(optimizer, num_states=4)
