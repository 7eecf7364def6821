"""What a command can be told. Settings are data: frozen, checked when made, written beside the run as JSON."""

import dataclasses
import difflib
import json
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from shardtorch.errors import ConfigError
from shardtorch.mesh import Mesh, SliceTopology


@dataclass(frozen=True)
class TrainConfig:
    """Pretrain a model on text."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Preset: llama-tiny, llama2-7b, -13b or -70b, llama3-8b, -70b or -405b."""
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
    microbatches: int = 1
    """Parts in which the gradient of a batch is computed, one after the other, to save memory; a divisor of
    `global_batch_size`."""
    loss_chunks: int | None = None
    """Pieces in which the loss over the vocabulary is computed, a divisor of `seq_len`. None: as few as keep a device's
    logits at 512 MiB."""
    remat: Literal["full", "none"] = "none"
    """`full` keeps only each layer's input and computes the layer again in the backward pass; `none` keeps what the
    backward pass needs."""
    attention: Literal["auto", "flash", "torch"] = "auto"
    """`flash` is a kernel that never holds the scores, `torch` torch's own op; `auto` takes the kernel on TPUs where it
    fits."""
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
        for name in ("steps", "decay_steps", "global_batch_size", "seq_len", "microbatches", "eval_every_steps",
                     "eval_tokens", "save_every_steps", "keep_checkpoints"):  # fmt: skip
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
        if self.global_batch_size % self.microbatches:
            raise ConfigError(
                "microbatches must divide global_batch_size.",
                got=f"microbatches={self.microbatches}, global_batch_size={self.global_batch_size}",
                fix="use a power of two for both.",
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
    """Preset: llama-tiny, llama2-7b, -13b or -70b, llama3-8b, -70b or -405b."""
    mesh: str = "fsdp=8"
    """Axes and sizes of the mesh, such as `data=2,fsdp=16,tensor=4`."""
    json: bool = False
    """Print JSON in place of the table."""


@dataclass(frozen=True)
class PlanConfig:
    """Compile the training step for a TPU slice that need not be here; say whether it fits and how fast it will be."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Preset, such as llama3-8b."""
    topology: str
    """The slice, such as `v5p:4x4x4`, `v6e:16x16` or `2 x v6e:16x16`: v4, v5e, v5p, v6e or tpu7x."""
    mesh: str = ""
    """Axes and sizes of the mesh, busiest axis last, such as `fsdp=16,tensor=4`; -1 is inferred. Empty: as much `fsdp`
    in a slice as the model's width can be divided by, and `data` for the rest."""
    dcn: str = ""
    """How much of each axis crosses slices, such as `data=2`; empty: the first axis crosses all slices."""
    global_batch_size: Annotated[int | None, tyro.conf.arg(aliases=["--global-batch"])] = None
    """Sequences in a batch, over all chips. None: one for each microbatch and device that the batch is sharded
    over."""
    seq_len: Annotated[int, tyro.conf.arg(aliases=["--seq"])] = 8192
    """Tokens in a sequence."""
    microbatches: int = 1
    """Parts in which the gradient of a batch is computed, one after the other."""
    remat: Literal["full", "none"] = "full"
    """`full` keeps only each layer's input and computes the layer again in the backward pass; `none` keeps what the
    backward pass needs."""
    loss_chunks: int | None = None
    """Pieces in which the loss over the vocabulary is computed, a divisor of `seq_len`. None: as few as keep a device's
    logits at 512 MiB."""
    attention: Literal["auto", "flash", "torch"] = "auto"
    """`flash` is a kernel that never holds the scores, `torch` torch's own op; `auto` takes the kernel where it
    fits."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What parameters are cast to where they are used; they are stored in float32."""
    flags: tuple[str, ...] = ()
    """Further options of the compiler, each as `name=value`."""
    cache: Path = Path("~/.cache/shardtorch/plans")
    """Folder that keeps what was compiled."""
    json: Path | None = None
    """Write the report here as JSON."""
    html: Path | None = None
    """Write the report here as a page for the browser."""
    timeline: Path | None = None
    """Write the predicted step here as a trace for ui.perfetto.dev."""
    search: bool = False
    """Try meshes, remat and microbatches, and rank them; `remat` and `microbatches` are then ignored."""
    budget_minutes: float = 20.0
    """How long a search may take."""
    price_per_chip_hour: float | None = None
    """For tokens per dollar, in dollars."""
    out: Path | None = None
    """With `search`: write the best plan here, as settings for `shardtorch train --config`."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "microbatches"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1.", f"{name}={getattr(self, name)}")
        for name in ("global_batch_size", "price_per_chip_hour"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} must be positive.", f"{name}={value}")
        _require(0 < self.budget_minutes < math.inf, "budget_minutes must be positive.", f"{self.budget_minutes}")
        for flag in self.flags:
            name, found, value = flag.partition("=")
            _require(bool(name and found and value), "a flag is name=value.", f"{flag!r}")
        chunks = self.loss_chunks
        _require(
            chunks is None or (chunks >= 1 and self.seq_len % chunks == 0),
            "loss_chunks must divide seq_len.",
            f"loss_chunks={chunks}, seq_len={self.seq_len}",
        )
        _require(not (self.search and self.mesh), "a search finds the mesh.", f"search and mesh={self.mesh}")
        _require(self.out is None or self.search, "out is for what a search finds.", f"out={self.out}, no search")
        self.parse_topology()
        if self.mesh:
            Mesh.parse(self.mesh, dcn=self.dcn)

    def parse_topology(self) -> SliceTopology:
        """The slices that `topology` names."""
        return SliceTopology.parse(self.topology)

    def parse_mesh(self, embed_dim: int) -> Mesh:
        """The mesh that `mesh` and `dcn` say, over all devices of the slices.

        Args:
          embed_dim: Width of the model, which `fsdp` divides where no mesh is given.

        Raises:
          TopologyError: It does not fit the slices.
        """
        topology = self.parse_topology()
        per_slice = topology.num_devices // topology.num_slices
        fsdp = math.gcd(embed_dim, per_slice)
        data = topology.num_devices // fsdp
        text = self.mesh or (f"data={data},fsdp={fsdp}" if data > 1 else f"fsdp={fsdp}")
        mesh = Mesh.parse(text, dcn=self.dcn)
        if topology.num_slices > 1 and not self.dcn and mesh.axis_names:
            mesh = Mesh.parse(text, dcn=f"{mesh.axis_names[0]}={topology.num_slices}")
        if not mesh.is_bound:
            mesh = mesh.bind(topology.num_devices)
        topology.check(mesh)
        return mesh


@dataclass(frozen=True)
class DoctorConfig:
    """Show what is installed here, what devices there are, and how to get what is missing."""


def read_train_settings(path: Path) -> dict[str, Any]:
    """Fields of a `TrainConfig` from a file: a JSON object of any of them, as `shardtorch plan --search --out` writes.

    Returns:
      Values of the fields' types, by name. Whether they go together, `TrainConfig` checks.

    Raises:
      ConfigError: The file can't be read, is no JSON object, has a key that is no setting, or a value of another type.
    """
    try:
        settings = json.loads(path.read_text())
        if not isinstance(settings, dict):
            raise TypeError(f"a JSON {type(settings).__name__}")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: settings are read from a JSON object.",
            got=f"{error}",
            fix='name a file that holds settings, such as {"model": "llama-tiny", "mesh": "fsdp=8"}.',
        ) from error
    return typed_settings(TrainConfig, settings, str(path))


def typed_settings(config: type, settings: dict[str, Any], path: str) -> dict[str, Any]:
    """What JSON holds of some fields of a config, as values of the fields' types.

    Args:
      config: `TrainConfig` or another of this module.
      settings: Values by name.
      path: Where they were read, for errors.

    Raises:
      ConfigError: A key is no setting, or a value is of another type.
    """
    hints = typing.get_type_hints(config)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(config)}
    typed: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in kinds:
            close = difflib.get_close_matches(name, kinds, n=1)
            raise ConfigError(
                f"{path}: every key must be a setting of shardtorch train.",
                got=repr(name),
                fix=f"did you mean {close[0]!r}?" if close else "take it out; shardtorch train --help lists them.",
            )
        typed[name] = _value_of(kinds[name], value, f"{path}: {name}")
    return typed


def _value_of(kind: Any, value: Any, name: str) -> Any:
    """A value that JSON holds, as one of a field's type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        fits, words = value in arguments, " or ".join(map(json.dumps, arguments))
    elif origin is types.UnionType:
        (kind,) = (each for each in arguments if each is not type(None))
        return None if value is None else _value_of(kind, value, name)
    elif origin is tuple and isinstance(value, list):
        return tuple(_value_of(arguments[0], item, name) for item in value)
    else:
        accepted = {Path: str, float: (int, float)}.get(kind, origin or kind)
        fits = isinstance(value, accepted) and isinstance(value, bool) == (kind is bool)
        words = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")
    if not fits:
        raise ConfigError(f"{name} must be {words}.", got=json.dumps(value), fix="correct the value in the file.")
    return kind(value) if kind in (Path, float) else value


def _require(holds: bool, law: str, got: str) -> None:
    if not holds:
        raise ConfigError(law, got=got, fix="correct the value; --help describes each setting.")
