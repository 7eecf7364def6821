"""Every example runs, learns, and is as short as it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *args: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *args]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]


@pytest.mark.slow
def test_pretrain(tmp_path: Path) -> None:
    out = run("pretrain.py", "20", str(tmp_path))
    assert losses(out)[-1] < losses(out)[0]
    assert re.search(r"held-out text: \d\.\d+ bits per byte \(zlib -9 needs 2\.\d+\)", out)
    assert (tmp_path / "step_00000020" / "manifest.json").is_file()


def test_pretrain_is_short() -> None:
    assert len((EXAMPLES / "pretrain.py").read_text().splitlines()) < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single_device.py", "annotate.py"])
def test_loops_learn_and_compile_once(name: str) -> None:
    out = run(name)
    assert losses(out)[-1] < 0.5 * losses(out)[0]
    # The first step has no optimizer state or sharded gradients yet, every later one is the same graph.
    assert re.search(r"graphs compiled: [12]$", out.strip())


def test_all_are_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(path.name in tested for path in EXAMPLES.glob("*.py"))
