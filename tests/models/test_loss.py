import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_python
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


# Groups and order


@settings(max_examples=60)
@given(
    num_groups=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    rows_per_group=st.integers(1, 2),
    positions_per_group=st.integers(1, 2),
    num_chunks=st.integers(1, 4),
    reduction=st.sampled_from(["mean", "sum"]),
    ignored_share=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**16),
)
def test_groups_change_no_value(
    num_groups, rows_per_group, positions_per_group, num_chunks, reduction, ignored_share, seed
):
    batch, seq = num_groups[0] * rows_per_group, num_groups[1] * positions_per_group * num_chunks
    x, weight, targets = make_inputs(batch, seq, 5, 7, seed=seed)
    targets[torch.rand(batch, seq, generator=torch.Generator().manual_seed(seed)) < ignored_share] = IGNORED_TARGET
    grouped = chunked_cross_entropy(x, weight, targets, num_chunks, reduction=reduction, num_groups=num_groups)
    whole = chunked_cross_entropy(x, weight, targets, num_chunks, reduction=reduction)
    torch.testing.assert_close(
        loss_and_grads(grouped, x, weight), loss_and_grads(whole, x, weight), rtol=1e-12, atol=1e-12
    )


def test_gradcheck_of_groups():
    x, weight, targets = make_inputs(4, 8, 3, 6)

    def loss(x, weight):
        return chunked_cross_entropy(x, weight, targets, 2, num_groups=(2, 2))

    assert torch.autograd.gradcheck(loss, (x, weight))


@pytest.mark.parametrize("num_groups", [(4, 1), (5, 1), (1, 4), (2, 6), (12, 1), (1, 12), (0, 1), (1, -1)])
def test_groups_divide_the_batch_and_a_chunk(num_groups):
    x, weight, targets = make_inputs(6, 12, 3, 6)
    with pytest.raises(
        ValueError,
        match=rf"must divide the batch and the positions of a chunk.\n"
        rf"  got: {re.escape(str(num_groups))} groups, a batch of 6, 4 chunks of 3\n"
        r"  fix: use fewer groups or chunks",
    ):
        chunked_cross_entropy(x, weight, targets, 4, num_groups=num_groups)


@pytest.mark.parametrize("num_groups", [(1, 1), (2, 3)])
@pytest.mark.parametrize("needs_weight_grad", [True, False])
@pytest.mark.parametrize("needs_x_grad", [True, False])
def test_a_chunk_starts_from_what_came_out_of_in_order(needs_x_grad, needs_weight_grad, num_groups):
    x, weight, targets = make_inputs(2, 12, 3, 6)
    x.requires_grad_(needs_x_grad)
    weight.requires_grad_(needs_weight_grad)
    leaves = [leaf for leaf in (x, weight) if leaf.requires_grad]

    def results(**how):
        loss = chunked_cross_entropy(x, weight, targets, 4, reduction="sum", **how)
        return loss.detach(), *(torch.autograd.grad(loss, leaves) if leaves else ())

    given = []

    def copy_and_spoil(tensors):
        copies = [tensor.clone() for tensor in tensors]
        given.append(copies)
        for tensor in tensors:
            tensor.fill_(torch.nan)
        return copies

    expected, original = results(), x.detach().clone()
    actual = results(num_groups=num_groups, in_order=copy_and_spoil)
    torch.testing.assert_close(actual, expected)
    # Besides its own positions and the loss so far, a chunk gets what was last added to: the gradients, as far as
    # they are needed.
    assert [len(tensors) for tensors in given] == [2] + 3 * [2 + needs_x_grad + needs_weight_grad]
    for chunk, (x_chunk, loss, *_) in enumerate(given):
        assert torch.equal(x_chunk, original[:, chunk::4])
        so_far = (torch.arange(12) % 4 < chunk).expand(2, 12)
        logits = original @ weight.detach().T
        want = F.cross_entropy(logits[so_far], targets[so_far], reduction="sum") if chunk else loss.new_zeros(())
        torch.testing.assert_close(loss, want)


SHARDED = """
import json, pathlib, re
import torch
from shardtorch.engine import start
from shardtorch.mesh import Mesh, NamedSharding, P
from shardtorch.models import chunked_cross_entropy

folder = pathlib.Path({folder!r})
engine = start(num_devices=8)
generator = torch.Generator().manual_seed(0)
x_values, weight_values = (torch.randn(*shape, generator=generator) for shape in ((8, 16, 24), (40, 24)))
target_values = torch.randint(40, (8, 16), generator=generator)

def sums(mesh, spec, weight_spec, num_groups):
    # What the all-reduces of the step are of, the loss, and the gradients.
    tokens, whole = NamedSharding(mesh, P(*spec)), NamedSharding(mesh, P())
    x = engine.put(x_values, tokens, x_values.shape).requires_grad_()
    weight = engine.put(weight_values, whole, weight_values.shape).requires_grad_()
    targets = engine.put(target_values, tokens, target_values.shape)
    engine.sync()
    before = set(folder.glob("*after_optimizations.txt"))

    @engine.compile
    def step():
        loss = chunked_cross_entropy(
            engine.constrain(x, tokens), weight, targets, 4, num_groups=num_groups, in_order=engine.in_order
        )
        x_grad, weight_grad = torch.autograd.grad(loss, (x, weight))
        return loss, engine.constrain(x_grad, tokens), engine.constrain(weight_grad, NamedSharding(mesh, weight_spec))

    results = step()
    engine.sync()
    (text,) = [path.read_text() for path in set(folder.glob("*after_optimizations.txt")) - before]
    calls = re.findall(r"= (\\(.*?\\)|\\S+) (?:all-reduce|reduce-scatter)(?:-start)?\\(", text)
    shapes = [dims for call in calls for dims in re.findall(r"\\w+\\[([\\d,]*)\\]", call)]
    return {{"shapes": shapes, "values": [result.tolist() for result in results]}}

full, mixed, by_seq = Mesh(fsdp=8), Mesh(data=2, fsdp=4), Mesh(fsdp=4, context=2)
print(json.dumps({{
    "fsdp": sums(full, ("fsdp",), P(None, "fsdp"), (8, 1)),
    "whole": sums(full, ("fsdp",), P(), (8, 1)),
    "mixed": sums(mixed, (("data", "fsdp"),), P(None, "fsdp"), (8, 1)),
    "by_seq": sums(by_seq, ("fsdp", "context"), P(None, "fsdp"), (4, 2)),
    "ungrouped": sums(full, ("fsdp",), P(None, "fsdp"), (1, 1)),
}}))
"""


@pytest.mark.slow
def test_devices_sum_the_gradient_of_the_weight_once_per_step(tmp_path: Path):
    """Not once per chunk. Without groups it is, which shows that the test can fail."""
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_backend_optimization_level=0"
    done = run_python(SHARDED.format(folder=str(tmp_path)), XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    sizes = {
        name: [math.prod(map(int, shape.split(","))) for shape in result["shapes"] if shape]
        for name, result in found.items()
    }
    once = [40 * 24]
    assert (sizes["fsdp"], sizes["whole"], sizes["mixed"]) == (once, once, once)  # besides scalars
    assert sizes["by_seq"] == 2 * once  # over one mesh axis, then over the other
    assert sizes["ungrouped"] == 4 * once
    first = found["ungrouped"]["values"]
    for result in found.values():
        for actual, expected in zip(result["values"], first, strict=True):
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=1e-6)
