"""`generate`: text from a trained model, in plain torch on the CPU."""

import re
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from shardtorch.config import GenerateConfig
from shardtorch.errors import CheckpointError
from shardtorch.models import Llama, LlamaConfig, RopeScaling
from shardtorch.train import latest_checkpoint, load_tokenizer, read_extra, read_tensors


def generate(config: GenerateConfig, console: Console | None = None) -> str:
    """Continues `config.prompt` with the newest checkpoint of a run, and prints it.

    Returns:
      Prompt and continuation.

    Raises:
      CheckpointError: There is no checkpoint in the folder, or it is damaged.
    """
    text = sample(
        config.run,
        prompt=config.prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seed=config.seed,
    )
    (console or Console()).print(text, markup=False, highlight=False, soft_wrap=True)
    return text


def sample(
    run: Path, *, prompt: str, max_new_tokens: int, temperature: float = 0.8, top_k: int = 50, seed: int = 0
) -> str:
    """Prompt and continuation; see `GenerateConfig` for the arguments."""
    checkpoint, folder = _locate(run)
    model = load_model(checkpoint)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    # A separator stands before every document that the model has read.
    tokens = [0, *tokenizer.encode(prompt).ids]
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            window = tokens[-model.config.max_seq_len :]
            logits = model(torch.tensor([window]))[0, -1]
            token = _draw(logits, temperature, top_k, generator)
            if token == 0:
                break
            tokens.append(token)
    return tokenizer.decode(tokens[1:])


def load_model(checkpoint: Path) -> Llama:
    """The model of a checkpoint, whole, in plain torch on the CPU."""
    fields = read_extra(checkpoint).get("model")
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{checkpoint}: a checkpoint to generate from must describe its model.",
            got="no 'model' in its manifest",
            fix="use a checkpoint that shardtorch train has written.",
        )
    described: dict[str, Any] = {**fields}
    scaling = described.pop("rope_scaling")
    config = LlamaConfig(**described, rope_scaling=None if scaling is None else RopeScaling(**scaling))
    with torch.device("meta"):
        model = Llama(config)
    weights = read_tensors(checkpoint, "model.")
    if config.tie_embeddings:
        weights["head.weight"] = weights["embed.weight"]  # saved once
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _locate(run: Path) -> tuple[Path, Path]:
    """The checkpoint to use and the folder of its run."""
    run = run.resolve()
    if re.fullmatch(r"step_\d+", run.name):
        return run, run.parent.parent
    checkpoint = latest_checkpoint(run / "checkpoints")
    if checkpoint is None:
        raise CheckpointError(
            f"{run}: there must be a checkpoint to generate from.",
            got=f"none in {run / 'checkpoints'}",
            fix="train first: shardtorch train llama-tiny --out " + str(run),
        )
    return checkpoint, run


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature < 1e-6:  # 0, or so close that the division overflows
        return int(logits.argmax())
    if top_k:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
