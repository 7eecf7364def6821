"""`shardtorch plan` end to end, with the real compiler: what it writes, what it prints, and what it says to mistakes.

Loading torch_xla and compiling take long, so commands share processes, and whatever needs nothing compiled needs none.
"""

import importlib.util
import json
import os
from pathlib import Path

import command_line
import pytest

from shardtorch.aot import CompileReport
from shardtorch.engine.libtpu import _compile
from shardtorch.mesh import SliceTopology

SMALL = ["--topology", "v5e:2x4", "--mesh", "fsdp=8", "--global-batch", "8", "--seq", "128"]
HEADLINES = {
    "fits": bool,
    "hbm_bytes_per_chip": int,
    "hbm_limit_bytes": int,
    "predicted_step_s": float,
    "tokens_per_s_per_chip": float,
    "compile_s": float,
    "libtpu_version": str,
    "collectives": list,
    "buffers": list,
}
"""What a script may count on in `--json`."""


class Planned:
    """llama-tiny, planned twice, and as much of it as can't fit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        cache = ["--cache", str(root / "cache")]

        def words(name: str, *more: str) -> list[str]:
            files = [f"--{kind}={root / name}.{ending}" for kind, ending in
                     (("json", "json"), ("html", "html"), ("timeline", "trace.json"))]  # fmt: skip
            return ["plan", "llama-tiny", *SMALL, *cache, *files, *more]

        # Two processes, of which the second finds what the first compiled.
        self.first = command_line.finish(command_line.start_in_turn([words("first")]))
        self.kept = {path: path.stat().st_mtime_ns for path in (root / "cache").iterdir()}
        self.second = command_line.finish(
            command_line.start_in_turn(
                [words("second"), words("large", "--global-batch", str(2**13), "--remat", "none", "--seq", "256")]
            )
        )

    def json(self, name: str) -> dict:
        return json.loads((self.root / f"{name}.json").read_text())

    def report(self, name: str) -> CompileReport:
        return CompileReport.from_json((self.root / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return Planned(tmp_path_factory.mktemp("plan"))


@pytest.mark.slow
def test_a_plan_says_everything_and_nothing_else(planned: Planned):
    for done in (planned.first, planned.second):
        assert (done.returncode, done.stderr) == (0, "")
    out = planned.first.stdout
    assert "llama-tiny, 8 x 128 tokens, remat full" in out
    assert "fits: 15." in out
    assert "predicted" in out
    for ending in ("json", "html", "trace.json"):
        assert f"wrote {planned.root / 'first'}.{ending}" in out
    # Nothing of the compiler's own words.
    assert not any(word in out for word in ("spmd_partitioner", "sharding_propagation", "absl::", "E0000"))


@pytest.mark.slow
def test_what_a_script_may_count_on(planned: Planned):
    fields = planned.json("first")
    assert {name: type(fields[name]) for name in HEADLINES} == HEADLINES
    assert fields["fits"] is True
    assert 0 < fields["hbm_bytes_per_chip"] < 100 * 2**20
    assert fields["hbm_bytes_per_chip"] == sum(planned.report("first").memory.by_kind().values())
    assert 15 * 2**30 < fields["hbm_limit_bytes"] < SliceTopology.parse("v5e:2x4").hbm_bytes
    per_chip = 8 * 128 / fields["predicted_step_s"] / 8
    assert fields["tokens_per_s_per_chip"] == pytest.approx(per_chip)
    assert {axis for it in fields["collectives"] for axis in it["axes"]} == {"fsdp"}
    assert any(it["origin"]["module"].startswith("layers") for it in fields["collectives"])
    names = {it["name"] for it in fields["buffers"]}
    assert {"layers.*.mlp.w_down.weight", "layers.*.mlp.w_down.weight.exp_avg"} <= names


@pytest.mark.slow
def test_the_page_and_the_timeline(planned: Planned):
    page = (planned.root / "first.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "layers.*.mlp.w_down" in page
    assert "http://" not in page.replace("http://www.w3.org/", "")
    trace = json.loads((planned.root / "first.trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    step_us = planned.json("first")["predicted_step_s"] * 1e6
    assert step_us / 2 < max(event["ts"] + event["dur"] for event in events) <= step_us * 1.001


@pytest.mark.slow
def test_the_second_time_nothing_is_compiled(planned: Planned):
    first, second = planned.json("first"), planned.json("second")
    for fields in (first, second):
        del fields["trace_s"]
    assert first == second  # the time of compiling too: it is the first one's
    assert {path: path.stat().st_mtime_ns for path in planned.kept} == planned.kept
    assert len(planned.kept) == 1


@pytest.mark.slow
def test_what_does_not_fit_is_a_result_that_says_by_how_much(planned: Planned):
    report = planned.report("large")
    assert not report.fits
    assert report.memory.headroom < 0
    assert report.verdict.startswith("does not fit: ")
    assert report.verdict in " ".join(planned.second.stdout.split())
    assert report.advice
    assert (planned.root / "large.html").exists()


def mistake(capfd: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What a command says that is refused, in this process."""
    assert command_line.main_here("plan", *words) == 2
    said = capfd.readouterr()
    assert said.out == ""
    first, got, fix = said.err.rstrip("\n").split("\n")
    assert first.partition(": ")[0].endswith("Error"), first
    assert got.startswith("  got: ")
    assert fix.startswith("  fix: ")
    return said.err


@pytest.mark.parametrize(
    ("words", "law", "fix"),
    [
        (["llama-tiny", "--topology", "v5e:3x5"], "TopologyError: hosts hold 2x2 chips", "write it like v5e:4x4"),
        (["llama-tiny", "--topology", "v9:2x2"], "TopologyError: there is no TPU generation 'v9'", "use one of v4"),
        (["llama-tiny", "--topology", "v5e"], "TopologyError: a topology is written as generation:shape", "v5p:4x4x4"),
        (
            ["llama-tiny", *SMALL, "--mesh", "fsdp=4"],
            "TopologyError: v5e:2x4 has 8 devices, and the mesh 4",
            "make the sizes of the mesh multiply to 8",
        ),
        (["llama-tinny", *SMALL], "ConfigError: the model must be one of the presets", "did you mean llama-tiny?"),
        (
            ["llama-tiny", *SMALL, "--global-batch", "12"],
            "ConfigError: every device must have an equal part of every microbatch",
            "use a multiple of 8 for --global-batch-size",
        ),
        (
            ["llama-tiny", *SMALL, "--microbatches", "3"],
            "ConfigError: every device must have an equal part of every microbatch",
            "use a multiple of 24 for --global-batch-size",
        ),
        (
            ["llama-tiny", *SMALL, "--seq", "512"],
            "ConfigError: llama-tiny reads at most 256 tokens",
            "use --seq-len 256",
        ),
        (["llama-tiny", *SMALL, "--flags", "xla_a"], "ConfigError: a flag is name=value", "--help"),
        (["llama-tiny", *SMALL, "--flags", "=1"], "ConfigError: a flag is name=value", "--help"),
        (["llama-tiny", *SMALL, "--out", "best.json"], "ConfigError: out is for what a search finds", ""),
    ],
    ids=lambda words: " ".join(words[-2:]) if isinstance(words, list) else "-",
)
def test_each_mistake_is_one_message(words: list[str], law: str, fix: str, capfd: pytest.CaptureFixture[str]):
    said = mistake(capfd, *words)
    assert law in said.partition("\n")[0]
    assert fix in said.rpartition("  fix: ")[2]


@pytest.mark.parametrize("missing", ["libtpu", "jax"])
def test_without_the_extra(missing: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        _compile.importlib.util, "find_spec", lambda name, *rest: None if name == missing else find_spec(name, *rest)
    )
    said = mistake(capfd, "llama-tiny", *SMALL)
    assert said.startswith("EngineUnavailableError: planning compiles with libtpu")
    assert f"no {missing} in this environment" in said
    assert "pip install 'shardtorch[plan]'" in said


@pytest.mark.slow
def test_mistakes_that_come_late(tmp_path: Path):
    """An axis that shards nothing, a flag that only libtpu knows to be none, and a cache that can't be written."""
    (tmp_path / "file").write_text("mine")
    flag = command_line.start("plan", "llama-tiny", *SMALL, "--cache", tmp_path, "--flags", "xla_no_such_flag=1")
    cache = command_line.start("plan", "llama-tiny", *SMALL, "--cache", tmp_path / "file")
    axis = command_line.start("plan", "llama-tiny", *SMALL, "--cache", tmp_path, "--mesh", "fsdp=4,dsfp=2")
    for process, law, got in (
        (axis, "ShardingError: mesh axis 'dsfp' shards nothing: no rule uses it.", "dsfp"),
        (flag, "ShardtorchError: libtpu must accept the step for v5e:2x4.", "xla_no_such_flag"),
        (cache, f"ConfigError: {tmp_path / 'file'}: the cache of compiled steps must be writable.", "exists"),
    ):
        done = command_line.finish(process)
        assert done.returncode == 2, done.stderr
        first, said, fix = done.stderr.rstrip("\n").split("\n")
        assert first == law
        assert said.startswith("  got: ")
        assert got in said
        assert fix.startswith("  fix: ")
    assert os.listdir(tmp_path) == ["file"]
