"""Bad values on the command line: one clear message, exit code 2, no traceback."""

import re

import pytest

from shardtorch.cli import main

MISTAKES = {
    # words of the command line: what the message must say
    "train llama-tini": "did you mean llama-tiny",
    "train llama-tiny --mesh fsdp=x": "fsdp=x",
    "train llama-tiny --mesh fsdp=4,fsdp=2": "given twice",
    "train llama-tiny --devices 8 --mesh fsdp=4": r"needs 4 devices",
    "train llama-tiny --devices 8 --mesh expert=8": "'expert'",
    "train llama-tiny --mesh fsdp=3": "not divisible by mesh axis 'fsdp' of size 3",
    "train llama-tiny --mesh fsdp=8 --global-batch-size 4": "fewer than mesh axis 'fsdp' of size 8",
    "train llama-tiny --devices 0": "devices must be at least 1",
    "train llama-tiny --seq-len 1024": "reads at most 256 tokens",
    "train llama-tiny --steps 1000": "add --decay-steps 1000",
    "train llama-tiny --warmup-steps 200": "warm-up must be shorter",
    "train llama-tiny --lr -1": "lr must be positive",
    "train llama-tiny --lr nan": "lr must be positive",
    "train llama-tiny --loss-chunks 7": "loss_chunks must divide",
    "train llama-tiny --seed -1": "seed must be",
    "train llama-tiny --resume --out {tmp}/none": "a checkpoint to resume from",
    "train llama-tiny --engine reference --data {tmp}/none.txt": "none.txt",
    "generate {tmp}/none": "a checkpoint to generate from",
    "train llama-tiny --data=": "data must name a text",
    "generate {tmp}/none --seed 99999999999999999999999": "63-bit",
    "generate {tmp}/none --temperature -1": "temperature must be",
    "inspect llama3-8b --mesh tensor=48": "not divisible by mesh axis 'tensor' of size 48",
    "inspect llama3-8b --mesh fsdp=-1": "sizes of all mesh axes",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_one_clear_message(words: str, tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)
    code = main(words.format(tmp=tmp_path).split())
    err = capsys.readouterr().err
    assert code == 2
    assert "\n  got: " in err
    assert "\n  fix: " in err
    assert "Traceback" not in err
    assert re.search(MISTAKES[words], err), err


@pytest.mark.parametrize(
    "words", ["train", "train llama-tiny --no-such-option", "train llama-tiny --steps many", "fly"]
)
def test_what_the_parser_refuses(words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert stopped.value.code == 2
    assert "Traceback" not in "".join(capsys.readouterr())


def test_a_folder_is_one_runs(tmp_path, capsys: pytest.CaptureFixture[str]):
    import fcntl

    out = tmp_path / "run"
    out.mkdir()
    with open(out / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["train", "llama-tiny", "--engine", "reference", "--out", str(out)]) == 2
    assert "one run at a time" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == [".lock"]
