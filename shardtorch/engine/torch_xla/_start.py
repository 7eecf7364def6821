"""Starts the runtime, or says why it can't be started: after the fact torch_xla only crashes.

Private symbol of torch_xla 2.9.0: `_XLAC._xla_get_spmd_config_is_locked`.
"""

import glob
import os
import sys
import warnings

from shardtorch.engine._contract import Inventory
from shardtorch.errors import EngineUnavailableError

_MAX_VIRTUAL_DEVICES = 127
_LAUNCHERS = {
    "PJRT_LOCAL_PROCESS_COUNT": "torch_xla.launch or xmp.spawn",
    "LOCAL_WORLD_SIZE": "torchrun",
}


def check_environment(num_devices: int | None) -> str:
    """The platform to start, once nothing stands in the way.

    Raises:
      EngineUnavailableError: Several processes share this host's devices, or the device count can't be had.
    """
    for variable, launcher in _LAUNCHERS.items():
        if (_integer(variable) or 1) > 1:
            raise EngineUnavailableError(
                "one process per host drives all of its devices.",
                got=f"a launch of several processes by {launcher} ({variable}={os.environ[variable]})",
                fix="start the program once per host, with plain python.",
            )
    platform = os.environ.setdefault("PJRT_DEVICE", "TPU" if _has_tpu() else "CPU")
    if platform not in ("CPU", "TPU"):
        raise EngineUnavailableError(
            "the engine runs on TPUs, or on virtual CPU devices.",
            got=f"PJRT_DEVICE={platform} in the environment",
            fix="set PJRT_DEVICE=TPU or PJRT_DEVICE=CPU, or unset it.",
        )
    if platform == "TPU" and not _has_tpu():  # libtpu would ask for a metadata server for minutes
        raise EngineUnavailableError(
            "PJRT_DEVICE=TPU needs a machine with TPU chips.",
            got="neither /dev/accel0... nor /dev/vfio/0... here",
            fix="unset PJRT_DEVICE to run on virtual CPU devices; in a container, pass the chips' devices in.",
        )
    if platform == "CPU":
        virtual = _integer("CPU_NUM_DEVICES")
        if num_devices is not None and virtual not in (None, num_devices):
            raise EngineUnavailableError(
                f"the number of virtual CPU devices is fixed by CPU_NUM_DEVICES={virtual} in the environment.",
                got=f"{num_devices} devices",
                fix=f"unset CPU_NUM_DEVICES, or ask for {virtual}.",
            )
        count = num_devices or virtual or 1
        if count > _MAX_VIRTUAL_DEVICES:
            raise EngineUnavailableError(
                f"there can be at most {_MAX_VIRTUAL_DEVICES} virtual CPU devices: torch counts devices in 8 bits, and "
                "could compute no gradient on more.",
                got=f"{count} devices",
                fix="use fewer.",
            )
        os.environ["CPU_NUM_DEVICES"] = str(count)
    return platform


def _integer(variable: str) -> int | None:
    """What an environment variable counts; None if it is not set."""
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise EngineUnavailableError(
            f"the environment variable {variable} is a positive integer.",
            got=f"{variable}={text!r}",
            fix=f"unset {variable}, or give it a number.",
        )
    return int(text)


def _has_tpu() -> bool:
    """Whether this is a TPU VM: chips show as /dev/accel0... or, from v5p on, as /dev/vfio/0..."""
    return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def start_runtime(num_devices: int | None) -> None:
    """Switches torch_xla to SPMD and checks what came up.

    Raises:
      EngineUnavailableError: torch_xla is not installed, was used before, finds no devices or another number of them;
        or a backward pass has run before.
    """
    already_imported = "torch_xla" in sys.modules
    # XLA warns at every compile that GSPMD will go, and torch_xla 2.9.0 has nothing else. Errors still show.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":  # "1" is what torch_xla sets when it is imported
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    try:
        import torch_xla
    except ImportError as error:
        raise EngineUnavailableError(
            "the torch_xla engine needs torch_xla==2.9.0 beside torch==2.9.0.",
            got=f"import failed: {error}",
            fix="pip install torch==2.9.0 torch_xla==2.9.0",
        ) from error
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        # After a device, a seed or a tensor on "xla" has been touched, use_spmd() is a segmentation fault later on.
        locked = torch_xla._XLAC._xla_get_spmd_config_is_locked()  # pyright: ignore[reportPrivateImportUsage]
        if already_imported and locked:
            raise EngineUnavailableError(
                "the engine must start before torch_xla touches a device.",
                got="a device, a seed or a tensor on 'xla' was used earlier in this process",
                fix="call shardtorch.start(...) at the top of the program, before anything on 'xla'.",
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            xr.use_spmd()
    try:
        found = xr.global_runtime_device_count()
    except (RuntimeError, OSError) as error:
        raise EngineUnavailableError(
            f"the runtime must find its devices (PJRT_DEVICE={os.environ['PJRT_DEVICE']}).",
            got=str(error),
            fix="see that no other process uses the TPU, or set PJRT_DEVICE=CPU to run on virtual CPU devices.",
        ) from error
    if num_devices is not None and found != num_devices:
        raise EngineUnavailableError(
            "the engine must run on all devices that the runtime has.",
            got=f"{num_devices} devices asked for, {found} there",
            fix=f"ask for {found}"
            + (
                ", or start a new process: the number of virtual devices is fixed once one was used."
                if xr.device_type() == "CPU"
                else "."
            ),
        )
    _check_autograd()
    if xr.process_count() > 1:
        _join_hosts()


def _check_autograd() -> None:
    """torch 2.9.0 makes autograd's threads once, at the first backward pass, for the devices that are known by then."""
    import torch

    try:
        (torch.zeros((), device="xla", requires_grad=True) * 1.0).backward()  # dispatches nothing
    except RuntimeError as error:
        raise EngineUnavailableError(
            "the engine must start before anything computes a gradient.",
            got="a backward pass ran earlier in this process, so none can run on 'xla' any more",
            fix="call shardtorch.start(...) at the top of the program.",
        ) from error


def _join_hosts() -> None:
    """Connects the hosts for what they do together besides computing, such as saving a checkpoint."""
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401  registers the xla:// rendezvous

    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="xla://")


def inventory() -> Inventory:
    """See `Engine.inventory`."""
    import torch_xla.runtime as xr

    platform = (xr.device_type() or "CPU").lower()
    return Inventory(
        platform,
        _chip_name() if platform == "tpu" else platform,
        xr.global_runtime_device_count(),
        xr.process_index(),
        xr.process_count(),
    )


def _chip_name() -> str:
    """The generation as `SliceTopology` names it; the metadata calls a v5e `v5litepod`."""
    from torch_xla._internal import tpu

    return {"v5litepod": "v5e"}.get(kind := tpu.get_tpu_type(), kind)
