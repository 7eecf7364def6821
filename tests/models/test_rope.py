import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtorch.models import RopeScaling
from shardtorch.models._rope import apply_rotary, rotary_frequencies, rotary_tables

LLAMA_3_1 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)


def rotated(vector, position, theta=10_000.0):
    cos, sin = rotary_tables(position + 1, vector.shape[-1], theta)
    return apply_rotary(vector[None, None, None, :], cos[-1:].double(), sin[-1:].double()).flatten()


@settings(max_examples=50)
@given(
    half_head_dim=st.integers(1, 8),
    q_position=st.integers(0, 200),
    k_position=st.integers(0, 200),
    shift=st.integers(0, 200),
    seed=st.integers(0, 2**16),
)
def test_scores_depend_only_on_the_distance(half_head_dim, q_position, k_position, shift, seed):
    q, k = torch.randn(2, 2 * half_head_dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    here = rotated(q, q_position) @ rotated(k, k_position)
    there = rotated(q, q_position + shift) @ rotated(k, k_position + shift)
    torch.testing.assert_close(here, there, rtol=0, atol=1e-3)


@settings(max_examples=50)
@given(half_head_dim=st.integers(1, 8), position=st.integers(0, 5000), seed=st.integers(0, 2**16))
def test_rotation_keeps_the_norm(half_head_dim, position, seed):
    q = torch.randn(2 * half_head_dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(rotated(q, position).norm(), q.norm(), rtol=1e-5, atol=0)


def test_position_zero_is_the_identity():
    q = torch.randn(16, dtype=torch.float64)
    torch.testing.assert_close(rotated(q, 0), q)


def test_rotation_is_a_complex_product():
    seq, head_dim = 9, 8
    x = torch.randn(2, 3, seq, head_dim)
    angles = torch.tensor([[p * 10_000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)] for p in range(seq)])
    turned = torch.complex(x[..., : head_dim // 2], x[..., head_dim // 2 :]) * torch.polar(
        torch.ones_like(angles), angles
    )
    actual = apply_rotary(x, *rotary_tables(seq, head_dim, 10_000.0))
    torch.testing.assert_close(actual, torch.cat((turned.real, turned.imag), dim=-1))


def test_tables_are_float32_and_exact_at_positions_that_bfloat16_lacks():
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        cos, sin = rotary_tables(4098, 8, 10_000.0)
    finally:
        torch.set_default_dtype(default)
    assert cos.dtype == sin.dtype == torch.float32
    assert math.isclose(cos[4097, 0], math.cos(4097), abs_tol=1e-6)
    assert math.isclose(sin[4097, 1], math.sin(409.7), abs_tol=1e-4)


def test_rotation_keeps_the_dtype():
    x = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
    assert apply_rotary(x, *rotary_tables(4, 8, 10_000.0)).dtype == torch.bfloat16


def meta_apply_scaling(frequencies):
    """`apply_scaling` of Llama 3.1 as Meta published it: github.com/meta-llama/llama-models, models/llama3/model.py."""
    scale_factor, low_freq_factor, high_freq_factor, old_context_len = 8, 1, 4, 8192
    low_freq_wavelen = old_context_len / low_freq_factor
    high_freq_wavelen = old_context_len / high_freq_factor
    new_frequencies = []
    for frequency in frequencies:
        wavelen = 2 * math.pi / frequency
        if wavelen < high_freq_wavelen:
            new_frequencies.append(frequency)
        elif wavelen > low_freq_wavelen:
            new_frequencies.append(frequency / scale_factor)
        else:
            smooth = (old_context_len / wavelen - low_freq_factor) / (high_freq_factor - low_freq_factor)
            new_frequencies.append((1 - smooth) * frequency / scale_factor + smooth * frequency)
    return new_frequencies


def test_scaling_equals_the_published_formula():
    plain = [500_000.0 ** (-2 * i / 128) for i in range(64)]
    expected = torch.tensor(meta_apply_scaling(plain))
    actual = rotary_frequencies(128, 500_000.0, LLAMA_3_1)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    kept, mixed, slowed = (
        actual == torch.tensor(plain),
        actual < torch.tensor(plain),
        actual * 8 <= torch.tensor(plain) * 1.0001,
    )
    assert kept.sum() > 20
    assert slowed.sum() > 20
    assert (mixed & ~slowed).sum() > 3  # all three branches were seen


def test_without_scaling_the_series_is_geometric():
    frequencies = rotary_frequencies(64, 10_000.0)
    torch.testing.assert_close(frequencies[1:] / frequencies[:-1], torch.full((31,), 10_000.0 ** (-1 / 32)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"factor": 0.5}, r"factor must be at least 1\.\n  got: factor=0\.5\n  fix: "),
        ({"low_freq_factor": 4.0}, r"less than high_freq_factor\.\n  got: low_freq_factor=4\.0, high_freq_factor=4\.0"),
        ({"low_freq_factor": 0.0}, "low_freq_factor must be positive"),
        ({"original_max_seq_len": 0}, "original_max_seq_len must be at least 1 token"),
    ],
)
def test_scaling_errors_teach(changed, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**changed)
