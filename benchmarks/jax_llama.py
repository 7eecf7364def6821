"""The training step of shardtorch's Llama in plain jax, as MaxText writes one: what ours is measured against.

Layers are one `lax.scan` over stacked weights with full rematerialization; parameters and Adam's moments are float32
and cast to bfloat16 where used; attention is the splash kernel inside `shard_map`; shardings are annotations of
parameters and activations, and the partitioner finds the collectives.

Three things are as in shardtorch, so that both do the same work on the same devices: the loss computes its gradients
along with itself, chunk by chunk, and sums them per group of devices (MaxText computes the logits again in the backward
pass); device ids fill the mesh in order; weight decay spares the norms.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from shardtorch.models import LlamaConfig

BATCH = ("data", "fsdp")
SHARDINGS = {
    "embed": ("tensor", "fsdp"),
    "norm": (None,),
    "head": ("tensor", "fsdp"),
    "attention_norm": (None, None),
    "wq": (None, "fsdp", "tensor", None),
    "wk": (None, "fsdp", "tensor", None),
    "wv": (None, "fsdp", "tensor", None),
    "wo": (None, "tensor", None, "fsdp"),
    "mlp_norm": (None, None),
    "w_gate": (None, "fsdp", "tensor"),
    "w_up": (None, "fsdp", "tensor"),
    "w_down": (None, "tensor", "fsdp"),
}
"""Mesh axes of every parameter; those of layers have the layer first."""
Params = dict[str, Any]
IGNORED_TARGET = -100


def shapes(config: "LlamaConfig") -> dict[str, tuple[int, ...]]:
    """Of every parameter; those of layers are stacked."""
    layers, embed, mlp = config.num_layers, config.embed_dim, config.mlp_dim
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    return {
        "embed": (config.vocab_size, embed),
        "norm": (embed,),
        "head": (config.vocab_size, embed),
        "attention_norm": (layers, embed),
        "wq": (layers, embed, heads, head_dim),
        "wk": (layers, embed, kv_heads, head_dim),
        "wv": (layers, embed, kv_heads, head_dim),
        "wo": (layers, heads, head_dim, embed),
        "mlp_norm": (layers, embed),
        "w_gate": (layers, embed, mlp),
        "w_up": (layers, embed, mlp),
        "w_down": (layers, mlp, embed),
    }


class Step:
    """`(state, tokens, targets, lr) -> (state, [loss, grad_norm])`, state being parameters, two moments and a count.

    Args:
      config: The model; its embeddings are not tied.
      mesh: Of jax.
      loss_chunks: In how many pieces along the sequence the loss is computed.
    """

    def __init__(self, config: "LlamaConfig", mesh: jax.sharding.Mesh, loss_chunks: int) -> None:
        assert not config.tie_embeddings, "no preset of a size that is benchmarked ties them"
        self.config, self.mesh, self.loss_chunks = config, mesh, loss_chunks

    def sharding(self, *axes: str | tuple[str, ...] | None) -> NamedSharding:
        """A sharding by those of the named axes that the mesh has."""

        def present(entry: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
            if isinstance(entry, tuple):
                return tuple(axis for axis in entry if axis in self.mesh.axis_names) or None
            return entry if entry in self.mesh.axis_names else None

        return NamedSharding(self.mesh, PartitionSpec(*map(present, axes)))

    def constrain(self, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
        """Annotates an activation."""
        return jax.lax.with_sharding_constraint(x, self.sharding(*axes))

    def __call__(
        self, state: tuple[Params, Params, Params, jax.Array], tokens: jax.Array, targets: jax.Array, lr: jax.Array
    ) -> tuple[tuple[Params, Params, Params, jax.Array], jax.Array]:
        params, means, squares, count = state
        loss, grads = jax.value_and_grad(self.loss)(params, tokens, targets)
        grad_norm = jnp.sqrt(sum(jnp.sum(jnp.square(grad)) for grad in grads.values()))
        scale = jnp.minimum(1.0, 1.0 / (grad_norm + 1e-6))
        count = count + 1
        updated: tuple[Params, Params, Params] = ({}, {}, {})
        for name, param in params.items():
            grad = grads[name] * scale
            mean = 0.9 * means[name] + 0.1 * grad
            square = 0.95 * squares[name] + 0.05 * jnp.square(grad)
            update = mean / (1 - 0.9**count) / (jnp.sqrt(square / (1 - 0.95**count)) + 1e-8)
            decay = 0.0 if "norm" in name else 0.1
            for new, value in zip(updated, (param - lr * (update + decay * param), mean, square), strict=True):
                new[name] = value
        return (*updated, count), jnp.stack([loss, grad_norm])

    def loss(self, params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean negative log-likelihood of the targets."""
        tables = rotary_tables(self.config, tokens.shape[1])
        x = self.constrain(params["embed"].astype(jnp.bfloat16)[tokens], BATCH, None, None)
        layers = {name: param for name, param in params.items() if name not in ("embed", "norm", "head")}
        layer = jax.checkpoint(partial(self.layer, tables), policy=jax.checkpoint_policies.nothing_saveable)
        x, _ = jax.lax.scan(layer, x, layers)
        x = self.constrain(rms_norm(x, params["norm"], self.config.norm_eps), BATCH, None, None)
        groups = math.prod(self.mesh.shape.get(axis, 1) for axis in BATCH)
        return cross_entropy(x, params["head"].astype(jnp.bfloat16), targets, self.loss_chunks, groups)

    def layer(self, tables: tuple[jax.Array, jax.Array], x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        """One decoder layer, as the body of a scan."""
        residual, heads, hidden = (BATCH, None, None), (BATCH, None, "tensor", None), (BATCH, None, "tensor")
        w = {name: weight if "norm" in name else weight.astype(jnp.bfloat16) for name, weight in weights.items()}
        y = self.constrain(rms_norm(x, w["attention_norm"], self.config.norm_eps), *residual)
        q, k, v = (
            self.constrain(jnp.einsum("bse,ehd->bshd", y, w[name]), *heads).transpose(0, 2, 1, 3)
            for name in ("wq", "wk", "wv")
        )
        attended = self.attention(apply_rotary(q, *tables), apply_rotary(k, *tables), v).transpose(0, 2, 1, 3)
        x = x + self.constrain(jnp.einsum("bshd,hde->bse", self.constrain(attended, *heads), w["wo"]), *residual)
        y = self.constrain(rms_norm(x, w["mlp_norm"], self.config.norm_eps), *residual)
        gate, up = (self.constrain(jnp.einsum("bse,em->bsm", y, w[name]), *hidden) for name in ("w_gate", "w_up"))
        y = self.constrain(jnp.einsum("bsm,me->bse", jax.nn.silu(gate) * up, w["w_down"]), *residual)
        return self.constrain(x + y, *residual), None

    def attention(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Causal attention over `[batch, heads, seq, head_dim]`."""
        spec = self.sharding(BATCH, "tensor", None, None).spec
        kernel = splash_kernel(self.config.num_heads // self.mesh.shape.get("tensor", 1), q.shape[2])
        local = jax.shard_map(jax.vmap(kernel), mesh=self.mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
        return local(q * self.config.head_dim**-0.5, k, v)


def splash_kernel(num_heads: int, seq_len: int) -> Any:
    """The attention kernel of one device, with the blocks that shardtorch takes."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block = next(block for block in (1024, 512, 256, 128) if seq_len % block == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    blocks = splash.BlockSizes(**{f"block_{name}": block for name in names})
    mask = masks.MultiHeadMask([masks.CausalMask((seq_len, seq_len))] * num_heads)
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Inside in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps) * weight).astype(x.dtype)


def rotary_tables(config: "LlamaConfig", seq_len: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, `[seq, head_dim / 2]`; without Llama 3.1's scaling, which changes values only."""
    frequencies = config.rope_theta ** -(jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    angles = jnp.arange(seq_len, dtype=jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `[batch, heads, seq, head_dim]`."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(x: jax.Array, weight: jax.Array, targets: jax.Array, num_chunks: int, num_groups: int) -> jax.Array:
    """Mean negative log-likelihood under the logits `x @ weight.T`; see `shardtorch.models.chunked_cross_entropy`."""
    return _loss_and_grads(x, weight, targets, num_chunks, num_groups)[0]


def _loss_and_grads(x: jax.Array, weight: jax.Array, targets: jax.Array, num_chunks: int, num_groups: int) -> Any:
    batch, seq, embed = x.shape
    wide_weight, ids = weight.astype(jnp.float32), jnp.arange(weight.shape[0])
    scored = targets != IGNORED_TARGET
    scale = scored / jnp.maximum(scored.sum(), 1)

    def chunked(a: jax.Array) -> jax.Array:
        """Every `num_chunks`-th position is a chunk."""
        return a.reshape(batch, seq // num_chunks, num_chunks, -1).transpose(2, 0, 1, 3)

    loss, weight_grad, x_grads = jnp.float32(0), jnp.float32(0), []
    for x_chunk, target, chunk_scale in zip(chunked(x), chunked(targets), chunked(scale), strict=True):
        logits = jnp.einsum("bse,ve->bsv", x_chunk.astype(jnp.float32), wide_weight)
        is_target = ids == target
        log_normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        target_logit = jnp.where(is_target, logits, 0).sum(axis=-1, keepdims=True)
        loss += ((log_normalizer - target_logit) * chunk_scale).sum()
        logits_grad = ((jnp.exp(logits - log_normalizer) - is_target) * chunk_scale).astype(x.dtype)
        x_grads.append(jnp.einsum("bsv,ve->bse", logits_grad, weight))
        rows, columns = (a.reshape(num_groups, batch // num_groups, *a.shape[1:]) for a in (logits_grad, x_chunk))
        weight_grad += jnp.einsum("gbsv,gbse->gve", rows, columns).astype(jnp.float32)
    x_grad = jnp.stack(x_grads).transpose(1, 2, 0, 3).reshape(batch, seq, embed)
    return loss, (x_grad, weight_grad.sum(axis=0).astype(weight.dtype))


def _scale_grads(num_chunks: int, num_groups: int, grads: tuple[jax.Array, jax.Array], loss_grad: jax.Array) -> Any:
    del num_chunks, num_groups
    return *((grad * loss_grad).astype(grad.dtype) for grad in grads), None


cross_entropy.defvjp(_loss_and_grads, _scale_grads)


def lower_step(
    config: "LlamaConfig", mesh_sizes: dict[str, int], topology: str, batch: int, seq: int, *, loss_chunks: int
) -> jax.stages.Lowered:
    """The step over a slice that need not exist, before it is compiled; see `compile_step`."""
    from jax.experimental import topologies

    jax.config.update("jax_use_shardy_partitioner", False)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    devices = np.array(sorted(devices, key=lambda device: device.id)).reshape(tuple(mesh_sizes.values()))
    step = Step(config, jax.sharding.Mesh(devices, tuple(mesh_sizes)), loss_chunks)

    def empty(shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=step.sharding(*axes))

    stored = {name: empty(shape, jnp.float32, *SHARDINGS[name]) for name, shape in shapes(config).items()}
    state = (stored, stored, stored, empty((), jnp.float32))
    rows = empty((batch, seq), jnp.int32, BATCH, None)
    out_shardings = (jax.tree.map(lambda x: x.sharding, state), step.sharding())
    return jax.jit(step, donate_argnums=0, out_shardings=out_shardings).lower(state, rows, rows, empty((), jnp.float32))


def compile_step(
    config: "LlamaConfig", mesh_sizes: dict[str, int], topology: str, batch: int, seq: int, *, loss_chunks: int
) -> jax.stages.Compiled:
    """Compiles the step for a slice that need not exist.

    Args:
      config: The model.
      mesh_sizes: Sizes of some of `data`, `fsdp` and `tensor`, slowest first.
      topology: One slice as libtpu names it, such as `v5p:4x4x4`.
      batch: Sequences per step, on all devices.
      seq: Tokens per sequence.
      loss_chunks: In how many pieces along the sequence the loss is computed.
    """
    return lower_step(config, mesh_sizes, topology, batch, seq, loss_chunks=loss_chunks).compile()
