"""The search: what it tries, in which order it ranks, and that it ends in time and alone.

The functions that stand for the compiler are called in processes of their own, which import this module.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import environment
from rich.console import Console

from shardtorch.aot import CompileReport, Memory, StepTime
from shardtorch.config import PlanConfig, TrainConfig, read_train_settings
from shardtorch.errors import ConfigError
from shardtorch.mesh import Mesh, NamedSharding, SliceTopology
from shardtorch.models import PRESETS
from shardtorch.run import _search_space
from shardtorch.run._model import batch_spec, build_model
from shardtorch.run._plan import make_plan
from shardtorch.run._search import rank, search, train_settings
from shardtorch.run._search_space import Candidate, Space, least_bytes, meshes, search_space
from shardtorch.run._search_workers import Exploration, Outcome, explore

TOPOLOGIES = ["v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "2 x v5e:2x2", "4 x v6e:2x4", "v5p:2x2x2", "v4:2x2x1"]
configs = st.builds(
    PlanConfig,
    st.sampled_from(["llama-tiny", "llama3-8b", "llama3-70b"]),
    topology=st.sampled_from(TOPOLOGIES),
    global_batch_size=st.none() | st.integers(1, 64),
    seq_len=st.sampled_from([128, 256]),
    compute_dtype=st.sampled_from(["float32", "bfloat16"]),
)


def space_of(config: PlanConfig, limit: float = float("inf")) -> Space:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_search_space, "memory_limit", lambda topology: limit)
        return search_space(PRESETS[config.model], config.parse_topology(), config)


@settings(max_examples=25)
@given(configs)
def test_every_candidate_is_legal_and_covers_the_devices(config: PlanConfig):
    candidates = space_of(config).candidates
    shape, topology = PRESETS[config.model], config.parse_topology()
    assert len(set(candidates)) == len(candidates)
    for candidate in candidates:
        mesh = candidate.mesh
        topology.check(mesh)
        assert prod(mesh.shape.values()) == topology.num_devices
        assert set(mesh.axis_names) <= {"data", "fsdp", "tensor"}
        assert mesh.dcn.get("tensor", 1) == 1
        tensor = mesh.shape.get("tensor", 1)
        assert [size % tensor for size in (shape.num_heads, shape.num_kv_heads, shape.mlp_dim, shape.vocab_size)] == [
            0
        ] * 4
        assert shape.embed_dim % mesh.shape.get("fsdp", 1) == 0
        part = candidate.global_batch_size // candidate.microbatches
        assert part * candidate.microbatches == candidate.global_batch_size
        NamedSharding(mesh, batch_spec(mesh)).validate((part, config.seq_len))
        assert config.global_batch_size in (None, candidate.global_batch_size)
        applied = candidate.applied_to(config)
        assert applied.parse_mesh(4096) == mesh
        assert (applied.search, applied.json, applied.out) == (False, None, None)


@settings(max_examples=25)
@given(configs.filter(lambda config: config.global_batch_size is not None))
def test_every_configuration_is_tried_or_counted(config: PlanConfig):
    for limit in (float("inf"), 2**33, 0):
        space = space_of(config, limit)
        num_meshes = len(list(meshes(config.parse_topology())))
        assert len(space.candidates) + sum(space.left_out.values()) == 2 * 4 * num_meshes


@pytest.mark.parametrize("text", TOPOLOGIES)
def test_meshes_are_all_factorisations(text: str):
    topology = SliceTopology.parse(text)
    found = list(meshes(topology))
    assert len(set(found)) == len(found)
    sizes = {tuple(mesh.shape.get(axis, 1) for axis in ("data", "fsdp", "tensor")) for mesh in found}
    numbers = range(1, topology.num_devices + 1)
    every = {(d, f, t) for d in numbers for f in numbers for t in numbers if d * f * t == topology.num_devices}
    if topology.num_slices == 1:
        assert sizes == every
    else:  # one axis crosses all slices, and it isn't tensor
        slices = topology.num_slices
        assert sizes == {(d, f, t) for d, f, t in every if d % slices == 0 or (d == 1 and f % slices == 0)}


@settings(max_examples=25)
@given(configs, st.integers(20, 36).map(lambda power: 2**power))
def test_only_what_can_not_fit_is_pruned(config: PlanConfig, limit: int):
    unlimited, limited = space_of(config), space_of(config, limit)
    fitting = {candidate for candidate in unlimited.candidates if candidate.least_bytes <= limit}
    assert fitting <= set(limited.candidates)
    assert all(candidate.least_bytes <= limit for candidate in limited.candidates)


@settings(max_examples=25)
@given(configs)
def test_the_bound_is_the_state_of_the_whole_model_and_what_the_loop_holds(config: PlanConfig):
    shape, topology = replace(PRESETS[config.model], num_layers=3), config.parse_topology()
    itemsize = 4 if config.compute_dtype == "float32" else 2
    for mesh in {candidate.mesh for candidate in space_of(config).candidates}:
        model, plan = build_model(shape, mesh)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        held = {name: prod(each.shard_shape(shapes[name])) for name, each in plan.resolve(shapes, mesh).items()}
        of_layers = sum(size for name, size in held.items() if name.startswith("layers."))
        batch_devices = mesh.shape.get("data", 1) * mesh.shape.get("fsdp", 1)
        inputs = 3 * 2 * config.seq_len * shape.embed_dim * itemsize  # of 2 sequences per device
        expected = 3 * 4 * sum(held.values()) + inputs + of_layers * itemsize
        bound = least_bytes(shape, topology, mesh, 2 * batch_devices, config)
        assert bound == expected * topology.devices_per_chip


def test_replicas_within_a_slice_only_where_they_help():
    config = PlanConfig("llama-tiny", topology="v5e:2x4", seq_len=256, global_batch_size=8)
    estimates = {c.mesh: c.estimate_s for c in space_of(config).candidates if (c.remat, c.microbatches) == ("none", 1)}
    assert estimates[Mesh(data=8)] < estimates[Mesh(fsdp=8)]  # it reduces gradients, and gathers nothing
    assert Mesh(data=2, fsdp=4) in estimates


TINY = PlanConfig("llama-tiny", topology="v5e:2x4", seq_len=256, global_batch_size=64, budget_minutes=10)


def candidate_of(**changes: object) -> Candidate:
    fields = {"mesh": Mesh(fsdp=8), "remat": "full", "microbatches": 1, "global_batch_size": 64}
    return Candidate(**(fields | changes), least_bytes=0, likely_bytes=0, estimate_s=1.0)  # pyright: ignore


def plan_of(config: PlanConfig, *, step_s: float = 1.0, num_bytes: int = 2**30, limit: int = 2**31) -> CompileReport:
    fits = num_bytes <= limit
    return CompileReport(
        title="made up",
        topology=config.topology,
        mesh=config.mesh,
        num_chips=8,
        libtpu_version="0",
        fits=fits,
        memory=Memory(limit, num_bytes, 0, 0, 0, 0, 0),
        peak_flops=1e12,
        hbm_bandwidth=1e12,
        trace_s=0.0,
        compile_s=0.0,
        step_time=StepTime(step_s, 0.0, 0.0, 0.0, 1.0) if fits else None,
        tokens_per_step=(config.global_batch_size or 8) * config.seq_len,
        model_flops=1e12,
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), max_size=12))
def test_ranking(kinds: list[tuple[int, int]]):
    outcomes = [Outcome(candidate_of(), plan_of(TINY, step_s=s, num_bytes=b * 2**30)) for s, b in kinds]
    reports = [outcome.report for outcome in rank(outcomes) if outcome.report]
    assert len(reports) == len(kinds)
    assert [report.fits for report in reports] == sorted((b <= 2 for _, b in kinds), reverse=True)
    rates = [report.tokens_per_s_per_chip for report in reports if report.fits]
    assert rates == sorted(rates, reverse=True)
    rest = [report.memory.total for report in reports if not report.fits]
    assert rest == sorted(rest)


def test_what_needs_no_less():
    base = candidate_of(microbatches=2)
    assert base.needs_no_less_than(base)
    assert candidate_of(microbatches=2, remat="none").needs_no_less_than(base)
    assert candidate_of(microbatches=2, global_batch_size=128).needs_no_less_than(base)
    assert candidate_of(microbatches=4, global_batch_size=128).needs_no_less_than(base)
    for other in (
        candidate_of(microbatches=1, global_batch_size=32),  # holds no sum of gradients
        candidate_of(microbatches=4),
        candidate_of(microbatches=2, mesh=Mesh(fsdp=4, tensor=2)),
    ):
        assert not other.needs_no_less_than(base)
    assert not base.needs_no_less_than(candidate_of(microbatches=2, remat="none"))


def test_train_takes_the_winner():
    found = train_settings(
        candidate_of(microbatches=4, mesh=Mesh(data=4, tensor=2, dcn={"data": 2})), PRESETS["llama-tiny"], TINY
    )
    config = TrainConfig(**found)  # pyright: ignore[reportArgumentType]
    assert config.parse_mesh() == Mesh(data=4, tensor=2, dcn={"data": 2})
    assert (config.remat, config.microbatches, config.compute_dtype) == ("full", 4, "bfloat16")
    assert config.loss_chunks == 1


def test_nothing_that_can_fit_is_one_message():
    config = PlanConfig("llama3-70b", topology="v5e:2x4")
    with pytest.raises(
        ConfigError, match=r"must fit on v5e:2x4[^\n]*\n  got: at least [\d.]+ GiB per chip .*of 15\.7 GiB"
    ):
        search(config, Console(file=io.StringIO()))
    config = PlanConfig("llama3-8b", topology="v5e:4x4", global_batch_size=3)
    with pytest.raises(ConfigError, match=r"must have a mesh on v5e:4x4"):
        search(config, Console(file=io.StringIO()))
    with pytest.raises(ConfigError, match="reads at most 256 tokens"):
        search(replace(TINY, seq_len=512), Console(file=io.StringIO()))


# ---- with processes ----


def made_up(config: PlanConfig) -> CompileReport:
    """Plans, failures of several kinds, and steps that do not fit, by the size along `tensor` and the microbatches."""
    tensor = config.parse_mesh(4096).shape.get("tensor", 1)
    if tensor == 2:
        raise ConfigError("a law.", got="something", fix="nothing")
    if tensor == 4:
        raise RuntimeError("a bug")
    if tensor == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.remat == "none":
        return plan_of(config, num_bytes=2**33)
    return plan_of(config, step_s=config.microbatches)


def first_then_stuck(config: PlanConfig) -> CompileReport:
    """Finishes the first time; then says that it has begun, in a file named after its process, and never ends."""
    try:
        (config.cache / "first").touch(exist_ok=False)
    except FileExistsError:
        (config.cache / f"{os.getpid()}.pid").touch()
        time.sleep(3600)
    return plan_of(config)


def workers_in(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.pid")]


def wait_until(holds: Callable[[], bool]) -> None:
    """Up to two minutes, for a busy machine."""
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it never came about")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_failures_are_rows_and_the_winner_is_written(tmp_path: Path):
    out = io.StringIO()
    some = [
        candidate_of(),
        candidate_of(microbatches=2),
        candidate_of(remat="none"),
        *(candidate_of(mesh=Mesh(tensor=n) if n == 8 else Mesh(fsdp=8 // n, tensor=n)) for n in (2, 4, 8)),
        candidate_of(remat="none", microbatches=2, global_batch_size=128),
    ]
    config = replace(
        TINY, search=True, out=tmp_path / "best.json", json=tmp_path / "best_report.json", price_per_chip_hour=1.2
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardtorch.run._search.search_space", lambda *_: Space(tuple(some), {"a reason": 7}, some[0]))
        report = search(config, Console(file=out, width=200), compile=made_up)
    text = out.getvalue()
    assert report.fits
    assert report.predicted_step_s == 1.0
    assert "7: a reason" in text
    assert "ConfigError: a law. something" in text
    assert "RuntimeError: a bug" in text
    assert "ended by signal 9" in text
    assert "1 not tried: they need no less memory than one that did not fit" in text
    # 64 x 256 tokens on 8 chips in 1 s: 2,048 a chip, and an hour of a chip costs 1.2 dollars.
    assert "6,144,000" in text
    assert CompileReport.from_json((tmp_path / "best_report.json").read_text()) == report
    assert TrainConfig(**read_train_settings(tmp_path / "best.json")).microbatches == 1


@pytest.mark.slow
def test_the_deadline_ends_the_workers(tmp_path: Path):
    config = replace(TINY, cache=tmp_path)

    def end_once_stuck(progress: Exploration) -> None:
        if workers_in(tmp_path) and progress.plans:
            progress.deadline = 0.0

    some = [candidate_of(microbatches=n) for n in (1, 2, 4, 8)]
    found = explore(some, config, first_then_stuck, time.monotonic() + 600, end_once_stuck)
    assert [outcome.candidate.microbatches for outcome in found.plans] == [found.outcomes[0].candidate.microbatches]
    stopped = [outcome for outcome in found.outcomes if outcome.reason == "stopped at the end of the time"]
    assert 1 <= len(stopped) <= 2
    assert len(found.plans) + len(stopped) + len(found.queue) == 4
    assert not any(map(is_running, workers_in(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
def test_no_worker_outlives_the_search(tmp_path: Path, how: signal.Signals):
    program = (
        "import test_search, rich.console, dataclasses, pathlib, signal; from shardtorch.run._search import search; "
        # Tests that run in the background of a shell inherit that it is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"config = dataclasses.replace(test_search.TINY, cache=pathlib.Path({str(tmp_path)!r})); "
        "search(config, rich.console.Console(), compile=test_search.first_then_stuck)"
    )
    here = Path(__file__).parent
    env = environment(PYTHONPATH=os.pathsep.join(map(str, (here, here.parent))), COLUMNS="200")
    shown = tmp_path / "shown.txt"
    with shown.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=env, stdout=file, stderr=subprocess.PIPE, text=True
        )
    try:
        wait_until(lambda: bool(workers_in(tmp_path)) and "tokens/s/chip" in shown.read_text())
        process.send_signal(how)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    out = shown.read_text()
    wait_until(lambda: not any(map(is_running, workers_in(tmp_path))))
    if how is signal.SIGINT:
        assert "KeyboardInterrupt" in err  # which the command line turns into one word
        assert "the best plan" in out
        assert "not tried: interrupted" in out


@pytest.mark.slow
def test_the_bound_holds_for_what_the_compiler_says(tmp_path: Path):
    config = replace(TINY, global_batch_size=256, cache=tmp_path)
    variants = [(Mesh(fsdp=8), "full", 1), (Mesh(data=4, fsdp=2), "full", 2)]
    every = {(each.mesh, each.remat, each.microbatches): each for each in space_of(config).candidates}
    found = explore([every[v] for v in variants], config, make_plan, time.monotonic() + 600, lambda progress: None)
    assert len(found.plans) == len(variants), found.outcomes
    for outcome in found.plans:
        assert outcome.report is not None
        memory = outcome.report.memory
        assert outcome.candidate.least_bytes <= memory.total - memory.code
        assert outcome.candidate.least_bytes > memory.parameters + memory.optimizer_state


@pytest.mark.slow
def test_a_real_search(tmp_path: Path):
    out, best = tmp_path / "out.json", tmp_path / "report.json"
    # One sequence leaves two configurations, tensor=8 with and without remat: it ends without waiting for a deadline.
    words = ["plan", "llama-tiny", "--topology", "v5e:2x4", "--seq", "256", "--global-batch", "1", "--search"]
    words += ["--budget-minutes", "20", "--cache", tmp_path / "cache", "--out", out, "--json", best]
    words += ["--price-per-chip-hour", "1.2", "--html", tmp_path / "page.html", "--timeline", tmp_path / "trace.json"]
    done = subprocess.run(
        [sys.executable, "-m", "shardtorch.cli", *map(str, words)],
        env=environment(COLUMNS="120"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = CompileReport.from_json(best.read_text())
    assert report.fits
    config = TrainConfig(**read_train_settings(out))
    assert config.parse_mesh() == Mesh(tensor=8)
    assert (config.global_batch_size, config.seq_len, config.microbatches) == (1, 256, 1)
    assert f"remat {config.remat}" in report.title
    rates = [
        float(rate.replace(",", "")) for rate in re.findall(r": ([\d,]+) tokens/s/chip, .*\(predicted\)", done.stdout)
    ]
    assert len(rates) == 2
    assert round(report.tokens_per_s_per_chip or 0) == max(rates)
    assert "llama-tiny on v5e:2x4, as predicted" in done.stdout
    assert json.loads((tmp_path / "trace.json").read_text())
    assert (tmp_path / "page.html").read_text()
