"""Causal attention that never holds the scores: splash attention, on any mesh that shards batch and heads."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shardtorch.engine import Engine, Kernel
from shardtorch.engine._splash import SplashBackward, SplashForward
from shardtorch.errors import ShardingError
from shardtorch.mesh import Mesh, PartitionSpec, SpecLike

_LANES = 128
_BLOCKS = (1024, 512, 256, 128)
"""Rows of a block; the largest is taken that divides the sequence and fits. 2048 need more VMEM than a kernel gets by
default, even of 128 bfloat16 columns."""
_BLOCK_WORK = 2**28
"""Most that rows times bytes of a block of q, k or v may be, as scores grow with the square of rows. With libtpu 0.0.40
blocks of 1024 x 128 in bfloat16, and of 512 rows with 256 columns or in float32, compile forward and backward for every
generation; twice the rows do not for v4."""


def why_not_flash(seq_len: int, head_dim: int, num_kv_heads: int, mesh: Mesh, spec: SpecLike) -> str | None:
    """Why the kernel can't be used, in words; None if it can.

    Args:
      seq_len: Of queries and keys.
      head_dim: Width of a head.
      num_kv_heads: Key and value heads; a device needs those of its query heads, and whole ones.
      mesh: Bound.
      spec: How `[batch, heads, seq, head_dim]` lies on the mesh.
    """
    spec = PartitionSpec.of(spec)
    if seq_len % _LANES:
        return f"the sequence length, {seq_len}, is no multiple of {_LANES}"
    if head_dim % _LANES:
        return f"head_dim, {head_dim}, is no multiple of {_LANES}"
    if any(mesh.axis_size(spec.axes_of(dim)) > 1 for dim in range(2, len(spec))):
        return f"the sequence or head_dim is cut up, {spec} on {mesh}"
    if num_kv_heads % mesh.axis_size(spec.axes_of(1)):
        return f"{num_kv_heads} key heads can't be shared out evenly, {spec} on {mesh}"
    return None


class FlashAttention(nn.Module):
    """Softmax attention of each position to itself and those before it, as a kernel. Takes the place of
    `shardtorch.models.CausalAttention`.

    Forward it keeps the output and the log-sum-exp of each row, so that the backward pass runs no forward kernel.

    Args:
      mesh: Bound.
      spec: How `[batch, heads, seq, head_dim]` lies on it: batch and heads may be sharded, key heads alike.
      engine: Where it runs; on virtual CPU devices the kernel is interpreted, which is slow.

    Source: splash attention of jax (jax.experimental.pallas.ops.tpu), after FlashAttention-2, arXiv:2307.08691.
    """

    def __init__(self, mesh: Mesh, spec: SpecLike, engine: Engine) -> None:
        super().__init__()
        self._mesh, self._spec, self._engine = mesh, PartitionSpec.of(spec), engine

    def forward(
        self,
        q: Float[Tensor, "batch heads seq head_dim"],
        k: Float[Tensor, "batch kv_heads seq head_dim"],
        v: Float[Tensor, "batch kv_heads seq head_dim"],
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Query head `h` reads key and value head `h // (heads / kv_heads)`; scores are times `head_dim ** -0.5`.

        Raises:
          ShardingError: The shapes are not for this kernel; see `why_not_flash`.
        """
        batch, heads, seq, head_dim = q.shape
        kv_heads = k.shape[1]
        reason = why_not_flash(seq, head_dim, kv_heads, self._mesh, self._spec)
        alike = k.shape == v.shape == (batch, kv_heads, seq, head_dim) and q.dtype == k.dtype == v.dtype
        if reason or not alike or heads % kv_heads:
            raise ShardingError(
                "flash attention takes queries, keys and values of one length, a multiple of 128, one dtype, and whole "
                "heads of a multiple of 128.",
                got=reason or ", ".join(f"{n} {tuple(x.shape)} {x.dtype}" for n, x in {"q": q, "k": k, "v": v}.items()),
                fix="use shardtorch.models.CausalAttention in its place.",
            )
        out = _Flash.apply(q * head_dim**-0.5, k, v, self)
        assert isinstance(out, Tensor)
        return out

    def run(self, tensors: tuple[Tensor, ...], *, backward: bool) -> list[Tensor]:
        """Calls one of the two kernels."""
        q = tensors[0]
        row_bytes = q.shape[3] * q.element_size()
        fitting = (block for block in _BLOCKS if q.shape[2] % block == 0 and block**2 * row_bytes <= _BLOCK_WORK)
        block = next(fitting, _LANES)
        interpret = self._engine.inventory().platform != "tpu"
        heads, rows = self._spec, PartitionSpec(*self._spec.entries[:2])
        if backward:
            ins, outs = (heads, heads, heads, heads, rows, heads), (heads, heads, heads)
            kernel = Kernel("flash_attention_backward", SplashBackward(block, interpret), self._mesh, ins, outs)
        else:
            ins, outs = (heads, heads, heads), (heads, rows)
            kernel = Kernel("flash_attention_forward", SplashForward(block, interpret), self._mesh, ins, outs)
        return self._engine.call_kernel(kernel, tensors)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, attention: FlashAttention) -> Tensor:
        out, log_sum_exp = attention.run((q, k, v), backward=False)
        ctx.attention = attention
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return (*ctx.attention.run((*ctx.saved_tensors, grads[0]), backward=True), None)
