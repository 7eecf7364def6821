"""Programs in processes of their own: how a runtime starts is fixed once per process."""

import os
import subprocess
import sys

_ENVIRONMENT = dict(os.environ)  # before the engine of the test process adds to it


def environment(**variables: str) -> dict[str, str]:
    """What pytest was started with, on virtual CPU devices: without what the engine of the tests added."""
    return _ENVIRONMENT | {"PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu"} | variables


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program, with further environment variables. The caller checks the return code."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False)
