"""What the command line says, and how it ends; `test_mistakes.py` has the bad values."""

import dataclasses
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import main_here
from processes import environment

from shardtorch import run
from shardtorch.cli import TrainCommand, main
from shardtorch.config import DoctorConfig, GenerateConfig, InspectConfig, PlanConfig, TrainConfig

SETTINGS = {
    "train": TrainConfig,
    "generate": GenerateConfig,
    "plan": PlanConfig,
    "inspect": InspectConfig,
    "doctor": DoctorConfig,
}


def letters_of(text: str) -> str:
    """A text without the frames and line breaks that a help page puts into it, and without its own spaces."""
    return re.sub(r"[│╭╮╰╯─\s]", "", text)


def help_of(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main_here(verb, "--help") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return letters_of(captured.out)


def docs_of(settings: type) -> dict[str, str]:
    """The string under each field, by the field's name."""
    import ast
    import inspect

    (body,) = (node.body for node in ast.parse(inspect.getsource(settings)).body if isinstance(node, ast.ClassDef))
    docs = {}
    for field, doc in pairwise(body):
        match field, doc:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = text
    return docs


@pytest.mark.parametrize("verb", SETTINGS)
def test_help_describes_every_setting(verb: str, capsys: pytest.CaptureFixture[str]):
    page, settings = help_of(verb, capsys), SETTINGS[verb]
    assert settings.__doc__ is not None
    assert letters_of(settings.__doc__) in page
    docs = docs_of(settings)
    assert docs.keys() == {field.name for field in dataclasses.fields(settings)}
    for name, doc in docs.items():
        assert letters_of(doc) in page, name


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]):
    assert main_here("--help") == 0
    page = letters_of(capsys.readouterr().out)
    for verb, settings in SETTINGS.items():
        assert settings.__doc__ is not None
        assert verb + letters_of(settings.__doc__) in page


def test_train_does_not_grow_unnoticed():
    """A trainer rots by its options. Before you raise this number, look for one to take out."""
    assert len(dataclasses.fields(TrainConfig)) == 31


def test_train_reads_settings_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def train(config: TrainConfig, _: object) -> Any:
        asked.append(config)
        return SimpleNamespace(interrupted=False)

    monkeypatch.setattr(run, "train", train)
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"model": "llama-tiny", "mesh": "fsdp=4", "remat": "full", "resume": True, "lr": 1}))
    assert main_here("train", "--config", file) == 0
    assert main_here("train", f"--config={file}", "--mesh", "tensor=2", "--no-resume") == 0
    assert main_here("train", "llama3-8b", "--config", file, "--remat", "none") == 0
    told = TrainConfig("llama-tiny", mesh="fsdp=4", remat="full", resume=True, lr=1.0)
    assert asked == [
        told,
        dataclasses.replace(told, mesh="tensor=2", resume=False),
        dataclasses.replace(told, model="llama3-8b", remat="none"),
    ]
    assert all(type(config) is TrainConfig for config in asked)  # what a run saves has no name of a file
    page = help_of("train", capsys)
    assert letters_of(docs_of(TrainCommand)["config"]) in page
    assert "--config" in page


def test_inspect_gives_json(capsys: pytest.CaptureFixture[str]):
    assert main_here("inspect", "llama3-405b", "--mesh", "fsdp=64,tensor=8", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_parameters"] == 405_853_388_800
    assert facts["mesh"] == "Mesh(fsdp=64, tensor=8)"
    sizes = facts["bytes_per_device"]
    assert sizes["optimizer"] == 2 * sizes["parameters"] == 2 * sizes["gradients"]
    assert sizes["parameters"] == sum(row["bytes_per_device"] for row in facts["parameters"])
    # All but the norm weights is sharded over all 512 devices, as far as it divides.
    assert sizes["parameters"] == pytest.approx(4 * facts["num_parameters"] / 512, rel=0.1)
    (up,) = (row for row in facts["parameters"] if row["parameter"] == "layers.*.mlp.w_up.weight")
    assert (up["num_layers"], up["shape"], up["shard_shape"]) == (126, [53_248, 16_384], [6656, 256])


def test_inspect_cuts_no_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main_here("inspect", "llama-tiny", "--mesh", "fsdp=4,tensor=2") == 0
    out = capsys.readouterr().out
    (row,) = (line for line in out.splitlines() if "layers.*.attention.wq.weight" in line)
    assert "4 x [256, 256]" in row
    assert "P('tensor', 'fsdp')" in row
    assert "[128, 64]" in row
    assert "…" not in out
    assert "4,196,608 parameters." in out


def test_doctor_says_whether_training_can_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    finding = run._doctor.Finding("Python", "3.11", ok=True)
    missing = run._doctor.Finding("torch_xla", "[missing]", ok=False, fix="pip install torch_xla==2.9.0")
    monkeypatch.setattr(run._doctor, "findings", lambda: [finding])
    assert main_here("doctor") == 0
    monkeypatch.setattr(run._doctor, "findings", lambda: [finding, missing])
    capsys.readouterr()
    assert main_here("doctor") == 1
    out = capsys.readouterr().out
    assert re.search(r"!!.*torch_xla.*\[missing\].*pip install torch_xla==2\.9\.0", out)


@pytest.mark.slow
@pytest.mark.parametrize(("variables", "code"), [({}, 0), ({"LOCAL_WORLD_SIZE": "2"}, 1)])
def test_doctor_looks_at_the_devices(variables: dict[str, str], code: int):
    command = [sys.executable, "-m", "shardtorch.cli", "doctor"]
    env = environment(COLUMNS="300", **variables)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
    assert ("one process per host drives all of its devices" in done.stdout) == bool(variables)
    for package in ("torch", "torch_xla", "jax", "libtpu", "pyarrow", "datasets"):
        assert f" {package} " in done.stdout


def test_an_error_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(run, "inspect", broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["inspect", "llama-tiny"])


def test_an_interruption_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "generate", interrupted)
    assert main(["generate", "somewhere"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., int]:
    """Trains one step with the reference engine on a small text. Returns the exit code."""
    from pydoc_data.topics import topics

    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(topics[name] for name in sorted(topics))[:100_000])
    where = ["--data", text, "--cache", tmp_path / "cache", "--engine", "reference"]
    return lambda *words: main_here(
        "train", "llama-tiny", *where, "--steps", "1", "--seq-len", "16", "--sample-tokens", "0", *words
    )


def test_out_is_a_file(train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        assert train("--out", out) == 2
        assert f"ConfigError: {out}: a run must be able to write its files.\n  got: " in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_resumed_run_may_change_how_it_computes(train: Callable[..., int], tmp_path: Path):
    out = tmp_path / "run"
    assert train("--out", out, "--microbatches", "4") == 0
    assert train("--out", out, "--microbatches", "2", "--remat", "full", "--steps", "2", "--resume") == 0
    assert train("--out", tmp_path / "whole", "--steps", "2") == 0
    in_parts, whole = (
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (out, tmp_path / "whole")
    )
    assert in_parts == pytest.approx(whole, rel=1e-5)


def test_every_device_has_its_part_of_a_microbatch(capsys: pytest.CaptureFixture[str]):
    assert main_here("train", "llama-tiny", "--mesh", "fsdp=8", "--microbatches", "2") == 2
    assert "ShardingError: a microbatch [global_batch_size / microbatches, seq_len]" in capsys.readouterr().err


def test_a_full_disk_ends_in_one_message(train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    assert train("--out", tmp_path / "run") == 2
    err = capsys.readouterr().err
    assert err.startswith("ConfigError: ")
    assert "No space left on device" in err
    assert "Traceback" not in err


def test_a_checkpoint_without_room_ends_in_one_message(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 2**20, before[1]))  # a file may not grow further, as on a full disk
    try:
        code = train("--out", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2
    err = capsys.readouterr().err
    assert re.search(r"CheckpointError: .*step_00000001: the checkpoint must be written, which takes 48\.0 MiB", err)
    assert "Traceback" not in err
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_run_that_diverges_stops(train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    code = train("--out", out, "--steps", "9", "--warmup-steps", "0", "--lr", "1e30", "--save-every-steps", "1")
    assert code == 2
    assert re.search(r"loss and gradient must stay finite.*\n  got: .*(nan|inf)", capsys.readouterr().err)
    reached = len((out / "metrics.jsonl").read_text().splitlines())
    assert 1 < reached < 9
    assert not (out / "checkpoints" / f"step_{reached:08d}").exists()
