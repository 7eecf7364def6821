"""What a train step sends between devices: pinned, and what a textbook says.

If a change is meant, write the golden files anew with `python tests/fsdp/golden.py`.
"""

import json
from collections import Counter
from collections.abc import Mapping

import golden
import pytest
from golden import BATCH, GOLDEN, SEQ, STEPS, Collective, Compiled

from shardtorch.fsdp._gather import without
from shardtorch.run._model import build_model

FULLY_SHARDED = [step for step in STEPS if "fsdp" in step]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Compiled]:
    return golden.compile_steps(tmp_path_factory.mktemp("dump"))


@pytest.mark.parametrize("step", STEPS)
def test_collectives_are_those_of_the_golden_file(compiled: Mapping[str, Compiled], step: str):
    assert golden.summary(compiled[step].collectives) == json.loads((GOLDEN / f"{step}.json").read_text())


def gathers(compiled: Compiled, place: str) -> Counter[tuple[int, ...]]:
    return Counter(c.shape for c in compiled.collectives if (c.kind, c.place) == ("all-gather", place))


def gathered_weights(step: str, *, of_layer: bool) -> Counter[tuple[int, ...]]:
    """What a device holds of each matrix after a gather over fsdp, as the plan says."""
    mesh = golden.mesh_of(step)
    model, plan = build_model(golden.config(), mesh)
    shapes = {
        name.replace("layers.0", "layers.*"): tuple(p.shape)
        for name, p in model.named_parameters()
        if not name.startswith("layers.1")
    }
    return Counter(
        without(sharding, ("fsdp",)).shard_shape(shapes[name])
        for name, sharding in plan.resolve(shapes, mesh).items()
        if "fsdp" in sharding.spec.axes and name.startswith("layers.") == of_layer
    )


@pytest.mark.parametrize("step", FULLY_SHARDED)
def test_each_weight_is_gathered_once_forward_and_once_backward_and_nothing_else_is(
    compiled: Mapping[str, Compiled], step: str
):
    of_layer = gathered_weights(step, of_layer=True)
    assert of_layer.total() == 7
    assert gathers(compiled[step], "scan 0") == of_layer
    assert gathers(compiled[step], "scan 1") == of_layer  # with remat too: the forward pass in it uses the same
    assert gathers(compiled[step], "step") == gathered_weights(step, of_layer=False)


@pytest.mark.parametrize("step", STEPS)
def test_nothing_is_resharded(compiled: Mapping[str, Compiled], step: str):
    kinds = {c.kind for c in compiled[step].collectives}
    assert kinds <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert {c.place for c in compiled[step].collectives} <= {"step", "scan 0", "scan 1"}


def test_without_tensor_parallelism_no_activation_is_sent(compiled: Mapping[str, Compiled]):
    for step in ("fsdp=8", "fsdp=8,remat"):
        for c in compiled[step].collectives:
            assert BATCH not in c.shape, c
            assert SEQ not in c.shape, c


def test_tensor_parallelism_sums_activations_and_gathers_nothing(compiled: Mapping[str, Compiled]):
    step = compiled["tensor=8"]
    assert not [c for c in step.collectives if c.kind == "all-gather"]
    forward = [c for c in step.collectives if c.place == "scan 0"]
    assert [(c.kind, c.shape) for c in forward] == [("all-reduce", (BATCH, SEQ, 256))] * 2  # attention and MLP


def test_remat_needs_less_memory(compiled: Mapping[str, Compiled]):
    assert compiled["fsdp=8,remat"].temporary_bytes < compiled["fsdp=8"].temporary_bytes


def test_the_reader_would_see_a_gathered_activation():
    """The module's form: a loop body, an entry, a tuple of results, a scalar that does not count."""
    module = """HloModule step
%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %gathered = f32[16,64,256]{2,1,0} all-gather(%x), channel_id=1, dimensions={1}
}
ENTRY %step (a: f32[]) -> f32[] {
  %loop = (s32[], f32[8,4]{1,0}) while(%init), condition=%cond, body=%body
  %sums = (f32[8]{0}, bf16[2,4]{1,0}) all-reduce-start(%a, %b), to_apply=%add
  %norm = f32[] all-reduce(%c), to_apply=%add
  %moved = f32[8,4]{1,0} all-to-all(%d), dimensions={0}
}
"""
    assert golden.collectives(module) == (
        Collective("all-gather", "scan 0", "f32", (16, 64, 256)),
        Collective("all-reduce", "step", "f32", (8,)),
        Collective("all-reduce", "step", "bf16", (2, 4)),
        Collective("all-to-all", "step", "f32", (8, 4)),
    )
