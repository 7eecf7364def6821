"""The metrics files: exact, one uninterrupted run, and loud when they can't be written."""

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardtorch.errors import ConfigError
from shardtorch.train._metrics import MetricsLog, StepMetrics


def metrics_at(step: int, **changes: float | None) -> StepMetrics:
    fields = {"loss": 9.0 / step, "grad_norm": 1.5, "lr": 0.1 * step, "tokens_per_s": 4096.0, "step_s": 1 / 3}
    return StepMetrics(step=step, **(fields | changes))


def write_steps(out_dir: Path, steps: range, resume_step: int | None = None) -> None:
    with MetricsLog(out_dir, resume_step=resume_step) as log:
        for step in steps:
            log.step(metrics_at(step))
            if step % 2 == 0:
                log.eval(step, loss=2.0 * step, bits_per_byte=1.0 * step)


def read_lines(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_fields_in_order_and_mfu_only_when_known(tmp_path: Path):
    with MetricsLog(tmp_path) as log:
        log.step(metrics_at(1))
        log.step(metrics_at(2, mfu=0.5))
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert list(first) == ["step", "loss", "grad_norm", "lr", "tokens_per_s", "step_s"]
    assert list(second) == [*first, "mfu"]


@settings(max_examples=25)
@given(loss=st.floats(allow_nan=False, allow_infinity=False), lr=st.floats(min_value=0, max_value=1))
def test_floats_read_back_exactly(loss: float, lr: float):
    with tempfile.TemporaryDirectory() as folder:
        with MetricsLog(Path(folder)) as log:
            log.step(metrics_at(1, loss=loss, lr=lr))
        (line,) = read_lines(Path(folder) / "metrics.jsonl")
    assert (line["loss"], line["lr"]) == (loss, lr)
    assert math.copysign(1.0, line["loss"]) == math.copysign(1.0, loss)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null_and_tensorboard_keeps_it(tmp_path: Path, value: float):
    with MetricsLog(tmp_path) as log:
        log.step(metrics_at(1, loss=value))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (line,) = [
        json.loads(text, parse_constant=refuse) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert line["loss"] is None
    (event,) = read_scalars(tmp_path)["train/loss"]
    assert event == (1, pytest.approx(value, nan_ok=True))


def test_every_line_is_in_the_file_when_the_call_returns(tmp_path: Path):
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.step(metrics_at(step))
            log.eval(step, loss=1.0, bits_per_byte=0.5)
            assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, step + 1))
            assert len(read_lines(tmp_path / "eval.jsonl")) == step


@pytest.mark.parametrize("checkpoint", [0, 3, 4, 5])
def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(tmp_path: Path, checkpoint: int):
    write_steps(tmp_path / "whole", range(1, 9))
    write_steps(tmp_path / "resumed", range(1, 6))
    write_steps(tmp_path / "resumed", range(checkpoint + 1, 9), resume_step=checkpoint)
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list(tmp_path.rglob("*.tmp"))


@settings(max_examples=25)
@given(data=st.data())
def test_a_file_cut_anywhere_resumes_to_what_is_whole(data: st.DataObject):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write_steps(Path(folder), range(1, 5))
        content = path.read_bytes()
        size = data.draw(st.integers(0, len(content)), label="size")
        path.write_bytes(content[:size])
        checkpoint = data.draw(st.integers(0, 6), label="checkpoint")
        write_steps(Path(folder), range(checkpoint + 1, 9), resume_step=checkpoint)
        # An object that lacks only its newline is whole.
        num_whole = content[:size].count(b"}")
        expected = [step for step in range(1, num_whole + 1) if step <= checkpoint] + list(range(checkpoint + 1, 9))
        assert [line["step"] for line in read_lines(path)] == expected


def test_zeros_at_the_end_after_a_power_cut_are_a_torn_line(tmp_path: Path):
    write_steps(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\0" * 512)
    write_steps(tmp_path, range(4, 5), resume_step=3)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_step_is_scored_once(tmp_path: Path):
    with MetricsLog(tmp_path) as log:
        log.eval(0, loss=3.0, bits_per_byte=2.0)
        log.eval(4, loss=2.0, bits_per_byte=1.0)
    with MetricsLog(tmp_path, resume_step=4) as log:
        log.eval(4, loss=2.5, bits_per_byte=1.5)  # of the state that the run before has scored
        log.eval(6, loss=1.0, bits_per_byte=0.5)
    lines = read_lines(tmp_path / "eval.jsonl")
    assert [(line["step"], line["eval_loss"]) for line in lines] == [(0, 3.0), (4, 2.0), (6, 1.0)]
    assert [event[:2] for event in read_scalars(tmp_path)["eval/eval_loss"]] == [(0, 3.0), (4, 2.0), (6, 1.0)]


def test_only_one_process_writes(tmp_path: Path):
    write_steps(tmp_path, range(1, 4))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with MetricsLog(tmp_path, resume_step=1, writes=False) as log:
        log.step(metrics_at(2))
        log.eval(2, loss=1.0, bits_per_byte=0.5)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_resuming_without_a_file_starts_one(tmp_path: Path):
    write_steps(tmp_path, range(6, 8), resume_step=5)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [6, 7]


@pytest.mark.parametrize("line", [b"no json", b"[1]", b'{"loss": 1.0}', b""])
def test_a_damaged_line_inside_the_file_is_an_error_and_nothing_is_removed(tmp_path: Path, line: bytes):
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = b"".join([lines[0], line + b"\n", *lines[1:]])
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2"), MetricsLog(tmp_path, resume_step=2):
        pass
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl"])
def test_a_fresh_run_refuses_a_folder_with_metrics(tmp_path: Path, name: str):
    (tmp_path / name).write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"--resume, or choose another --out"), MetricsLog(tmp_path):
        pass
    assert (tmp_path / name).read_text() == '{"step": 1}\n'


def test_a_fresh_run_accepts_a_folder_whose_files_are_empty(tmp_path: Path):
    with MetricsLog(tmp_path):
        pass
    write_steps(tmp_path, range(1, 3))
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 2


def test_a_step_that_does_not_rise_is_a_bug(tmp_path: Path):
    write_steps(tmp_path, range(1, 4))
    with MetricsLog(tmp_path, resume_step=3) as log, pytest.raises(AssertionError, match="step 3 after step 3"):
        log.step(metrics_at(3))


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="able to write its metrics"), MetricsLog(tmp_path / "file" / "run"):
        pass


def test_a_failure_while_entering_closes_what_was_opened(tmp_path: Path):
    (tmp_path / "tensorboard").touch()  # a file where the folder must go
    log = MetricsLog(tmp_path)
    with pytest.raises(ConfigError, match="tensorboard: a run must be able to write its metrics"), log:
        pass
    assert log._steps._file.closed
    assert log._evals._file.closed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl"])
def test_a_full_disk_is_an_error(tmp_path: Path, name: str):
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=rf"{name}: .*write(?s:.)*No space left"):
        write_steps(tmp_path, range(1, 3))


def read_scalars(out_dir: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(out_dir / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_one_uninterrupted_run_too(tmp_path: Path):
    write_steps(tmp_path, range(1, 6))
    write_steps(tmp_path, range(4, 8), resume_step=3)
    scalars = read_scalars(tmp_path)
    assert set(scalars) == {
        *("train/loss", "train/grad_norm", "train/lr", "train/tokens_per_s", "train/step_s"),
        *("eval/eval_loss", "eval/eval_bits_per_byte"),
    }
    assert scalars["train/loss"] == [(step, pytest.approx(9.0 / step)) for step in range(1, 8)]
    assert scalars["eval/eval_bits_per_byte"] == [(2, 2.0), (4, 4.0), (6, 6.0)]
