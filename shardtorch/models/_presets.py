"""Llama models by name."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from ._llama import LlamaConfig
from ._rope import RopeScaling


def _llama_3_1(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=mlp_dim,
        max_seq_len=131_072,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192),
        tie_embeddings=False,
    )


def _llama_2(num_layers: int, embed_dim: int, num_heads: int, num_kv_heads: int, mlp_dim: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32_000,
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        mlp_dim=mlp_dim,
        max_seq_len=4096,
        norm_eps=1e-5,
        rope_theta=10_000.0,
    )


PRESETS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        # Learns English on a laptop. Every dim that a mesh may split divides by 8.
        "llama-tiny": LlamaConfig(
            vocab_size=2048,
            num_layers=4,
            embed_dim=256,
            num_heads=16,
            num_kv_heads=8,
            head_dim=16,
            mlp_dim=768,
            max_seq_len=256,
            rope_theta=10_000.0,
        ),
        # Llama 2, arXiv:2307.09288, and the released configurations.
        "llama2-7b": _llama_2(num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=32, mlp_dim=11_008),
        "llama2-13b": _llama_2(num_layers=40, embed_dim=5120, num_heads=40, num_kv_heads=40, mlp_dim=13_824),
        "llama2-70b": _llama_2(num_layers=80, embed_dim=8192, num_heads=64, num_kv_heads=8, mlp_dim=28_672),
        # The Llama 3 Herd of Models, arXiv:2407.21783, table 3; context and rotary scaling as released in Llama 3.1.
        "llama3-8b": _llama_3_1(num_layers=32, embed_dim=4096, num_heads=32, mlp_dim=14_336),
        "llama3-70b": _llama_3_1(num_layers=80, embed_dim=8192, num_heads=64, mlp_dim=28_672),
        "llama3-405b": _llama_3_1(num_layers=126, embed_dim=16_384, num_heads=128, mlp_dim=53_248),
    }
)
"""Model shapes by name."""


def preset(name: str) -> LlamaConfig:
    """The model shape of that name.

    Raises:
      ValueError: There is none.

    >>> preset("llama3-8b").num_parameters
    8030261248
    """
    if name not in PRESETS:
        close = get_close_matches(name, PRESETS, n=1)
        raise ValueError(
            f"the model must be one of {', '.join(PRESETS)}.\n"
            f"  got: {name!r}\n"
            f"  fix: {f'did you mean {close[0]!r}?' if close else 'use one of these names.'}"
        )
    return PRESETS[name]
