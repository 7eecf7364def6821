"""The command line in processes of their own, where any number of devices can start."""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from processes import environment

from shardtorch.cli import main
from shardtorch.engine import _start


def main_here(*words: str | Path) -> int:
    """The exit code of `shardtorch` with these words, run in this process.

    It may train with the reference engine. The engine that the tests run on is running again afterwards.
    """
    running, num_threads = _start._running, torch.get_num_threads()
    _start._running = None
    torch.set_num_threads(1)  # see `start`
    try:
        return main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        _start._running = running
        torch.set_num_threads(num_threads)


def start(*words: str | Path) -> subprocess.Popen[str]:
    """`shardtorch` with these words, under way."""
    return _start_python("-m", "shardtorch.cli", *map(str, words))


def start_in_turn(commands: list[list[str]]) -> subprocess.Popen[str]:
    """`shardtorch` with the words of each command, one after the other in one process: loading torch_xla takes long."""
    program = "import json, sys; from shardtorch.cli import main; sys.exit(any(map(main, json.loads(sys.argv[1]))))"
    return _start_python("-c", program, json.dumps(commands))


def _start_python(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, *words]
    # Threads of several runs on few cores wait for each other, which makes eager torch many times slower.
    env = environment(OMP_NUM_THREADS="1", COLUMNS="80")
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """How a process ended."""
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """`shardtorch` with these words, whatever its exit code."""
    return finish(start(*words))


def read_lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    """Waits until a run has reported a step."""
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
        assert process.poll() is None, f"it ended before step {step}: {finish(process)}"
        time.sleep(0.02)


class Runs:
    """Trainings of llama-tiny in folders of one root, on one text that is small enough to be scored quickly."""

    def __init__(self, root: Path) -> None:
        from pydoc_data.topics import topics

        self.root = root
        self.text = root / "text.txt"
        self.text.write_text("\n\n".join(topics[name] for name in sorted(topics))[:120_000])
        self.cache = root / "cache"

    def words(self, out: str, *words: str) -> list[str]:
        """A command line; later words win over earlier ones."""
        where = ["--data", str(self.text), "--cache", str(self.cache), "--out", str(self.root / out)]
        return ["train", "llama-tiny", *where, "--seq-len", "32", "--sample-tokens", "0", *words]

    def train(self, out: str, *words: str) -> Path:
        """Trains to the end. Returns the run's folder."""
        done = run(*self.words(out, *words))
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return self.root / out
