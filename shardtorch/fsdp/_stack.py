"""Equal layers as one: each weight stored once as `[num_layers, ...]`, the layers run as one scan."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.errors import ShardingError

LAYER = "*"
"""Name of the module that stands for every layer: `layers.*.attention.wq.weight` is a stack."""


class StackedLayers(nn.Module):
    """Takes the place of a `ModuleList` of equal layers, so that `for layer in layers: x = layer(x, ...)` runs a scan.

    Its one child, named `*`, is a layer whose parameters are stacks. Iterating yields this module once. State dicts
    keep the names of the single layers.
    """

    def __init__(self, layers: nn.ModuleList, path: str, engine: Engine, *, remat: bool) -> None:
        super().__init__()
        check_alike(layers, path)
        self.num_layers, self.path, self.remat = len(layers), path, remat
        self.add_module(LAYER, layers[0])
        self._engine = engine
        self._bodies: dict[object, Callable[..., Tensor]] = {}
        self.uses: Mapping[str, Callable[[Tensor], Tensor]] = {}
        """How one layer's stored weights become those that are used, by name within the layer."""
        self.register_state_dict_post_hook(_unstack_names)

    def __iter__(self) -> Iterator["StackedLayers"]:
        yield self

    def __len__(self) -> int:
        return self.num_layers

    def __getitem__(self, index):
        raise ShardingError(
            f"{self.path}: stacked layers run together, as one scan.",
            got=f"{self.path}[{index}]",
            fix="loop with `for layer in layers: x = layer(x, ...)`, or do not stack them (stack=None).",
        )

    def forward(self, x: Tensor, *args) -> Tensor:
        """Runs every layer.

        Args:
          x: What the first layer gets; each layer returns the next one's.
          *args: Passed to every layer alike. Tensors get no gradient; anything else must be hashable.
        """
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        static = tuple(None if isinstance(arg, Tensor) else (arg,) for arg in args)
        layer = self._modules[LAYER]
        weights = dict(layer.named_parameters()) | dict(layer.named_buffers())
        return self._engine.scan(self._body(static), x, weights, tensors, remat=self.remat)

    def _body(self, static: tuple) -> Callable[..., Tensor]:
        """One layer as a function; the same object for the same static arguments, so that it is traced once."""
        key = (static, self.training)
        if key not in self._bodies:
            layer = self._modules[LAYER]

            def body(x: Tensor, weights: dict[str, Tensor], *constants: Tensor) -> Tensor:
                weights = {name: self.uses[name](w) if name in self.uses else w for name, w in weights.items()}
                rest = iter(constants)
                args = [next(rest) if arg is None else arg[0] for arg in static]
                return torch.func.functional_call(layer, weights, (x, *args))

            self._bodies[key] = body
        return self._bodies[key]


def check_alike(layers: nn.Module, path: str) -> None:
    """Raises unless one layer can stand for all: same modules, same settings, same shapes, nothing shared.

    Raises:
      ShardingError: With the first difference found.
    """
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ShardingError(
            f"{path}: only a ModuleList of layers can be stacked.",
            got=f"{type(layers).__name__} of {len(list(layers.children()))} modules",
            fix="name the ModuleList of the equal layers, or pass stack=None.",
        )
    owners: dict[int, str] = {}
    first = _description(layers[0])
    for number, layer in enumerate(layers):
        for key, value in _description(layer).items():
            if first.get(key) != value:
                raise ShardingError(
                    f"{path}: layers that are stacked must be alike.",
                    got=f"{path}.{number}: {key} is {value}; {path}.0: {key} is {first.get(key)}",
                    fix="make them equal, or pass stack=None.",
                )
        if missing := first.keys() - _description(layer).keys():
            raise ShardingError(
                f"{path}: layers that are stacked must be alike.",
                got=f"{path}.{number} has no {sorted(missing)[0]}; {path}.0 has",
                fix="make them equal, or pass stack=None.",
            )
        for name, parameter in layer.named_parameters():
            if owner := owners.get(id(parameter)):
                raise ShardingError(
                    f"{path}: layers that are stacked must not share parameters.",
                    got=f"{path}.{number}.{name} is {owner}",
                    fix="pass stack=None.",
                )
            owners[id(parameter)] = f"{path}.{number}.{name}"


def _description(layer: nn.Module) -> dict[str, object]:
    """Everything about a layer that its code can depend on, besides values of tensors."""
    facts: dict[str, object] = {}
    for module_name, module in layer.named_modules():
        prefix = f"{module_name}." if module_name else ""
        facts[f"{prefix}class"] = type(module).__name__
        for key, value in vars(module).items():
            if not key.startswith("_") and isinstance(value, int | float | str | bool | tuple | torch.dtype | None):
                facts[prefix + key] = value
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        facts[name] = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    return facts


def _unstack_names(module: nn.Module, state_dict: dict, prefix: str, local_metadata) -> None:
    """Gives each layer's part of a stack its own name."""
    assert isinstance(module, StackedLayers)
    star = f"{prefix}{LAYER}."
    stacks = {name.removeprefix(star): state_dict.pop(name) for name in list(state_dict) if name.startswith(star)}
    for layer in range(module.num_layers):
        for name, stack in stacks.items():
            state_dict[f"{prefix}{layer}.{name}"] = stack[layer]


def layer_ndim(name: str, parameter: Tensor) -> int:
    """Number of dims of a parameter as the model's code sees it: a stack, named `layers.*....`, has one more."""
    return parameter.ndim - (LAYER in name.split("."))
