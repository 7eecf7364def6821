"""`plan --search`: which mesh, remat and microbatches are best, by compiling those that may be."""

import json
import time
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from shardtorch.aot import CompileReport, show
from shardtorch.aot._memory import memory_limit
from shardtorch.aot._quantities import bytes_text, seconds_text
from shardtorch.config import PlanConfig, TrainConfig
from shardtorch.engine.libtpu import libtpu_version
from shardtorch.errors import ConfigError
from shardtorch.mesh import SliceTopology
from shardtorch.models import LlamaConfig
from shardtorch.run._model import batch_spec, check_seq_len, loss_chunks, model_config
from shardtorch.run._plan import make_plan, write_plan, write_text
from shardtorch.run._search_space import Candidate, Space, search_space
from shardtorch.run._search_workers import Compile, Exploration, Outcome, explore

_MAX_ROWS = 20
_MAX_REASONS = 8


def search(config: PlanConfig, console: Console, *, compile: Compile = make_plan) -> CompileReport:
    """Compiles what may be best until the time is over, shows a ranked table and the winner, writes what is asked for.

    Args:
      config: What to search for. Without `global_batch_size`, sizes of the batch are tried too. Plans are ranked by
        predicted tokens/s/chip.
      console: Where to show it.
      compile: What a worker calls for each configuration.

    Returns:
      The winner's report; if nothing fits, the one that comes closest.

    Raises:
      ConfigError: Nothing could be compiled; the message says why.
      KeyboardInterrupt: It was interrupted; what had been found until then is shown and written first.
      ShardtorchError: The model, the topology or the installation isn't there.
    """
    deadline = time.monotonic() + 60 * config.budget_minutes
    shape, topology = model_config(config.model), config.parse_topology()
    check_seq_len(config.model, shape, config.seq_len)
    libtpu_version()  # says what isn't installed before any worker does
    space = search_space(shape, topology, config)
    _show_space(space, console)
    if not space.candidates:
        raise _nothing_to_try(space, config, topology)
    with console.status("starting") as status:
        shown = 0

        def on_change(progress: Exploration) -> None:
            nonlocal shown
            for outcome in progress.outcomes[shown:]:
                console.print(_line(outcome), highlight=False, markup=False, soft_wrap=True)
            shown = len(progress.outcomes)
            status.update(_status(progress))

        found = explore(space.candidates, config, compile, deadline, on_change)
    ranked = rank(found.plans)
    failed = [outcome for outcome in found.outcomes if outcome.report is None]
    _show_ranking(ranked, failed, config, topology, console)
    _show_untried(found, console)
    if not ranked:
        if found.interrupted:
            raise KeyboardInterrupt
        raise ConfigError(
            "no configuration could be compiled.",
            got=failed[0].reason if failed else "no time for any",
            fix="use a larger --budget-minutes, or plan one mesh without --search to see what is wrong.",
        )
    report = _write_winner(ranked[0], shape, config, console)
    if found.interrupted:
        raise KeyboardInterrupt
    return report


def rank(plans: Sequence[Outcome]) -> list[Outcome]:
    """Those that were compiled, best first: what fits by predicted tokens/s/chip, then the rest by memory."""

    def key(outcome: Outcome) -> tuple[bool, float, int]:
        report = _report(outcome)
        rate = report.tokens_per_s_per_chip or 0.0
        return not report.fits, -rate if report.fits else 0.0, report.memory.total

    return sorted(plans, key=key)


def train_settings(candidate: Candidate, shape: LlamaConfig, config: PlanConfig) -> dict[str, object]:
    """What `shardtorch train --config` needs to run a plan.

    >>> from shardtorch.mesh import Mesh
    >>> from shardtorch.models import preset
    >>> candidate = Candidate(Mesh(fsdp=4, tensor=2), "full", 1, 8, 0, 0, 0.0)
    >>> config = PlanConfig("llama-tiny", topology="v5e:2x4", seq_len=256)
    >>> train_settings(candidate, preset("llama-tiny"), config)["mesh"]
    'fsdp=4,tensor=2'
    """
    plan = candidate.applied_to(config)
    devices = candidate.mesh.axis_size(batch_spec(candidate.mesh).axes_of(0))
    per_device = candidate.global_batch_size // (candidate.microbatches * devices)
    settings: dict[str, object] = {
        "model": config.model,
        "mesh": plan.mesh,
        "dcn": plan.dcn,
        "global_batch_size": candidate.global_batch_size,
        "seq_len": config.seq_len,
        "microbatches": candidate.microbatches,
        "remat": candidate.remat,
        "loss_chunks": config.loss_chunks or loss_chunks(config.seq_len, shape.vocab_size, per_device),
        "attention": config.attention,
        "compute_dtype": config.compute_dtype,
    }
    TrainConfig(**settings)  # pyright: ignore[reportArgumentType]  # raises if train would not take it
    return settings


def _report(outcome: Outcome) -> CompileReport:
    assert outcome.report is not None
    return outcome.report


def _write_winner(winner: Outcome, shape: LlamaConfig, config: PlanConfig, console: Console) -> CompileReport:
    report = _report(winner)
    console.rule("the best plan" if report.fits else "nothing fits; the closest")
    show(report, console)
    write_plan(winner.candidate.applied_to(config, files=True), report, console)
    if config.out is not None and report.fits:
        write_text(config.out, json.dumps(train_settings(winner.candidate, shape, config), indent=1) + "\n")
        console.print(f"wrote {config.out}; shardtorch train --config {config.out}", highlight=False, soft_wrap=True)
    elif config.out is not None:
        console.print(f"did not write {config.out}: nothing fits", highlight=False, soft_wrap=True)
    return report


def _nothing_to_try(space: Space, config: PlanConfig, topology: SliceTopology) -> ConfigError:
    if space.smallest is None:
        reasons = "; ".join(f"{number} x {reason}" for reason, number in list(space.left_out.items())[:3])
        return ConfigError(
            f"{config.model} must have a mesh on {topology}.",
            got=reasons,
            fix="choose a --global-batch-size that divides over the devices, or another topology.",
        )
    return ConfigError(
        f"{config.model} must fit on {topology} before a search can be for speed.",
        got=f"at least {bytes_text(space.smallest.least_bytes)} per chip for state, gradients and each layer's input, "
        f"of {bytes_text(memory_limit(topology))}",
        fix="use more chips, or a smaller batch.",
    )


def _show_space(space: Space, console: Console) -> None:
    lines = [f"{len(space.candidates):,} configurations to compile, the fastest by a rough estimate first."]
    left_out = sorted(space.left_out.items(), key=lambda item: -item[1])
    if left_out:
        lines.append(f"{sum(space.left_out.values()):,} more are left out:")
        lines += [f"  {number:,}: {reason}" for reason, number in left_out[:_MAX_REASONS]]
        if rest := left_out[_MAX_REASONS:]:
            lines.append(f"  {sum(number for _, number in rest):,}: other reasons of these kinds")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _show_untried(found: Exploration, console: Console) -> None:
    why = "interrupted" if found.interrupted else "the time was over"
    for number, reason in (
        (found.num_hopeless, "they need no less memory than one that did not fit"),
        (len(found.queue), why),
    ):
        if number:
            console.print(f"{number:,} not tried: {reason}", highlight=False)


def _status(progress: Exploration) -> str:
    done, running, queued = len(progress.outcomes), len(progress.running), len(progress.queue)
    left = max(0.0, progress.deadline - time.monotonic())
    best = next((f"; best: {_line(each)}" for each in rank(progress.plans)), "")
    return f"{done} done, {running} running, {queued} queued; {left / 60:.1f} min left{best}"


def _name(candidate: Candidate) -> str:
    sizes = ",".join(f"{axis}={size}" for axis, size in candidate.mesh.shape.items())
    crossing = "".join(f" (DCN {axis}={factor})" for axis, factor in candidate.mesh.dcn.items() if factor > 1)
    return sizes + crossing


def _line(outcome: Outcome) -> str:
    candidate = outcome.candidate
    text = (
        f"{_name(candidate)}, remat {candidate.remat}, batch {candidate.global_batch_size} in "
        f"{candidate.microbatches}: "
    )
    if outcome.report is None:
        return text + outcome.reason
    report = outcome.report
    if not report.fits or report.predicted_step_s is None:
        return text + report.verdict
    rate = report.tokens_per_s_per_chip or 0.0
    return text + f"{rate:,.0f} tokens/s/chip, {bytes_text(report.memory.total)} (predicted)"


def _show_ranking(
    ranked: Sequence[Outcome], failed: Sequence[Outcome], config: PlanConfig, topology: SliceTopology, console: Console
) -> None:
    table = Table(title=f"{config.model} on {topology}, as predicted", title_justify="left", box=SIMPLE)
    columns = ["", "mesh", "remat", "micro-\nbatches", "batch", "fits"]
    limit = f"{memory_limit(topology) / 2**30:.1f}"
    columns += [f"HBM GiB\nof {limit}", "step", "tokens/s\n/chip", "MFU\n(causal)"]
    if config.price_per_chip_hour is not None:
        columns.append("tokens\nper $")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in (1, 2, 5) else "right", no_wrap=True)
    if failed:
        table.add_column("why not", max_width=60)
    for place, outcome in enumerate([*ranked, *failed][:_MAX_ROWS], start=1):
        table.add_row(*_row(place, outcome, config.price_per_chip_hour))
    # The table is as wide as it needs to be: a terminal can scroll or wrap, and a cut name says nothing.
    needed = Measurement.get(console, console.options.update(width=10_000), table).maximum
    width, console.width = console.width, max(console.width, needed)
    console.print(table)
    console.width = width
    if (more := len(ranked) + len(failed) - _MAX_ROWS) > 0:
        console.print(f"{more:,} more", highlight=False)


def _row(place: int, outcome: Outcome, price: float | None) -> list[str]:
    candidate = outcome.candidate
    row = [_name(candidate), candidate.remat, str(candidate.microbatches), str(candidate.global_batch_size)]
    empty = [""] * (price is not None)
    if outcome.report is None:
        return ["", *row, "", "", "", "", "", *empty, outcome.reason]
    report = outcome.report
    rate, mfu, step_s = report.tokens_per_s_per_chip, report.mfu(), report.predicted_step_s
    row += ["yes" if report.fits else "no", f"{report.memory.total / 2**30:.2f}"]
    if rate is None or step_s is None:
        return [str(place), *row, "", "", "", *empty]
    row += [seconds_text(step_s), f"{rate:,.0f}", "" if mfu is None else f"{mfu:.1%}"]
    return [str(place), *row, *([] if price is None else [f"{rate * 3600 / price:,.0f}"])]
