"""Kernels in jax for the hot ops of a model, with torch's own op as their reference."""

from shardtorch.pallas._attention import FlashAttention as FlashAttention
from shardtorch.pallas._attention import why_not_flash as why_not_flash
