"""`load_state_dict` on a sharded model: by shard, and without losing the sharding as torch_xla's copy does."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardtorch.engine import Engine, Index
from shardtorch.mesh import NamedSharding


def load_by_shard(
    model: nn.Module, shardings: Mapping[str, NamedSharding], engine: Engine, prefix: str | None, num_layers: int
) -> None:
    """Makes `model.load_state_dict` place what it loads shard by shard.

    Args:
      model: Sharded.
      shardings: By parameter name.
      engine: Where to.
      prefix: Of the names of stacks, such as `layers.*.`, if there are any.
      num_layers: In a stack.
    """
    taken: set[str] = set()

    def singles(name: str) -> list[str]:
        if prefix is None or not name.startswith(prefix):
            return [name]
        return [name.replace(prefix, f"{prefix[:-2]}{layer}.", 1) for layer in range(num_layers)]

    def before(module, state_dict, load_prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        taken.clear()
        ties: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            ties.setdefault(id(parameter), []).append(name)
        for name, parameter in model.named_parameters():
            is_stack = len(singles(name)) > 1 or singles(name) != [name]
            sources: list[Tensor | None] = [state_dict.get(load_prefix + single) for single in singles(name)]
            absent = [single for single, source in zip(singles(name), sources, strict=True) if source is None]
            if absent:
                missing_keys.extend(load_prefix + single for single in absent)
                taken.update(load_prefix + tied for tied in ties[id(parameter)])
                continue
            want = tuple(parameter.shape[1:] if is_stack else parameter.shape)
            wrong = [
                f"size mismatch for {load_prefix + single}: copying a param with shape {tuple(source.shape)} from "
                f"checkpoint, the shape in current model is {want}."
                for single, source in zip(singles(name), sources, strict=True)
                if tuple(source.shape) != want
            ]
            error_msgs.extend(wrong)
            if not wrong:
                read = _read_stack(sources) if is_stack else _read(sources[0])
                parameter.data = engine.materialize(parameter.shape, parameter.dtype, shardings[name], read)
            for tied in ties[id(parameter)]:
                taken.add(load_prefix + tied)
                for single in singles(tied):
                    state_dict.pop(load_prefix + single, None)

    def after(module, incompatible_keys) -> None:
        # Loaded above, or reported above by their own names: torch's own pass has found them missing.
        incompatible_keys.missing_keys[:] = [key for key in incompatible_keys.missing_keys if key not in taken]

    model.register_load_state_dict_pre_hook(before)
    model.register_load_state_dict_post_hook(after)


def _read(source: Tensor):
    return lambda index: source.detach()[index].cpu()


def _read_stack(sources: list[Tensor]):
    def read(index: Index) -> Tensor:
        layers, *rest = index
        return torch.stack([sources[layer].detach()[tuple(rest)].cpu() for layer in range(layers.start, layers.stop)])

    return read
