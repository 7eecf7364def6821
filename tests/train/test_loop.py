"""The loop: what it does, in which order, and how it stops. On the reference engine."""

import inspect
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import environment
from rich.console import Console
from torch import Tensor

from shardtorch.engine import Engine, Inventory
from shardtorch.engine._reference import ReferenceEngine
from shardtorch.errors import ConfigError
from shardtorch.fsdp import fully_shard
from shardtorch.mesh import Mesh, NamedSharding, P
from shardtorch.models import Llama, preset
from shardtorch.train import (
    Display,
    Loop,
    MetricsLog,
    Schedule,
    StepMetrics,
    Summary,
    TrainState,
    adamw,
    make_eval_step,
    make_step,
)
from shardtorch.train._data import IGNORED, Batch

SMALL = replace(
    preset("llama-tiny"), num_layers=2, vocab_size=64, embed_dim=32, num_heads=2, num_kv_heads=2, mlp_dim=64
)
BATCH, SEQ = 2, 8


class Overlapping(ReferenceEngine):
    """Says that it is a TPU, whose steps the host must not wait for."""

    def inventory(self) -> Inventory:
        return replace(super().inventory(), platform="tpu", device_kind="v5p")


def batch_of(k: int) -> Batch:
    tokens = np.random.default_rng(k).integers(0, SMALL.vocab_size, (BATCH, SEQ + 1))
    return {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}


HELDOUT = [batch_of(1000), batch_of(1001)]
HELDOUT[1]["targets"][1, 3:] = IGNORED
NUM_HELDOUT_TOKENS = 2 * BATCH * SEQ - (SEQ - 3)


class Recorded:
    """A loop, and what it did, in order: `("step", k)`, and as well "batch", "report", "eval" and "save"."""

    def __init__(self, out: Path, engine: Engine, *, step: int = 0, **changes: Any) -> None:
        self.out, self.events = out, []
        with torch.device("meta"):
            model = Llama(SMALL)
        mesh = Mesh(fsdp=1)
        fully_shard(model, mesh, init=model.initializers(), stack="layers", engine=engine)
        optimizer = adamw(model)
        self.state = TrainState(step, model, optimizer)
        train_step = make_step(model, optimizer, clip_norm=1.0, loss_chunks=1)

        def recorded_step(tokens: Tensor, targets: Tensor, lr: Tensor) -> Tensor:
            self.events.append(("step", self.state.step + 1))
            return train_step(tokens, targets, lr)

        def batches(k: int) -> Batch:
            self.events.append(("batch", k))
            return batch_of(k)

        settings = {
            "engine": engine,
            "batch_sharding": NamedSharding(mesh, P("fsdp")),
            "global_batch_size": BATCH,
            "step": recorded_step,
            "eval_step": make_eval_step(model, loss_chunks=1),
            "schedule": Schedule(1e-2, warmup_steps=2, decay_steps=50),
            "batches": batches,
            "heldout": HELDOUT,
            "num_heldout_tokens": NUM_HELDOUT_TOKENS,
            "num_heldout_bytes": 100,
            "reference_bits_per_byte": 2.0,
            "flops_per_token": 6e6,
            "peak_flops": None,
            "eval_every_steps": 1000,
            "save_every_steps": 1000,
            "save": lambda state: self.events.append(("save", state.step)),
        }
        self.loop = Loop(**(settings | changes))

    def run(self, last_step: int) -> Summary:
        events = self.events

        class Log(MetricsLog):
            def step(self, metrics: StepMetrics) -> None:
                events.append(("report", metrics.step))
                super().step(metrics)

            def eval(self, step: int, loss: float, bits_per_byte: float) -> None:
                events.append(("eval", step))
                super().eval(step, loss, bits_per_byte)

        console = Console(file=io.StringIO())
        resume_step = self.state.step or None
        with Log(self.out, resume_step) as log, Display(console, last_step, self.state.step, {}) as display:
            return self.loop.run(self.state, last_step, log, display)

    def lines(self, name: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.out / name).read_text().splitlines()]

    def of(self, *kinds: str) -> list[tuple[str, int]]:
        return [event for event in self.events if event[0] in kinds]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make small operations slow where other programs run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[ReferenceEngine, Overlapping])
def any_engine(request: pytest.FixtureRequest) -> Engine:
    return request.param()


def test_the_fake_is_an_engine():
    """It differs from the engine that passes the contract's tests in what it says of its platform, and in no more."""
    fake, real = Overlapping().inventory(), ReferenceEngine().inventory()
    assert replace(fake, platform=real.platform, device_kind=real.device_kind) == real
    for name, verb in inspect.getmembers(Engine, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(Overlapping, name)) == inspect.signature(verb), name


def test_a_batch_a_step_and_scores_around_them(tmp_path: Path, any_engine: Engine):
    run = Recorded(tmp_path, any_engine)
    summary = run.run(3)
    assert run.of("batch") == [("batch", k) for k in (0, 1, 2)]  # update k + 1 takes batch k
    assert run.of("step") == [("step", k) for k in (1, 2, 3)]
    assert run.events[0] == ("eval", 0)
    assert run.events[-3:] == [("report", 3), ("save", 3), ("eval", 3)]
    assert (run.state.step, summary.step, summary.interrupted) == (3, 3, False)
    assert (summary.train_step_compiles, summary.compiles, summary.compiles_after_step_1) == (0, 0, 0)


def test_the_numbers_are_those_of_the_steps(tmp_path: Path, any_engine: Engine):
    run = Recorded(tmp_path / "whole", any_engine)
    by_hand = Recorded(tmp_path / "by hand", ReferenceEngine())
    expected = []
    for k in range(4):
        tokens, targets = (torch.from_numpy(x) for x in batch_of(k).values())
        by_hand.state.step = k
        expected.append(by_hand.loop.step(tokens, targets, torch.tensor(run.loop.schedule(k + 1))).tolist())
    summary = run.run(4)
    lines = run.lines("metrics.jsonl")
    assert [[line["loss"], line["grad_norm"]] for line in lines] == expected
    assert [line["lr"] for line in lines] == [run.loop.schedule(step) for step in (1, 2, 3, 4)]
    for line in lines:
        assert line["tokens_per_s"] == pytest.approx(BATCH * SEQ / line["step_s"])
    nll = sum(by_hand.loop.eval_step(*(torch.from_numpy(x) for x in batch.values())).item() for batch in HELDOUT)
    assert summary.eval.loss == nll / NUM_HELDOUT_TOKENS
    assert summary.eval.bits_per_byte == pytest.approx(nll / math.log(2) / 100)
    assert run.lines("eval.jsonl")[-1]["eval_loss"] == summary.eval.loss


def test_utilisation_is_told_where_the_peak_is_known(tmp_path: Path):
    run = Recorded(tmp_path, Overlapping(), peak_flops=1e12)
    run.run(2)
    for line in run.lines("metrics.jsonl"):
        assert line["mfu"] == pytest.approx(6e6 * line["tokens_per_s"] / 1e12)


def test_virtual_devices_report_each_step_at_once(tmp_path: Path):
    run = Recorded(tmp_path, ReferenceEngine())
    run.run(3)
    assert run.of("step", "report") == [(what, k) for k in (1, 2, 3) for what in ("step", "report")]


def test_a_tpu_has_the_next_step_before_one_is_read(tmp_path: Path):
    run = Recorded(tmp_path, Overlapping())
    run.run(4)
    order = ["step 1", "step 2", "report 1", "step 3", "report 2", "step 4", "report 3", "report 4"]
    assert [f"{what} {k}" for what, k in run.of("step", "report")] == order


def test_everything_is_read_before_it_is_saved_or_scored(tmp_path: Path, any_engine: Engine):
    run = Recorded(tmp_path, any_engine, save_every_steps=2, eval_every_steps=3)
    run.run(7)
    assert run.of("save") == [("save", k) for k in (2, 4, 6, 7)]
    assert run.of("eval") == [("eval", k) for k in (0, 3, 6, 7)]
    for place, (what, step) in enumerate(run.events):
        if what in ("save", "eval"):
            assert run.events[:place].count(("report", step)) == (step > 0)
            assert ("step", step + 1) not in run.events[:place]
    assert run.of("report") == [("report", k) for k in range(1, 8)]
    assert run.events.index(("save", 6)) < run.events.index(("eval", 6))  # what is safe is safe


def test_a_run_at_its_end_is_scored_and_no_more(tmp_path: Path):
    run = Recorded(tmp_path, ReferenceEngine(), step=5)
    summary = run.run(5)
    assert run.events == [("eval", 5)]
    assert (summary.step, summary.eval.step, summary.interrupted) == (5, 5, False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step(tmp_path: Path, any_engine: Engine, number: int):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def batches(k: int) -> Batch:
        if k == 2:
            os.kill(os.getpid(), number)
        return batch_of(k)

    run = Recorded(tmp_path, any_engine, batches=batches)
    summary = run.run(10)
    assert (summary.step, summary.interrupted, summary.eval.step) == (3, True, 3)
    assert run.events[-3:] == [("report", 3), ("save", 3), ("eval", 3)]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def batches(k: int) -> Batch:
        if k == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        return batch_of(k)

    run = Recorded(tmp_path, ReferenceEngine(), batches=batches)
    with pytest.raises(KeyboardInterrupt):
        run.run(10)
    assert not run.of("save")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def raising(at: int) -> Callable[[int], Batch]:
    def batches(k: int) -> Batch:
        if k == at:
            raise OSError("the disk of the data is gone")
        return batch_of(k)

    return batches


def test_an_error_of_the_data_comes_up_and_restores_the_signals(tmp_path: Path, any_engine: Engine):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = Recorded(tmp_path, any_engine, batches=raising(at=2))
    with pytest.raises(OSError, match="the disk of the data is gone"):
        run.run(10)
    assert not run.of("save")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("broken", [(math.nan, 1.0), (1.0, math.inf)])
def test_nothing_is_saved_once_a_number_is_not_finite(tmp_path: Path, any_engine: Engine, broken: tuple[float, float]):
    def step(tokens: Tensor, targets: Tensor, lr: Tensor) -> Tensor:
        run.events.append(("step", run.state.step + 1))
        return torch.tensor(broken if run.state.step == 3 else (1.0, 1.0))

    run = Recorded(tmp_path, any_engine, step=0, save_every_steps=1)
    run.loop = replace(run.loop, step=step)
    with pytest.raises(ConfigError, match=r"must stay finite.*\n.*at step 4"):
        run.run(10)
    assert run.of("save") == [("save", k) for k in (1, 2, 3)]
    assert run.lines("metrics.jsonl")[-1]["step"] == 4


@pytest.mark.slow
def test_processes_stop_together(tmp_path: Path):
    program = f"""
import os, signal, sys
import torch.distributed as dist
from shardtorch.train._loop import _stop_requested
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{tmp_path / "meeting"}", rank=rank, world_size=2)
answers = []
with _stop_requested(2) as stop:
    for step in range(4):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        answers.append(stop())
print(*answers)
"""
    processes = []
    for rank in (0, 1):
        command = [sys.executable, "-c", program, str(rank)]
        processes.append(subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True))
    for process in processes:
        assert process.communicate()[0].splitlines()[-1].split() == ["False", "False", "True", "True"]
