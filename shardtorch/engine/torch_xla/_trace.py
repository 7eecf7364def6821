"""What may happen while a layer body is traced. torch_xla's traces hold no data: it ends the process if they are read.

So a body is first run on fake tensors, where what is wrong with it is an error.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch
import torch_xla
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardtorch.engine.torch_xla._ops import PartitionedOps
from shardtorch.errors import ShardtorchError

_tracing: ContextVar[bool] = ContextVar("tracing", default=False)
_READS = (Tensor.__repr__, Tensor.__format__, Tensor.tolist, Tensor.numpy)
"""Reads of values that fake tensors allow."""


def is_tracing() -> bool:
    """Whether a layer body is being lowered: its inputs look like data but are values of a graph."""
    return _tracing.get()


@contextmanager
def tracing():
    """While a layer body is traced."""
    token = _tracing.set(True)
    try:
        with PartitionedOps(), _FullDeviceName():
            yield
    finally:
        _tracing.reset(token)


def sync(*, wait: bool) -> None:
    """Runs what is pending.

    Raises:
      ShardtorchError: A layer body is being traced.
    """
    if is_tracing():
        raise _depends_on_values("what is pending was to run inside the layer")
    flush_autograd()
    torch_xla.sync(wait=wait)


def flush_autograd() -> None:
    """Waits until autograd's thread has let go of the last graph, which it may hold for a moment after a backward pass.

    Values that it holds would be computed by the next sync: now and then a graph would have outputs more, and be
    compiled again, or a layer's values without data would end the process. The thread takes up a pass only when it is
    through with the one before, so this runs one, of data that is there: a pending value would be held in turn.
    """
    x, gradient = _flushing_data()
    with torch.enable_grad():
        y = _Identity.apply(x)
        assert isinstance(y, Tensor)
        torch.autograd.grad(y, x, gradient)


@lru_cache(maxsize=1)
def _flushing_data() -> tuple[Tensor, Tensor]:
    return torch.zeros(1).to("xla").requires_grad_(), torch.zeros(1).to("xla")


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


def check_layer(body: Callable[..., Tensor], make_arguments: Callable[[], Sequence[Tensor]]) -> None:
    """Runs a layer body without data.

    Args:
      make_arguments: Makes the arguments of `body` from factory functions of torch.

    Raises:
      ShardtorchError: The body uses tensors from outside, reads values, or keeps a tensor that it made.
    """
    with torch.no_grad(), FakeTensorMode(), tracing(), _OwnTensors() as own:
        try:
            body(*make_arguments())
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _depends_on_values(f"{error.func}, which needs them") from error
    own.check_that_none_is_kept()


class _FullDeviceName(TorchFunctionMode):
    """Makes tensors on `xla:0` where `xla` is asked for: to fake tensors (torch 2.9.0) these are two devices."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") in ("xla", torch.device("xla")):
            kwargs["device"] = "xla:0"
        return func(*args, **kwargs)


class _OwnTensors(TorchFunctionMode):
    """Looks after the tensors of a layer body that runs on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in given:
            if not isinstance(x, FakeTensor):
                raise ShardtorchError(
                    "a scanned layer must use no tensor besides its arguments and its own parameters: it would keep "
                    "the present values, and no gradient would reach it.",
                    got=f"a tensor of shape {tuple(x.shape)} from outside the layer",
                    fix="pass it to the layer as an argument, or do not stack the layers (stack=None).",
                )
        if func in _READS:
            raise _depends_on_values(f"torch.Tensor.{func.__name__}, which needs them")
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if any(x.device.type == "xla" for x in given) and any(x.device.type != "xla" for x in made):
            raise _depends_on_values(f"a tensor moved to {made[0].device}, which needs them")
        self._made += map(weakref.ref, made)
        return out

    def check_that_none_is_kept(self) -> None:
        """Raises if a tensor that was made is still there."""
        if any(made() is not None for made in self._made):
            gc.collect()
        for made in self._made:
            if (x := made()) is not None:
                raise ShardtorchError(
                    "what a scanned layer makes must leave it as its output: one trace stands for all layers.",
                    got=f"a tensor of shape {tuple(x.shape)} that outlived the layer",
                    fix="add it to the output, do not keep it, or do not stack the layers (stack=None).",
                )


def _depends_on_values(got: str) -> ShardtorchError:
    return ShardtorchError(
        "a scanned layer must not depend on the values of its tensors in Python: it is traced once, without data.",
        got=got,
        fix="use torch.where in place of conditions, and no item(), print() or nonzero(); or do not stack the layers "
        "(stack=None).",
    )
