"""The collectives of a small Llama's train step, as XLA compiles it for each mesh.

    python tests/fsdp/golden.py

writes tests/fsdp/golden/*.json anew; look at the difference before you commit it.

The numbers are XLA's own, read from its dump. On CPU it leaves a reduce-scatter as an all-reduce and a slice.
"""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from shardtorch import engine as engines
from shardtorch.fsdp import fully_shard
from shardtorch.mesh import Mesh, NamedSharding, P
from shardtorch.models import LlamaConfig, preset
from shardtorch.run._model import batch_spec, build_model
from shardtorch.train import adamw, make_step

GOLDEN = Path(__file__).parent / "golden"
STEPS = ("fsdp=8", "fsdp=8,remat", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2", "tensor=8")
"""Mesh axes, and whether layers are computed again in the backward pass."""
BATCH, SEQ, LOSS_CHUNKS, NUM_LAYERS = 16, 64, 4, 2

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"= (?P<result>\(.*?\)|\S+) (?P<kind>{_KINDS})(?:-start)?\(")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>\S+) \(.*\{$")
_WHILE = re.compile(r" while\(.*body=%?(?P<body>[\w.\-]+)")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a module."""

    kind: str
    place: str
    """`step`, or `scan 0`, `scan 1`, ... for what runs once per layer, by the loop's place in the step."""
    dtype: str
    shape: tuple[int, ...]
    """Of the result on one device."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA made of a step."""

    collectives: tuple[Collective, ...]
    """Without those of scalars, such as the parts of the gradient's norm."""
    temporary_bytes: int
    """Per device, besides arguments and results."""


def collectives(module: str) -> tuple[Collective, ...]:
    """The collectives in the text of a module, in order, without those of scalars."""
    lines_of: dict[str, list[str]] = {}
    entry = name = ""
    for line in module.splitlines():
        if match := _COMPUTATION.match(line):
            name = match["name"]
            entry = name if match["entry"] else entry
        lines_of.setdefault(name, []).append(line)
    loops = [match["body"] for line in lines_of[entry] if (match := _WHILE.search(line))]
    places = {entry: "step"} | {body: f"scan {number}" for number, body in enumerate(loops)}
    found = []
    for name, lines in lines_of.items():
        for match in filter(None, map(_COLLECTIVE.search, lines)):
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match["result"]):
                shape = tuple(int(size) for size in dims.split(",") if size)
                if shape:
                    found.append(Collective(match["kind"], places.get(name, name), dtype, shape))
    return tuple(found)


def summary(found: tuple[Collective, ...]) -> dict[str, dict[str, dict[str, int]]]:
    """Count and bytes by place and kind."""
    counts = Counter((c.place, c.kind) for c in found)
    sizes: Counter[tuple[str, str]] = Counter()
    for c in found:
        sizes[c.place, c.kind] += c.num_bytes
    result: dict[str, dict[str, dict[str, int]]] = {}
    for place, kind in sorted(counts):
        result.setdefault(place, {})[kind] = {"count": counts[place, kind], "bytes": sizes[place, kind]}
    return result


def compile_steps(folder: Path) -> Mapping[str, Compiled]:
    """Compiles every step in one process of its own, since XLA reads its flags once, and reads what it dumped."""
    flags = "--xla_dump_hlo_as_text --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment = os.environ | {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "8",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_dump_to={folder} {flags}",  # they change the code made of the HLO, and no pass over it
    }
    command = [sys.executable, __file__, "--compile", str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr[-4000:]}")
    compiled, start = {}, 0
    for name, end in json.loads(run.stdout.splitlines()[-1]).items():
        files = [path for n in range(start, end) for path in folder.glob(f"module_{n:04d}.*after_optimizations.txt")]
        step = max(files, key=lambda path: path.stat().st_size)
        report = step.with_name(step.name.replace(".txt", "-memory-usage-report.txt")).read_text()
        temporaries = re.search(r"size ([\d.]+)(B|KiB|MiB|GiB), preallocated-temp", report)
        assert temporaries is not None, report[:2000]
        unit = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[temporaries[2]]
        compiled[name] = Compiled(collectives(step.read_text()), round(float(temporaries[1]) * unit))
        start = end
    return compiled


def config() -> LlamaConfig:
    return dataclasses.replace(preset("llama-tiny"), num_layers=NUM_LAYERS, vocab_size=512)


def mesh_of(step: str) -> Mesh:
    return Mesh(**{axis: int(size) for axis, _, size in (part.partition("=") for part in step.split(",")) if size})


def _compile_all(folder: Path) -> None:
    """What the process does. Prints how many modules XLA had dumped after each step."""
    engine = engines.start(num_devices=8)
    num_modules = {}
    for name in STEPS:
        mesh = mesh_of(name)
        model, plan = build_model(config(), mesh)
        fully_shard(
            model,
            mesh,
            axis="fsdp" if "fsdp" in mesh.axis_names else None,
            plan=plan,
            init=model.initializers(),
            stack="layers",
            remat=name.endswith("remat"),
        )
        step = engine.compile(make_step(model, adamw(model), clip_norm=1.0, loss_chunks=LOSS_CHUNKS))
        batch = NamedSharding(mesh, batch_spec(mesh))
        tokens, targets = (engine.put(torch.zeros(BATCH, SEQ, dtype=torch.long), batch, (BATCH, SEQ)) for _ in "ab")
        step(tokens, targets, engine.put(torch.tensor(1e-3), NamedSharding(mesh, P()), ()))
        engine.sync()
        num_modules[name] = 1 + max(int(path.name[7:11]) for path in folder.glob("module_*after_optimizations.txt"))
    print(json.dumps(num_modules))


def _write() -> None:
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, compiled in compile_steps(Path(folder)).items():
            (GOLDEN / f"{name}.json").write_text(json.dumps(summary(compiled.collectives), indent=2) + "\n")


if __name__ == "__main__":
    if "--compile" in sys.argv:
        _compile_all(Path(sys.argv[-1]))
    else:
        _write()
