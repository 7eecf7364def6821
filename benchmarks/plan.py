"""The compiled training step against the same step written in plain jax: what libtpu makes of both for the same slice.

    pip install -e '.[plan]'
    python benchmarks/plan.py --model llama3-8b --topology v5p:4x4x4 --mesh fsdp=64 --global-batch 64 --seq 8192

Both have the same mesh, batch, shardings, rematerialization and attention kernel, and are compiled one after the other,
each in a process of its own. No TPU is needed. jax_llama.py is the other side.

`cycles` adds up the compiler's own estimates, `predicted` is the walk through the schedule that shardtorch's report
makes, before its fitted factor, and `exposed` the part of it in which a core waits for the network; all take loops as
often as they run.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple


class Contender(NamedTuple):
    """What libtpu made of a step."""

    text: str
    """The scheduled module."""
    temp_bytes: int
    argument_bytes: int
    compile_s: float


def model_config(args):
    """The model, with another number of layers if that is asked for."""
    from shardtorch.models import preset

    config = preset(args.model)
    return replace(config, num_layers=args.layers) if args.layers else config


def compile_shardtorch(args) -> Contender:
    import torch

    import shardtorch as st
    from shardtorch.engine.libtpu import Compiled, compile_for
    from shardtorch.mesh import NamedSharding, SliceTopology
    from shardtorch.run._model import batch_spec, build_model, fit_to_engine
    from shardtorch.train import adamw, make_step

    topology = SliceTopology.parse(args.topology)
    engine = st.start("libtpu", topology=args.topology)
    mesh = st.Mesh.parse(args.mesh).bind(topology.num_devices)
    model, plan = build_model(model_config(args), mesh)
    fit_to_engine(model, mesh, engine, args.seq, "flash")
    st.fully_shard(
        model,
        mesh,
        axis="fsdp" if "fsdp" in mesh.axis_names else None,
        plan=plan,
        init=model.initializers(),
        stack="layers",
        remat=True,
        compute_dtype=torch.bfloat16,
        engine=engine,
    )
    optimizer = adamw(model)
    state = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        state |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    rows = NamedSharding(mesh, batch_spec(mesh))
    batch = [engine.zeros((args.global_batch, args.seq), torch.int64, rows) for _ in range(2)]
    batch.append(engine.zeros((), torch.float32, NamedSharding(mesh, st.P())))
    step = make_step(model, optimizer, clip_norm=1.0, loss_chunks=args.loss_chunks)
    lowered = engine.lower(step, batch, state, {module: name for name, module in model.named_modules()})
    compiled = compile_for(lowered, topology, dict(flag.split("=", 1) for flag in args.flag))
    if not isinstance(compiled, Compiled):
        sys.exit(compiled.message[:2000])
    return Contender(compiled.text, compiled.temp_bytes, compiled.argument_bytes, compiled.compile_s)


def compile_jax(args) -> Contender:
    from shardtorch.engine.libtpu import _compile

    _compile._prepare_environment()  # before jax is imported
    import jax_llama

    from shardtorch.mesh import Mesh, SliceTopology

    mesh = Mesh.parse(args.mesh).bind(SliceTopology.parse(args.topology).num_devices)
    lowered = jax_llama.lower_step(
        model_config(args), dict(mesh.shape), args.topology, args.global_batch, args.seq, loss_chunks=args.loss_chunks
    )
    flags = {name: _compile._BOOLS.get(value, value) for name, value in (flag.split("=", 1) for flag in args.flag)}
    start = time.monotonic()
    compiled = lowered.compile(compiler_options=flags)
    compile_s = time.monotonic() - start
    memory = compiled.memory_analysis()
    text = compiled.runtime_executable().hlo_modules()[0].to_string()
    return Contender(text, memory.temp_size_in_bytes, memory.argument_size_in_bytes, compile_s)


CONTENDERS = {"shardtorch": compile_shardtorch, "jax": compile_jax}


def figures(made: Contender, args) -> dict[str, float]:
    """One column of the table."""
    from shardtorch.aot._cost import CoreCost, NetworkCost
    from shardtorch.aot._hlo import Module
    from shardtorch.aot._schedule import Simulation
    from shardtorch.mesh import Mesh, SliceTopology

    topology, module = SliceTopology.parse(args.topology), Module.parse(made.text)
    mesh = Mesh.parse(args.mesh).bind(topology.num_devices)
    schedule = Simulation(module, CoreCost(module, topology), NetworkCost(topology, mesh)).run()
    found: dict[str, float] = defaultdict(float)
    found |= {
        "temporaries GB": made.temp_bytes / 1e9,
        "arguments GB": made.argument_bytes / 1e9,
        "compile s": made.compile_s,
        "cycles, 1e9": sum((use.instruction.estimated_cycles or 0) * use.count for use in schedule.core.values()) / 1e9,
        "FLOP of matmuls, 1e12": sum(use.flops for use in schedule.core.values()) / 1e12,
        "predicted s": schedule.seconds,
        "exposed s": sum(use.exposed for use in schedule.network.values()),
    }
    for use in schedule.network.values():
        found[f"{use.kind} calls"] += use.count
        found[f"{use.kind} GB"] += use.count * use.bytes / 1e9
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"model": "llama3-8b", "topology": "v5p:4x4x4", "mesh": "fsdp=64"}.items():
        parser.add_argument(f"--{name}", default=default)
    for name, default in {"global-batch": 64, "seq": 8192, "loss-chunks": 8, "layers": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE", help="of the compiler, for both")
    parser.add_argument("--only", choices=CONTENDERS)
    parser.add_argument("--child", choices=CONTENDERS)
    parser.add_argument("--save", metavar="PREFIX", help="write each scheduled module to PREFIX followed by its name")
    args = parser.parse_args()
    if args.child:
        made = CONTENDERS[args.child](args)
        if args.save:
            with open(f"{args.save}{args.child}.txt", "w") as file:
                file.write(made.text)
        print("RESULT " + json.dumps(figures(made, args)))
        return
    results = {}
    for name in [args.only] if args.only else CONTENDERS:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        results[name] = json.loads(lines[0].removeprefix("RESULT "))
    layers = f"{args.layers} layers of " if args.layers else ""
    print(f"{layers}{args.model}, {args.global_batch} x {args.seq} tokens, {args.topology}, {args.mesh}, {args.flag}")
    print(f"{'':24s}" + "".join(f"{name:>12s}" for name in [*results, *["ratio"] * (len(results) == 2)]))
    for row in dict.fromkeys(row for result in results.values() for row in result):
        values = [result.get(row, 0.0) for result in results.values()]
        ratio = f"{values[0] / values[1]:12.2f}" if len(values) == 2 and values[1] else ""
        print(f"{row:24s}" + "".join(f"{value:12.3f}" for value in values) + ratio)


if __name__ == "__main__":
    main()
