"""Lowerings that partition well, in place of torch's own.

torch folds batch dims into one before a matrix product: `[batch, seq]` in `linear`, `[batch, heads]` in attention. If
both are sharded the product of the fold can't be, and the partitioner gathers one of them. A dot with several batch
dims, which XLA has, keeps them apart. torch_xla lowers `torch.einsum` to one, but AOTAutograd takes it to pieces
first, so here it is an op of its own.
"""

import string

import torch
import torch.nn.functional as F
import torch_xla.core.xla_model
from einops import rearrange
from torch import Tensor
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("shardtorch::einsum", mutates_args=())
def _einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum(equation, a, b)


@_einsum.register_fake
def _(equation, a, b):
    inputs, output = equation.split("->")
    sizes = dict(zip(inputs.replace(",", ""), (*a.shape, *b.shape), strict=True))
    return a.new_empty([sizes[index] for index in output])


def _setup_context(ctx, inputs, output):
    ctx.equation, a, b = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx, grad):
    inputs, output = ctx.equation.split("->")
    first, second = inputs.split(",")
    a, b = ctx.saved_tensors
    grad_a = _einsum(f"{output},{second}->{first}", grad, b) if ctx.needs_input_grad[1] else None
    grad_b = _einsum(f"{output},{first}->{second}", grad, a) if ctx.needs_input_grad[2] else None
    return None, grad_a, grad_b


_einsum.register_autograd(_backward, setup_context=_setup_context)


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """`torch.einsum` of two tensors. Every index of an input is in the other input or in the output."""
    return _einsum(equation, a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x `[..., in]`, weight `[out, in]`."""
    if x.ndim == 0 or weight.ndim != 2:
        return F.linear(x, weight, bias)
    batch = string.ascii_lowercase[: x.ndim - 1]
    y = einsum(f"{batch}y,zy->{batch}z", x, weight)
    return y if bias is None else y + bias


def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """Softmax attention, q `[batch, heads, seq, dim]`, k and v `[batch, kv_heads, kv_seq, dim]`.

    Scores are float32. Query head `h` reads key head `h // (heads / kv_heads)`.
    """
    q = rearrange(q, "batch (kv_heads group) seq dim -> batch kv_heads group seq dim", kv_heads=k.shape[1])
    scores = einsum("bkgqd,bksd->bkgqs", q * (q.shape[-1] ** -0.5 if scale is None else scale), k).float()
    if is_causal:
        num_queries, num_keys = scores.shape[-2:]
        query = torch.arange(num_queries, device=q.device)[:, None]
        scores = scores.masked_fill(query < torch.arange(num_keys, device=q.device), float("-inf"))
    out = einsum("bkgqs,bksd->bkgqd", scores.softmax(dim=-1).to(v.dtype), v)
    return rearrange(out, "batch kv_heads group seq dim -> batch (kv_heads group) seq dim")


@torch.library.custom_op("shardtorch::in_order", mutates_args=())
def in_order(tensors: list[Tensor]) -> list[Tensor]:
    """See `Engine.in_order`: XLA's optimization barrier."""
    copies = [x.clone() for x in tensors]
    torch_xla.core.xla_model.optimization_barrier_(copies)
    return copies


@in_order.register_fake
def _(tensors):
    return [torch.empty_like(x) for x in tensors]


class PartitionedOps(TorchFunctionMode):
    """While it is active, `linear` and `scaled_dot_product_attention` on XLA tensors are those of this module."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear and args and args[0].device.type == "xla":
            return linear(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            lowered = _lower_attention(*args, **kwargs)
            if lowered is not None:
                return lowered
        return func(*args, **kwargs)


def _lower_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor | None:
    """None for what `attention` does not do: masks, dropout, other ranks, broadcasting, heads that do not fit."""
    shapes_fit = (
        query.ndim == key.ndim == value.ndim == 4
        and query.shape[0] == key.shape[0]
        and key.shape[:3] == value.shape[:3]
        and query.shape[1] % key.shape[1] == 0
        and (enable_gqa or query.shape[1] == key.shape[1])
    )
    if query.device.type != "xla" or attn_mask is not None or dropout_p or not shapes_fit:
        return None
    return attention(query, key, value, is_causal=is_causal, scale=scale)
