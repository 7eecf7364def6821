"""Starting an engine too late, twice, with wrong devices or in the wrong process is a clear error, never a crash."""

import os

import pytest
import torch
from processes import run_python

from shardtorch import engine as engines
from shardtorch.engine import Engine, _start
from shardtorch.engine._reference import ReferenceEngine
from shardtorch.errors import EngineUnavailableError


@pytest.fixture
def nothing_started(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process in which no engine runs yet, as far as `start` can tell, with no settings in its environment."""
    monkeypatch.setattr(_start, "_running", None)
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


BAD_ENVIRONMENTS = {
    "torchrun": (
        {"LOCAL_WORLD_SIZE": "2"},
        "one process per host drives all of its devices",
        r"a launch of several processes by torchrun \(LOCAL_WORLD_SIZE=2\)",
        "start the program once per host, with plain python",
    ),
    "xmp.spawn": (
        {"PJRT_LOCAL_PROCESS_COUNT": "4"},
        "one process per host drives all of its devices",
        r"by torch_xla.launch or xmp.spawn \(PJRT_LOCAL_PROCESS_COUNT=4\)",
        "start the program once per host, with plain python",
    ),
    "another device count": (
        {"CPU_NUM_DEVICES": "4"},
        "the number of virtual CPU devices is fixed by CPU_NUM_DEVICES=4 in the environment",
        "got: 8 devices",
        "unset CPU_NUM_DEVICES, or ask for 4",
    ),
    "LOCAL_WORLD_SIZE is no number": (
        {"LOCAL_WORLD_SIZE": "two"},
        "the environment variable LOCAL_WORLD_SIZE is a positive integer",
        "LOCAL_WORLD_SIZE='two'",
        "unset LOCAL_WORLD_SIZE",
    ),
    "PJRT_LOCAL_PROCESS_COUNT is no number": (
        {"PJRT_LOCAL_PROCESS_COUNT": "1.0"},
        "the environment variable PJRT_LOCAL_PROCESS_COUNT is a positive integer",
        "PJRT_LOCAL_PROCESS_COUNT='1.0'",
        "unset PJRT_LOCAL_PROCESS_COUNT",
    ),
    "CPU_NUM_DEVICES is no number": (
        {"CPU_NUM_DEVICES": ""},
        "the environment variable CPU_NUM_DEVICES is a positive integer",
        "CPU_NUM_DEVICES=''",
        "unset CPU_NUM_DEVICES, or give it a number",
    ),
    "CPU_NUM_DEVICES is negative": (
        {"CPU_NUM_DEVICES": "-8"},
        "the environment variable CPU_NUM_DEVICES is a positive integer",
        "CPU_NUM_DEVICES='-8'",
        "unset CPU_NUM_DEVICES, or give it a number",
    ),
    "no TPU here": (
        {"PJRT_DEVICE": "TPU"},
        "PJRT_DEVICE=TPU needs a machine with TPU chips",
        "neither /dev/accel0... nor /dev/vfio/0... here",
        "unset PJRT_DEVICE to run on virtual CPU devices",
    ),
    "a GPU": (
        {"PJRT_DEVICE": "CUDA"},
        "the engine runs on TPUs, or on virtual CPU devices",
        "PJRT_DEVICE=CUDA in the environment",
        "set PJRT_DEVICE=TPU or PJRT_DEVICE=CPU, or unset it",
    ),
}


@pytest.mark.parametrize(("variables", "law", "got", "fix"), BAD_ENVIRONMENTS.values(), ids=BAD_ENVIRONMENTS)
def test_a_bad_environment(nothing_started: pytest.MonkeyPatch, variables: dict, law: str, got: str, fix: str):
    nothing_started.setattr("shardtorch.engine.torch_xla._start._has_tpu", lambda: False)
    for name, value in variables.items():
        nothing_started.setenv(name, value)
    with pytest.raises(EngineUnavailableError, match=rf"(?s){law}.*{got}.*{fix}"):
        engines.start(num_devices=8)
    with pytest.raises(EngineUnavailableError, match="an engine must run before tensors can be sharded"):
        engines.running()


@pytest.mark.parametrize("name", ["torch_xla", "reference"])
@pytest.mark.parametrize("num_devices", [0, -1, 8.0, "8", True], ids=repr)
def test_a_bad_number_of_devices(nothing_started: pytest.MonkeyPatch, name: str, num_devices: object):
    with pytest.raises(EngineUnavailableError, match="the number of devices is a positive integer") as error:
        engines.start(name, num_devices=num_devices)
    assert error.value.got == f"num_devices={num_devices!r}"


def test_an_engine_that_does_not_exist(nothing_started: pytest.MonkeyPatch):
    with pytest.raises(
        EngineUnavailableError,
        match=r"must be one that exists.\n  got: 'jax'\n  fix: use 'torch_xla', 'reference' or 'libtpu'",
    ):
        engines.start("jax")  # pyright: ignore[reportArgumentType]


def test_none_was_started(nothing_started: pytest.MonkeyPatch):
    with pytest.raises(EngineUnavailableError, match=r"no engine in this process\n  fix: call shardtorch.start"):
        engines.running()


def test_the_reference_engine(nothing_started: pytest.MonkeyPatch):
    with pytest.raises(EngineUnavailableError, match=r"the reference engine has one device.\n  got: 8 devices"):
        engines.start("reference", num_devices=8)
    engine = engines.start("reference")
    assert isinstance(engine, ReferenceEngine)
    assert engines.start("reference", num_devices=1) is engine is engines.running()
    assert engine.inventory().num_devices == 1


def test_starting_again_gives_the_same_engine(xla: Engine):
    assert engines.start(num_devices=8) is engines.start() is engines.running() is xla


def test_starting_again_with_another_count(xla: Engine):
    with pytest.raises(
        EngineUnavailableError, match=r"(?s)4 devices asked for, 8 there.*start a new process: the number"
    ):
        engines.start(num_devices=4)
    assert engines.running() is xla


def test_the_environment_says_how_many(xla: Engine):
    assert os.environ["CPU_NUM_DEVICES"] == "8"


# In a process of its own, since torch_xla starts once per process.

TOO_LATE = {
    "a tensor": "torch.zeros(1, device='xla')",
    "a seed": "torch_xla.manual_seed(0)",
}


def assert_raises_cleanly(code: str, message: str, **variables: str) -> None:
    """The program ends with this EngineUnavailableError: not with a signal, and nothing of torch_xla's after it."""
    done = run_python(f"import shardtorch, torch\n{code}", **variables)
    assert done.returncode == 1, done.stderr
    law, *rest = done.stderr[done.stderr.rindex("shardtorch.errors.") :].splitlines()
    assert law.startswith("shardtorch.errors.EngineUnavailableError: ")
    assert message in law
    assert [line[:7] for line in rest] == ["  got: ", "  fix: "]


@pytest.mark.slow
@pytest.mark.parametrize("touch", TOO_LATE.values(), ids=TOO_LATE)
def test_after_a_device_was_touched(touch: str):
    code = f"import torch_xla\n{touch}\nshardtorch.start(num_devices=8)"
    assert_raises_cleanly(code, "the engine must start before torch_xla touches a device.")


@pytest.mark.slow
def test_after_devices_were_counted():
    code = "import torch_xla.runtime as xr\nxr.global_runtime_device_count()\nshardtorch.start(num_devices=8)"
    assert_raises_cleanly(code, "the engine must run on all devices that the runtime has.")


@pytest.mark.slow
def test_after_a_backward_pass():
    """torch would fail an internal assertion at the first backward pass on the device."""
    code = "torch.ones(2, requires_grad=True).sum().backward()\nshardtorch.start(num_devices=8)"
    assert_raises_cleanly(code, "the engine must start before anything computes a gradient.")


@pytest.mark.slow
def test_without_torch_xla():
    code = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch_xla", "_XLAC"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
assert shardtorch.start("reference").name == "reference"
shardtorch.start(num_devices=8)
"""
    assert_raises_cleanly(code, "the torch_xla engine needs torch_xla==2.9.0 beside torch==2.9.0.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    ["import torch_xla", "import torch_xla.runtime as xr; xr.use_spmd(); x = torch.zeros(1, device='xla')"],
    ids=["imported", "SPMD already on"],
)
def test_torch_xla_in_use_but_not_too_late(before: str):
    code = f"""
import torch
{before}
import shardtorch
from shardtorch import Mesh, P, mark_sharding
engine = shardtorch.start(num_devices=8)
x = mark_sharding(torch.nn.Parameter(torch.ones(8).to("xla")), Mesh(fsdp=8), P("fsdp"))
(x * x).sum().backward()
engine.sync()
print(engine.inventory().num_devices, engine.sharding_of(x), x.grad.sum().item())
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8 {devices=[8]0,1,2,3,4,5,6,7} 16.0\n"
    assert "GSPMD" not in done.stderr


COUNTS = """
import torch
import shardtorch
from shardtorch.mesh import Mesh, NamedSharding, P

engine = shardtorch.start({argument})
mesh = Mesh(fsdp=-1).bind(engine.inventory().num_devices)
sharding, rows = NamedSharding(mesh, P(None, "fsdp")), NamedSharding(mesh, P("fsdp"))
values = torch.arange(3 * 16 * 16.0).reshape(3, 16, 16) / 1000
w = engine.materialize((3, 16, 16), torch.float32, sharding, lambda index: values[index]).requires_grad_()
for shard in engine.local_shards(w, sharding):
    assert torch.equal(shard.data, values[shard.index])
    assert shard.data.shape == (3, 16 // {num_devices}, 16)

x = engine.put(torch.ones(16, 16), rows, (16, 16))
step = engine.compile(lambda: engine.scan(lambda x, w: torch.tanh(x @ w["w"]), x, {{"w": w}}, (), remat=True).sum())
loss = step()
want, plain = torch.ones(16, 16), values.clone().requires_grad_()
for i in range(3):
    want = torch.tanh(want @ plain[i])
want.sum().backward()
torch.testing.assert_close(loss.cpu(), want.sum().detach())
loss.backward()
torch.testing.assert_close(w.grad.cpu(), plain.grad)
print(engine.inventory().num_devices, len(engine.local_shards(w, sharding)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "argument", "variables"),
    [(1, "", {}), (2, "num_devices=2", {}), (4, "", {"CPU_NUM_DEVICES": "4"}), (16, "num_devices=16", {})],
    ids=["1 by default", "2", "4 by the environment", "16"],
)
def test_other_numbers_of_devices(num_devices: int, argument: str, variables: dict[str, str]):
    done = run_python(COUNTS.format(num_devices=num_devices, argument=argument), **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{num_devices} {num_devices}\n"
    assert done.stderr == ""  # XLA warns of GSPMD's end at every compile, if it is let


def test_tensors_on_the_device_are_seen_as_such(xla: Engine):
    assert xla.device == torch.zeros(1, device="xla").device
