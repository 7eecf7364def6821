"""Where the operations of a lowered step come from: module, source line and phase.

Each operation that is traced gets a number as its scope, `~7~`, which XLA carries in `op_name` through all its passes;
what the numbers mean is kept beside the module.

Private symbols of torch_xla 2.9.0: `_XLAC._set_ir_debug`, `_XLAC.profiler.scope_pusher`; of torch 2.9.0:
`torch._C._current_autograd_node`, `torch.autograd._get_sequence_nr`. tests/engine/test_lower.py would notice.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import einops
import torch
import torch_xla
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardtorch.engine._contract import Origin
from shardtorch.errors import ShardtorchError

_XLAC = torch_xla._XLAC  # pyright: ignore[reportPrivateImportUsage]
_PACKAGE = Path(__file__).parents[2]
_NOT_THE_USERS = tuple(
    f"{path}{os.sep}"
    for path in (
        Path(torch.__file__).parent,
        Path(torch_xla.__file__).parent,
        _PACKAGE / "engine",
        _PACKAGE / "fsdp",
        _PACKAGE / "aot",
        Path(einops.__file__).parent,
    )
)
_recording: ContextVar["Provenance | None"] = ContextVar("recording", default=None)


class Provenance(TorchDispatchMode):
    """While it is active, operations are numbered by where they come from, and none may read a value.

    Args:
      names: Path of each module.
      after_change: Called with the values before and after each change in place.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        after_change: Callable[[torch.Tensor, torch.Tensor], None] = lambda before, after: None,
    ) -> None:
        super().__init__()
        self._after_change = after_change
        self.origins: list[Origin] = []
        self._numbers: dict[Origin, int] = {}
        self._names = names
        self._modules: list[str] = []
        self._of_node: dict[int, Origin] = {}
        self._in_backward_loop = False
        self._seen_backward = False

    @contextmanager
    def recording(self) -> Iterator["Provenance"]:
        """Records until the end of the block."""
        hooks = [
            register_module_forward_pre_hook(lambda module, args: self._modules.append(self._names.get(module, ""))),
            register_module_forward_hook(lambda module, args, out: self._leave(), always_call=True),
        ]
        token = _recording.set(self)
        _XLAC._set_ir_debug(True)
        try:
            with self, _AboveDispatch(self):
                yield self
        finally:
            _XLAC._set_ir_debug(False)
            _recording.reset(token)
            self._of_node.clear()
            for hook in hooks:
                hook.remove()

    def _leave(self) -> None:
        self._modules.pop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        origin = self._origin()
        if (what := _read_by(func, args, kwargs)) is not None:
            raise _reads(origin, what)
        scope = self._scope(origin)
        try:
            out = func(*args, **kwargs)
            if func is torch.ops.aten._propagate_xla_data.default:
                self._after_change(*args)
            return out
        finally:
            del scope

    def _scope(self, origin: Origin) -> object:
        """While it lives, operations carry the number of an origin."""
        number = self._numbers.setdefault(origin, len(self.origins))
        if number == len(self.origins):
            self.origins.append(origin)
        return _XLAC.profiler.scope_pusher(f"~{number}~")

    def run_einsum(self, args: tuple, kwargs: dict) -> torch.Tensor:
        """`torch.einsum`, which torch_xla 2.9.0 takes before a dispatch mode sees it."""
        scope = self._scope(self._origin())
        try:
            return torch.einsum(*args, **kwargs)
        finally:
            del scope

    def _origin(self) -> Origin:
        node = torch._C._current_autograd_node()
        if node is not None:
            self._seen_backward |= not self._in_backward_loop  # a loop's backward body is traced with its forward one
            forward = self._of_node.get(node._sequence_nr(), Origin())  # pyright: ignore[reportAttributeAccessIssue]
            return Origin(forward.module, forward.source, "backward")
        module = next((name for name in reversed(self._modules) if name), "")
        in_forward = bool(self._modules) or not self._seen_backward
        phase = "backward" if self._in_backward_loop else "forward" if in_forward else "update"
        origin = Origin(module, _source(), phase)
        sequence = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
        self._of_node.setdefault(sequence - 1, origin)
        return origin


class _AboveDispatch(TorchFunctionMode):
    """What a dispatch mode does not see."""

    def __init__(self, provenance: Provenance) -> None:
        super().__init__()
        self._provenance = provenance

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.einsum:
            return self._provenance.run_einsum(args, kwargs or {})
        as_text = func in (torch.Tensor.__repr__, torch.Tensor.__format__)
        if as_text and args[0].device.type == "xla" and not isinstance(args[0], FakeTensor):
            raise _reads(Origin(source=_source()), "a tensor as text (print(), repr() or an f-string)")
        return func(*args, **(kwargs or {}))


def _reads(origin: Origin, what: str) -> ShardtorchError:
    return ShardtorchError(
        "a step that is planned must not depend on the values of its tensors in Python: there are none yet.",
        got=f"{origin.source or origin.module or 'the step'} asks for {what}",
        fix="use torch.where in place of conditions, keep metrics as tensors that the step returns, and pass what "
        "changes from step to step as a 0-d tensor.",
    )


@contextmanager
def in_backward() -> Iterator[None]:
    """What is traced here belongs to the backward pass, the forward operations that it repeats too."""
    recording = _recording.get()
    if recording is None:
        yield
        return
    recording._in_backward_loop, before = True, recording._in_backward_loop
    try:
        yield
    finally:
        recording._in_backward_loop = before


def _read_by(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> str | None:
    """What an operation brings from the device to the host, in words; None if nothing."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if not any(x.device.type == "xla" for x in tensors):
        return None
    if func is torch.ops.aten._local_scalar_dense.default:
        return "a tensor's value (item(), bool(), float(), tolist() or a condition on it)"
    to = kwargs.get("device")
    if func is torch.ops.aten._to_copy.default and to is not None and torch.device(to).type not in ("xla", "meta"):
        return "a tensor on the host (cpu(), to('cpu') or print())"
    if torch.Tag.data_dependent_output in func.tags:
        return f"what {func.overloadpacket.__name__} tells of values"
    if torch.Tag.dynamic_output_shape in func.tags:
        indices = args[1] if func is torch.ops.aten.index.Tensor else None
        if indices is None or any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return f"a tensor whose shape depends on values ({func.overloadpacket.__name__} with a mask or nonzero())"
    return None


def _source() -> str:
    """The innermost line of code that is the user's, or a model's."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS) and not file.startswith("<") and not file.endswith("contextlib.py"):
            parent = f"{_PACKAGE.parent}{os.sep}"
            return f"{file.removeprefix(parent)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
