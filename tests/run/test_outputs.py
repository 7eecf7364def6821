"""What a run leaves behind, and what can be done with it elsewhere."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Runs, main_here, read_lines
from processes import run_python

from shardtorch.config import GenerateConfig
from shardtorch.models import preset
from shardtorch.run import generate
from shardtorch.run._generate import sample

MESH = "fsdp=4,tensor=2"

pytestmark = pytest.mark.slow


def test_one_object_a_step(trained: Callable[[str], Path]):
    lines = read_lines(trained(MESH) / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 41))
    for line in lines:
        assert list(line) == ["step", "loss", "grad_norm", "lr", "tokens_per_s", "step_s"]
        assert all(math.isfinite(value) and value > 0 for value in line.values())
        assert line["tokens_per_s"] == pytest.approx(8 * 32 / line["step_s"])
    assert lines[0]["loss"] == pytest.approx(math.log(2048), rel=0.1)  # it starts knowing nothing
    assert lines[-1]["loss"] < lines[0]["loss"] - 2


def test_evaluations(trained: Callable[[str], Path]):
    first, last = read_lines(trained(MESH) / "eval.jsonl")
    assert [list(line) for line in (first, last)] == [["step", "eval_loss", "eval_bits_per_byte"]] * 2
    assert (first["step"], last["step"]) == (0, 40)
    assert last["eval_bits_per_byte"] < first["eval_bits_per_byte"] - 0.5
    ratio = last["eval_bits_per_byte"] / last["eval_loss"]
    assert first["eval_bits_per_byte"] / first["eval_loss"] == pytest.approx(ratio)


def test_summary(runs: Runs, trained: Callable[[str], Path]):
    out = trained(MESH)
    summary = json.loads((out / "summary.json").read_text())
    last = read_lines(out / "eval.jsonl")[-1]
    assert summary["eval"] == {"step": 40, "loss": last["eval_loss"], "bits_per_byte": last["eval_bits_per_byte"]}
    assert (summary["step"], summary["interrupted"], summary["mesh"]) == (40, False, "Mesh(fsdp=4, tensor=2)")
    assert summary["num_parameters"] == preset("llama-tiny").num_parameters
    assert 1 < summary["zlib_bits_per_byte"] < 4
    assert summary["config"]["data"] == str(runs.text)
    assert summary["config"]["steps"] == 40
    assert {"train_step_compiles", "compiles", "compiles_after_step_1"} <= summary.keys()


def test_folder(trained: Callable[[str], Path]):
    out = trained(MESH)
    assert sorted(path.name for path in out.iterdir()) == [
        ".lock",
        "checkpoints",
        "eval.jsonl",
        "metrics.jsonl",
        "summary.json",
        "tensorboard",
        "tokenizer.json",
    ]
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_00000040"]


def test_plain_torch_scores_the_same(runs: Runs, trained: Callable[[str], Path]):
    done = run_python(f"""
import sys
import torch, torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from shardtorch.models import Llama, preset
from shardtorch.train import heldout_batches, prepare
torch.set_num_threads(1)
config = preset("llama-tiny")
model = Llama(config)
state = {{f"model.{{name}}": x for name, x in model.state_dict().items()}}
dcp.load(state, checkpoint_id={str(trained(MESH) / "checkpoints" / "step_00000040")!r}, no_dist=True)
model.load_state_dict({{name.removeprefix("model."): x for name, x in state.items()}})
corpus = prepare({str(runs.text)!r}, config.vocab_size, {str(runs.cache)!r})
nll = 0.0
with torch.no_grad():
    for batch in heldout_batches(corpus, 4, 32):
        tokens, targets = torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["targets"])
        nll += F.cross_entropy(model(tokens).flatten(0, 1).double(), targets.flatten(), reduction="sum").item()
assert "torch_xla" not in sys.modules
print(nll / (len(corpus.heldout) - 1))
""")
    assert done.returncode == 0, done.stderr
    summary = json.loads((trained(MESH) / "summary.json").read_text())
    assert float(done.stdout) == pytest.approx(summary["eval"]["loss"], rel=1e-5)


def test_generate(trained: Callable[[str], Path], capsys: pytest.CaptureFixture[str]):
    run = trained("reference")
    config = GenerateConfig(run, prompt="The class", max_new_tokens=8, seed=3)
    text = generate(config)
    assert text.startswith("The class")
    assert len(text) > len("The class")
    assert capsys.readouterr().out == text + "\n"
    assert generate(config) == text
    checkpoint = run / "checkpoints" / "step_00000040"
    assert sample(checkpoint, prompt="The class", max_new_tokens=8, seed=3) == text
    assert sample(run, prompt="The class", max_new_tokens=8, seed=4) != text


def test_generate_greedily(trained: Callable[[str], Path]):
    run = trained("reference")
    texts = {sample(run, prompt="The", max_new_tokens=6, temperature=0, seed=seed) for seed in range(3)}
    assert len(texts) == 1
    assert texts == {sample(run, prompt="The", max_new_tokens=6, temperature=1, top_k=1)}


def test_a_prompt_may_be_empty_or_of_any_characters(trained: Callable[[str], Path]):
    run = trained("reference")
    assert isinstance(sample(run, prompt="", max_new_tokens=3), str)
    assert sample(run, prompt="naïve 东 <|endoftext|> [red]", max_new_tokens=2).startswith(
        "naïve 东 <|endoftext|> [red]"
    )


def test_a_text_longer_than_the_model_reads(trained: Callable[[str], Path]):
    prompt = "the class of the object " * 60
    assert sample(trained("reference"), prompt=prompt, max_new_tokens=2).startswith(prompt)


@pytest.mark.parametrize("source", ["folder", "lines.jsonl"])
def test_other_sources_of_text(runs: Runs, tmp_path: Path, source: str):
    text = runs.text.read_text()
    documents = [text[start : start + 10_000] for start in range(0, len(text), 10_000)]
    options = []
    if source == "folder":
        (tmp_path / source / "inner").mkdir(parents=True)
        for number, document in enumerate(documents):
            (tmp_path / source / ("inner" if number % 2 else "") / f"{number}.txt").write_text(document)
    else:
        lines = [json.dumps({"id": number, "body": document}) for number, document in enumerate(documents)]
        (tmp_path / source).write_text("\n".join(lines))
        options = ["--text-field", "body"]
    words = [
        "--data",
        str(tmp_path / source),
        *options,
        "--engine",
        "reference",
        "--steps",
        "1",
        "--sample-tokens",
        "3",
    ]
    assert main_here(*runs.words(f"from {source}", *words)) == 0
    summary = json.loads((runs.root / f"from {source}" / "summary.json").read_text())
    assert summary["step"] == 1
    assert summary["sample"].startswith("The")
