"""Rotary position embedding (RoFormer, arXiv:2104.09864), with the frequency scaling of Llama 3.1."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Stretches the slow rotations of a model that was pretrained on shorter sequences, as Llama 3.1 does.

    Let `turns` be how often a frequency turns within `original_max_seq_len` positions. A frequency with more than
    `high_freq_factor` turns is kept, one with fewer than `low_freq_factor` is divided by `factor`, and in between the
    two are mixed linearly in `turns`. Source: `apply_scaling` in github.com/meta-llama/llama-models,
    models/llama3/model.py.
    """

    factor: float = 8.0
    """What the slowest frequencies are divided by; at least 1."""
    low_freq_factor: float = 1.0
    """Frequencies with fewer turns than this are divided by `factor`. In turns per `original_max_seq_len`."""
    high_freq_factor: float = 4.0
    """Frequencies with more turns than this are kept. In turns per `original_max_seq_len`."""
    original_max_seq_len: int = 8192
    """Sequence length of the first pretraining, in tokens."""

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(
                "rope_scaling.factor must be at least 1.\n"
                f"  got: factor={self.factor}\n"
                "  fix: use the ratio of the new sequence length to the old one (8 in Llama 3.1), or rope_scaling=None."
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "rope_scaling.low_freq_factor must be positive and less than high_freq_factor.\n"
                f"  got: low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}\n"
                "  fix: use 1 and 4, as Llama 3.1 does."
            )
        if self.original_max_seq_len < 1:
            raise ValueError(
                "rope_scaling.original_max_seq_len must be at least 1 token.\n"
                f"  got: original_max_seq_len={self.original_max_seq_len}\n"
                "  fix: use the sequence length of the first pretraining (8192 in Llama 3)."
            )


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, *, device: torch.device | None = None
) -> Float[Tensor, " half_head_dim"]:
    """Angle per position of every rotated pair, `theta ** (-2 * i / head_dim)`, fastest first.

    Args:
      head_dim: Size of one head; even.
      theta: Base of the geometric series.
      scaling: Stretches the slow frequencies; None keeps all.
      device: Where to compute them.

    Returns:
      float32, in radians per position.

    >>> rotary_frequencies(8, 10000.0)
    tensor([1.0000, 0.1000, 0.0100, 0.0010])
    """
    exponents = torch.arange(0, head_dim, 2, device=device).to(torch.float32) / head_dim
    frequencies = torch.pow(theta, -exponents)
    if scaling is None:
        return frequencies
    turns = frequencies * (scaling.original_max_seq_len / (2 * math.pi))
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotary_tables(
    seq_len: int, head_dim: int, theta: float, scaling: RopeScaling | None = None, *, device: torch.device | None = None
) -> tuple[Float[Tensor, "seq half_head_dim"], Float[Tensor, "seq half_head_dim"]]:
    """Cosine and sine of every angle, for the positions 0 to `seq_len - 1`.

    They are made from integer positions in float32, whatever the model's dtype: bfloat16 has no 257.

    Args:
      seq_len: Number of positions.
      head_dim: Size of one head; even.
      theta: Base of the frequencies.
      scaling: Stretches the slow frequencies; None keeps all.
      device: Where to compute them.

    Returns:
      `(cos, sin)`, float32, each of shape `[seq_len, head_dim / 2]`.
    """
    positions = torch.arange(seq_len, device=device).to(torch.float32)
    angles = positions[:, None] * rotary_frequencies(head_dim, theta, scaling, device=device)
    return angles.cos(), angles.sin()


def apply_rotary(
    x: Float[Tensor, "batch heads seq head_dim"],
    cos: Float[Tensor, "seq half_head_dim"],
    sin: Float[Tensor, "seq half_head_dim"],
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Rotates every pair `(x[..., i], x[..., i + head_dim / 2])` by its angle.

    Pairs are split by halves, as in Hugging Face's Llama checkpoints. Meta's own checkpoints pair neighbours
    `(x[..., 2 * i], x[..., 2 * i + 1])`: their wq and wk need their rows permuted within each head.

    Args:
      x: Queries or keys.
      cos: Cosines, as from `rotary_tables`.
      sin: Sines, as from `rotary_tables`.

    Returns:
      The rotated `x`, computed at least in float32 and returned in the dtype of `x`.
    """
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
