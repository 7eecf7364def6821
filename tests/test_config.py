"""Settings are checked when they are made."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtorch.config import GenerateConfig, InspectConfig, TrainConfig, read_train_settings
from shardtorch.errors import ConfigError, ShardtorchError

NUMBERS = {
    field.name: field.type
    for field in dataclasses.fields(TrainConfig)
    if field.type in (int, float) and field.name != "seed"
}
MAY_BE_ZERO = {"warmup_steps", "weight_decay", "sample_tokens", "beta1", "beta2"}


def test_defaults_hold():
    assert TrainConfig("llama-tiny").parse_mesh().axis_names == ("fsdp",)
    assert InspectConfig("llama-tiny").mesh == "fsdp=8"


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig("llama-tiny").steps = 3


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_negative_infinite_or_not_a_number(name: str):
    wrong = [-1] if NUMBERS[name] is int else [-1.0, math.nan, math.inf, -math.inf]
    for value in wrong if name in MAY_BE_ZERO else [*wrong, 0]:
        with pytest.raises(ConfigError, match=name):
            TrainConfig("llama-tiny", **{name: value})


@pytest.mark.parametrize("name", ["temperature", "top_k", "seed", "max_new_tokens"])
def test_no_number_of_generate_is_negative(name: str):
    with pytest.raises(ConfigError, match=rf"{name} must be"):
        GenerateConfig(run="run", **{name: -1})


def test_a_temperature_is_a_number():
    with pytest.raises(ConfigError, match="temperature"):
        GenerateConfig(run="run", temperature=math.nan)


@given(steps=st.integers(1, 500), decay_steps=st.integers(1, 500), warmup_steps=st.integers(0, 500))
def test_steps_fit_into_the_schedule(steps: int, decay_steps: int, warmup_steps: int):
    settings = {"steps": steps, "decay_steps": decay_steps, "warmup_steps": warmup_steps}
    if steps <= decay_steps and warmup_steps < decay_steps:
        assert TrainConfig("llama-tiny", **settings).steps == steps
    else:
        with pytest.raises(ConfigError, match=r"go on past the end|warm-up must be shorter"):
            TrainConfig("llama-tiny", **settings)


@given(seq_len=st.integers(1, 256), loss_chunks=st.integers(1, 256))
def test_chunks_divide_the_sequence(seq_len: int, loss_chunks: int):
    if seq_len % loss_chunks == 0:
        TrainConfig("llama-tiny", seq_len=seq_len, loss_chunks=loss_chunks)
    else:
        with pytest.raises(ConfigError, match="loss_chunks must divide"):
            TrainConfig("llama-tiny", seq_len=seq_len, loss_chunks=loss_chunks)


@given(batch=st.integers(1, 256), microbatches=st.integers(1, 256))
def test_microbatches_divide_the_batch(batch: int, microbatches: int):
    if batch % microbatches == 0:
        TrainConfig("llama-tiny", global_batch_size=batch, microbatches=microbatches)
    else:
        with pytest.raises(ConfigError, match="microbatches must divide global_batch_size"):
            TrainConfig("llama-tiny", global_batch_size=batch, microbatches=microbatches)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_is_32_bits(seed: int):
    with pytest.raises(ConfigError, match="32-bit"):
        TrainConfig("llama-tiny", seed=seed)


@pytest.mark.parametrize("mesh", [{"mesh": "fsdp"}, {"mesh": "fsdp=0"}, {"mesh": "fsdp=2", "dcn": "data=2"}])
def test_a_mesh_is_read_at_once(mesh: dict[str, str]):
    with pytest.raises(ShardtorchError):
        TrainConfig("llama-tiny", **mesh)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig("llama-tiny"),
        TrainConfig("llama3-8b", devices=8, loss_chunks=4, lr=1.0, remat="full", resume=True, out=Path("a/b")),
    ],
)
def test_settings_come_back_from_a_file(config: TrainConfig, tmp_path: Path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in vars(config).items()}))
    assert TrainConfig(**read_train_settings(file)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "settings are read from a JSON object.*No such file"),
        ("{", "settings are read from a JSON object.*Expecting property name"),
        ("[1]", "settings are read from a JSON object.*a JSON list"),
        ("\xff", "settings are read from a JSON object"),
        ({"mehs": "fsdp=8"}, "every key must be a setting.*'mehs'.*did you mean 'mesh'"),
        ({"zzzzzz": 1}, "every key must be a setting.*--help lists them"),
        ({"mesh": 8}, "mesh must be text.*got: 8"),
        ({"seq_len": "256"}, 'seq_len must be a whole number.*"256"'),
        ({"seq_len": 256.0}, "seq_len must be a whole number"),
        ({"seq_len": True}, "seq_len must be a whole number"),
        ({"seq_len": None}, "seq_len must be a whole number.*null"),
        ({"devices": "all"}, "devices must be a whole number"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"resume": 1}, "resume must be true or false"),
        ({"remat": True}, 'remat must be "full" or "none".*true'),
        ({"out": 3}, "out must be text"),
    ],
    ids=str,
)
def test_what_a_file_of_settings_can_get_wrong(text: Any, message: str, tmp_path: Path):
    file = tmp_path / "settings.json"
    if text is not None:
        file.write_bytes(text.encode("latin-1") if isinstance(text, str) else json.dumps(text).encode())
    with pytest.raises(ConfigError, match=f"(?s){message}") as failed:
        read_train_settings(file)
    assert str(file) in str(failed.value)
