"""What a search may try: the legal configurations, what each needs at least, and in which order to try them."""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shardtorch.aot._memory import memory_limit
from shardtorch.config import PlanConfig
from shardtorch.errors import ShardingError
from shardtorch.mesh import Mesh, SliceTopology
from shardtorch.mesh._mesh import divisors
from shardtorch.models import LlamaConfig
from shardtorch.run._inspect import rows
from shardtorch.run._model import batch_spec

MICROBATCHES = (1, 2, 4, 8)
PER_DEVICE = (1, 2, 4, 8, 16)
"""Sequences that a device has of a batch, where the size of the batch is open."""
_FLOAT32 = 4
_LOGITS_BYTES = 2**29  # see `loss_chunks`

_TOO_LARGE = "state, gradients and each layer's input alone need more HBM than a chip has"
_SLOWER = "replicas within a slice are estimated to be slower than more of fsdp"

Remat = Literal["full", "none"]


@dataclass(frozen=True)
class Candidate:
    """A configuration to try."""

    mesh: Mesh
    remat: Remat
    microbatches: int
    global_batch_size: int
    """In sequences."""
    least_bytes: int
    """HBM that it needs for certain, per chip; see `least_bytes`."""
    likely_bytes: int
    """HBM that it will need by a rough estimate, per chip: it decides only what is tried first."""
    estimate_s: float
    """A rough estimate of a step's time; see `estimate_s`. It decides only what is tried first."""

    def applied_to(self, config: PlanConfig, *, files: bool = False) -> PlanConfig:
        """The settings that plan this and nothing else; without `files`, they write none."""
        return replace(
            config if files else replace(config, json=None, html=None, timeline=None),
            mesh=_text(self.mesh.shape),
            dcn=_text({axis: factor for axis, factor in self.mesh.dcn.items() if factor > 1}),
            remat=self.remat,
            microbatches=self.microbatches,
            global_batch_size=self.global_batch_size,
            search=False,
            out=None,
        )

    def needs_no_less_than(self, other: "Candidate") -> bool:
        """Whether it is `other` with as many or more sequences in a microbatch, more microbatches, or less remat."""
        return (
            self.mesh == other.mesh
            and self.global_batch_size * other.microbatches >= other.global_batch_size * self.microbatches
            and self.microbatches >= other.microbatches
            and (self.remat, other.remat) != ("full", "none")
        )


@dataclass(frozen=True)
class Space:
    """What a search may try, and what it leaves out."""

    candidates: tuple[Candidate, ...]
    """In the order in which to try them."""
    left_out: Mapping[str, int]
    """Numbers of configurations that need not be compiled, by the reason, in words."""
    smallest: Candidate | None
    """The legal one that needs least, whether it can fit or not."""


def search_space(shape: LlamaConfig, topology: SliceTopology, config: PlanConfig) -> Space:
    """Every mesh, remat, number of microbatches, and if it is open, size of the batch, that can be worth compiling.

    Left out is what breaks a rule of the plan, what needs more memory than there is even by a lower bound, and replicas
    within a slice that are estimated slower than sharding the parameters over the same devices.
    """
    left_out: Counter[str] = Counter()
    legal = [each for mesh in meshes(topology) for each in _of_mesh(shape, topology, mesh, config, left_out)]
    limit = memory_limit(topology)
    fitting = [each for each in legal if each.least_bytes <= limit]
    if len(fitting) < len(legal):
        left_out[_TOO_LARGE] = len(legal) - len(fitting)
    sharded = {_over_same_devices(each): each.estimate_s for each in fitting if not _has_replicas(each.mesh)}
    kept = [
        each
        for each in fitting
        if not _has_replicas(each.mesh) or each.estimate_s < sharded.get(_over_same_devices(each), math.inf)
    ]
    if len(kept) < len(fitting):
        left_out[_SLOWER] = len(fitting) - len(kept)
    kept.sort(key=lambda each: _place_in_line(each, limit))
    return Space(tuple(kept), left_out, min(legal, key=lambda each: each.least_bytes, default=None))


def meshes(topology: SliceTopology) -> Iterator[Mesh]:
    """Every way to lay axes `data`, `fsdp` and `tensor` over the devices, without those of size 1.

    On several slices, one of `data` and `fsdp` crosses all of them, and `tensor` none: it talks most.

    >>> [dict(mesh.shape) for mesh in meshes(SliceTopology.parse("v5e:2x2"))][:3]
    [{'fsdp': 4}, {'data': 2, 'fsdp': 2}, {'data': 4}]
    >>> list(meshes(SliceTopology.parse("2 x v5e:1x1")))
    [Mesh(fsdp=2, dcn={'fsdp': 2}), Mesh(data=2, dcn={'data': 2})]
    """
    slices, num_devices = topology.num_slices, topology.num_devices
    for tensor in divisors(num_devices // slices):
        for data in divisors(num_devices // tensor):
            sizes = {"data": data, "fsdp": num_devices // tensor // data, "tensor": tensor}
            axes = {axis: size for axis, size in sizes.items() if size > 1} or {"fsdp": 1}
            if slices == 1:
                yield Mesh(axes)
            elif data % slices == 0:
                yield Mesh(axes, dcn={"data": slices})
            elif data == 1:
                yield Mesh(axes, dcn={"fsdp": slices})


def least_bytes(
    shape: LlamaConfig,
    topology: SliceTopology,
    mesh: Mesh,
    microbatch: int,
    config: PlanConfig,
) -> int:
    """HBM per chip that a step can't do without, in bytes: a lower bound, by what is alive as the backward pass ends.

    Parameters and two moments, in float32, by the plan's shardings; each layer's input, which remat keeps and which
    the backward pass needs without it; the gradients of the layers, in the computation's dtype, into which the loop
    over the layers writes while it reads the inputs.

    Args:
      shape: The model.
      topology: The slices.
      mesh: Over their devices; legal for the model.
      microbatch: Sequences of a microbatch, over all devices.
      config: For the sequence length and the dtype.

    Raises:
      ShardingError: The plan does not fit the mesh.
    """
    layer, rest = _parameter_bytes(shape, mesh)
    itemsize = _itemsize(config)
    state = 3 * (shape.num_layers * layer + rest)
    inputs = shape.num_layers * _tokens(mesh, microbatch, config) * shape.embed_dim * itemsize
    gradients = shape.num_layers * layer // _FLOAT32 * itemsize
    return topology.devices_per_chip * (state + inputs + gradients)


def estimate_s(
    shape: LlamaConfig,
    topology: SliceTopology,
    mesh: Mesh,
    remat: Remat,
    microbatches: int,
    batch: int,
    config: PlanConfig,
) -> float:
    """A step's time if matrix products ran at the chips' peak, with collectives before or after, in seconds.

    The model's FLOPs, a third more with remat, over the peak; and the bytes of the collectives that the plan asks for
    over the bandwidth of two links to neighbours, or of the data centre network. For each microbatch the parameters are
    gathered along `fsdp` twice and their gradients reduced once along `fsdp` and once along `data`; each layer's two
    blocks reduce activations along `tensor` in both passes, and again with remat.
    """
    sizes = {"data": 1, "fsdp": 1, "tensor": 1} | dict(mesh.shape)
    flops = batch * config.seq_len * shape.flops_per_token(config.seq_len) / topology.num_chips
    again = remat == "full"
    layer, rest = _parameter_bytes(shape, mesh)
    itemsize = _itemsize(config)
    held = (shape.num_layers * layer + rest) / _FLOAT32 * itemsize
    activations = _tokens(mesh, batch, config) * shape.embed_dim * itemsize
    dcn = {"data": 1, "fsdp": 1, "tensor": 1} | dict(mesh.dcn)
    ici = {axis: size // dcn[axis] for axis, size in sizes.items()}
    # What a device sends: of a gathered result, all but what it has; an all-reduce is a reduce-scatter and a gather.
    sent = {
        "fsdp": 3 * microbatches * held * dcn["fsdp"] * (ici["fsdp"] - 1),
        "data": 2 * microbatches * held * (ici["data"] - 1) / ici["data"],
        "tensor": (6 if again else 4) * shape.num_layers * 2 * activations * (ici["tensor"] - 1) / ici["tensor"],
    }
    # Within a slice first, so that what crosses slices is each device's own part.
    sent_over_dcn = microbatches * held * (3 * (dcn["fsdp"] - 1) + 2 * (dcn["data"] - 1) / dcn["data"] / ici["data"])
    per_device = 1 / topology.devices_per_chip
    return (
        flops * (4 / 3 if again else 1) / topology.bf16_flops
        + sum(sent.values()) / (2 * topology.ici_link_bandwidth * per_device)
        + sent_over_dcn / (topology.dcn_bandwidth * per_device)
    )


def _of_mesh(
    shape: LlamaConfig, topology: SliceTopology, mesh: Mesh, config: PlanConfig, left_out: Counter[str]
) -> Iterator[Candidate]:
    """The legal configurations on a mesh; counts the others."""
    batch_devices = mesh.axis_size(batch_spec(mesh).axes_of(0))
    sizes = [config.global_batch_size] if config.global_batch_size else [n * batch_devices for n in PER_DEVICE]
    found: list[tuple[int, int]] = []
    for batch in sizes:
        for microbatches in MICROBATCHES:
            if batch % (batch_devices * microbatches) == 0:
                found.append((batch, microbatches))
            elif config.global_batch_size:
                left_out[f"not every device has an equal part of every microbatch of a batch of {batch}"] += 2
    reason = _why_not(shape, mesh)
    if reason is not None:
        if found:
            left_out[reason] += 2 * len(found)
        return
    for batch, microbatches in found:
        least = least_bytes(shape, topology, mesh, batch // microbatches, config)
        for remat in ("none", "full"):
            yield Candidate(
                mesh,
                remat,
                microbatches,
                batch,
                least,
                least + _working_bytes(shape, topology, mesh, remat, batch // microbatches, config),
                estimate_s(shape, topology, mesh, remat, microbatches, batch, config),
            )


def _place_in_line(candidate: Candidate, limit: int) -> tuple[object, ...]:
    """What will hardly fit comes last. Estimates within about 1 % are equal; then few microbatches, which make small
    programs, and little memory come first."""
    hundredths = round(100 * math.log(candidate.estimate_s / candidate.global_batch_size))
    return candidate.likely_bytes > limit, hundredths, candidate.microbatches, candidate.least_bytes


def _why_not(shape: LlamaConfig, mesh: Mesh) -> str | None:
    """Why a model can't be on a mesh; None if it can."""
    tensor = mesh.shape.get("tensor", 1)
    for number, what in ((shape.num_heads, "attention heads"), (shape.num_kv_heads, "key and value heads")):
        if number % tensor:
            return f"the size along 'tensor' does not divide the {number} {what}"
    try:
        rows(replace(shape, num_layers=1), mesh)
    except ShardingError as error:
        return error.law
    return None


def _working_bytes(
    shape: LlamaConfig, topology: SliceTopology, mesh: Mesh, remat: Remat, microbatch: int, config: PlanConfig
) -> int:
    """Roughly what a step needs beyond `least_bytes`: what one layer computes, without remat every layer; two layers'
    gathered parameters; logits and their gradients."""
    tensor = mesh.shape.get("tensor", 1)
    width = shape.num_heads * shape.head_dim * 2 + shape.num_kv_heads * shape.head_dim * 2 + 3 * shape.mlp_dim
    computed = _tokens(mesh, microbatch, config) * (4 * shape.embed_dim + width // tensor) * _itemsize(config)
    layer, _ = _parameter_bytes(shape, mesh)
    gathered = 2 * layer // _FLOAT32 * _itemsize(config) * mesh.shape.get("fsdp", 1)
    layers = shape.num_layers if remat == "none" else 1
    return topology.devices_per_chip * (computed * layers + gathered + 2 * _LOGITS_BYTES // tensor)


@functools.cache
def _parameter_bytes(shape: LlamaConfig, mesh: Mesh) -> tuple[int, int]:
    """Float32 bytes that a device holds of one layer's parameters, and of those outside of layers."""
    # All layers lie alike, and a model of one is made quickly.
    sizes = [("*" in row.parameter, row.bytes_per_device) for row in rows(replace(shape, num_layers=1), mesh)]
    return sum(size for inside, size in sizes if inside), sum(size for inside, size in sizes if not inside)


def _tokens(mesh: Mesh, sequences: int, config: PlanConfig) -> int:
    """Tokens that a device has of some sequences."""
    return sequences // mesh.axis_size(batch_spec(mesh).axes_of(0)) * config.seq_len


def _itemsize(config: PlanConfig) -> int:
    return 2 if config.compute_dtype == "bfloat16" else _FLOAT32


def _has_replicas(mesh: Mesh) -> bool:
    """Whether devices of one slice hold the same parameters."""
    return mesh.ici.get("data", 1) > 1


def _over_same_devices(candidate: Candidate) -> tuple[object, ...]:
    """Equal for configurations that differ in how many of the batch's devices are replicas within a slice."""
    mesh = candidate.mesh
    crossing = next((axis for axis, factor in mesh.dcn.items() if factor > 1), None)
    others = (candidate.remat, candidate.microbatches, candidate.global_batch_size)
    return (mesh.shape.get("tensor", 1), crossing, *others)


def _text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())
