"""`load_state_dict` on a sharded model or a part of it: by shard, and without losing the sharding as a copy does."""

from collections.abc import Iterator, Mapping, MutableMapping

from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.fsdp._names import Names
from shardtorch.fsdp._read import read_stack, read_tensor
from shardtorch.mesh import NamedSharding


def load_by_shard(model: nn.Module, names: Names, shardings: Mapping[str, NamedSharding], engine: Engine) -> None:
    """Makes `load_state_dict` place what it loads shard by shard, under the model's own names.

    This holds for the model, for its modules, and for a module that it becomes a part of. What is loaded is stored in
    the dtype that is there already, with `assign=True` too.

    Args:
      model: Sharded.
      names: How its parameters are stored.
      shardings: By stored name, of parameters and buffers; a tied one by its first name.
      engine: Where to.
    """
    placed = {id(tensor): shardings[name] for name, tensor in _saved(model)}
    owned: dict[str, dict[str, NamedSharding]] = {}
    for name, tensor in _saved(model, remove_duplicate=False):
        owner = names.stack if names.stack is not None and names.is_stacked(name) else name.rpartition(".")[0]
        owned.setdefault(owner, {})[name] = placed[id(tensor)]
    for path, its_shardings in owned.items():
        _Loader(model.get_submodule(path), path, names, its_shardings, engine)


class _Loader:
    """Loads the tensors of one module: of a stack of layers, or of any other module its own."""

    def __init__(
        self, module: nn.Module, path: str, names: Names, shardings: Mapping[str, NamedSharding], engine: Engine
    ) -> None:
        self.names, self.shardings, self.engine = names, shardings, engine
        self.prefix = f"{path}." if path else ""
        self.taken: set[str] = set()
        self.absent: list[str] = []
        module.register_load_state_dict_pre_hook(self.before)
        module.register_load_state_dict_post_hook(self.after)

    def before(self, module, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        self.taken.clear()
        self.absent.clear()
        for name, sharding in self.shardings.items():
            keys = [prefix + single.removeprefix(self.prefix) for single in self.names.singles(name)]
            tensor = _tensor(module, name.removeprefix(self.prefix))
            self.taken |= {prefix + name.removeprefix(self.prefix), *keys}
            self.absent += [key for key in keys if key not in state_dict]
            parts = list(tensor.detach()) if self.names.is_stacked(name) else [tensor]
            found = [_take(state_dict, key, part, errors) for key, part in zip(keys, parts, strict=True)]
            if all(source is None for source in found):
                continue
            # Layers that the state dict lacks keep their values.
            reads = [read_tensor(part if source is None else source) for source, part in zip(found, parts, strict=True)]
            read = read_stack(reads) if self.names.is_stacked(name) else reads[0]
            tensor.data = self.engine.materialize(tuple(tensor.shape), tensor.dtype, sharding, read)

    def after(self, module, incompatible_keys) -> None:
        # torch's own pass has found nothing of what was taken above.
        missing = incompatible_keys.missing_keys
        missing[:] = [key for key in missing if key not in self.taken] + self.absent


def _take(state_dict: MutableMapping[str, Tensor], key: str, part: Tensor, errors: list[str]) -> Tensor | None:
    """Takes an entry out of a state dict; None if it is not there or, with an error as torch words it, does not fit."""
    if key not in state_dict:
        return None
    source = state_dict.pop(key)
    if source.shape == part.shape:
        return source
    errors.append(
        f"size mismatch for {key}: copying a param with shape {tuple(source.shape)} from checkpoint, the shape in "
        f"current model is {tuple(part.shape)}."
    )
    return None


def _tensor(module: nn.Module, name: str) -> Tensor:
    """A parameter as it is stored, or a buffer."""
    path, _, short_name = name.rpartition(".")
    owner = module.get_submodule(path)
    parameter = owner._parameters.get(short_name)
    return owner.get_buffer(short_name) if parameter is None else parameter


def _saved(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """What a state dict holds, by stored name: parameters, and buffers unless they say otherwise."""
    yield from model.named_parameters(remove_duplicate=remove_duplicate)
    for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
        path, _, short_name = name.rpartition(".")
        if short_name not in model.get_submodule(path)._non_persistent_buffers_set:
            yield name, buffer
