"""`train`: from settings to a trained model."""

import dataclasses
import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shardtorch.annotate import bind
from shardtorch.config import TrainConfig
from shardtorch.engine import Engine, start
from shardtorch.errors import CheckpointError, ConfigError
from shardtorch.fsdp import fully_shard
from shardtorch.mesh import Mesh, NamedSharding, SliceTopology
from shardtorch.models import LlamaConfig
from shardtorch.run._generate import sample
from shardtorch.run._model import batch_spec, build_model, check_seq_len, fit_to_engine, loss_chunks, model_config
from shardtorch.train import (
    Batch,
    Corpus,
    Display,
    Loop,
    MetricsLog,
    Schedule,
    Summary,
    TrainState,
    adamw,
    heldout_batches,
    latest_checkpoint,
    make_eval_step,
    make_step,
    prepare,
    read_extra,
    train_loader,
    zlib_bits_per_byte,
)

_MAY_DIFFER = {"out", "devices", "mesh", "dcn", "engine", "cache", "data", "text_field", "steps", "resume",
               "eval_every_steps", "eval_tokens", "save_every_steps", "keep_checkpoints", "sample_tokens",
               "microbatches", "loss_chunks", "remat", "attention"}  # fmt: skip
"""Settings that a resumed run may change: they don't change what is learned, up to rounding. Text is
compared by its content, wherever it lies."""
_MAX_PARAMETERS_TO_SAMPLE = 1_000_000_000


def train(config: TrainConfig, console: Console | None = None) -> Summary:
    """Trains a model, with metrics, evaluations and checkpoints in `config.out`, and prints a sample of its text.

    Args:
      config: What to do.
      console: Where to show it.

    Returns:
      How it went; `out/summary.json` holds the same.

    Raises:
      ShardtorchError: One of its kinds, for whatever in the settings, the data, the folder or the devices doesn't fit.
    """
    console = console or Console()
    shape = model_config(config.model)
    check_seq_len(config.model, shape, config.seq_len)
    resume_from = _resume_from(config)
    mesh = config.parse_mesh()
    if mesh.is_bound:  # says what doesn't fit before anything starts
        _check_batch(config, mesh)
        build_model(shape, mesh)
    engine = _start(config, mesh)
    inventory = engine.inventory()
    first_process = inventory.process_index == 0
    if not first_process:
        console = Console(quiet=True)
    mesh = bind(mesh, engine)
    batch_sharding = _check_batch(config, mesh)
    model, plan = build_model(shape, mesh)
    attention = fit_to_engine(model, mesh, engine, config.seq_len, config.attention)

    cache = config.cache.expanduser()
    corpus = prepare(config.data, shape.vocab_size, cache, text_field=config.text_field, console=console)
    if resume_from is not None:
        _check_same_text(resume_from, corpus)
    processes = {"process_index": inventory.process_index, "process_count": inventory.process_count}
    loader = train_loader(corpus, config.global_batch_size, config.seq_len, config.seed, **processes)
    corpus = corpus.with_heldout(config.eval_tokens)
    heldout = heldout_batches(corpus, config.global_batch_size, config.seq_len, **processes)
    reference = zlib_bits_per_byte(corpus.heldout_text())
    header = {
        "model": f"{config.model}, {shape.num_parameters / 1e6:,.1f} million parameters",
        "mesh": f"{mesh!r} on {inventory.num_devices} {inventory.device_kind} device(s), engine {engine.name}",
        "attention": attention,
        "data": f"{config.data}, {len(corpus.train):,} tokens; held out {corpus.num_heldout_bytes:,} bytes",
        "out": str(config.out),
    }
    with (
        _only_run(config.out) if first_process else nullcontext(),
        MetricsLog(config.out, _step_of(resume_from), writes=first_process) as log,
        Display(console, config.steps, _step_of(resume_from) or 0, header) as display,
    ):
        with display.waiting("placing the parameters, shard by shard"):
            fully_shard(
                model,
                mesh,
                axis="fsdp" if "fsdp" in mesh.axis_names else None,
                plan=plan,
                init=model.initializers(),
                seed=config.seed,
                stack="layers",
                remat=config.remat == "full",
                compute_dtype=torch.bfloat16 if config.compute_dtype == "bfloat16" else None,
                engine=engine,
            )
            optimizer = adamw(model, beta1=config.beta1, beta2=config.beta2, weight_decay=config.weight_decay)
        state = TrainState(0, model, optimizer)
        extra = {"config": _as_json(config), "model": dataclasses.asdict(shape), "data": corpus.fingerprint}
        if resume_from is not None:
            with display.waiting(f"resuming from {resume_from}"):
                state.restore(resume_from)
        if first_process:
            with _writable(config.out):
                shutil.copyfile(corpus.tokenizer_path, config.out / "tokenizer.json")

        per_device = config.global_batch_size // config.microbatches // mesh.axis_size(batch_sharding.spec.axes_of(0))
        num_chunks = config.loss_chunks or loss_chunks(config.seq_len, shape.vocab_size, per_device)

        def batch(k: int) -> Batch:
            found = loader[k]
            assert found is not None, "the loader filters nothing out"
            return found

        loop = Loop(
            engine=engine,
            batch_sharding=batch_sharding,
            global_batch_size=config.global_batch_size,
            step=make_step(
                model,
                optimizer,
                clip_norm=config.clip_norm,
                loss_chunks=num_chunks,
                microbatches=config.microbatches,
            ),
            eval_step=make_eval_step(model, loss_chunks=num_chunks),
            schedule=Schedule(config.lr, config.warmup_steps, config.decay_steps),
            batches=batch,
            heldout=heldout,
            num_heldout_tokens=len(corpus.heldout) - 1,
            num_heldout_bytes=corpus.num_heldout_bytes,
            reference_bits_per_byte=reference,
            flops_per_token=shape.flops_per_token(config.seq_len),
            peak_flops=_peak_flops(inventory.platform, inventory.device_kind, inventory.num_devices),
            eval_every_steps=config.eval_every_steps,
            save_every_steps=config.save_every_steps,
            save=lambda state: state.save(config.out / "checkpoints", extra, keep=config.keep_checkpoints),
        )
        summary = loop.run(state, config.steps, log, display)
    if first_process:
        _report(config, shape, mesh, summary, reference, console)
    return summary


@contextmanager
def _only_run(out: Path) -> Iterator[None]:
    """Keeps other runs out of a run's folder: two would remove each other's checkpoints. It ends with the process.

    Raises:
      ConfigError: Another run has it.
    """
    with _writable(out):
        out.mkdir(parents=True, exist_ok=True)
        path = out / ".lock"
        path.touch()
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{out}: one run at a time writes a run's folder.",
                got="another run that is going on there",
                fix="wait for it, or choose another --out.",
            ) from None
        yield


def _resume_from(config: TrainConfig) -> Path | None:
    """The checkpoint to go on from; None for a fresh run.

    Raises:
      CheckpointError: There is none to go on from.
      ConfigError: There is one, but it is not asked for, or is of a run with other settings.
    """
    newest = latest_checkpoint(config.out / "checkpoints")
    if newest is None:
        if not config.resume:
            return None
        begun = (config.out / "metrics.jsonl").exists()
        raise CheckpointError(
            f"{config.out}: there must be a checkpoint to resume from.",
            got=f"none in {config.out / 'checkpoints'}" + (": the run ended before its first one" if begun else ""),
            fix="delete the folder, or start a new run with another --out."
            if begun
            else "start the run without --resume, or name its folder with --out.",
        )
    if not config.resume:
        raise ConfigError(
            "a new run needs a folder that holds no checkpoints of another run.",
            got=str(newest),
            fix="continue that run with --resume, or choose another --out.",
        )
    _check_same_settings(newest, config)
    if (step := _step_of(newest) or 0) > config.steps:
        raise ConfigError(
            f"{config.out}: the run is past the step to train until.",
            got=f"step {step}, steps={config.steps}",
            fix=f"use --steps with more than {step}.",
        )
    return newest


def _step_of(checkpoint: Path | None) -> int | None:
    return None if checkpoint is None else int(checkpoint.name.removeprefix("step_"))


def _start(config: TrainConfig, mesh: Mesh) -> Engine:
    if config.engine == "reference":
        return start("reference", num_devices=config.devices)
    on_cpu = os.environ.get("PJRT_DEVICE", "CPU") == "CPU"
    num_devices = config.devices or (mesh.size if mesh.is_bound and on_cpu else None)
    if num_devices is not None:
        mesh.bind(num_devices)  # says what doesn't fit before anything starts
    return start(num_devices=num_devices)


def _check_batch(config: TrainConfig, mesh: Mesh) -> NamedSharding:
    """How the batch lies on the mesh, once every sequence and token has its place."""
    sharding = NamedSharding(mesh, batch_spec(mesh))
    rows, name = config.global_batch_size // config.microbatches, "the batch [global_batch_size, seq_len]"
    if config.microbatches > 1:
        name = "a microbatch [global_batch_size / microbatches, seq_len]"
    sharding.validate((rows, config.seq_len), name)
    return sharding


def _check_same_settings(path: Path, config: TrainConfig) -> None:
    """A resumed run goes on with the settings that it began with."""
    before, after = _saved_config(path), _as_json(config)
    differing = [name for name in after if name not in _MAY_DIFFER and before.get(name) != after[name]]
    if differing:
        raise ConfigError(
            f"{path}: a run must be resumed with the settings that it began with.",
            got="; ".join(f"{name}: {before.get(name)!r} then, {after[name]!r} now" for name in differing),
            fix="give the same values as then, or start a new run with another --out.",
        )


def _check_same_text(path: Path, corpus: Corpus) -> None:
    """A resumed run goes on with the text that it began with, wherever it lies now."""
    if read_extra(path).get("data") != corpus.fingerprint:
        raise ConfigError(
            f"{path}: a run must be resumed on the text that it began with.",
            got=f"other text than that of data={_saved_config(path).get('data')!r} then",
            fix="give the same text, or start a new run with another --out.",
        )


def _saved_config(path: Path) -> dict[str, Any]:
    """The settings of the run that wrote a checkpoint."""
    saved = read_extra(path).get("config")
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"{path}: a checkpoint to resume from must hold the settings of its run.",
            got="no 'config' in its manifest",
            fix="use a checkpoint that shardtorch train has written.",
        )
    return {**saved}


def _peak_flops(platform: str, generation: str, num_devices: int) -> float | None:
    """Peak of all devices together, in FLOP/s; None where it isn't known, as for virtual CPU devices."""
    shapes = {"v5e": (2, 2), "v6e": (2, 2), "v4": (2, 2, 1), "v5p": (2, 2, 1), "tpu7x": (2, 2, 1)}
    if platform != "tpu" or generation not in shapes:
        return None
    # At run time a v4 chip is one device, its two cores together; a tpu7x chip is two.
    devices_per_chip = 2 if generation == "tpu7x" else 1
    return SliceTopology(generation, shapes[generation]).bf16_flops / devices_per_chip * num_devices


@contextmanager
def _writable(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{out}: a run must be able to write its files.",
            got=str(error),
            fix="make room or make the folder writable and continue with --resume, or choose another --out.",
        ) from error


def _as_json(config: TrainConfig) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(config).items()}


def _report(
    config: TrainConfig, shape: LlamaConfig, mesh: Mesh, summary: Summary, reference: float, console: Console
) -> None:
    facts = dataclasses.asdict(summary) | {
        "zlib_bits_per_byte": reference,
        "mesh": repr(mesh),
        "num_parameters": shape.num_parameters,
        "config": _as_json(config),
    }
    if config.sample_tokens and not summary.interrupted and shape.num_parameters <= _MAX_PARAMETERS_TO_SAMPLE:
        text = sample(config.out, prompt="The", max_new_tokens=config.sample_tokens)
        facts["sample"] = text
        console.print("\n[bold]A sample of its text[/bold]")
        console.print(text, markup=False, highlight=False)
    with _writable(config.out):
        (config.out / "summary.json").write_text(json.dumps(facts, indent=2) + "\n")
    bits = summary.eval.bits_per_byte
    console.print(f"\nheld-out text: {bits:.3f} bits per byte (zlib -9 needs {reference:.3f})")
    console.print(
        f"in {config.out}: checkpoints, metrics.jsonl, eval.jsonl, tensorboard and summary.json", soft_wrap=True
    )
    if summary.interrupted:
        console.print(f"stopped after step {summary.step}; go on with the same command and --resume")
    else:
        console.print(f"to read more of it: shardtorch generate {shlex.quote(str(config.out))}", soft_wrap=True)
