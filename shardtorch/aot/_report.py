"""`CompileReport`: what compiling a step for a TPU slice tells, as data.

Times are predictions, from the compiler's own schedule and a stated cost model; bytes are the compiler's. Sizes are per
chip, in bytes; times are for one step, in seconds.
"""

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from shardtorch.aot._quantities import bytes_text
from shardtorch.engine import Origin
from shardtorch.errors import ConfigError


@dataclass(frozen=True)
class Memory:
    """HBM of one chip at the step's peak, in bytes. The parts add up to `total`."""

    limit: int
    """What a program can use of the chip's HBM."""
    parameters: int
    gradients: int
    optimizer_state: int
    batch: int
    """Other arguments and results of the step: tokens, learning rate, metrics."""
    activations: int
    """Activations and temporaries: what lives only within the step, besides gradients."""
    code: int
    """The program itself."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state + self.batch + self.activations + self.code

    @property
    def headroom(self) -> int:
        """What is left of the limit; negative if the step does not fit."""
        return self.limit - self.total

    def by_kind(self) -> dict[str, int]:
        """The parts under the names that `Buffer.kind` has for them; they add up to `total`."""
        return {
            "parameter": self.parameters,
            "gradient": self.gradients,
            "optimizer": self.optimizer_state,
            "batch": self.batch,
            "activation": self.activations,
            "code": self.code,
        }


@dataclass(frozen=True)
class Buffer:
    """A piece of HBM that is in use at the step's peak."""

    name: str
    """The state tensor's name, such as `layers.*.mlp.w_up.weight`, or the compiler's name of the value."""
    kind: Literal["parameter", "gradient", "optimizer", "batch", "activation", "code"]
    bytes: int
    shape: str
    """On one device, in XLA's notation, such as `bf16[32,8192,4096]`."""
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True)
class Collective:
    """One collective of the program, over all its calls in a step."""

    kind: Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
    name: str
    """The compiler's name of the operation."""
    axes: tuple[str, ...]
    """Mesh axes that it runs along; empty if its groups are no product of axes."""
    network: Literal["ICI", "DCN"]
    """DCN if any group has devices of several slices."""
    group_size: int
    """Devices that take part together."""
    count: int
    """Calls in a step."""
    bytes: int
    """Payload of one call on one chip: the gathered result, or what is reduced, in bytes."""
    seconds: float
    """Predicted time of all calls on the network."""
    exposed_seconds: float
    """The part of it in which the chip does nothing else."""
    origin: Origin = field(default_factory=Origin)
    warning: str = ""
    """Why it should not be there, and the annotation that would avoid it: a value that the partitioner replicated or
    resharded on its own. Empty for a collective that the plan asks for."""


@dataclass(frozen=True)
class Operation:
    """One operation of the program on the chip's core, over all its calls in a step."""

    name: str
    category: Literal["matmul", "kernel", "elementwise", "copy"]
    """`matmul`: has a dot or convolution; `kernel`: a custom kernel; `copy`: moves data only."""
    count: int
    seconds: float
    """Predicted, of all calls."""
    flops: float
    """Of matrix products, of all calls."""
    bytes: int
    """HBM read and written, of all calls."""
    bound: Literal["compute", "memory"]
    """What limits it: the matrix units' peak, or HBM's bandwidth."""
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one step, in seconds. The parts add up to `total`."""

    compute: float
    """Operations that the matrix and vector units limit, kernels included."""
    memory: float
    """Operations that HBM's bandwidth limits."""
    communication: float
    """Collectives, where nothing runs beside them."""
    hidden_communication: float
    """Collectives, where something does; not part of the total."""
    efficiency: float
    """What the times were divided by, fitted on published step times; 1 for none."""

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.communication


@dataclass(frozen=True)
class Event:
    """A stretch of the predicted step, for a timeline."""

    name: str
    lane: Literal["core", "network"]
    category: str
    """Of an operation, or the kind of a collective."""
    start: float
    """Seconds from the start of the step."""
    duration: float
    repeats: tuple[tuple[int, float], ...] = ()
    """For each loop around it, the outermost first: how often it runs, and seconds from one iteration to the next. The
    event itself is that of each loop's first iteration."""
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True)
class CompileReport:
    """What compiling a step for a TPU slice tells."""

    title: str
    """What was compiled, such as `llama3-8b`."""
    topology: str
    """The slices, such as `v5p:4x4x4`."""
    mesh: str
    """Its axes and sizes, such as `fsdp=64`."""
    num_chips: int
    libtpu_version: str
    fits: bool
    memory: Memory
    peak_flops: float
    """Dense bfloat16 peak of a chip, in FLOP/s."""
    hbm_bandwidth: float
    """Of a chip, in bytes/s."""
    trace_s: float
    """Time it took to trace and lower the step, on this machine."""
    compile_s: float
    """Time it took to compile it, on this machine; of the first time, if it came from the cache."""
    step_time: StepTime | None = None
    """None if the compiler gave up for lack of memory."""
    tokens_per_step: int | None = None
    """None for a step that isn't told."""
    model_flops: float | None = None
    """What the model needs for one step over all chips, in FLOP: causal attention counts half, recomputing nothing."""
    model_flops_full_attention: float | None = None
    """The same with attention counted whole, as PaLM does."""
    collectives: tuple[Collective, ...] = ()
    operations: tuple[Operation, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    """The largest at the peak, largest first."""
    events: tuple[Event, ...] = ()
    advice: tuple[str, ...] = ()
    """What would help, in the order of what it would bring."""
    layout: tuple[str, ...] = ()
    """What the plan did with parameters that one would not guess from the mesh."""
    assumptions: tuple[str, ...] = ()
    """What the predictions take for granted."""

    @property
    def verdict(self) -> str:
        """Whether it fits, and by how much, as a sentence without a full stop."""
        headroom, limit = self.memory.headroom, bytes_text(self.memory.limit)
        if self.fits:
            return f"fits: {bytes_text(headroom)} of {limit} HBM per chip left"
        if headroom < 0:
            return f"does not fit: {bytes_text(-headroom)} over the limit of {limit} HBM per chip"
        return f"does not fit: the parts leave {bytes_text(headroom)} of {limit} HBM per chip, but not in one piece"

    @property
    def predicted_step_s(self) -> float | None:
        """Predicted time of a step."""
        return None if self.step_time is None else self.step_time.total

    @property
    def tokens_per_s_per_chip(self) -> float | None:
        """Predicted training throughput."""
        if self.predicted_step_s is None or self.tokens_per_step is None:
            return None
        return self.tokens_per_step / self.predicted_step_s / self.num_chips

    def mfu(self, *, causal: bool = True) -> float | None:
        """Predicted model FLOPs utilisation: what the model needs, over what the chips could do in that time.

        Args:
          causal: Count half of full attention, which is what a causal model needs; else all of it.
        """
        flops = self.model_flops if causal else self.model_flops_full_attention
        if self.predicted_step_s is None or flops is None:
            return None
        return flops / (self.predicted_step_s * self.num_chips * self.peak_flops)

    def as_dict(self) -> dict[str, Any]:
        """Everything, with the headline figures first, as JSON can hold it."""
        return {
            "fits": self.fits,
            "hbm_bytes_per_chip": self.memory.total,
            "hbm_limit_bytes": self.memory.limit,
            "predicted_step_s": self.predicted_step_s,
            "tokens_per_s_per_chip": self.tokens_per_s_per_chip,
            "mfu_causal": self.mfu(),
            "mfu_full_attention": self.mfu(causal=False),
        } | dataclasses.asdict(self)

    def to_json(self) -> str:
        """The report as JSON text; `from_json` reads it."""
        return json.dumps(self.as_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CompileReport":
        """The report that `to_json` wrote.

        Raises:
          ConfigError: The text is not such a report.
        """
        try:
            return _read(cls, json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                "a report must be JSON that `shardtorch plan --json` of this version wrote.",
                got=f"{type(error).__name__}: {error}",
                fix="make it again.",
            ) from error


def _read(kind: Any, value: Any) -> Any:
    """A value of a field's type from what JSON made of it.

    Raises:
      TypeError: It is of another type.
      KeyError: A field is missing.
    """
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{f.name: _read(hints[f.name], _checked(dict, value)[f.name]) for f in dataclasses.fields(kind)})  # pyright: ignore[reportCallIssue]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        items = _checked(list, value)
        if arguments[-1] is Ellipsis:
            return tuple(_read(arguments[0], item) for item in items)
        return tuple(_read(kind, item) for kind, item in zip(arguments, items, strict=True))
    if origin is types.UnionType:
        return None if value is None else _read(arguments[0], value)
    if origin is Literal:
        if value not in arguments:
            raise TypeError(f"{value!r} is none of {', '.join(map(repr, arguments))}")
        return value
    return _checked((int, float) if kind is float else kind, value)


def _checked(kind: type | tuple[type, ...], value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.80} is not of type {kind}")
    return value
