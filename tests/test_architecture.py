"""The house rules of the package: who may import whom, and how big a module may be.

The rules are checked on the syntax tree, so an import counts wherever it stands: at the top, in a function, or under
TYPE_CHECKING.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "shardtorch"
SOURCE = Path(__file__).parent.parent / PACKAGE

# Which units of the package a unit may import, besides itself. `shardtorch` is the package's own __init__, which
# re-exports; whoever imports a name from there depends on everything that it imports.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "mesh": {"errors"},
    "engine": {"errors", "mesh"},
    "annotate": {"errors", "mesh", "engine"},
    "fsdp": {"errors", "mesh", "engine", "annotate"},
    "pallas": {"errors", "mesh", "engine", "annotate"},
    "models": set(),
    "train": {"errors", "mesh", "engine", "annotate", "fsdp", "models"},
    "aot": {"errors", "mesh", "engine", "annotate", "fsdp", "models", "train"},
    "config": {"errors", "mesh", "engine", "annotate", "fsdp", "pallas", "models", "train", "aot"},
    "run": {"errors", "mesh", "engine", "annotate", "fsdp", "pallas", "models", "train", "aot", "config"},
    "cli": {"errors", "mesh", "engine", "annotate", "fsdp", "pallas", "models", "train", "aot", "config", "run"},
    "__main__": {"cli"},
}
MAY_IMPORT[PACKAGE] = set(MAY_IMPORT) - {"cli", "__main__"}
MAY_IMPORT["cli"].add(PACKAGE)

# The units that may import a library at all.
ONLY_IN: dict[str, set[str]] = {
    "torch_xla": {"engine"},
    "libtpu": {"engine"},
    "jax": {"engine", "pallas", "aot"},
    "jaxlib": {"engine", "pallas", "aot"},
    "examples": set(),
    "tests": set(),
    "benchmarks": set(),
}
# The only libraries, besides the standard one, that a unit may import.
NOTHING_BUT: dict[str, set[str]] = {"errors": set(), "mesh": {"numpy"}, "models": {"torch", "einops", "jaxtyping"}}

PRIVATE_SYMBOLS = {"_XLAC"}
PRIVATE_SYMBOLS_IN = {"engine"}
FORBIDDEN_NAMES = {"utils", "common", "base"}
MAX_LINES = 400


def violations(source: Path) -> list[str]:
    """Every broken rule in the package at `source`, as `path:line: what`, sorted by path and line."""
    paths = sorted(source.rglob("*.py"))
    assert paths, f"{source} holds no modules"
    modules = {_module_name(path, source) for path in paths}
    found = [
        (path.relative_to(source).as_posix(), line, text)
        for path in paths
        for line, text in _violations_of(path, source, modules)
    ]
    return [f"{path}:{line}: {text}" for path, line, text in sorted(found)]


def _violations_of(path: Path, source: Path, modules: set[str]) -> Iterator[tuple[int, str]]:
    module = _module_name(path, source)
    unit = _unit(module)
    text = path.read_text()
    num_lines = len(text.splitlines())
    if num_lines > MAX_LINES:
        yield MAX_LINES + 1, f"{num_lines} lines; a module has at most {MAX_LINES}"
    for name in FORBIDDEN_NAMES.intersection(module.split(".")):
        yield 1, f"a module is named after its noun, not '{name}'"
    if unit not in MAY_IMPORT:
        yield 1, f"'{unit}' is missing from the import table"
        return
    tree = ast.parse(text, filename=str(path))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for line, imported in _imports(tree, package, modules):
        top = imported.partition(".")[0]
        if top == PACKAGE:
            target = _unit(imported)
            if target != unit and target not in MAY_IMPORT[unit]:
                yield line, f"{unit} may not import {imported}"
        elif unit not in ONLY_IN.get(top, {unit}) or top not in NOTHING_BUT.get(unit, {top}) | sys.stdlib_module_names:
            yield line, f"{unit} may not import {imported}"
    if unit not in PRIVATE_SYMBOLS_IN:
        for line, name in _names(tree):
            if name in PRIVATE_SYMBOLS:
                yield line, f"{unit} may not name {name}"


def _module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _unit(module: str) -> str:
    """The entry of the import table that a module of the package belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else PACKAGE


def _imports(tree: ast.AST, package: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every imported module. `package` is what relative imports start from."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name
            case ast.ImportFrom(module=name, names=names, level=level):
                parents = package.split(".")
                above = parents[: len(parents) - level + 1] if level else []
                base = ".".join([*above, *([name] if name else [])])
                # `from package import name` imports a module if there is one of that name.
                inner = {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in names}
                yield from ((node.lineno, imported) for imported in sorted(inner))
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every name, attribute, imported name and string that is nothing but a name."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                yield node.lineno, name
            case ast.alias(name=name):
                yield from ((node.lineno, part) for part in name.split("."))
            case ast.ImportFrom(module=str(name)):
                yield from ((node.lineno, part) for part in name.split("."))


def test_the_package_keeps_the_rules():
    assert violations(SOURCE) == []


# The files of a planted package. `# !` on a line starts the violations that must be reported there, and no others.
PLANTED = """
=== __init__.py
from shardtorch.mesh import Mesh as Mesh
from .cli import main  # ! shardtorch may not import shardtorch.cli
=== __main__.py
from shardtorch.cli import main
from shardtorch import run  # ! __main__ may not import shardtorch.run
=== errors.py
import os
import numpy  # ! errors may not import numpy
from . import mesh  # ! errors may not import shardtorch.mesh
=== mesh/__init__.py
from ._mesh import Mesh as Mesh
=== mesh/_mesh.py
import numpy as np
from collections.abc import Mapping
from . import _spec
from ..errors import ShardingError
import torch  # ! mesh may not import torch
=== mesh/_spec.py
from .. import errors, engine  # ! mesh may not import shardtorch.engine
def f():
    from ..engine._xla import X  # ! mesh may not import shardtorch.engine._xla
=== mesh/_rules.py
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import shardtorch.annotate as a  # ! mesh may not import shardtorch.annotate
from shardtorch import Mesh  # ! mesh may not import shardtorch
=== engine/__init__.py
=== engine/_xla.py
import torch, torch_xla, jax, libtpu
from torch_xla import _XLAC
from shardtorch.mesh import Mesh
import shardtorch.fsdp  # ! engine may not import shardtorch.fsdp
=== annotate.py
from .engine import X
x = torch_xla._XLAC  # ! annotate may not name _XLAC
y = getattr(torch_xla, "_XLAC")  # ! annotate may not name _XLAC
'the words torch_xla._XLAC in a text are fine'
import jax.numpy as jnp  # ! annotate may not import jax.numpy
from jaxlib import xla_client  # ! annotate may not import jaxlib
from jaxtyping import Float
=== fsdp/__init__.py
from ..annotate import shard_module
from ..train import step  # ! fsdp may not import shardtorch.train
from .. import models  # ! fsdp may not import shardtorch.models
=== fsdp/_shard.py
import importlib
def f():
    import torch_xla.core.xla_model as xm  # ! fsdp may not import torch_xla.core.xla_model
importlib.import_module("torch_xla")  # ! fsdp may not import torch_xla
__import__("jax")  # ! fsdp may not import jax
=== pallas/__init__.py
import jax
from .. import fsdp  # ! pallas may not import shardtorch.fsdp
=== models/__init__.py
from ._llama import Llama as Llama
=== models/_llama.py
import math, torch, einops
from jaxtyping import Float
from torch import nn
import numpy  # ! models may not import numpy
from ..errors import ConfigError  # ! models may not import shardtorch.errors
=== train/__init__.py
from shardtorch.fsdp import fully_shard
from shardtorch.models._llama import Llama
from ..aot import compile_step  # ! train may not import shardtorch.aot
=== train/_step.py
from torch_xla._XLAC import f  # ! train may not import torch_xla._XLAC ! train may not name _XLAC
=== train/utils.py
x = 1  # ! a module is named after its noun, not 'utils'
=== aot/__init__.py
import jax
from ..train import step
from ..config import Config  # ! aot may not import shardtorch.config
=== aot/base/__init__.py
x = 1  # ! a module is named after its noun, not 'base'
=== config.py
from . import train, pallas, aot
from . import run  # ! config may not import shardtorch.run
=== run.py
from .config import Config
from .cli import main  # ! run may not import shardtorch.cli
=== cli.py
from shardtorch import Mesh
from .run import run
import examples.pretrain  # ! cli may not import examples.pretrain
=== common.py
x = 1  # ! a module is named after its noun, not 'common' ! 'common' is missing from the import table
"""


def test_planted_violations_are_caught_and_nothing_else(tmp_path: Path):
    expected: list[str] = []
    for block in PLANTED.split("=== ")[1:]:
        name, _, text = block.partition("\n")
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        for number, line in enumerate(text.splitlines(), start=1):
            expected += [f"{name}:{number}: {law}" for law in line.partition("  # ! ")[2].split(" ! ") if law]
    assert sorted(violations(tmp_path)) == sorted(expected)


@pytest.mark.parametrize(
    ("num_lines", "expected"), [(400, []), (401, ["engine/_x.py:401: 401 lines; a module has at most 400"])]
)
def test_a_long_module_is_caught(tmp_path: Path, num_lines: int, expected: list[str]):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/_x.py").write_text("x = 1\n" * num_lines)
    assert violations(tmp_path) == expected


def loaded_by(statement: str, path: Path) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `statement`; it finds those in `path` too."""
    program = f"import sys; sys.path.insert(0, {str(path)!r}); {statement}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=SOURCE.parent
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_the_package_loads_no_runtime(tmp_path: Path):
    loaded = loaded_by(f"import {PACKAGE}", tmp_path)
    assert PACKAGE in loaded
    assert not loaded & {"torch_xla", "jax", "jaxlib", "libtpu"}


@pytest.mark.parametrize("name", ["torch_xla", "jax"])
def test_a_package_that_loads_a_runtime_would_be_seen(tmp_path: Path, name: str):
    (tmp_path / f"{name}.py").touch()
    (tmp_path / "planted.py").write_text(f"import {name}")
    assert {"planted", name} <= loaded_by("import planted", tmp_path)
