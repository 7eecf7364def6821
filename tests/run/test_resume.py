"""A run that was stopped, however it was stopped, goes on as if it never had been."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Runs, finish, main_here, read_lines, start, wait_for_step

from shardtorch.train import latest_checkpoint, read_extra

MESH = ("--devices", "8", "--mesh", "fsdp=4,tensor=2")
REFERENCE = ("--engine", "reference")
TOLERANCE = 1e-4  # as between meshes that train from the start

pytestmark = pytest.mark.slow


def learned(run: Path) -> list[dict[str, float]]:
    """What a run's metrics say of each step, but for times."""
    return [
        {name: line[name] for name in ("step", "loss", "grad_norm", "lr")} for line in read_lines(run / "metrics.jsonl")
    ]


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of every file."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def stopped(runs: Runs, out: str, signal_number: int, *words: str, at: int) -> subprocess.CompletedProcess[str]:
    """A run that gets a signal once it has reported a step."""
    process = start(*runs.words(out, *words))
    wait_for_step(process, runs.root / out, at)
    process.send_signal(signal_number)
    return finish(process)


@pytest.fixture(scope="module")
def terminated(runs: Runs) -> Path:
    """A sharded run of 40 steps that got SIGTERM after step 20."""
    done = stopped(runs, "terminated", signal.SIGTERM, *MESH, "--steps", "40", at=20)
    assert done.returncode == 130, done.stderr
    assert done.stderr == ""
    out = runs.root / "terminated"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["interrupted"]
    assert 20 <= summary["step"] < 40
    assert latest_checkpoint(out / "checkpoints") == out / "checkpoints" / f"step_{summary['step']:08d}"
    assert read_lines(out / "metrics.jsonl")[-1]["step"] == summary["step"]
    assert read_lines(out / "eval.jsonl")[-1]["step"] == summary["eval"]["step"] == summary["step"]
    assert f"stopped after step {summary['step']}" in done.stdout
    return out


def resumed(runs: Runs, interrupted: Path, out: str, *words: str) -> Path:
    """A copy of an interrupted run, taken to its end."""
    shutil.copytree(interrupted, runs.root / out)
    return runs.train(out, "--resume", *words)


def test_the_same_mesh_goes_on_bit_for_bit(runs: Runs, terminated: Path, trained: Callable[[str], Path]):
    out = resumed(runs, terminated, "same mesh", *MESH, "--steps", "40")
    assert learned(out) == learned(trained("fsdp=4,tensor=2"))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["step"], summary["interrupted"]) == (40, False)
    assert (summary["train_step_compiles"], summary["compiles_after_step_1"]) == (1, 0)


def test_another_mesh_goes_on_within_rounding(runs: Runs, terminated: Path, trained: Callable[[str], Path]):
    out = resumed(runs, terminated, "other mesh", "--devices", "2", "--mesh", "tensor=2", "--steps", "40")
    whole = learned(trained("fsdp=4,tensor=2"))
    largest = 0.0
    for line, expected in zip(learned(out), whole, strict=True):
        assert (line["step"], line["lr"]) == (expected["step"], expected["lr"])
        for name in ("loss", "grad_norm"):
            largest = max(largest, abs(line[name] - expected[name]) / expected[name])
    print(f"largest relative difference {largest:.1e}")
    assert largest <= TOLERANCE
    assert largest > 0  # the last steps really ran on another mesh


def test_steps_in_two_commands_are_those_of_one(runs: Runs, trained: Callable[[str], Path]):
    assert main_here(*runs.words("halves", *REFERENCE, "--steps", "20")) == 0
    assert main_here(*runs.words("halves", *REFERENCE, "--steps", "40", "--resume")) == 0
    out, whole = runs.root / "halves", trained("reference")
    assert learned(out) == learned(whole)
    start, middle, end = read_lines(out / "eval.jsonl")  # the end of one and the start of the other are one line
    assert middle["step"] == 20
    assert [start, end] == read_lines(whole / "eval.jsonl")


def test_ctrl_c_saves_and_goes_on(runs: Runs, trained: Callable[[str], Path]):
    done = stopped(runs, "ctrl-c", signal.SIGINT, *REFERENCE, "--steps", "40", at=3)
    assert done.returncode == 130
    assert done.stderr == ""
    assert "asked to stop" in done.stdout
    assert main_here(*runs.words("ctrl-c", *REFERENCE, "--steps", "40", "--resume")) == 0
    assert learned(runs.root / "ctrl-c") == learned(trained("reference"))


def test_a_killed_run_goes_on_from_its_last_checkpoint(runs: Runs, trained: Callable[[str], Path]):
    often = (*REFERENCE, "--save-every-steps", "5", "--keep-checkpoints", "2")
    killed = stopped(runs, "killed", signal.SIGKILL, *often, "--steps", "40", at=13)
    assert killed.returncode == -signal.SIGKILL
    out = runs.root / "killed"
    assert latest_checkpoint(out / "checkpoints") == out / "checkpoints" / "step_00000010"
    assert read_lines(out / "metrics.jsonl")[-1]["step"] > 10  # lines that the run to come writes again
    assert main_here(*runs.words("killed", *often, "--steps", "22", "--resume")) == 0
    assert learned(out) == learned(trained("reference"))[:22]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step_00000020", "step_00000022"]
    assert read_extra(out / "checkpoints" / "step_00000022")["step"] == 22


def test_a_run_at_its_end_says_so_again(runs: Runs, trained: Callable[[str], Path]):
    out = runs.root / "at its end"
    shutil.copytree(trained("reference"), out)
    before = files_of(out)
    assert main_here(*runs.words("at its end", *REFERENCE, "--steps", "40", "--resume")) == 0
    after = files_of(out)
    changed = {Path(name).relative_to(out).parts[0] for name in after if after[name] != before.get(name)}
    assert changed <= {"summary.json", "tokenizer.json", "tensorboard", ".lock"}
    first, again = (json.loads((run / "summary.json").read_text()) for run in (trained("reference"), out))
    assert (again["step"], again["eval"], again["interrupted"]) == (40, first["eval"], False)
    assert again["train_step_compiles"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "40"], "a new run needs a folder that holds no checkpoints of another run"),
        (["--steps", "30", "--resume"], "the run is past the step to train until"),
        (["--seed", "1", "--lr", "1e-2", "--resume"], "lr: 0.003 then, 0.01 now; seed: 0 then, 1 now"),
        (["--data", "topics", "--resume"], "must be resumed on the text that it began with"),
    ],
)
def test_another_run_in_the_folder_is_refused_and_touches_nothing(
    runs: Runs, trained: Callable[[str], Path], capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    out = trained("reference")
    before = files_of(out)
    assert main_here(*runs.words("reference", *REFERENCE, *words)) == 2
    assert message in capsys.readouterr().err
    assert files_of(out) == before


def test_another_model_is_refused(runs: Runs, trained: Callable[[str], Path], capsys: pytest.CaptureFixture[str]):
    words = runs.words("reference", "--resume")
    words[words.index("llama-tiny")] = "llama3-8b"
    assert trained("reference").is_dir()
    assert main_here(*words) == 2
    assert "model: 'llama-tiny' then, 'llama3-8b' now" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused(
    runs: Runs, trained: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
):
    out = runs.root / "damaged"
    shutil.copytree(trained("reference"), out)
    shards = out / "checkpoints" / "step_00000040" / "__0_0.distcp"
    content = bytearray(shards.read_bytes())
    content[len(content) // 2] ^= 1
    shards.write_bytes(content)
    metrics = (out / "metrics.jsonl").read_bytes()
    assert main_here(*runs.words("damaged", *REFERENCE, "--steps", "41", "--resume")) == 2
    assert capsys.readouterr().err.startswith("CheckpointError: ")
    assert (out / "metrics.jsonl").read_bytes() == metrics


def test_a_run_that_ended_before_its_first_checkpoint_says_what_to_do(
    runs: Runs, trained: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
):
    early = runs.root / "early"
    early.mkdir()
    shutil.copy(trained("reference") / "metrics.jsonl", early)
    assert main_here(*runs.words("early", *REFERENCE, "--resume")) == 2
    err = capsys.readouterr().err
    assert "the run ended before its first one\n  fix: delete the folder, or start a new run with another --out" in err
