"""The training step against torch_xla's FSDPv2 with scan_layers and against eager torch: same model, batch and losses.

    pip install -e '.[bench]'
    python benchmarks/step.py

Each contender runs in processes of its own, in turn, so that a machine whose speed drifts treats them alike. `first` is
the median over the rounds of the time from a model (on the CPU, or for shardtorch on the meta device) to the end of the
first step, placement and compilation included; `step` and `host` are medians over later steps, of the whole step and
of the part until the host has handed it to the devices.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

NUM_DEVICES = 8
Contender = tuple[float, Callable[[], tuple[float, float]], Callable[[], int]]
"""When it began, one step (which returns the loss and when the host was done), and the number of graphs compiled."""


def model_config(args):
    """The benchmarked model: `llama-tiny` with other sizes."""
    from shardtorch.models import preset

    heads = args.width // 16
    tiny = preset("llama-tiny")
    return replace(
        tiny,
        num_layers=args.layers,
        embed_dim=args.width,
        num_heads=heads,
        num_kv_heads=heads // 2,
        mlp_dim=3 * args.width,
        max_seq_len=args.seq,
    )


def batches(args):
    """One batch of random tokens, the same for all."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 2048, (args.batch, args.seq + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def initial_model(args):
    """The model on the CPU, filled from the same draws for every contender."""
    import torch

    from shardtorch.engine._reference import ReferenceEngine
    from shardtorch.fsdp import fully_shard
    from shardtorch.mesh import Mesh
    from shardtorch.models import Llama

    with torch.device("meta"):
        model = Llama(model_config(args))
    return fully_shard(model, Mesh(fsdp=1), init=model.initializers(), engine=ReferenceEngine())


def run_shardtorch(args) -> Contender:
    import torch

    import shardtorch as st
    from shardtorch.run._model import batch_spec, build_model
    from shardtorch.train import adamw, make_step

    engine = st.start(num_devices=NUM_DEVICES)
    mesh = st.Mesh.parse(args.mesh)
    model, plan = build_model(model_config(args), mesh)
    tokens, targets = batches(args)
    begin = time.perf_counter()
    st.fully_shard(model, mesh, plan=plan, init=model.initializers(), stack="layers", remat=args.remat)
    optimizer = adamw(model)
    step = engine.compile(make_step(model, optimizer, clip_norm=1.0, loss_chunks=1))
    batch = st.NamedSharding(mesh, batch_spec(mesh))
    everywhere = st.NamedSharding(mesh, st.P())

    def one():
        x, y = (engine.put(t, batch, t.shape) for t in (tokens, targets))
        lr = engine.put(torch.tensor(1e-3), everywhere, ())
        metrics = step(x, y, lr)
        host = time.perf_counter()
        loss = float(metrics.cpu()[0])
        return loss, host

    return begin, one, engine.num_compiles


def run_fsdpv2(args) -> Contender:
    import numpy as np
    import torch

    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(NUM_DEVICES))
    from shardtorch.models import Llama

    model = Llama(model_config(args))
    model.load_state_dict(initial_model(args).state_dict())
    import torch_xla
    import torch_xla.debug.metrics as met
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.experimental.scan_layers import scan_layers
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(NUM_DEVICES), (NUM_DEVICES, 1), ("fsdp", "tensor"))
    tokens, targets = batches(args)
    begin = time.perf_counter()

    class Layer(torch.nn.Module):
        """A layer of one argument, which is what scan_layers takes."""

        def __init__(self, layer, cos, sin):
            super().__init__()
            self.layer = layer
            self.register_buffer("cos", cos)
            self.register_buffer("sin", sin)

        def forward(self, x):
            return self.layer(x, self.cos, self.sin)

    class Scanned(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def __iter__(self):
            yield lambda x, cos, sin: scan_layers(self.layers, x)

    from shardtorch.models._rope import rotary_tables

    c = model.config
    cos, sin = rotary_tables(args.seq, c.head_dim, c.rope_theta, c.rope_scaling, device=torch.device("cpu"))
    model.layers = Scanned(torch.nn.ModuleList(Layer(layer, cos.clone(), sin.clone()) for layer in model.layers))
    model = FSDPv2(model.to("xla"), mesh=mesh)  # marks the logits as sharded over the batch
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(1e-3), betas=(0.9, 0.95), foreach=False, capturable=True)
    spec = xs.ShardingSpec(mesh, ("fsdp", None))

    def one():
        import torch_xla.core.xla_model as xm

        x, y = xm.send_cpu_data_to_device([tokens, targets], torch_xla.device(), input_sharding=spec)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(1e-3).to("xla")
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch_xla.sync()
        host = time.perf_counter()
        return float(loss.detach().cpu()), host

    return begin, one, lambda: (met.metric_data("CompileTime") or [0])[0]


def run_eager(args) -> Contender:
    import torch

    from shardtorch.train import adamw, make_step

    model = initial_model(args)
    tokens, targets = batches(args)
    begin = time.perf_counter()
    optimizer = adamw(model)
    step = make_step(model, optimizer, clip_norm=1.0, loss_chunks=1)

    def one():
        return float(step(tokens, targets, torch.tensor(1e-3))[0]), time.perf_counter()

    return begin, one, lambda: 0


CONTENDERS = {"shardtorch": run_shardtorch, "fsdpv2": run_fsdpv2, "eager": run_eager}


def child(args):
    """Runs one contender in this process and prints its figures."""
    begin, one, num_compiles = CONTENDERS[args.child](args)
    result = {"step_s": [], "host_s": [], "loss": []}
    for i in range(args.steps + 1):
        start = time.perf_counter()
        loss, host = one()
        end = time.perf_counter()
        result["loss"].append(loss)
        if i == 0:
            result["first_s"] = end - begin
        else:
            result["step_s"].append(end - start)
            result["host_s"].append(host - start)
    result["compiles"] = num_compiles()
    print("RESULT " + json.dumps(result))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"steps": 8, "rounds": 2, "layers": 8, "width": 256, "batch": 16, "seq": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mesh", default="fsdp=8")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--child", choices=CONTENDERS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    names = [args.only] if args.only else list(CONTENDERS)
    results = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
            done = subprocess.run(command, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
            results[name].append(json.loads(lines[0].removeprefix("RESULT ")))
    print(f"{'':12s} {'first s':>8s} {'step s':>8s} {'host s':>8s} {'compiles':>8s}  loss of the last step")
    table = {}
    for name, rounds in results.items():
        table[name] = first, step, host = (
            statistics.median(r["first_s"] for r in rounds),
            statistics.median(s for r in rounds for s in r["step_s"]),
            statistics.median(s for r in rounds for s in r["host_s"]),
        )
        print(
            f"{name:12s} {first:8.2f} {step:8.3f} {host:8.3f} {rounds[0]['compiles']:8d}  {rounds[0]['loss'][-1]:.6f}"
        )
    for other in names[1:]:
        first, step = (table[names[0]][i] / table[other][i] for i in (0, 1))
        print(f"{names[0]} / {other}: step {step:.2f}, first step {first:.2f}")
    return 0


if __name__ == "__main__":
    main()
