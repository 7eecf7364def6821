"""A user's own step from start to report, with the real compiler, and what is said to one who gets it wrong.

Which engine a process runs on is fixed, so the engine for planning has a process of its own, one for all these tests.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from processes import run_python

from shardtorch.aot import CompileReport, compile_report
from shardtorch.aot._cache import _read
from shardtorch.engine import Engine, _start
from shardtorch.engine.libtpu import Compiled
from shardtorch.errors import EngineUnavailableError

PROGRAM = """
import json, sys
from pathlib import Path

import torch

import shardtorch as st
from shardtorch.aot import compile_report

folder = Path(sys.argv[1])
engine = st.start("libtpu", topology="v5e:2x4")
mesh = st.Mesh(data=2, fsdp=4)
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
st.fully_shard(model, mesh)
optimizer = st.shard_optimizer(torch.optim.AdamW(model.parameters(), capturable=True, foreach=False), model)


def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def reads(read):
    def step(x):
        read(model(x).sum())
        return x.sum()

    return step


def branches(x):
    loss = model(x).sum()
    return loss if loss > 0 else -loss


def batch(mesh=mesh):
    return engine.zeros((1024, 512), torch.float32, st.NamedSharding(mesh, st.P(mesh.axis_names)))


plain = torch.optim.AdamW(model.parameters(), capturable=True, foreach=False)


def careless(x):
    model(x).square().mean().backward()
    plain.step()
    plain.zero_grad()
    return x.sum()


state, x = (model, optimizer), batch()
w = engine.zeros((1024, 1024), torch.float32, st.NamedSharding(mesh, st.P("fsdp")))
MISTAKES = {
    "another topology": lambda: compile_report(step, state, [x], "v5e:4x4"),
    "a topology that does not exist": lambda: compile_report(step, state, [x], "v5e:3x5"),
    "a mesh that does not fit": lambda: compile_report(
        lambda w: w.sum(), {}, [batch(st.Mesh(fsdp=4))], "v5e:2x4"
    ),
    "a mesh over slices": lambda: compile_report(
        lambda w: w.sum(), {}, [batch(st.Mesh(fsdp=8, dcn={"fsdp": 2}))], "v5e:2x4"
    ),
    "two meshes": lambda: compile_report(step, state, [batch(st.Mesh(fsdp=8))], "v5e:2x4"),
    "item": lambda: compile_report(reads(lambda y: y.item()), state, [x], "v5e:2x4"),
    "a branch": lambda: compile_report(branches, state, [x], "v5e:2x4"),
    "print": lambda: compile_report(reads(print), state, [x], "v5e:2x4"),
    "a batch of torch's": lambda: compile_report(step, state, [torch.zeros(1024, 512)], "v5e:2x4"),
    "a batch that is no tensor": lambda: compile_report(step, state, [[1, 2]], "v5e:2x4"),
    "a model of torch's": lambda: compile_report(
        lambda x: x.sum(), torch.nn.Linear(4, 4), [x], "v5e:2x4"
    ),
    "a model on meta": lambda: compile_report(
        lambda x: x.sum(), torch.nn.Linear(4, 4, device="meta"), [x], "v5e:2x4"
    ),
    "a state of something else": lambda: compile_report(step, (model, 3), [x], "v5e:2x4"),
    "an optimizer without its state": lambda: compile_report(careless, (model, plain), [x], "v5e:2x4"),
    "a state that is not told": lambda: compile_report(lambda x: w.sum() + x.sum(), {}, [x], "v5e:2x4"),
    "a step without a result": lambda: compile_report(lambda x: None, state, [x], "v5e:2x4"),
    "a flag that does not exist": lambda: compile_report(
        lambda x: x.sum(), {}, [x], "v5e:2x4", flags={"xla_no_such_flag": "1"}
    ),
}
errors = {}
for name, call in MISTAKES.items():
    try:
        call()
    except Exception as error:
        errors[name] = [type(error).__name__, str(error)]
    else:
        errors[name] = ["", ""]
(folder / "errors.json").write_text(json.dumps(errors))

# After all of it.
report = compile_report(
    step, state, [x], "v5e:2x4", title="mine", tokens_per_step=1024, model_flops=1e9, cache=folder / "cache"
)
(folder / "report.json").write_text(report.to_json())
assert all(parameter.grad is None for parameter in model.parameters())
"""


class Planned:
    """What the program left."""

    def __init__(self, folder: Path) -> None:
        (folder / "step.py").write_text(PROGRAM)
        code = (
            f"import runpy, sys; sys.argv = ['step.py', {str(folder)!r}]; runpy.run_path({str(folder / 'step.py')!r})"
        )
        done = run_python(code)
        assert done.returncode == 0, done.stderr
        self.output = done.stdout + done.stderr
        self.errors: Mapping[str, tuple[str, str]] = json.loads((folder / "errors.json").read_text())
        self.report = CompileReport.from_json((folder / "report.json").read_text())
        self.source = folder / "step.py"
        (path,) = (folder / "cache").iterdir()
        compiled = _read(path)
        assert isinstance(compiled, Compiled)
        self.compiled = compiled


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return Planned(tmp_path_factory.mktemp("planned"))


def line_of(planned: Planned, text: str) -> str:
    lines = planned.source.read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, start=1) if line.strip() == text)
    return f"step.py:{number}"


NUM_PARAMETERS = 512 * 2048 + 2048 + 2048 * 512 + 512
STATE = 4 * NUM_PARAMETERS // 4
"""Bytes of the parameters on a device, in float32, over the four devices of `fsdp`."""


@pytest.mark.slow
def test_memory_is_that_of_the_executable(planned: Planned):
    memory, compiled = planned.report.memory, planned.compiled
    held = compiled.argument_bytes + compiled.output_bytes - compiled.alias_bytes
    assert memory.parameters + memory.optimizer_state + memory.batch == pytest.approx(held, rel=0.02)
    assert memory.code == pytest.approx(compiled.code_bytes, rel=0.02)
    # What is lost between temporaries is in their allocation, and libtpu 0.0.40 adds it to its statistics once more.
    lost = sum(buffer.bytes for buffer in planned.report.buffers if buffer.name == "lost between buffers")
    assert memory.total == pytest.approx(held + compiled.temp_bytes - lost + compiled.code_bytes, rel=0.02)
    assert sum(memory.by_kind().values()) == memory.total
    assert memory.parameters == pytest.approx(STATE, rel=0.02)
    assert memory.optimizer_state == pytest.approx(2 * STATE, rel=0.02)
    assert memory.batch == pytest.approx(1024 * 512 * 4 // 8, rel=0.05)
    assert planned.report.fits
    assert planned.report.verdict.startswith("fits: 15.")
    assert sum(buffer.bytes for buffer in planned.report.buffers) <= memory.total


@pytest.mark.slow
def test_what_the_step_updates_is_donated(planned: Planned):
    assert planned.compiled.alias_bytes == pytest.approx(3 * STATE, rel=0.02)
    # Besides it, the step returns a loss.
    assert planned.compiled.output_bytes - planned.compiled.alias_bytes < 2**14


@pytest.mark.slow
def test_collectives_say_where_they_come_from(planned: Planned):
    collectives = planned.report.collectives
    assert collectives
    assert {axis for it in collectives for axis in it.axes} == {"data", "fsdp"}
    for it in collectives:
        assert (it.network, it.count) == ("ICI", 1)
        assert it.group_size == {("data",): 2, ("fsdp",): 4, ("data", "fsdp"): 8}[it.axes]
        assert 0 <= it.exposed_seconds <= it.seconds * (1 + 1e-9)
        assert it.bytes > 0
        assert it.warning == ""
    gathers = [it for it in collectives if it.kind == "all-gather" and it.axes == ("fsdp",)]
    assert {it.origin.module for it in gathers} >= {"0", "2"}
    # torch's own modules are no source of the user's; where the user calls them is.
    forward = line_of(planned, "loss = model(x).square().mean()")
    assert any(it.origin.source.endswith(forward) for it in collectives)
    assert all(it.origin.source.partition(":")[0].endswith("step.py") for it in collectives if it.origin.source)
    # A weight is gathered whole, in float32: the step computes in what it stores.
    assert max(it.bytes for it in gathers) in (512 * 2048 * 4, 512 * 2048 * 2)


@pytest.mark.slow
def test_times_add_up(planned: Planned):
    report = planned.report
    time = report.step_time
    assert time is not None
    assert report.predicted_step_s == time.total == time.compute + time.memory + time.communication
    assert time.communication == pytest.approx(sum(it.exposed_seconds for it in report.collectives))
    sent = sum(it.seconds for it in report.collectives)
    assert time.communication + time.hidden_communication == pytest.approx(sent)
    busy = sum(it.seconds for it in report.operations)
    assert busy <= (time.compute + time.memory) * (1 + 1e-9)
    assert report.tokens_per_s_per_chip == pytest.approx(1024 / time.total / 8)
    assert report.mfu() == pytest.approx(1e9 / (time.total * 8 * 197e12))
    # Forward, and both products of the backward pass but for the input's gradient, which nobody asks for.
    products = 2 * 1024 * 512 * 2048 * (2 + 2 + 1) // 8
    assert sum(it.flops for it in report.operations) == pytest.approx(products, rel=0.01)
    assert (report.title, report.mesh, report.topology, report.num_chips) == ("mine", "data=2,fsdp=4", "v5e:2x4", 8)
    assert report.trace_s > 0 < report.compile_s


@pytest.mark.slow
def test_nothing_is_printed(planned: Planned):
    assert planned.output == ""


READS = ("ShardtorchError", "a step that is planned must not depend on the values of its tensors")
EXPECTED = {
    "another topology": ("TopologyError", "a step is compiled for the slices that it was built for"),
    "a topology that does not exist": ("TopologyError", "the first two sizes of a slice are even"),
    "a mesh that does not fit": ("TopologyError", "v5e:2x4 has 8 devices, and the mesh 4"),
    "a mesh over slices": ("TopologyError", "v5e:2x4 has 1 slices"),
    "two meshes": ("ShardingError", "what a step works on lies on one mesh"),
    "item": READS,
    "a branch": READS,
    "print": READS,
    "a batch of torch's": ("ShardingError", "argument 0: what a planned step works on must be made by its engine"),
    "a batch that is no tensor": (
        "ShardingError",
        "argument 0: what a planned step works on must be made by its engine",
    ),
    "a model of torch's": ("ShardingError", "weight: what a planned step works on must be made by its engine"),
    "a model on meta": ("ShardingError", "weight: what a planned step works on must be made by its engine"),
    "a state of something else": ("ConfigError", "the state of a step is made of modules, optimizers and tensors"),
    "an optimizer without its state": ("ShardingError", "the state of a step must be there before it is called"),
    "a state that is not told": ("ShardingError", "what a step reads must be in its state or its batch"),
    "a step without a result": ("ShardtorchError", "a step must return a tensor, or update its state"),
    "a flag that does not exist": ("ShardtorchError", "libtpu must accept the step for v5e:2x4"),
}


@pytest.mark.slow
def test_each_mistake_is_one_clear_message(planned: Planned):
    assert set(planned.errors) == set(EXPECTED)
    for name, (kind, law) in EXPECTED.items():
        found, text = planned.errors[name]
        assert found == kind, (name, text)
        assert law in text, (name, text)
        first, got, fix = text.split("\n")  # and nothing else
        assert first, name
        for line, start in ((got, "  got: "), (fix, "  fix: ")):
            assert line.startswith(start), (name, text)
            assert len(line) > len(start), (name, text)


@pytest.mark.slow
def test_a_mistake_is_told_in_the_users_names(planned: Planned):
    assert "v5e:4x4, and the engine's v5e:2x4" in planned.errors["another topology"][1]
    assert "start('libtpu', topology='v5e:4x4')" in planned.errors["another topology"][1]
    assert "Mesh(data=2, fsdp=4) and Mesh(fsdp=8)" in planned.errors["two meshes"][1]
    assert "shape (1024, 512) on cpu" in planned.errors["a batch of torch's"][1]
    assert "[1, 2]" in planned.errors["a batch that is no tensor"][1]
    assert "xla_no_such_flag" in planned.errors["a flag that does not exist"][1]


def test_a_step_is_planned_on_its_engine(reference: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_start, "_running", reference)
    with pytest.raises(EngineUnavailableError, match=r"^a step is planned on the engine 'libtpu'") as caught:
        compile_report(lambda: None, (), [], "v5e:2x4")
    assert caught.value.got == "the engine 'reference'"
    assert "shardtorch.start('libtpu', topology='v5e:2x4')" in caught.value.fix
    monkeypatch.setattr(_start, "_running", None)
    with pytest.raises(EngineUnavailableError, match="an engine must run"):
        compile_report(lambda: None, (), [], "v5e:2x4")
