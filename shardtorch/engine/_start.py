"""Which engine this process runs on. A runtime belongs to its process, so this is the one thing that is global."""

from typing import Literal

from shardtorch.engine._contract import Engine
from shardtorch.errors import EngineUnavailableError

_running: Engine | None = None


def start(name: Literal["torch_xla", "reference"] = "torch_xla", *, num_devices: int | None = None) -> Engine:
    """Starts the engine of this process. Call it before anything touches an XLA device.

    Args:
      name: `torch_xla` runs on the TPU slice, or on virtual CPU devices where there is none; `reference` is eager
        torch on one CPU device, without sharding.
      num_devices: Devices to expect; on CPU, how many virtual ones to make (default: CPU_NUM_DEVICES, else 1).

    Returns:
      The engine. Starting it again returns the same one.

    Raises:
      EngineUnavailableError: It is too late, the device count can't be had, several processes were launched on this
        host, or torch_xla is missing.
    """
    global _running
    if name not in ("torch_xla", "reference"):
        raise EngineUnavailableError(
            "the engine must be one that exists.", got=repr(name), fix="use 'torch_xla' or 'reference'."
        )
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
