"""`load_state_dict` on a sharded model: by shard, and without losing the sharding as torch_xla's copy does."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.fsdp._names import Names
from shardtorch.fsdp._read import read_stack, read_tensor
from shardtorch.mesh import NamedSharding


def load_by_shard(model: nn.Module, names: Names, shardings: Mapping[str, NamedSharding], engine: Engine) -> None:
    """Makes `model.load_state_dict` place what it loads shard by shard, under the model's own names.

    Args:
      model: Sharded.
      names: How its parameters are stored.
      shardings: By stored name, of parameters and buffers.
      engine: Where to.
    """
    handled: set[str] = set()
    absent: list[str] = []

    def before(module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        handled.clear()
        absent.clear()
        owners: dict[int, list[str]] = {}
        for name, tensor in _saved(model, remove_duplicate=False):
            owners.setdefault(id(tensor), []).append(name)
        for name, tensor in _saved(model):
            singles = names.singles(name)
            found = {single: state_dict[prefix + single] for single in singles if prefix + single in state_dict}
            absent.extend(prefix + single for single in singles if single not in found)
            want = tuple(tensor.shape[1:] if names.is_stacked(name) else tensor.shape)
            wrong = {single: tuple(source.shape) for single, source in found.items() if tuple(source.shape) != want}
            error_msgs.extend(
                f"size mismatch for {prefix + single}: copying a param with shape {shape} from checkpoint, the shape "
                f"in current model is {want}."
                for single, shape in wrong.items()
            )
            if len(found) == len(singles) and not wrong:
                reads = [read_tensor(source) for source in found.values()]
                read = read_stack(reads) if names.is_stacked(name) else reads[0]
                tensor.data = engine.materialize(tuple(tensor.shape), tensor.dtype, shardings[name], read)
            for owner in owners[id(tensor)]:
                handled.add(prefix + owner)
                for single in names.singles(owner):
                    state_dict.pop(prefix + single, None)

    def after(module, incompatible_keys) -> None:
        # torch's own pass has found nothing of what was taken above.
        others = [key for key in incompatible_keys.missing_keys if key not in handled]
        incompatible_keys.missing_keys[:] = absent + others

    model.register_load_state_dict_pre_hook(before)
    model.register_load_state_dict_post_hook(after)


def _saved(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """What a state dict holds, by stored name: parameters, and buffers unless they say otherwise."""
    yield from model.named_parameters(remove_duplicate=remove_duplicate)
    for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
        path, _, short_name = name.rpartition(".")
        if short_name not in model.get_submodule(path)._non_persistent_buffers_set:
            yield name, buffer
