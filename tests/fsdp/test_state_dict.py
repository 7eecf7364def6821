"""State dicts of sharded models: the model's own names in its own order, to and from plain torch, and by shard."""

import copy
from collections import OrderedDict

import pytest
import torch
from fsdp_cases import CASES, SMALL, ZOO_INIT, Case, Zoo, assert_all_lie_as_planned, on_meta, parameters_of
from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.fsdp import fully_shard, placement
from shardtorch.mesh import Mesh, NamedSharding, P

STACKED = CASES["data=2,fsdp=2,tensor=2, stacked, remat"]
BOTH = {"stacked": STACKED, "not stacked": CASES["fsdp=4,tensor=2"]}


def plain_zoo(seed: int = 1) -> Zoo:
    torch.manual_seed(seed)
    model = Zoo()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(torch.rand_like(buffer))
    return model


@pytest.fixture(params=BOTH.values(), ids=BOTH)
def case(request) -> Case:
    return request.param


def sharded_zoo(engine: Engine, case: Case, **arguments) -> nn.Module:
    return fully_shard(on_meta(Zoo), case.mesh.bind(8), init=ZOO_INIT, engine=engine, **(case.arguments() | arguments))


def assert_holds(model: nn.Module, want: dict[str, Tensor]) -> None:
    """Bit for bit, and each where its sharding says."""
    found = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    assert list(found) == list(want)
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name
    assert_all_lie_as_planned(model)


def test_names_and_order_are_those_of_the_model(engine: Engine, case: Case):
    plain, model = Zoo(), sharded_zoo(engine, case)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert list(model.state_dict(prefix="a.")) == [f"a.{name}" for name in plain.state_dict()]
    assert list(model.blocks.state_dict()) == list(plain.blocks.state_dict())
    assert list(nn.Sequential(model).state_dict()) == list(nn.Sequential(plain).state_dict())
    assert {n: x.shape for n, x in model.state_dict().items()} == {n: x.shape for n, x in plain.state_dict().items()}


@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_checkpoint_loads_and_stays_sharded(engine: Engine, case: Case, assign: bool):
    model, want = sharded_zoo(engine, case), plain_zoo().state_dict()
    parameters = dict(model.named_parameters())
    result = model.load_state_dict(want, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())  # optimizers hold them
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    assert_holds(model, want)


def test_a_sharded_checkpoint_loads_into_plain_torch(engine: Engine, case: Case):
    model, plain = sharded_zoo(engine, case), plain_zoo()
    plain.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    for name, parameter in parameters_of(model, 3).items():
        assert torch.equal(plain.get_parameter(name), parameter), name


def test_a_checkpoint_on_the_devices_loads_onto_another_mesh(xla: Engine):
    source = sharded_zoo(xla, STACKED, seed=5)
    target = sharded_zoo(xla, CASES["fsdp=8"])
    want = {name: tensor.cpu() for name, tensor in source.state_dict().items()}
    target.load_state_dict(source.state_dict())
    assert_holds(target, want)


def test_training_goes_on_from_what_was_loaded(xla: Engine):
    case = CASES["fsdp=8, stacked"]
    model, plain = sharded_zoo(xla, case), plain_zoo()
    plain.scale.copy_(model.scale.cpu())  # not in the state dict
    model.load_state_dict(plain.state_dict())
    tokens = torch.arange(128).reshape(8, 16) % 64
    logits = xla.compile(model)(xla.put(tokens, NamedSharding(case.mesh, P("fsdp")), (8, 16)))
    torch.testing.assert_close(logits.cpu(), plain(tokens), rtol=1e-5, atol=1e-5)


def test_dtypes_are_those_that_are_stored(engine: Engine, case: Case):
    model, want = sharded_zoo(engine, case), plain_zoo().double().state_dict()
    model.load_state_dict(want, assign=True)
    assert_holds(model, {name: tensor.float() for name, tensor in want.items()})


class TestParts:
    """A module of a sharded model loads by itself, and the model within another."""

    @pytest.mark.parametrize("path", ["blocks", "embed", "norm", ""])
    def test_a_module_of_the_model(self, engine: Engine, case: Case, path: str):
        model, plain = sharded_zoo(engine, case), plain_zoo()
        want = model.state_dict()
        loaded = plain.get_submodule(path).state_dict()
        for name, tensor in loaded.items():
            want[f"{path}.{name}" if path else name] = tensor
        if path == "embed":
            want["head.weight"] = want["embed.weight"]  # tied
        want = {name: tensor.cpu() for name, tensor in want.items()}
        model.get_submodule(path).load_state_dict(loaded)
        assert_holds(model, want)

    def test_the_model_in_another(self, engine: Engine, case: Case):
        model, plain = nn.Sequential(sharded_zoo(engine, case)), nn.Sequential(plain_zoo())
        model.load_state_dict(plain.state_dict())
        assert_holds(model[0], plain[0].state_dict())

    def test_a_part_that_holds_the_stack(self, engine: Engine):
        def build() -> nn.Module:
            return nn.Sequential(
                OrderedDict(decoder=nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(2))}))
            )

        model = fully_shard(build(), Mesh(fsdp=8), stack="decoder.layers", plan=SMALL, engine=engine)
        plain = build()
        model.decoder.load_state_dict(plain.decoder.state_dict())
        assert_holds(model, plain.state_dict())


class TestWhatDoesNotFit:
    def test_missing_and_unexpected_names_are_those_of_the_model(self, engine: Engine, case: Case):
        model, state = sharded_zoo(engine, case), plain_zoo().state_dict()
        for name in ("blocks.1.up.weight", "blocks.2.shift", "norm.bias", "offset"):
            del state[name]
        state |= {"blocks.3.up.weight": torch.ones(1), "blocks.0.extra": torch.ones(1), "extra": torch.ones(1)}
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state)
        text = str(caught.value)
        for name in ("blocks.1.up.weight", "blocks.2.shift", "norm.bias", "offset"):
            assert f'"{name}"' in text.split("Unexpected")[0]
        for name in ("blocks.3.up.weight", "blocks.0.extra", "extra"):
            assert f'"{name}"' in text.split("Unexpected")[1]
        assert "*" not in text

    def test_not_strict_loads_what_is_there_and_keeps_the_rest(self, engine: Engine, case: Case):
        model, plain = sharded_zoo(engine, case), plain_zoo()
        before = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        state = plain.state_dict()
        absent = ["blocks.1.up.weight", "blocks.2.shift", "norm.bias"]
        want = {name: before[name] if name in absent else tensor for name, tensor in state.items()}
        for name in absent:
            del state[name]
        state["extra"] = torch.ones(1)
        result = model.load_state_dict(state, strict=False)
        assert sorted(result.missing_keys) == absent
        assert result.unexpected_keys == ["extra"]
        assert_holds(model, want)

    def test_nothing_of_a_stack_is_there(self, engine: Engine):
        model = sharded_zoo(engine, STACKED)
        before = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        result = model.load_state_dict({}, strict=False)
        assert sorted(result.missing_keys) == sorted(before)
        assert_holds(model, before)

    def test_shapes_that_differ_are_named_and_nothing_of_them_is_loaded(self, engine: Engine, case: Case):
        model, state = sharded_zoo(engine, case), plain_zoo().state_dict()
        before = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        state["blocks.1.up.weight"] = torch.ones(3, 4)
        state["mix.bias"] = torch.ones(7)
        for strict in (True, False):
            with pytest.raises(
                RuntimeError, match=r"size mismatch for blocks.1.up.weight: .*\(3, 4\).*\(64, 32\)"
            ) as e:
                model.load_state_dict(state, strict=strict)
            assert "size mismatch for mix.bias" in str(e.value)
            assert "Missing" not in str(e.value)
        want = state | {name: before[name] for name in ("blocks.1.up.weight", "mix.bias")}
        assert_holds(model, want)

    def test_a_tied_parameter_may_come_under_both_names_or_one(self, engine: Engine, case: Case):
        model, state = sharded_zoo(engine, case), plain_zoo().state_dict()
        want = copy.copy(state)
        del state["head.weight"]
        assert model.load_state_dict(state, strict=False).missing_keys == ["head.weight"]
        assert_holds(model, want)


def test_buffers_that_are_not_saved_are_not_asked_for(engine: Engine, case: Case):
    model = sharded_zoo(engine, case)
    before = model.scale.cpu()
    assert "scale" not in model.state_dict()
    model.load_state_dict(plain_zoo().state_dict())
    assert torch.equal(model.scale.cpu(), before)
    assert placement(model).engine is engine


def test_batch_norm_keeps_its_count(engine: Engine):
    """Its own way of loading old checkpoints, which lack the count, goes on to work."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    plain = build()
    plain[1].running_mean.fill_(2.0)
    plain[1].num_batches_tracked.fill_(7)
    model = fully_shard(build(), Mesh(fsdp=8), plan=SMALL, engine=engine)
    model.load_state_dict(plain.state_dict())
    assert_holds(model, plain.state_dict())
    old = {name: tensor for name, tensor in plain.state_dict().items() if "tracked" not in name}
    model.load_state_dict(old)
    assert_holds(model, plain.state_dict())
