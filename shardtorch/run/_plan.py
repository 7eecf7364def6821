"""`plan`: the training step, compiled for a slice that need not be here."""

import time
from pathlib import Path

import torch
from rich.console import Console

from shardtorch.aot import CompileReport, compile_report, show, to_html, to_perfetto
from shardtorch.config import PlanConfig
from shardtorch.engine import start
from shardtorch.errors import ConfigError
from shardtorch.fsdp import fully_shard
from shardtorch.mesh import Mesh, NamedSharding, P
from shardtorch.models import LlamaConfig
from shardtorch.run._model import (
    batch_spec,
    build_model,
    check_seq_len,
    fit_to_engine,
    loss_chunks,
    model_config,
    parameter_shardings,
)
from shardtorch.train import adamw, make_step


def plan(config: PlanConfig, console: Console | None = None) -> CompileReport:
    """Compiles a configuration, or searches for the best one, shows the report and writes what is asked for.

    Raises:
      ShardtorchError: One of its kinds, for whatever does not fit: the model, the topology, the mesh, the batch, the
        installation. Too little memory is no error but a result.
    """
    console = console or Console()
    if config.search:
        from shardtorch.run._search import search

        return search(config, console)
    begun = time.monotonic()
    with console.status(f"compiling {config.model} for {config.topology} (about a minute)"):
        report = make_plan(config)
    show(report, console)
    write_plan(config, report, console)
    console.print(f"planned in {time.monotonic() - begun:.0f} s on this machine", highlight=False)
    return report


def make_plan(config: PlanConfig) -> CompileReport:
    """Builds the step of a configuration and compiles it; see `plan`."""
    shape = model_config(config.model)
    mesh = config.parse_mesh(shape.embed_dim)
    check_seq_len(config.model, shape, config.seq_len)
    return compile_plan(shape, mesh, config)


def compile_plan(shape: LlamaConfig, mesh: Mesh, config: PlanConfig) -> CompileReport:
    """Compiles the training step of a model shape."""
    topology = str(config.parse_topology())
    batch = NamedSharding(mesh, batch_spec(mesh))
    per_device = config.microbatches * mesh.axis_size(batch.spec.axes_of(0))
    batch_size = config.global_batch_size or per_device
    if batch_size % per_device:
        raise ConfigError(
            "every device must have an equal part of every microbatch.",
            got=f"global_batch_size={batch_size}, microbatches={config.microbatches}, {batch.spec} on {mesh}",
            fix=f"use a multiple of {per_device} for --global-batch-size.",
        )
    batch.validate((batch_size, config.seq_len), "the batch [global_batch_size, seq_len]")
    model, rules = build_model(shape, mesh)  # says what doesn't fit before anything starts
    engine = start("libtpu", topology=topology)
    attention = fit_to_engine(model, mesh, engine, config.seq_len, config.attention)
    fully_shard(
        model,
        mesh,
        axis="fsdp" if "fsdp" in mesh.axis_names else None,
        plan=rules,
        init=model.initializers(),
        stack="layers",
        remat=config.remat == "full",
        compute_dtype=torch.bfloat16 if config.compute_dtype == "bfloat16" else None,
        engine=engine,
    )
    optimizer = adamw(model)
    chunks = config.loss_chunks or loss_chunks(config.seq_len, shape.vocab_size, batch_size // per_device)
    step = make_step(model, optimizer, clip_norm=1.0, loss_chunks=chunks, microbatches=config.microbatches)
    tokens = [engine.zeros((batch_size, config.seq_len), torch.int64, batch) for _ in range(2)]
    lr = engine.zeros((), torch.float32, NamedSharding(mesh, P()))
    num_tokens = batch_size * config.seq_len
    return compile_report(
        step,
        (model, optimizer),
        [*tokens, lr],
        topology,
        title=f"{config.model}, {batch_size} x {config.seq_len} tokens, remat {config.remat}, {attention}",
        tokens_per_step=num_tokens,
        model_flops=num_tokens * shape.flops_per_token(config.seq_len),
        model_flops_full_attention=num_tokens * shape.flops_per_token(config.seq_len, causal=False),
        flags=dict(flag.split("=", 1) for flag in config.flags),
        cache=config.cache.expanduser(),
    )


def write_plan(config: PlanConfig, report: CompileReport, console: Console) -> None:
    """Writes the files that a configuration asks for.

    Raises:
      ConfigError: One can't be written.
    """
    for path, text in (
        (config.json, report.to_json),
        (config.html, lambda: to_html(report, _shardings(config))),
        (config.timeline, lambda: to_perfetto(report)),
    ):
        if path is not None:
            write_text(path, text())
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _shardings(config: PlanConfig) -> dict[str, tuple[tuple[int, ...], NamedSharding]]:
    shape = model_config(config.model)
    return parameter_shardings(shape, config.parse_mesh(shape.embed_dim))


def write_text(path: Path, text: str) -> None:
    """Writes a file, and the folders above it.

    Raises:
      ConfigError: It can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"{path}: the file must be writable.", got=str(error), fix="make room, or choose another path."
        ) from error
