"""The code in README and docs runs, and says what is true."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment

ROOT = Path(__file__).parents[1]


def code_of(page: str) -> str:
    """The Python blocks of a page, as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks, f"{page} has no Python code"
    return "\n".join(blocks)


def run(program: str, folder: Path) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_readme(tmp_path: Path) -> None:
    out = run(code_of("README.md"), tmp_path)
    assert "{devices=[2,4]" in out


@pytest.mark.slow
def test_sharding_page(tmp_path: Path) -> None:
    out = run(code_of("docs/sharding.md"), tmp_path)
    assert "'layers.*.up.weight': (6, 256, 64)" in out
    assert "512 chips on 128 hosts, 32 GiB each" in out


@pytest.mark.slow
def test_training_page(tmp_path: Path) -> None:
    train = [sys.executable, "-m", "shardtorch.cli", "train", "llama-tiny", "--mesh", "fsdp=2", "--devices", "2"]
    quick = ["--steps", "1", "--seq-len", "16", "--sample-tokens", "0", "--out", str(tmp_path / "run")]
    subprocess.run(
        [*train, *quick, "--cache", str(tmp_path / "cache")], env=environment(), check=True, capture_output=True
    )
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    run(f"checkpoint = {str(checkpoint)!r}\n{code_of('docs/training.md')}", tmp_path)


@pytest.mark.slow
def test_planning_page(tmp_path: Path) -> None:
    out = run(code_of("docs/planning.md"), tmp_path)
    assert "fits: " in out
    assert "('fsdp',)" in out


def test_commands_exist() -> None:
    """Every command line that a page shows is one that the parser takes."""
    import tyro

    from shardtorch.cli import VERBS

    shown = [
        shlex.split(line, comments=True)
        for page in ("README.md", "docs/training.md", "docs/planning.md")
        for line in (ROOT / page).read_text().splitlines()
        if line.startswith("shardtorch ")
    ]
    assert len(shown) >= 5
    for _, *words in shown:
        if "--config" in words:  # whose file has the model
            words.insert(1, "llama-tiny")
        assert tyro.extras.subcommand_cli_from_dict(VERBS, args=words) is not None


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
