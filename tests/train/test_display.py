"""The display: what each kind of output shows, and the state it leaves a terminal in."""

import io
import math
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shardtorch.train._display import Display, LossCurve
from shardtorch.train._metrics import StepMetrics

HEADER = {"model": "llama-tiny", "mesh": "Mesh(fsdp=4, tensor=2)", "parameters": "3,147,264", "devices": "8 x CPU"}
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def metrics_at(step: int, loss: float = 3.25, mfu: float | None = None) -> StepMetrics:
    return StepMetrics(step=step, loss=loss, grad_norm=0.5, lr=3e-4, tokens_per_s=98765.4, step_s=0.25, mfu=mfu)


def terminal(width: int = 80, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, force_terminal=True, force_interactive=True, width=width, height=24)


def written(console: Console) -> str:
    console.file.flush()
    return console.file.buffer.getvalue().decode(console.file.encoding)


def panel_text(display: Display, width: int = 80) -> str:
    recorder = Console(file=io.StringIO(), record=True, force_terminal=True, width=width)
    recorder.print(display._render())
    return recorder.export_text()


class TestPlain:
    def console(self, **options: bool) -> Console:
        return Console(file=io.StringIO(), width=40, **options)  # narrow: lines must not wrap

    def test_a_run_is_plain_lines(self):
        console = self.console()
        with Display(console, total_steps=25, start_step=0, header=HEADER) as display:
            for step in range(1, 26):
                display.step(metrics_at(step, mfu=0.431 if step == 25 else None))
                if step == 20:
                    display.eval(step, 1.91234, 2.2)
            display.message("saved [bold]runs/x[/bold] :smile:")
        assert console.file.getvalue().splitlines() == [
            "model: llama-tiny",
            "mesh: Mesh(fsdp=4, tensor=2)",
            "parameters: 3,147,264",
            "devices: 8 x CPU",
            "step 1/25  loss 3.2500  grad norm 0.5  lr 3.00e-04  98,765 tokens/s  0.250 s/step",
            "step 10/25  loss 3.2500  grad norm 0.5  lr 3.00e-04  98,765 tokens/s  0.250 s/step",
            "step 20/25  loss 3.2500  grad norm 0.5  lr 3.00e-04  98,765 tokens/s  0.250 s/step",
            "step 20/25  held-out text: 1.9123 bits/byte (zlib -9: 2.2000)",
            "step 25/25  loss 3.2500  grad norm 0.5  lr 3.00e-04  98,765 tokens/s  0.250 s/step  MFU 43.1%",
            "saved [bold]runs/x[/bold] :smile:",
        ]

    def test_the_first_step_after_a_resume_gets_a_line(self):
        console = self.console()
        with Display(console, total_steps=100, start_step=42, header={}, line_every_steps=50) as display:
            for step in range(43, 52):
                display.step(metrics_at(step))
        assert re.findall(r"step (\d+)/", console.file.getvalue()) == ["43", "50"]

    def test_waiting_says_what_and_how_long(self):
        console = self.console()
        with Display(console, total_steps=1, start_step=0, header={}) as display, display.waiting("compiling"):
            assert console.file.getvalue() == "compiling ...\n"
        assert re.fullmatch(r"compiling \.\.\.\ncompiling: \d+\.\d s\n", console.file.getvalue())

    def test_waiting_claims_no_success_when_the_block_raises(self):
        console = self.console()
        with (
            pytest.raises(RuntimeError),
            Display(console, total_steps=1, start_step=0, header={}) as display,
            display.waiting("compiling"),
        ):
            raise RuntimeError
        assert console.file.getvalue() == "compiling ...\n"

    def test_forced_colour_brings_no_control_characters_into_a_file(self):
        console = self.console(force_terminal=True)
        assert console.is_interactive
        with Display(console, total_steps=1, start_step=0, header=HEADER) as display, display.waiting("compiling"):
            display.step(metrics_at(1, loss=math.nan))
            display.eval(1, 1.9, 2.2)
        assert "loss nan" in console.file.getvalue()
        assert not re.search(r"[^\n -~]", console.file.getvalue())


class TestPanel:
    @pytest.mark.parametrize("width", [80, 120])
    def test_it_shows_everything_within_the_width(self, width: int):
        display = Display(terminal(width), total_steps=300, start_step=0, header=HEADER, live=True)
        for step in range(1, 244):
            display.step(metrics_at(step, loss=2 + 6 / step, mfu=0.431))
        display.eval(200, 1.91234, 2.2)
        text = panel_text(display, width)
        assert all(len(line) == width for line in text.splitlines())
        assert len(text.splitlines()) <= 15
        shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
        for part in (
            *(f"{name} {value}" for name, value in HEADER.items()),
            *("step 243/300", "81%", "left", "loss 2.0247", "grad norm 0.5", "lr 3.00e-04", "tokens/s 98,765"),
            *("step time 0.250 s", "MFU 43.1%", "bits/byte 1.9123", "zlib -9 2.2000", "at step 200", "▁▁▁"),
        ):
            assert part in shown

    def test_no_mfu_is_shown_when_it_is_unknown(self):
        display = Display(terminal(), total_steps=2, start_step=0, header=HEADER, live=True)
        display.step(metrics_at(1))
        assert "MFU" not in panel_text(display)

    @pytest.mark.parametrize("width", [10, 30, 50])
    def test_a_narrow_terminal_is_survived(self, width: int):
        display = Display(terminal(width), total_steps=2, start_step=0, header=HEADER, live=True)
        display.step(metrics_at(1))
        assert all(len(line) <= width for line in panel_text(display, width).splitlines())

    def test_it_shows_what_is_waited_for_only_while_it_is(self):
        display = Display(terminal(), total_steps=2, start_step=0, header=HEADER, live=True)
        with display.waiting("tokenizing"), display.waiting("reading"):
            assert "reading" in panel_text(display)
        assert "tokenizing" not in panel_text(display)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_the_terminal_is_sane_whatever_is_raised(self, error: type[BaseException]):
        def train() -> None:
            with Display(console, 2, 0, HEADER, live=True) as display, display.waiting("compiling"):
                display.step(metrics_at(1))
                raise error

        console, streams = terminal(), (sys.stdout, sys.stderr)
        with pytest.raises(error):
            train()
        assert (sys.stdout, sys.stderr) == streams
        text = written(console)
        assert text.count(HIDE_CURSOR) == 1
        last_frame = text[text.rindex("shardtorch") :]
        assert last_frame.endswith("\n" + SHOW_CURSOR)
        assert "compiling" not in last_frame

    def test_messages_stay_above_the_panel(self):
        console = terminal()
        with Display(console, total_steps=2, start_step=0, header=HEADER, live=True) as display:
            display.message("saved checkpoint 1")
        assert "saved checkpoint 1\n" in written(console)

    def test_an_ascii_terminal_gets_ascii(self):
        console = terminal(encoding="ascii")
        with Display(console, total_steps=9, start_step=0, header=HEADER, live=True) as display:
            with display.waiting("compiling"):
                console.print(display._render())
            for step in range(1, 9):
                display.step(metrics_at(step, loss=9 / step))
        assert "9.00 #" in re.sub(r"\x1b\[[\d;]*m", "", written(console))


class TestLossCurve:
    def rows(self, curve: LossCurve, width: int = 80) -> list[str]:
        console = Console(file=io.StringIO(), width=width)
        console.print(curve)
        return console.file.getvalue().splitlines()

    @given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
    def test_buckets_hold_every_loss_once_and_stay_few(self, losses: list[float]):
        curve = LossCurve(max_buckets=8)
        for loss in losses:
            curve.append(loss)
        groups = [losses[start : start + curve.bucket_size] for start in range(0, len(losses), curve.bucket_size)]
        assert len(curve.means) <= 8
        assert curve.means == pytest.approx([sum(group) / len(group) for group in groups])

    @given(num_losses=st.integers(1, 200), width=st.integers(12, 100))
    def test_falling_losses_fall_within_the_width(self, num_losses: int, width: int):
        curve = LossCurve()
        for step in range(num_losses):
            curve.append(5.0 - 4.0 * step / num_losses)
        rows = self.rows(curve, width)
        assert max(map(len, rows)) == min(5 + num_losses, width)
        highest, lowest = float(rows[0].split()[0]), float(rows[-1].split()[0])
        if num_losses <= width - 5:
            assert (highest, lowest) == (5.0, pytest.approx(min(curve.means), abs=0.005))
        else:
            assert min(curve.means) <= lowest <= highest <= 5.0
        filled = [len(row) for row in rows]
        assert filled == sorted(filled)

    def test_equal_losses_and_no_losses(self):
        curve = LossCurve()
        assert self.rows(curve) == []
        for _ in range(3):
            curve.append(2.0)
        assert self.rows(curve)[-1] == "2.00 ▁▁▁"

    def test_a_loss_that_is_not_finite_is_a_gap(self):
        curve = LossCurve(num_rows=2)
        for loss in (2.0, math.nan, 1.0, math.inf, 1.0):
            curve.append(loss)
        assert self.rows(curve)[-1] == "1.00 █ ▁ ▁"
