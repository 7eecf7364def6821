"""What a command can be told. Settings are data: frozen, checked when made, written beside the run as JSON."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from shardtorch.errors import ConfigError
from shardtorch.mesh import Mesh


@dataclass(frozen=True)
class TrainConfig:
    """Pretrain a model on text."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Preset: llama-tiny, llama3-8b, llama3-70b or llama3-405b."""
    out: Path = Path("runs/default")
    """Folder of the run: metrics, checkpoints, summary."""
    devices: int | None = None
    """Devices to run on: on a TPU slice all it has, elsewhere how many virtual CPU devices to make. None: what the mesh
    needs, or all."""
    mesh: str = "fsdp=-1"
    """Axes and sizes of the mesh, busiest axis last, such as `data=2,fsdp=2,tensor=2`; -1 is inferred."""
    dcn: str = ""
    """How much of each axis crosses slices, such as `data=2`, on several slices; empty on one."""
    engine: Literal["torch_xla", "reference"] = "torch_xla"
    """`torch_xla`, or `reference`: plain eager torch on one CPU device, which applies no sharding."""
    data: str = "topics"
    """Text: `topics` (Python's own documentation), a file, folder or glob of .txt, .jsonl or .parquet, or
    `hf:OWNER/NAME[/SUBSET][:SPLIT]` with the extra `hub`."""
    text_field: str = "text"
    """Column of .jsonl and .parquet that holds the text."""
    cache: Path = Path("~/.cache/shardtorch")
    """Folder for tokenizers and tokens, shared between runs; `~` is the home folder."""
    steps: int = 200
    """Train until this step, in updates; at most `decay_steps`."""
    decay_steps: int = 200
    """Length of the learning rate schedule, in updates. It is apart from `steps` so that a run that stops early and
    one that goes on follow the same schedule."""
    warmup_steps: int = 20
    """Steps in which the learning rate climbs to `lr`, in updates."""
    lr: float = 3e-3
    """Peak learning rate of AdamW; it falls to a tenth along a cosine."""
    weight_decay: float = 0.1
    """Decay of matrices, per update, times the learning rate."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    clip_norm: float = 1.0
    """Largest global L2 norm that a gradient keeps."""
    global_batch_size: int = 8
    """Sequences in a batch, over all devices."""
    seq_len: int = 256
    """Tokens in a sequence."""
    loss_chunks: int | None = None
    """Pieces in which the loss over the vocabulary is computed, a divisor of `seq_len`. None: as few as keep a
    sequence's logits at 512 MiB."""
    remat: bool = False
    """Keep only each layer's input and compute the layer again in the backward pass."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters are cast to where they are used; they are stored in float32."""
    eval_every_steps: int = 100
    """How often the held-out text is scored, in updates; it is also scored before the first step and at the end."""
    eval_tokens: int = 2**20
    """How much of the held-out text is scored, in tokens from its start; all of it if it has fewer."""
    save_every_steps: int = 100
    """How often a checkpoint is written, in updates; one is also written at the end."""
    keep_checkpoints: int = 2
    """How many checkpoints stay."""
    sample_tokens: int = 120
    """Length of the sample of generated text at the end, in tokens; 0 for none. It is made on the host's CPU, and only
    of models of up to a billion parameters."""
    seed: int = 0
    """Of initial values and data order, 0 to 2**32 - 1."""
    resume: bool = False
    """Go on from the newest checkpoint in `out`, on this or another mesh."""

    def __post_init__(self) -> None:
        for name in ("steps", "decay_steps", "global_batch_size", "seq_len", "eval_every_steps", "eval_tokens",
                     "save_every_steps", "keep_checkpoints"):  # fmt: skip
            _require(getattr(self, name) >= 1, f"{name} must be at least 1.", f"{name}={getattr(self, name)}")
        if self.devices is not None:
            _require(self.devices >= 1, "devices must be at least 1.", f"devices={self.devices}")
        for name in ("lr", "clip_norm"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"{name} must be positive and finite.", f"{name}={value}")
        for name in ("weight_decay", "warmup_steps", "sample_tokens"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"{name} must be finite and not negative.", f"{name}={value}")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"{name} must be in [0, 1).", f"{name}={getattr(self, name)}")
        _require(bool(self.data), "data must name a text.", "data=''")
        _require(0 <= self.seed < 2**32, "seed must be an unsigned 32-bit number.", f"seed={self.seed}")
        if self.steps > self.decay_steps:
            raise ConfigError(
                "a run must not go on past the end of its learning rate schedule.",
                got=f"steps={self.steps}, decay_steps={self.decay_steps}",
                fix=f"add --decay-steps {self.steps}.",
            )
        if self.warmup_steps >= self.decay_steps:
            raise ConfigError(
                "the warm-up must be shorter than the schedule.",
                got=f"warmup_steps={self.warmup_steps}, decay_steps={self.decay_steps}",
                fix="use fewer warm-up steps or a longer schedule.",
            )
        if self.loss_chunks is not None and (self.loss_chunks < 1 or self.seq_len % self.loss_chunks):
            raise ConfigError(
                "loss_chunks must divide seq_len.",
                got=f"loss_chunks={self.loss_chunks}, seq_len={self.seq_len}",
                fix="use a power of two.",
            )
        self.parse_mesh()

    def parse_mesh(self) -> Mesh:
        """The mesh that `mesh` and `dcn` say."""
        return Mesh.parse(self.mesh, dcn=self.dcn)


@dataclass(frozen=True)
class GenerateConfig:
    """Continue a text with a trained model, in plain torch on the CPU."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or of one checkpoint in it."""
    prompt: str = "The"
    """Text to continue."""
    max_new_tokens: int = 200
    """Tokens to generate."""
    temperature: float = 0.8
    """Logits are divided by it; 0 always takes the likeliest token."""
    top_k: int = 50
    """Draw from this many likeliest tokens; 0 from all."""
    seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
            value = getattr(self, name)
            _require(least <= value < math.inf, f"{name} must be finite and at least {least}.", f"{name}={value}")
        _require(self.seed < 2**63, "seed must be a 63-bit number.", f"seed={self.seed}")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError("the prompt must be text in UTF-8.", got=f"{self.prompt!r}", fix="correct it.") from error


@dataclass(frozen=True)
class InspectConfig:
    """Show how a model lies on a mesh: each parameter's spec, shard and bytes. Needs no devices and no memory."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Preset: llama-tiny, llama3-8b, llama3-70b or llama3-405b."""
    mesh: str = "fsdp=8"
    """Axes and sizes of the mesh, such as `data=2,fsdp=16,tensor=4`."""
    json: bool = False
    """Print JSON in place of the table."""


@dataclass(frozen=True)
class DoctorConfig:
    """Show what is installed here, what devices there are, and how to get what is missing."""


def _require(holds: bool, law: str, got: str) -> None:
    if not holds:
        raise ConfigError(law, got=got, fix="correct the value; --help describes each setting.")
