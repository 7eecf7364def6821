"""A step over placeholders as an HLO module.

Private symbols of torch_xla 2.9.0: `_XLAC.lowering.LoweringContext`, `_XLAC._check_tensor_need_materialization`.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardtorch.engine._contract import Argument, Lowered
from shardtorch.engine.torch_xla._annotate import op_sharding, sharding_of
from shardtorch.engine.torch_xla._ops import PartitionedOps
from shardtorch.engine.torch_xla._provenance import Provenance
from shardtorch.engine.torch_xla._scan import clear_frames
from shardtorch.engine.torch_xla._trace import flush_autograd
from shardtorch.errors import ShardtorchError
from shardtorch.mesh import NamedSharding

_XLAC = torch_xla._XLAC  # pyright: ignore[reportPrivateImportUsage]


def lower(
    step: Callable[..., Any],
    arguments: Sequence[Tensor],
    state: Mapping[str, Tensor],
    shardings: Mapping[str, NamedSharding],
    modules: Mapping[nn.Module, str],
) -> Lowered:
    """See `LibtpuEngine.lower`."""
    named = {**state, **{f"argument {n}": x for n, x in enumerate(arguments)}}
    by_id = {_XLAC._xla_get_tensor_id(x): shardings[name] for name, x in named.items()}

    def annotate_again(x: Tensor, changed: Tensor) -> None:
        # As torch_xla does with every change in place of data that it has sharded; it can't shard placeholders.
        sharding = by_id.get(_XLAC._xla_get_tensor_id(x))
        if sharding is not None and not sharding_of(changed):
            _XLAC._xla_annotate_custom_sharding(changed, op_sharding(sharding.tile_assignment(x.ndim)))

    provenance = Provenance(modules, annotate_again)
    # The step updates tensors in place, so a handle is kept on each one's value before it.
    before = {name: x.detach().clone() for name, x in named.items()}
    try:
        with PartitionedOps(), provenance.recording():
            out = step(*arguments)
            outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            changed = [name for name, x in state.items() if _XLAC._check_tensor_need_materialization([x])[0]]
            results = [*outputs, *(state[name].detach() for name in changed)]
            if not results:
                raise ShardtorchError(
                    "a step must return a tensor, or update its state.",
                    got=f"{step} does neither",
                    fix="return the loss.",
                )
            context = _XLAC.lowering.LoweringContext("step")
            context.build(results)
        parameters = context.device_parameter_id_tensor_mapping()
        names = {context.tensor_parameter_id(x): name for name, x in before.items()}
        result_of = {name: len(outputs) + n for n, name in enumerate(changed)}
        arguments_ = []
        for number, x in sorted(parameters.items()):
            name = names.get(number, f"constant {number}")
            arguments_.append(Argument(name, tuple(x.shape), x.dtype, shardings.get(name), result_of.get(name)))
        return Lowered(
            context.hlo(),
            tuple(arguments_),
            (*[None] * len(outputs), *(shardings[name] for name in changed)),
            tuple(provenance.origins),
        )
    except BaseException as error:
        clear_frames(error)
        raise
    finally:
        # Nothing of the trace may be left: a sync of this process would run it, and there is no data.
        before.clear()
        for x in state.values():
            x.grad = None
            if _XLAC._check_tensor_need_materialization([x])[0]:
                x.data = xb.create_placeholder_tensor(list(x.shape), x.dtype)
        flush_autograd()
        gc.collect()
