"""The loop: batches in, metrics out, evaluations and checkpoints on time."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shardtorch.engine import Engine
from shardtorch.errors import ConfigError
from shardtorch.mesh import NamedSharding, P
from shardtorch.train._data import Batch, bits_per_byte
from shardtorch.train._display import Display
from shardtorch.train._metrics import MetricsLog, StepMetrics
from shardtorch.train._optim import Schedule
from shardtorch.train._state import TrainState
from shardtorch.train._step import EvalStep, TrainStep


@dataclass(frozen=True)
class Evaluation:
    """Loss on the held-out text."""

    step: int
    loss: float
    """Mean over the scored tokens, in nats per token."""
    bits_per_byte: float


@dataclass(frozen=True)
class Summary:
    """How a run went."""

    step: int
    """Last step done."""
    eval: Evaluation
    """Of that step."""
    train_step_compiles: int
    """Graphs compiled by calls of the training step: 1, or 0 if there was no step left to do."""
    compiles: int
    """Graphs compiled by this process, placement of the parameters included."""
    compiles_after_step_1: int
    """Of these, after this process's first step: 0."""
    interrupted: bool
    """Whether a signal ended the run before its last step."""


@dataclass(frozen=True)
class Loop:
    """What the loop needs. `run` is the loop."""

    engine: Engine
    batch_sharding: NamedSharding
    """Of `tokens` and `targets`, `[batch, seq]`."""
    global_batch_size: int
    """In sequences."""
    step: TrainStep
    eval_step: EvalStep
    schedule: Schedule
    batches: Callable[[int], Batch]
    """`batches(k)` gives this process's rows of the batch of update k + 1."""
    heldout: Sequence[Batch]
    """This process's rows of the held-out batches."""
    num_heldout_tokens: int
    """Tokens that they score, in all processes."""
    num_heldout_bytes: int
    """Bytes of text behind them, in all processes."""
    reference_bits_per_byte: float
    """What zlib needs for that text; shown beside the model's figure."""
    flops_per_token: float
    """Model FLOPs of training on one token."""
    peak_flops: float | None
    """Peak FLOP/s of all devices together; None if unknown."""
    eval_every_steps: int
    save_every_steps: int
    save: Callable[[TrainState], Any]

    def run(self, state: TrainState, last_step: int, log: MetricsLog, display: Display) -> Summary:
        """Trains until `last_step`, or until SIGINT or SIGTERM asks to stop; then saves and evaluates, either way.

        Evaluates before the first step too: that compiles the evaluation, so nothing compiles after step 1.

        Args:
          state: Where to start from; it is updated in place, and is in a checkpoint already if its step is not 0.
          last_step: At least the state's step.
          log: Open; gets every step and evaluation.
          display: Open.

        Raises:
          ConfigError: A loss or a gradient is not finite, or the metrics can't be written.
          CheckpointError: The state can't be saved.
        """
        train_step, eval_step = self.engine.compile(self.step), self.engine.compile(self.eval_step)
        with display.waiting("compiling and running the first evaluation"):
            evaluation = self._evaluate(eval_step, state.step, log, display)
        before_first = after_first = self.engine.num_compiles()
        compiles_in_steps = 0
        # A step's metrics are read once the next step is under way, so that the devices never wait for the host.
        # Virtual CPU devices finish a step before they take another: there it would put times into the wrong step.
        num_under_way = 0 if self.engine.inventory().platform == "cpu" else 1
        pending: list[tuple[int, float, Tensor]] = []
        began, first, saved = time.perf_counter(), state.step + 1, state.step
        stopping = False
        with _stop_requested(self.engine.inventory().process_count) as stop:
            while state.step < last_step and not (stopping := stop()):
                tokens, targets = self._put(self.batches(state.step))
                lr = self.schedule(state.step + 1)
                lr_tensor = self._replicate(torch.tensor(lr))
                before = self.engine.num_compiles()
                compiles = state.step + 1 == first
                with display.waiting("compiling and running the first step") if compiles else nullcontext():
                    metrics = train_step(tokens, targets, lr_tensor)
                compiles_in_steps += self.engine.num_compiles() - before
                state.step += 1
                if state.step == first:
                    after_first = self.engine.num_compiles()
                pending.append((state.step, lr, metrics))
                save = state.step % self.save_every_steps == 0
                evaluate = state.step % self.eval_every_steps == 0
                began = self._report(pending, 0 if save or evaluate else num_under_way, began, log, display)
                if save:
                    self.save(state)
                    saved = state.step
                if evaluate:
                    evaluation = self._evaluate(eval_step, state.step, log, display)
                if save or evaluate:
                    began = time.perf_counter()
            if stopping:
                display.message(f"asked to stop: saving step {state.step}, then evaluating; Ctrl-C leaves at once")
            self._report(pending, 0, began, log, display)
            if saved != state.step:  # first, since whoever asked to stop may not wait for the evaluation
                self.save(state)
            if evaluation.step != state.step:
                evaluation = self._evaluate(eval_step, state.step, log, display)
        total = self.engine.num_compiles()
        steps_ran = state.step >= first
        return Summary(
            state.step,
            evaluation,
            compiles_in_steps,
            total,
            total - (after_first if steps_ran else before_first),
            interrupted=state.step < last_step,
        )

    def _report(
        self, pending: list[tuple[int, float, Tensor]], keep: int, began: float, log: MetricsLog, display: Display
    ) -> float:
        """Reads the metrics of all but the last `keep` steps, waiting for them. Returns when the last was read.

        Raises:
          ConfigError: One is not finite: so are the parameters from that step on, and a checkpoint of them would push
            out one that is sound.
        """
        while len(pending) > keep:
            step, lr, metrics = pending.pop(0)
            loss, grad_norm = metrics.cpu().tolist()
            now = time.perf_counter()
            tokens_per_s = self.global_batch_size * self._seq_len / (now - began)
            mfu = None if self.peak_flops is None else self.flops_per_token * tokens_per_s / self.peak_flops
            reported = StepMetrics(step, loss, grad_norm, lr, tokens_per_s, now - began, mfu)
            log.step(reported)
            display.step(reported)
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise ConfigError(
                    "loss and gradient must stay finite: after that no step learns anything.",
                    got=f"loss {loss}, gradient norm {grad_norm} at step {step}, learning rate {lr:.3g}",
                    fix="start again with a smaller lr, a smaller clip_norm or a longer warm-up.",
                )
            began = now
        return began

    def _evaluate(self, eval_step: EvalStep, step: int, log: MetricsLog, display: Display) -> Evaluation:
        nll = sum(eval_step(*self._put(batch)).cpu().item() for batch in self.heldout)
        evaluation = Evaluation(step, nll / self.num_heldout_tokens, bits_per_byte(nll, self.num_heldout_bytes))
        log.eval(step, evaluation.loss, evaluation.bits_per_byte)
        display.eval(step, evaluation.bits_per_byte, self.reference_bits_per_byte)
        return evaluation

    def _put(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the global batch, on the devices."""
        shape = (self.global_batch_size, self._seq_len)
        tokens, targets = (torch.from_numpy(rows) for rows in (batch["tokens"], batch["targets"]))
        return self.engine.put(tokens, self.batch_sharding, shape), self.engine.put(targets, self.batch_sharding, shape)

    def _replicate(self, value: Tensor) -> Tensor:
        return self.engine.put(value, NamedSharding(self.batch_sharding.mesh, P()), value.shape)

    @property
    def _seq_len(self) -> int:
        return self.heldout[0]["tokens"].shape[1]


@contextmanager
def _stop_requested(process_count: int) -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM has come since, to any of the processes; a second SIGINT interrupts at once.

    All processes ask at the same points, and get the same answer: one that stopped alone would leave the others waiting
    for it in their next step.
    """
    requested: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        requested.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop() -> bool:
        if process_count == 1:
            return bool(requested)
        anywhere = torch.tensor(len(requested))
        torch.distributed.all_reduce(anywhere)
        return bool(anywhere)

    try:
        yield stop
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
