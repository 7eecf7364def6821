import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardtorch.models import IGNORED_TARGET, chunked_cross_entropy


def make_inputs(batch, seq, embed, vocab, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, seq, embed, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, embed, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (batch, seq), generator=generator)
    return x, weight, targets


def loss_and_grads(loss, x, weight):
    return [t.detach() for t in (loss, *torch.autograd.grad(loss, (x, weight)))]


class RecordedOps(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns, and how many matrix products ran."""

    def __init__(self):
        super().__init__()
        self.largest, self.num_matmuls = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        self.num_matmuls += func._schema.name in ("aten::mm", "aten::bmm", "aten::addmm")
        return result


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    num_chunks=st.integers(1, 5),
    chunk_len=st.integers(1, 4),
    vocab=st.integers(1, 9),
    reduction=st.sampled_from(["mean", "sum"]),
    ignored_share=st.sampled_from([0.0, 0.3, 0.9]),
    seed=st.integers(0, 2**16),
)
def test_equals_cross_entropy_of_whole_logits(batch, num_chunks, chunk_len, vocab, reduction, ignored_share, seed):
    seq = num_chunks * chunk_len
    x, weight, targets = make_inputs(batch, seq, 5, vocab, seed=seed)
    targets[torch.rand(batch, seq, generator=torch.Generator().manual_seed(seed)) < ignored_share] = IGNORED_TARGET
    expected = F.cross_entropy((x @ weight.T).flatten(0, 1), targets.flatten(), reduction=reduction)
    if (targets == IGNORED_TARGET).all() and reduction == "mean":
        expected = 0 * x.sum() + 0 * weight.sum()  # where torch gives NaN
    actual = chunked_cross_entropy(x, weight, targets, num_chunks, reduction=reduction)
    torch.testing.assert_close(loss_and_grads(actual, x, weight), loss_and_grads(expected, x, weight))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradcheck(reduction):
    x, weight, targets = make_inputs(2, 4, 3, 6)
    targets[0, 1] = IGNORED_TARGET

    def scaled_loss(x, weight):
        return 3 * chunked_cross_entropy(x, weight, targets, 2, reduction=reduction)

    assert torch.autograd.gradcheck(scaled_loss, (x, weight))


def test_all_targets_ignored_is_zero_with_zero_gradients():
    x, weight, targets = make_inputs(2, 4, 3, 6)
    loss = chunked_cross_entropy(x, weight, torch.full_like(targets, IGNORED_TARGET), 2)
    for value in loss_and_grads(loss, x, weight):
        torch.testing.assert_close(value, torch.zeros_like(value))


@pytest.mark.parametrize("wrong", [-1, 6, -101])
def test_target_outside_the_vocabulary_makes_the_loss_nan(wrong):
    x, weight, targets = make_inputs(2, 4, 3, 6)
    targets[1, 2] = wrong
    assert math.isnan(chunked_cross_entropy(x, weight, targets, 2).item())


def test_bfloat16_is_summed_in_float32():
    x, weight, targets = make_inputs(4, 256, 32, 64, dtype=torch.bfloat16)
    loss, x_grad, weight_grad = loss_and_grads(
        chunked_cross_entropy(x, weight, targets, 64, reduction="sum"), x, weight
    )
    assert (loss.dtype, x_grad.dtype, weight_grad.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    x_exact, weight_exact = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = F.cross_entropy((x_exact @ weight_exact.T).flatten(0, 1), targets.flatten(), reduction="sum")
    expected = loss_and_grads(exact, x_exact, weight_exact)
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-3, atol=0)
    # A sum of 64 chunks that is rounded to bfloat16 after each would be off by several times this.
    assert (weight_grad.double() - expected[2]).norm() < 5e-3 * expected[2].norm()
    assert (x_grad.double() - expected[1]).norm() < 5e-3 * expected[1].norm()


def test_no_tensor_is_as_large_as_the_logits():
    batch, seq, embed, vocab, num_chunks = 2, 16, 4, 64, 8
    x, weight, targets = make_inputs(batch, seq, embed, vocab)
    with RecordedOps() as ops:
        chunked_cross_entropy(x, weight, targets, num_chunks).backward()
    assert ops.largest == batch * seq * vocab // num_chunks
    with RecordedOps() as ops:
        F.cross_entropy((x @ weight.T).flatten(0, 1), targets.flatten()).backward()
    assert ops.largest == batch * seq * vocab  # the recorder sees what it should see


def test_computes_only_the_gradients_that_are_needed():
    x, weight, targets = make_inputs(2, 4, 3, 6)

    def num_matmuls(x, weight):
        with RecordedOps() as ops:
            chunked_cross_entropy(x, weight, targets, 2)
        return ops.num_matmuls

    assert num_matmuls(x, weight) == 6
    assert num_matmuls(x.detach(), weight) == 4
    assert num_matmuls(x, weight.detach()) == 4
    assert num_matmuls(x.detach(), weight.detach()) == 2
    with torch.no_grad():
        assert num_matmuls(x, weight) == 2


def test_second_derivative_is_an_error():
    x, weight, targets = make_inputs(2, 4, 3, 6)
    with pytest.raises(NotImplementedError, match=r"first derivatives only(.|\n)*create_graph=True"):
        torch.autograd.grad(chunked_cross_entropy(x, weight, targets, 2), x, create_graph=True)


def test_errors_teach():
    x, weight, targets = make_inputs(2, 12, 3, 6)
    with pytest.raises(
        ValueError, match=r"must divide the sequence length, 12(.|\n)*got: 5 (.|\n)*one of 1, 2, 3, 4, 6, 12"
    ):
        chunked_cross_entropy(x, weight, targets, 5)
    with pytest.raises(ValueError, match="must divide the sequence length"):
        chunked_cross_entropy(x, weight, targets, 0)
    with pytest.raises(ValueError, match="reduction='max'"):
        chunked_cross_entropy(x, weight, targets, 2, reduction="max")
    with pytest.raises(ValueError, match=r"got: x \(2, 12, 3\), weight \(3, 6\)"):
        chunked_cross_entropy(x, weight.T, targets, 2)
    with pytest.raises(ValueError, match=r"targets \(2, 11\)"):
        chunked_cross_entropy(x, weight, targets[:, 1:], 2)
