"""From a lowered step to what libtpu makes of it for a slice.

Private symbols of jax and jaxlib 0.7.1: `jax._src.compiler.get_compile_options`, `jax._src.interpreters.mlir`,
`jax._src.lib.xla_client._xla`. Checked with libtpu 0.0.40, which leaves the buffer assignment of an executable empty,
so it is read from XLA's dump. tests/engine/test_libtpu.py exercises each of them.
"""

import base64
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from shardtorch.engine._contract import Argument, Lowered
from shardtorch.errors import ConfigError, EngineUnavailableError, ShardtorchError, TopologyError
from shardtorch.mesh import SliceTopology

_BOOLS = {"true": True, "false": False}
_DUMP = ("xla_dump_to", "xla_dump_hlo_as_proto")
_WATCHER = """
import re, shutil, sys
from pathlib import Path
folder = Path(sys.argv[1])
if not sys.stdin.buffer.read():  # it ended without a word
    lines = (folder / "log").read_text(errors="replace").splitlines() if (folder / "log").exists() else []
    fatal = dict.fromkeys(line for line in lines if re.match(r"F\\d{4} ", line))
    if fatal:
        print("libtpu ended the process, as it does for some flags and kernels that it can't compile:", *fatal,
              sep="\\n  ", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
"""
"""A program that waits for its parent to say something or to end, and in the second case says why it did."""


@dataclass(frozen=True)
class Compiled:
    """What libtpu made of a step: the program of one device."""

    text: str
    """The scheduled HLO module."""
    buffer_assignment: str
    """Which value lies where in memory, and when: a serialized `HloProto`, in base64."""
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of the outputs, those that take the place of arguments."""
    temp_bytes: int
    code_bytes: int
    peak_bytes: int
    log: str
    """What the compiler wrote to the error stream, such as which values it had to replicate."""
    compile_s: float
    libtpu_version: str


@dataclass(frozen=True)
class OutOfMemory:
    """libtpu gave up: the program needs more memory than a device has."""

    message: str
    """What it says, with its largest allocations."""
    buffer_assignment: str
    """As of `Compiled`; empty if it gave up before."""
    compile_s: float
    libtpu_version: str


def libtpu_version() -> str:
    """Version of the installed libtpu.

    Raises:
      EngineUnavailableError: It, or jax, isn't installed.
    """
    missing = [name for name in ("libtpu", "jax") if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineUnavailableError(
            "planning compiles with libtpu, which jax loads; no TPU is needed.",
            got=f"no {' and no '.join(missing)} in this environment",
            fix="pip install 'shardtorch[plan]'",
        )
    return version("libtpu")


def compile_for(
    lowered: Lowered, topology: SliceTopology, flags: Mapping[str, str] | None = None
) -> Compiled | OutOfMemory:
    """Compiles a step for slices that need not exist.

    Args:
      lowered: The step; shardings over as many devices as the topology has.
      topology: The slices.
      flags: Further options of the compiler, by name, such as `{"xla_tpu_scoped_vmem_limit_kib": "65536"}`.

    Raises:
      EngineUnavailableError: libtpu or jax isn't installed.
      TopologyError: libtpu does not know the topology.
      ConfigError: A flag says where XLA dumps to, which is read here.
      ShardtorchError: The compiler refuses the program, or a flag, for another reason than memory.
    """
    flags = flags or {}
    if taken := [name for name in _DUMP if name in flags]:
        raise ConfigError(
            f"{' and '.join(_DUMP)} are set here, to read what XLA dumps.", got=", ".join(taken), fix="leave it out."
        )
    libtpu = libtpu_version()
    prepare_environment()
    import jax
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    jax.config.update("jax_use_shardy_partitioner", False)
    devices = _devices(topology)
    ids = np.array([device.id for device in devices])
    with mlir.make_ir_context():
        bytecode = mlir.module_to_bytecode(_annotated(lowered, len(devices)))
    overrides: dict[str, Any] = {name: _BOOLS.get(value.lower(), value) for name, value in flags.items()}
    with tempfile.TemporaryDirectory(prefix="shardtorch-plan-") as dump, _watched(dump):
        overrides |= dict(zip(_DUMP, (dump, True), strict=True))
        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=ids.reshape(1, -1),
            use_spmd_partitioning=True,
            env_options_overrides=overrides,
        )
        start = time.monotonic()
        try:
            with _error_stream_to(Path(dump) / "log"):
                executable = devices[0].client.compile(bytecode, xla_client.DeviceList(tuple(devices)), options)
        except jax.errors.JaxRuntimeError as error:
            message = str(error)
            if "RESOURCE_EXHAUSTED" in message and not re.search(r"space (vmem|smem|sflag)", message):
                return OutOfMemory(message, _buffer_assignment(dump), time.monotonic() - start, libtpu)
            raise ShardtorchError(
                f"libtpu must accept the step for {topology}.",
                got=message[:2000],
                fix=f"correct or leave out {', '.join(flags)}, or see whether a kernel causes it: attention='torch'."
                if flags
                else "see whether a kernel causes it: attention='torch'.",
            ) from error
        compile_s = time.monotonic() - start
        buffer_assignment = _buffer_assignment(dump)
        log = (Path(dump) / "log").read_text(errors="replace")
    if not buffer_assignment:
        raise ShardtorchError(
            "libtpu must dump what lies where in memory.",
            got=f"no dump from libtpu {libtpu}",
            fix="pip install 'shardtorch[plan]', which brings one that does.",
        )
    memory = executable.get_compiled_memory_stats()
    (module,) = executable.hlo_modules()
    return Compiled(
        module.to_string(),
        buffer_assignment,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        memory.peak_memory_in_bytes,
        log,
        compile_s,
        libtpu,
    )


def graph_text(lowered: Lowered) -> str:
    """The graph of a step, equal for equal ones: with constants and scopes, without lines of code, and without the
    running number that torch_xla 2.9.0 adds to each scope."""
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    options = xla_client._xla.HloPrintOptions()  # pyright: ignore[reportPrivateImportUsage]
    options.print_large_constants = True
    text = xla_client.XlaComputation(lowered.hlo).get_hlo_module().to_string(options)
    text = re.sub(r"^HloModule [^,]*", "", text)
    text = re.sub(r'(source_\w+|stack_frame_id)=("[^"]*"|\d+)', "", text)
    return re.sub(r"(~\d+~)\.\d+", r"\1", text)


def _buffer_assignment(dump: str) -> str:
    """What XLA dumped of it; empty if it did not come so far."""
    files = list(Path(dump).glob("*.after_optimizations.hlo.pb"))
    return base64.b64encode(files[0].read_bytes()).decode() if files else ""


def prepare_environment() -> None:
    """Tells libtpu and jax that there is no TPU to look for; before jax is imported, which asks for one."""
    import libtpu

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else it asks for a metadata server
    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing here touches a chip, so several can compile
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # jax itself must look for no TPU
    for level in ("TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):
        os.environ.setdefault(level, "1")  # warnings: the partitioner's are part of the result


@contextmanager
def _watched(folder: str) -> Iterator[None]:
    """Lets another process say what libtpu said last, and remove the folder, if this process ends meanwhile: where
    libtpu finds something wrong with itself it ends the process, and nothing here could go on."""
    command = [sys.executable, "-S", "-E", "-c", _WATCHER, folder]
    # A session of its own, so that Ctrl-C does not come to it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as watcher:
        try:
            yield
        finally:
            watcher.communicate(b"alive")


@contextmanager
def _error_stream_to(path: Path) -> Iterator[None]:
    """Sends what C++ code writes to the process's error stream into a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@lru_cache(maxsize=16)
def _devices(topology: SliceTopology) -> list[Any]:
    """The compiler's devices, in the order of our ids: slice by slice, and within one by the runtime's own order."""
    from jax.experimental import topologies

    name = f"{topology.generation}:{'x'.join(map(str, topology.ici_shape))}"
    options: dict[str, Any] = {} if topology.num_slices == 1 else {"num_slices": topology.num_slices}
    if topology.num_chips == topology.num_slices:
        options["chips_per_host_bounds"] = [1, 1, 1]  # libtpu takes 2x2 for granted
    try:
        with _error_stream_to(Path(os.devnull)):  # it complains of the metadata server that it was told not to ask
            devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except Exception as error:  # its kind differs between versions
        raise TopologyError(
            f"libtpu {version('libtpu')} must know the topology.",
            got=f"{topology}: {str(error).splitlines()[0]}",
            fix="use a slice that can be rented, such as v5e:4x8, v6e:16x16 or v5p:4x4x4.",
        ) from error
    if len(devices) != topology.num_devices:
        raise TopologyError(
            f"{topology} has {topology.num_devices} devices.", got=f"{len(devices)} from libtpu", fix="report this."
        )
    return sorted(devices, key=lambda device: device.id)


def _annotated(lowered: Lowered, num_devices: int) -> Any:
    """The module with the shardings of its parameters and results, and which parameters' memory it may reuse."""
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
    from jaxlib.mlir import ir

    computation = xla_client.XlaComputation(lowered.hlo)
    to_mlir = xla_client._xla.mlir.xla_computation_to_mlir_module  # pyright: ignore[reportPrivateImportUsage]
    module = ir.Module.parse(to_mlir(computation))
    main: Any = next(op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main")

    def i32(number: int) -> Any:
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), number)

    def of_argument(argument: Argument) -> Any:
        sharding = argument.sharding
        text = "{replicated}" if sharding is None else str(sharding.tile_assignment(len(argument.shape)))
        attributes = {"mhlo.sharding": ir.StringAttr.get(text)}
        if argument.result is not None:
            attributes["tf.aliasing_output"] = i32(argument.result)
        return ir.DictAttr.get(attributes)

    ranks = {argument.result: len(argument.shape) for argument in lowered.arguments}

    def of_result(number: int) -> Any:
        sharding = lowered.result_shardings[number]
        if sharding is None:
            return ir.DictAttr.get({})
        text = str(sharding.tile_assignment(ranks[number]))
        return ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get(text)})

    main.attributes["arg_attrs"] = ir.ArrayAttr.get([of_argument(argument) for argument in lowered.arguments])
    main.attributes["res_attrs"] = ir.ArrayAttr.get([of_result(n) for n in range(len(lowered.result_shardings))])
    module.operation.attributes["mhlo.num_partitions"] = i32(num_devices)
    module.operation.attributes["mhlo.num_replicas"] = i32(1)
    return module
