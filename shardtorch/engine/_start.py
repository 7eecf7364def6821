"""Which engine this process runs on. A runtime belongs to its process, so this is the one thing that is global."""

import os
from typing import Literal

from shardtorch.engine._contract import Engine
from shardtorch.errors import EngineUnavailableError
from shardtorch.mesh import SliceTopology

_running: Engine | None = None


def start(
    name: Literal["torch_xla", "reference", "libtpu"] = "torch_xla",
    *,
    num_devices: int | None = None,
    topology: SliceTopology | str | None = None,
) -> Engine:
    """Starts the engine of this process. Call it before anything touches an XLA device.

    Args:
      name: `torch_xla` runs on the TPU slice, or on virtual CPU devices where there is none; `reference` is eager
        torch on one CPU device, without sharding; `libtpu` runs nothing: its tensors have no data, and a step over them
        is compiled for a slice that need not exist (`shardtorch.aot.compile_report`).
      num_devices: Devices to expect; on CPU, how many virtual ones to make (default: CPU_NUM_DEVICES, else 1).
      topology: The slices to plan for, such as `v5p:4x4x4`; for `libtpu` only.

    Returns:
      The engine. Starting it again returns the same one.

    Raises:
      EngineUnavailableError: It is too late, the device count can't be had, several processes were launched on this
        host, torch_xla is missing, or for `libtpu`, the extra `plan`.
      TopologyError: There is no such topology.
    """
    global _running
    if name not in ("torch_xla", "reference", "libtpu"):
        raise EngineUnavailableError(
            "the engine must be one that exists.", got=repr(name), fix="use 'torch_xla', 'reference' or 'libtpu'."
        )
    if (name == "libtpu") != (topology is not None):
        raise EngineUnavailableError(
            "the engine 'libtpu', and no other, is started for a topology.",
            got=f"start({name!r}, topology={topology!r})",
            fix="call start('libtpu', topology='v5p:4x4x4'), or leave topology out.",
        )
    if topology is not None:
        _running = _start_libtpu(topology, num_devices)
        return _running
    if num_devices is not None and (type(num_devices) is not int or num_devices < 1):
        raise EngineUnavailableError(
            "the number of devices is a positive integer.",
            got=f"num_devices={num_devices!r}",
            fix="give a number such as 8, or leave num_devices out.",
        )
    if name == "reference":
        from shardtorch.engine._reference import ReferenceEngine

        if num_devices not in (None, 1):
            raise EngineUnavailableError(
                "the reference engine has one device.",
                got=f"{num_devices} devices",
                fix="leave num_devices out; it accepts every mesh and applies none.",
            )
        engine: Engine = ReferenceEngine()
    else:
        from shardtorch.engine.torch_xla._start import check_environment, start_runtime

        if _running is None or _running.name != name:
            check_environment(num_devices)
        start_runtime(num_devices)
        from shardtorch.engine.torch_xla._engine import TorchXlaEngine

        engine = TorchXlaEngine()
    if _running is None or _running.name != name:
        _running = engine
    return _running


def _start_libtpu(topology: SliceTopology | str, num_devices: int | None) -> Engine:
    topology = SliceTopology.parse(topology) if isinstance(topology, str) else topology
    if num_devices not in (None, topology.num_devices):
        raise EngineUnavailableError(
            f"{topology} has {topology.num_devices} devices.", got=f"num_devices={num_devices}", fix="leave it out."
        )
    from shardtorch.engine.libtpu import libtpu_version, prepare_environment

    libtpu_version()  # says what isn't installed before anything is built
    prepare_environment()
    if _running is None or _running.name == "reference":
        from shardtorch.engine.torch_xla._start import check_environment, start_runtime

        # Tracing needs a device of torch_xla, and no matter how many.
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        check_environment(None)
        start_runtime(None)
    from shardtorch.engine.libtpu._engine import LibtpuEngine

    if isinstance(_running, LibtpuEngine) and _running.topology == topology:
        return _running
    return LibtpuEngine(topology)


def running() -> Engine:
    """The engine that `start` started.

    Raises:
      EngineUnavailableError: None was started.
    """
    if _running is None:
        raise EngineUnavailableError(
            "an engine must run before tensors can be sharded.",
            got="no engine in this process",
            fix="call shardtorch.start(num_devices=...) at the top of the program.",
        )
    return _running
