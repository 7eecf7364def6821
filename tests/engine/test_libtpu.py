"""libtpu for slices that aren't here: what it gives, what it refuses, and that it says nothing that isn't kept.

Everything is compiled by the real libtpu, with graphs that jax makes: this is no test of tracing.
"""

import dataclasses
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import environment, run_python

from shardtorch.aot._buffer_assignment import Program
from shardtorch.aot._hlo import Module
from shardtorch.engine import Argument, Engine, Lowered, start
from shardtorch.engine.libtpu import Compiled, OutOfMemory, _compile, compile_for, libtpu_version
from shardtorch.errors import ConfigError, EngineUnavailableError, ShardtorchError, TopologyError
from shardtorch.mesh import Mesh, NamedSharding, P, SliceTopology

V5E = SliceTopology.parse("v5e:2x4")
SLICES = ["v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "2 x v5e:2x2"]
"""Slices of 8 devices, of every generation."""


@cache
def graph(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> bytes:
    _compile.prepare_environment()
    import jax

    jax.config.update("jax_use_shardy_partitioner", False)
    structs = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    hlo: Any = jax.jit(fn).lower(*structs).compiler_ir("hlo")
    return hlo.as_serialized_hlo_module_proto()


def update(x: Any, w: Any) -> tuple[Any, Any]:
    return (x @ w).sum(), w * 2


def refused(x: Any) -> Any:
    import jax

    return jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct((64, 64), "float32"))(x)


def mesh_of(topology: SliceTopology) -> Mesh:
    return Mesh(data=topology.num_devices, dcn={"data": topology.num_slices})


def step(topology: SliceTopology = V5E, *, donated: bool = True) -> Lowered:
    """Rows of `x` and columns of `w` lie on all devices; `w` is updated in its place."""
    mesh = mesh_of(topology)
    x, w = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))
    arguments = (
        Argument("x", (64, 128), torch.float32, x),
        Argument("w", (128, 256), torch.float32, w, 1 if donated else None),
    )
    return Lowered(graph(update, (64, 128), (128, 256)), arguments, (None, w if donated else None), ())


def test_the_text_of_a_graph_holds_its_constants_and_no_lines_of_code():
    import numpy as np

    def adds(values: np.ndarray) -> Callable[..., Any]:
        return lambda x: x + values

    zeros, ones = np.zeros(4096, "float32"), np.ones(4096, "float32")
    elsewhere = lambda x: x + zeros  # noqa: E731
    texts = [_compile.graph_text(one_argument(fn, (4096,))) for fn in (adds(zeros), adds(ones), elsewhere)]
    assert texts[0] != texts[1]
    assert texts[0] == texts[2]
    assert "test_libtpu" not in texts[0]


def one_argument(fn: Callable[..., Any], shape: tuple[int, ...]) -> Lowered:
    sharding = NamedSharding(mesh_of(V5E), P("data"))
    return Lowered(graph(fn, shape), (Argument("x", shape, torch.float32, sharding),), (None,), ())


def compiled(topology: SliceTopology = V5E, flags: Mapping[str, str] | None = None, **how: Any) -> Compiled:
    result = compile_for(step(topology, **how), topology, flags)
    assert isinstance(result, Compiled)
    return result


@pytest.mark.parametrize("name", SLICES)
def test_every_generation_compiles(name: str, capfd: pytest.CaptureFixture[str]):
    topology = SliceTopology.parse(name)
    result = compiled(topology)
    # A device's share of each: one eighth, and of the results also the scalar with its padding.
    w = 128 * 256 * 4 // 8
    assert result.argument_bytes == 64 * 128 * 4 // 8 + w
    assert result.alias_bytes == w
    assert w < result.output_bytes <= w + 4096
    assert result.temp_bytes >= 0 < result.code_bytes
    assert result.peak_bytes > 0
    assert result.compile_s > 0
    assert result.libtpu_version == libtpu_version()
    # The program of one device, scheduled; for several slices, as one of its slice's devices.
    heading = result.text.partition("\n")[0]
    assert "is_scheduled=true" in heading
    module = Module.parse(result.text)
    assert module.num_partitions == 8 // topology.num_slices
    assert {str(it.arrays[0]) for it in module.entry.instructions if it.opcode == "parameter"} == {
        "f32[8,128]",
        "f32[128,32]",
    }
    sent = {it.opcode for computation in module.computations.values() for it in computation.instructions}
    assert sent & {"all-gather", "all-reduce", "all-reduce-start", "all-gather-start", "collective-permute-start"}
    assert ("recv" in sent) == (topology.num_slices > 1)
    assert Program.parse(result.buffer_assignment).allocations
    assert capfd.readouterr() == ("", "")


def test_without_donation_nothing_is_reused():
    with_it, without = compiled(), compiled(donated=False)
    assert (with_it.alias_bytes, without.alias_bytes) == (128 * 256 * 4 // 8, 0)
    assert with_it.argument_bytes == without.argument_bytes
    assert "input_output_alias={ {1}: (1, {}, may-alias) }" in with_it.text
    assert "input_output_alias" not in without.text


def test_the_same_step_compiles_to_the_same_program():
    assert compiled().text == compiled().text


def annotated(lowered: Lowered) -> str:
    from jax._src.interpreters import mlir

    with mlir.make_ir_context():
        return str(_compile._annotated(lowered, 8))


def test_the_module_says_how_everything_lies():
    text = annotated(step())
    assert 'mhlo.sharding = "{devices=[8,1]<=[8]}"' in text
    assert text.count('mhlo.sharding = "{devices=[1,8]<=[8]}"') == 2  # of the argument, and of the result
    assert text.count("tf.aliasing_output = 1 : i32") == 1
    assert "mhlo.num_partitions = 8 : i32" in text
    assert "mhlo.num_replicas = 1 : i32" in text
    constant = Lowered(step().hlo, (step().arguments[0], dataclasses.replace(step().arguments[1], sharding=None)),
                       (None, None), ())  # fmt: skip
    text = annotated(constant)
    assert 'mhlo.sharding = "{replicated}"' in text
    assert "[1,8]" not in text


def test_the_private_symbols_are_where_they_were():
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client

    for holder, name in (
        (compiler, "get_compile_options"),
        (mlir, "make_ir_context"),
        (mlir, "module_to_bytecode"),
        (xla_client, "DeviceList"),
        (xla_client, "XlaComputation"),
        (xla_client._xla.mlir, "xla_computation_to_mlir_module"),
    ):
        assert callable(getattr(holder, name))


@pytest.mark.parametrize(
    "name", ["v5e:2x4", "v4:2x2x2", "v5p:2x4x2", "v6e:4x4", "tpu7x:2x2x2", "2 x v5e:2x2", "3 x v4:2x2x1", "v6e:1x1"]
)
def test_devices_are_in_the_order_of_our_ids(name: str):
    topology = SliceTopology.parse(name)
    _compile.prepare_environment()
    devices = _compile._devices(topology)
    assert len(devices) == topology.num_devices
    dims = len(topology.ici_shape)
    slices = sorted({device.id // 100_000 for device in devices})
    assert len(slices) == topology.num_slices
    for number, device in enumerate(devices):
        place = (slices.index(device.id // 100_000), tuple(device.coords[:dims]))
        assert place == topology.place(number)


def test_flags_reach_the_compiler():
    without, with_it = compiled(), compiled(flags={"xla_tpu_enable_latency_hiding_scheduler": "false"})
    assert without.text != with_it.text
    # A boolean may be written as people do.
    assert compiled(flags={"xla_tpu_enable_latency_hiding_scheduler": "False"}).text == with_it.text
    assert compiled(flags={"xla_tpu_scoped_vmem_limit_kib": "65536"}).argument_bytes == without.argument_bytes


@pytest.mark.parametrize(
    ("flags", "got"),
    [
        ({"xla_no_such_flag": "1"}, "No such compile option: 'xla_no_such_flag'"),
        ({"xla_tpu_scoped_vmem_limit_kib": "much"}, "Failed to parse 'much' into flag xla_tpu_scoped_vmem_limit_kib"),
    ],
)
def test_a_flag_that_libtpu_refuses(flags: dict[str, str], got: str, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(ShardtorchError, match=r"^libtpu must accept the step for v5e:2x4\.") as caught:
        compile_for(step(), V5E, flags)
    assert got in caught.value.got
    assert caught.value.fix.startswith(f"correct or leave out {next(iter(flags))}")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["xla_dump_to", "xla_dump_hlo_as_proto"])
def test_a_flag_that_is_set_here(name: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"xla_dump_to and xla_dump_hlo_as_proto are set here") as caught:
        compile_for(step(), V5E, {"xla_a": "1", name: str(tmp_path)})
    assert caught.value.got == name


def test_a_program_that_libtpu_refuses(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(ShardtorchError, match=r"^libtpu must accept the step for v5e:2x4\.") as caught:
        compile_for(one_argument(refused, (64, 64)), V5E)
    assert "no_such_kernel" in caught.value.got
    assert caught.value.fix == "see whether a kernel causes it: attention='torch'."
    assert capfd.readouterr() == ("", "")


def test_too_little_memory_is_a_result(capfd: pytest.CaptureFixture[str]):
    result = compile_for(one_argument(lambda x: x.sum(0), (8 * 2**20, 2**13)), V5E)
    assert isinstance(result, OutOfMemory)
    assert "RESOURCE_EXHAUSTED" in result.message
    assert "Ran out of memory in memory space hbm" in result.message
    assert Program.parse(result.buffer_assignment).allocations
    assert result.libtpu_version == libtpu_version()
    assert capfd.readouterr() == ("", "")


def unchecked(generation: str, *ici_shape: int) -> SliceTopology:
    """A slice that our own table refuses, so that libtpu is asked."""
    topology = object.__new__(SliceTopology)
    for name, value in (("generation", generation), ("ici_shape", ici_shape), ("num_slices", 1)):
        object.__setattr__(topology, name, value)
    return topology


@pytest.mark.parametrize(
    ("topology", "got"),
    [
        (unchecked("v5e", 3, 5), 'v5e:3x5: INVALID_ARGUMENT: Topology layout "v5e:3x5" is not divisible'),
        (unchecked("v99", 2, 2), "v99:2x2: INVALID_ARGUMENT: Invalid TPU external name"),
    ],
    ids=str,
)
def test_a_topology_that_libtpu_does_not_know(topology: SliceTopology, got: str, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(TopologyError, match=r"^libtpu [\d.]+ must know the topology\.") as caught:
        compile_for(step(), topology)
    assert caught.value.got.startswith(got)
    assert "\n" not in caught.value.got
    assert "such as v5e:4x8" in caught.value.fix
    assert capfd.readouterr() == ("", "")


def test_a_topology_that_nobody_knows():
    with pytest.raises(TopologyError, match="the first two sizes of a slice are even"):
        start("libtpu", topology="v5e:3x5")


@pytest.mark.parametrize("missing", [("libtpu",), ("jax",), ("libtpu", "jax")])
def test_without_the_extra(missing: tuple[str, ...], xla: Engine, monkeypatch: pytest.MonkeyPatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        _compile.importlib.util,
        "find_spec",
        lambda name, *rest: None if name in missing else find_spec(name, *rest),
    )
    for call in (
        libtpu_version,
        lambda: compile_for(step(), V5E),
        lambda: start("libtpu", topology="v5e:2x4"),
    ):
        with pytest.raises(EngineUnavailableError, match="planning compiles with libtpu") as caught:
            call()
        assert caught.value.got == f"no {' and no '.join(missing)} in this environment"
        assert caught.value.fix == "pip install 'shardtorch[plan]'"


def test_the_log_is_what_the_compiler_wrote_and_the_error_stream_is_back(capfd: pytest.CaptureFixture[str]):
    import os

    log = compiled().log
    assert "partitioner" in log or "sharding_propagation" in log
    os.write(2, b"from C\n")
    assert capfd.readouterr().err == "from C\n"


PROGRAM = """
import json, sys
sys.path.insert(0, {tests!r})
import test_libtpu as it
from shardtorch.errors import ShardtorchError

logs = [len(it.compiled(it.SliceTopology.parse(name)).log) for name in ("v5e:2x4", "v4:2x2x1", "2 x v5e:2x2")]
for topology, flags in ((it.unchecked("v5e", 3, 5), {{}}), (it.V5E, {{"xla_no_such_flag": "1"}})):
    try:
        it.compile_for(it.step(), topology, flags)
    except ShardtorchError as error:
        logs.append(type(error).__name__)
print(json.dumps(logs), flush=True)
{last}
"""


def run(last: str, tmp_path: Path):
    """In a process of its own: its first client, its first topology, an environment that says nothing of TPUs."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    program = PROGRAM.format(tests=folders[0], last=last)
    return run_python(f"import sys; sys.path.insert(0, {folders[1]!r})\n{program}", TMPDIR=str(tmp_path))


KERNEL = """
import torch
import shardtorch as st
from shardtorch.engine.libtpu import compile_for
from shardtorch.pallas import FlashAttention

engine, mesh = st.start("libtpu", topology="2 x v5e:2x2"), st.Mesh(fsdp=8, dcn={"fsdp": 2})
q = engine.zeros((8, 2, 128, 128), torch.bfloat16, st.NamedSharding(mesh, st.P("fsdp")))
attend = FlashAttention(mesh, st.P("fsdp"), engine)
print(len(compile_for(engine.lower(lambda x: attend(x, x, x), [q], {}), engine.topology).text) > 0)
"""


@pytest.mark.slow
def test_a_kernel_for_several_slices_says_nothing_either():
    """In an environment that tells neither torch_xla nor jax what to look for."""
    untold = {name: value for name, value in environment().items() if name not in ("PJRT_DEVICE", "JAX_PLATFORMS")}
    done = subprocess.run([sys.executable, "-c", KERNEL], env=untold, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.slow
def test_nothing_of_the_compiler_comes_to_the_error_stream(tmp_path: Path):
    done = run("", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    one, another, two_slices, *errors = json.loads(done.stdout)
    assert min(one, another, two_slices) > 0
    assert errors == ["TopologyError", "ShardtorchError"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_if_libtpu_ends_the_process_its_last_words_are_seen(tmp_path: Path):
    # A check within libtpu 0.0.40 fails for lack of vector memory, and it aborts.
    done = run('it.compiled(flags={"xla_tpu_scoped_vmem_limit_kib": "1000"})', tmp_path)
    assert done.returncode == -signal.SIGABRT
    first, second = done.stderr.splitlines()
    assert first.startswith("libtpu ended the process")
    assert "Check failed: max_vmem_kib > 0" in second
    assert list(tmp_path.iterdir()) == []
