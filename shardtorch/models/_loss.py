"""Cross-entropy over a large vocabulary, without the logits of a whole batch."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

InOrder = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Gives back the same tensors, after all of them are there."""

IGNORED_TARGET = -100
"""A target that is not predicted, as in `torch.nn.functional.cross_entropy`."""


def chunked_cross_entropy(
    x: Float[Tensor, "batch seq embed"],
    weight: Float[Tensor, "vocab embed"],
    targets: Int[Tensor, "batch seq"],
    num_chunks: int,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    num_groups: tuple[int, int] = (1, 1),
    in_order: InOrder = list,
) -> Float[Tensor, ""]:
    """Negative log-likelihood of `targets` under the logits `x @ weight.T`, of which only one chunk exists at a time.

    A chunk holds float32 logits of shape `[batch, seq / num_chunks, vocab]`. The gradients of `x` and `weight` are
    computed with the loss, from the same logits, and kept until the backward pass, which only scales them (Liger
    Kernel, arXiv:2410.10989). Where none are needed, only the loss is computed.

    Args:
      x: Last activations. Logits and all sums over chunks are float32, or float64 if `x` or `weight` is; gradients of
        one chunk are multiplied in the dtype of `x`.
      weight: Output projection, in the layout of `torch.nn.Linear`.
      targets: Token ids; -100 marks a position to leave out. Any other id outside `[0, vocab)` makes the loss NaN: an
        error would have to wait for the device.
      num_chunks: Number of chunks; divides `seq`.
      reduction: "mean" over the targets that are not left out, or their "sum".
      num_groups: Into how many parts `batch` and `seq` are divided for the gradient of `weight`: it is summed over the
        chunks for each part apart, and over the parts once, at the end. With as many as devices shard these dims, each
        device adds up its own part, and one sum goes through the network instead of one per chunk.
      in_order: Called with what a chunk has added to and what the next one starts from. A compiler that is free to
        choose the order may run all chunks side by side, which saves no memory; what it can't look through keeps them
        apart.

    Returns:
      A float32 scalar (float64 for float64 inputs). If all targets are left out, it is 0 and so are the gradients,
      where `torch.nn.functional.cross_entropy` gives NaN: such a batch has nothing to teach.

    Raises:
      ValueError: The shapes do not fit, `num_chunks` does not divide `seq`, `num_groups` does not divide `batch` and a
        chunk, or `reduction` is unknown.

    >>> x, weight = torch.ones(1, 4, 8), torch.zeros(16, 8)
    >>> chunked_cross_entropy(x, weight, torch.tensor([[3, 1, -100, 2]]), num_chunks=2)  # log(16)
    tensor(2.7726)
    """
    batch, seq, embed = x.shape
    if weight.shape[1] != embed or targets.shape != (batch, seq):
        raise ValueError(
            "weight must have shape (vocab, embed) and targets (batch, seq), where x is (batch, seq, embed).\n"
            f"  got: x {tuple(x.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}\n"
            "  fix: pass weight as torch.nn.Linear holds it, and one target per position of x."
        )
    if num_chunks < 1 or seq % num_chunks:
        divisors = [n for n in range(1, seq + 1) if seq % n == 0]
        raise ValueError(
            f"the number of loss chunks must divide the sequence length, {seq}.\n"
            f"  got: {num_chunks} chunks\n"
            f"  fix: use one of {', '.join(map(str, divisors))}."
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"the loss is reduced by a mean or a sum.\n  got: reduction={reduction!r}\n  fix: use 'mean' or 'sum'."
        )
    if min(num_groups) < 1 or batch % num_groups[0] or seq // num_chunks % num_groups[1]:
        raise ValueError(
            "the numbers of groups must divide the batch and the positions of a chunk.\n"
            f"  got: {num_groups} groups, a batch of {batch}, {num_chunks} chunks of {seq // num_chunks}\n"
            "  fix: use fewer groups or chunks."
        )
    # Inside an autograd.Function grad mode is always off, and needs_input_grad ignores it: it has to be asked here.
    return _ChunkedCrossEntropy.apply(  # type: ignore
        x, weight, targets, num_chunks, reduction, num_groups, in_order, torch.is_grad_enabled()
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        num_chunks: int,
        reduction: str,
        num_groups: tuple[int, int],
        in_order: InOrder,
        grad_enabled: bool,
    ) -> Tensor:
        needs_x_grad, needs_weight_grad = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        wide_weight, narrow_weight = weight.to(dtype), weight.to(x.dtype)
        vocab_ids = torch.arange(weight.shape[0], device=x.device)

        scored = targets != IGNORED_TARGET
        in_vocab = (targets >= 0) & (targets < weight.shape[0])
        scale = scored.to(dtype)
        if reduction == "mean":
            scale = scale / scored.sum().clamp(min=1)
        scale = torch.where(scored & ~in_vocab, torch.nan, scale)

        # A chunk takes every num_chunks-th position rather than a run of neighbours. The order does not matter to a
        # sum, and if seq is sharded, each device then has its equal part of every chunk.
        x_chunks = rearrange(x, "batch (seq chunks) embed -> chunks batch seq embed", chunks=num_chunks)
        target_chunks = rearrange(targets, "batch (seq chunks) -> chunks batch seq 1", chunks=num_chunks)
        scale_chunks = rearrange(scale, "batch (seq chunks) -> chunks batch seq 1", chunks=num_chunks)

        loss = torch.zeros((), dtype=dtype, device=x.device)
        x_grads: list[Tensor] = []
        group_grads: Tensor | None = None
        grouped = {"group": num_groups[0], "run": num_groups[1]}
        for x_chunk, target_chunk, scale_chunk in zip(x_chunks, target_chunks, scale_chunks, strict=True):
            started = [] if group_grads is None else [group_grads]
            x_chunk, loss, *made = in_order([x_chunk, loss, *x_grads[-1:], *started])
            if needs_x_grad and x_grads:
                x_grads[-1], *made = made
            if group_grads is not None:
                (group_grads,) = made
            logits = torch.einsum("bse,ve->bsv", x_chunk.to(dtype), wide_weight)
            # Comparing with all ids, where a gather would do, is deliberate: a gather along a sharded vocab makes the
            # partitioner replicate the logits, while this is elementwise and its sum is one small all-reduce.
            is_target = vocab_ids == target_chunk
            log_normalizer = logits.logsumexp(dim=-1, keepdim=True)
            target_logit = torch.where(is_target, logits, 0).sum(dim=-1, keepdim=True)
            loss = loss + ((log_normalizer - target_logit) * scale_chunk).sum()

            if needs_x_grad or needs_weight_grad:
                # These products take factors in the dtype of x; only logits need float32 ones. libtpu 0.0.40 predicts
                # for v5p:2x2x4, bfloat16 and 16 x 8192 tokens, that float32 factors here cost 1.4 to 3.4 GB a chip, and
                # those of the logits 3 to 5 % of the time of the loss (the same computation written in jax).
                logits_grad = ((logits - log_normalizer).exp() - is_target.to(dtype)) * scale_chunk
                logits_grad = logits_grad.to(x.dtype)
                if needs_x_grad:
                    x_grads.append(torch.einsum("bsv,ve->bse", logits_grad, narrow_weight))
                if needs_weight_grad:
                    rows, columns = (
                        rearrange(rows, "(group batch) (run seq) dim -> group run batch seq dim", **grouped)
                        for rows in (logits_grad, x_chunk)
                    )
                    chunk_grads = torch.einsum("grbsv,grbse->grve", rows, columns).to(dtype)
                    group_grads = chunk_grads if group_grads is None else group_grads + chunk_grads

        x_grad = rearrange(x_grads, "chunks batch seq embed -> batch (seq chunks) embed") if needs_x_grad else None
        weight_grad = None if group_grads is None else group_grads.sum(dim=(0, 1)).to(weight.dtype)
        ctx.save_for_backward(x_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # Not `once_differentiable`: that lets a second derivative pass as zero when `loss_grad` is a constant.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "chunked_cross_entropy has first derivatives only.\n"
                "  got: a backward pass with create_graph=True\n"
                "  fix: for a second derivative, use torch.nn.functional.cross_entropy on the model's logits."
            )
        (loss_grad,) = grad_outputs
        x_grad, weight_grad = (None if g is None else (g * loss_grad).to(g.dtype) for g in ctx.saved_tensors)
        return x_grad, weight_grad, *[None] * 6
