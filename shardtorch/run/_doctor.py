"""`doctor`: what is installed here, and how to get what is missing."""

import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardtorch.engine import start
from shardtorch.errors import EngineUnavailableError

_REQUIRED = {"torch": "2.9.0", "torch_xla": "2.9.0"}
_OPTIONAL = {
    "jax": ("0.7.1", "kernels", "Pallas kernels"),
    "libtpu": (None, "plan", "compiling for TPU slices; running on a TPU needs torch_xla[tpu]"),
    "pyarrow": (None, "parquet", ".parquet files"),
    "datasets": (None, "hub", "Hugging Face datasets by name"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    ok: bool
    """False where a command would fail."""
    fix: str = ""
    """How to get it, or to get it right."""


def findings() -> list[Finding]:
    """Looks at Python, the packages and the devices; starts the engine."""
    version = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    found = [Finding("Python", version, fits, "" if fits else "use Python 3.11, 3.12 or 3.13")]
    for package, wanted in _REQUIRED.items():
        have = _version(package)
        ok = have is not None and have.split("+")[0] == wanted
        found.append(Finding(package, have or "missing", ok, "" if ok else f"pip install {package}=={wanted}"))
    for package, (wanted, extra, purpose) in _OPTIONAL.items():
        have = _version(package)
        right = have is not None and wanted in (None, have)
        fix = "" if right else f"pip install 'shardtorch[{extra}]' (for {purpose})"
        found.append(Finding(package, have or "not installed (optional)", have is None or right, fix))
    try:
        inventory = start().inventory()
        kind = f"{inventory.num_devices} x {inventory.device_kind}, process {inventory.process_index} of "
        fix = ""
        if inventory.platform == "cpu":
            fix = "virtual devices: CPU_NUM_DEVICES=8, or train --devices 8"
        found.append(Finding("devices", kind + str(inventory.process_count), True, fix))
    except EngineUnavailableError as error:
        found.append(Finding("devices", error.law + " " + error.got, False, error.fix))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found.append(Finding("host", f"{os.cpu_count()} cores, {memory:.0f} GiB of memory", True))
    return found


def doctor(console: Console | None = None) -> bool:
    """Prints the findings. Returns whether training can run here."""
    console = console or Console()
    table = Table(title="shardtorch doctor", title_justify="left")
    for column in ("", "what", "found", "to get it"):
        table.add_column(column)
    found = findings()
    for finding in found:
        table.add_row("ok" if finding.ok else "!!", finding.what, escape(finding.found), escape(finding.fix))
    console.print(table)
    return all(finding.ok for finding in found)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
