"""jax's splash attention as two functions: its own gradient rule can't be split into graph ops.

Private symbols of jax 0.7.1: `_splash_attention_forward`, `_splash_attention_bwd` of
`jax.experimental.pallas.ops.tpu.splash_attention`. tests/pallas compare both with torch's attention.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class SplashForward:
    """`(q, k, v) -> (out, log_sum_exp)`, of local pieces; q scaled.

    q `[batch, heads, seq, head_dim]`; k, v `[batch, kv_heads, seq, head_dim]`; out like q; log_sum_exp
    `[batch, heads, seq]`, float32.
    """

    block: int
    """Rows of q and k that are in VMEM together, a multiple of 128 that divides seq."""
    interpret: bool
    """Run as plain jax ops, for platforms other than TPU."""

    def __call__(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        import jax
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

        kernel = _make(q.shape[1], q.shape[2], self.block, self.interpret)

        def forward(q, k, v):
            kwargs = kernel.kwargs | {"save_residuals": True}
            out, (log_sum_exp,) = splash._splash_attention_forward(kernel.fwd_mask_info, q, k, v, None, None, **kwargs)
            return out, log_sum_exp

        return jax.vmap(forward)(q, k, v)


@dataclass(frozen=True)
class SplashBackward:
    """`(q, k, v, out, log_sum_exp, grad) -> (grad_q, grad_k, grad_v)`, of local pieces; see `SplashForward`."""

    block: int
    interpret: bool

    def __call__(self, q: Any, k: Any, v: Any, out: Any, log_sum_exp: Any, grad: Any) -> tuple[Any, Any, Any]:
        import jax
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

        kernel = _make(q.shape[1], q.shape[2], self.block, self.interpret)

        def backward(q, k, v, out, log_sum_exp, grad):
            residuals = (q, k, v, None, None, out, log_sum_exp, kernel.dq_mask_info, kernel.dkv_mask_info)
            grads = splash._splash_attention_bwd(**kernel.kwargs, res=residuals, do=grad)
            return grads[3:6]

        return jax.vmap(backward)(q, k, v, out, log_sum_exp, grad)


@lru_cache(maxsize=64)
def _make(num_heads: int, seq_len: int, block: int, interpret: bool) -> Any:
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    blocks = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    causal = masks.CausalMask((seq_len, seq_len))
    with jax.ensure_compile_time_eval():  # the mask's blocks are data, wherever the first call is traced
        return splash.make_splash_mha(
            masks.MultiHeadMask([causal] * num_heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
