"""Equal layers as one: each weight stored once as `[num_layers, ...]`, the layers run as one scan."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten  # torch 2.9.0 has no public one

from shardtorch.engine import Engine
from shardtorch.errors import ShardingError
from shardtorch.fsdp._names import LAYER


class StackedLayers(nn.Module):
    """Takes the place of a `ModuleList` of equal layers, so that `for layer in layers: x = layer(x, ...)` runs a scan.

    Its one child, named `*`, is a layer whose parameters and buffers are stacks. State dicts keep the names of the
    single layers. Call the module itself, `x = layers(x, ...)`, to run all layers.

    In a loop, the first layer's call runs all of them, and each later one must get the very tensor that the one before
    returned, and the same other arguments; it returns that tensor as it is. Anything else, such as `x = x + layer(x)`,
    is an error. Two things can't be seen: a loop that is left with `break` has run every layer all the same, and what
    it collects from layer to layer is the last layer's output each time.

    Args:
      layer: The layer that stands for all; `fully_shard` puts the stacks in.
      num_layers: How many it stands for.
      path: The list's path in the model, for errors.
      uses: How one layer's stored weights become those that are used, by name within the layer.
      engine: What runs the scan.
      remat: Keep each layer's input only and compute the layer again in the backward pass.
    """

    def __init__(
        self,
        layer: nn.Module,
        num_layers: int,
        path: str,
        uses: Mapping[str, Callable[[Tensor], Tensor]],
        engine: Engine,
        *,
        remat: bool,
    ) -> None:
        super().__init__()
        self.num_layers, self.path, self.remat = num_layers, path, remat
        self.add_module(LAYER, layer)
        self._uses, self._engine = uses, engine
        self._bodies: dict[object, Callable[..., Tensor]] = {}
        self.register_state_dict_post_hook(_name_layers)

    def __iter__(self) -> Iterator[Callable[..., Tensor]]:
        loop = _Loop(self)
        for number in range(self.num_layers):
            yield partial(loop.call, number)
        if 0 < loop.num_calls < self.num_layers:
            raise self.not_together(f"a loop that called {loop.num_calls} of {self.num_layers} layers")

    def __len__(self) -> int:
        return self.num_layers

    def __getitem__(self, index: int) -> nn.Module:
        raise self.not_together(f"{self.path}[{index}]")

    def not_together(self, got: str) -> ShardingError:
        """The error for code that wants a single layer."""
        return ShardingError(
            f"{self.path}: stacked layers run together, as one scan: each gets what the one before returned, and the "
            "same other arguments.",
            got=got,
            fix="loop with `for layer in layers: x = layer(x, ...)` and put what is done between layers into them, "
            "or do not stack them (stack=None).",
        )

    def forward(self, x: Tensor | None = None, /, *args, **kwargs) -> Tensor:
        """Runs every layer.

        Args:
          x: What the first layer gets, by position; each layer returns the next one's.
          *args: Passed to every layer alike, as are keyword arguments. Tensors, in tuples, lists and dicts too, get no
            gradient; anything else must be hashable.

        Raises:
          ShardingError: An argument is neither, or the first is no tensor.
        """
        if not isinstance(x, Tensor):
            raise ShardingError(
                f"{self.path}: stacked layers take their input, a tensor, as the first positional argument.",
                got=f"{', '.join(kwargs)} by keyword" if x is None and kwargs else type(x).__name__,
                fix="call layer(x, ...) and not layer(hidden_states=x), or do not stack the layers (stack=None).",
            )
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # Tensors are operands of the scan; the rest is part of the layer's code.
        static = tuple(None if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
        try:
            hash(static)
        except TypeError as error:
            raise ShardingError(
                f"{self.path}: an argument of stacked layers must be a tensor or hashable.",
                got=f"arguments of {', '.join(type(leaf).__name__ for leaf in leaves)}: {error}",
                fix="pass what the layer needs of it, or do not stack the layers (stack=None).",
            ) from None
        layer = self.get_submodule(LAYER)
        weights = dict(layer.named_parameters()) | dict(layer.named_buffers())
        return self._engine.scan(self._body(static, structure), x, weights, tensors, remat=self.remat)

    def _body(self, static: tuple, structure: TreeSpec) -> Callable[..., Tensor]:
        """One layer as a function; the same object for the same static arguments, so that it is traced once."""
        layer, uses = self.get_submodule(LAYER), self._uses
        key = (static, structure, _settings(layer))
        if key not in self._bodies:
            buffers = [name for name, _ in layer.named_buffers()]

            def body(x: Tensor, weights: dict[str, Tensor], *constants: Tensor) -> Tensor:
                weights = {name: uses[name](w) if name in uses else w for name, w in weights.items()}
                versions = {name: weights[name]._version for name in buffers}
                rest = iter(constants)
                leaves = [next(rest) if leaf is None else leaf[1] for leaf in static]
                args, kwargs = tree_unflatten(leaves, structure)
                out = torch.func.functional_call(layer, weights, (x, *args), kwargs)
                for name, version in versions.items():
                    if weights[name]._version != version:
                        raise ShardingError(
                            f"{self.path}.*.{name}: a stacked layer must not change its buffers; the change would be "
                            "lost.",
                            got="an in-place operation on it in forward",
                            fix="remove it (track_running_stats=False in a BatchNorm), or do not stack the layers "
                            "(stack=None).",
                        )
                return out

            self._bodies[key] = body
        return self._bodies[key]


def _settings(layer: nn.Module) -> tuple:
    """What a layer's code may depend on and can be changed after it was traced: simple attributes and hooks."""
    simple = (bool, int, float, str, torch.dtype)
    return tuple(
        (key, type(value), value) if isinstance(value, simple) else (key, *value)
        for module in layer.modules()
        for key, value in vars(module).items()
        if isinstance(value, simple) or (key in _HOOKS and value)
    )


class _Loop:
    """One loop over stacked layers: the first call runs them, and the others check that this is what the code means."""

    def __init__(self, layers: StackedLayers) -> None:
        self.layers, self.num_calls = layers, 0
        self.expected: tuple[list[tuple[object, int | None]], TreeSpec] | None = None

    def call(self, number: int, /, *args, **kwargs) -> Tensor:
        """Calls a layer by its number.

        Raises:
          ShardingError: It is not the next one, or does not get what the scan gave it.
        """
        layers = self.layers
        if number == 0 and self.num_calls in (0, layers.num_layers):  # layers may be kept in a list, and used again
            y = layers(*args, **kwargs)
            self.num_calls = 0
            self.expected = _seen((y, *args[1:]), kwargs)
        elif number != self.num_calls:
            raise layers.not_together(f"a call of layer {number} where layer {self.num_calls} is next")
        else:
            assert self.expected is not None
            (leaves, structure), (expected, expected_structure) = _seen(args, kwargs), self.expected
            if not args or not _unchanged(leaves[0], expected[0]):
                raise layers.not_together(f"layer {number} called with another input than layer {number - 1} returned")
            if structure != expected_structure or not all(map(_unchanged, leaves, expected)):
                raise layers.not_together(f"layer {number} called with other arguments than layer 0, besides its input")
            y = args[0]
        self.num_calls += 1
        if self.num_calls == layers.num_layers:
            self.expected = None  # which may be all that keeps the tensors
        return y


def _seen(args: tuple, kwargs: dict) -> tuple[list[tuple[object, int | None]], TreeSpec]:
    """Arguments as they are now: each leaf, with its version if it is a tensor, which every in-place change raises."""
    leaves, structure = tree_flatten((args, kwargs))
    return [(leaf, _version(leaf)) for leaf in leaves], structure


def _version(leaf: object) -> int | None:
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else None


def _unchanged(now: tuple[object, int | None], before: tuple[object, int | None]) -> bool:
    (a, version), (b, version_before) = now, before
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b and version == version_before
    return type(a) is type(b) and (a is b or bool(a == b))


def check_alike(layers: nn.Module, path: str) -> nn.ModuleList:
    """Raises unless one layer can stand for all: same modules, same settings, same shapes.

    Returns:
      The layers.

    Raises:
      ShardingError: With the first difference found.
    """
    if type(layers) is not nn.ModuleList or len(layers) == 0:  # a subclass may do more than hold layers
        raise ShardingError(
            f"{path}: only a ModuleList of layers can be stacked.",
            got=f"{type(layers).__name__} of {len(list(layers.children()))} modules",
            fix="name the ModuleList of the equal layers, or pass stack=None.",
        )
    first, absent = _description(layers[0]), object()
    for number, layer in enumerate(layers):
        facts = _description(layer)
        for key in first | facts:
            here, there = facts.get(key, absent), first.get(key, absent)
            if not _equal(here, there):
                values = [f"has no {key}" if v is absent else f"has {key} = {v!r}" for v in (here, there)]
                raise ShardingError(
                    f"{path}: layers that are stacked must be alike.",
                    got=f"{path}.{number} {values[0]}; {path}.0 {values[1]}",
                    fix="make them equal, or pass stack=None.",
                )
    return layers


def check_not_shared(model: nn.Module, path: str) -> None:
    """Raises if a parameter of a layer is used by another layer or outside: a stack would untie it.

    Raises:
      ShardingError: With both names.
    """
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = owners.setdefault(id(parameter), name)
        if other != name and (name.startswith(f"{path}.") or other.startswith(f"{path}.")):
            raise ShardingError(
                f"{path}: layers that are stacked must not share parameters.",
                got=f"{name} is {other}",
                fix="pass stack=None.",
            )


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _description(layer: nn.Module) -> dict[str, object]:
    """Everything about a layer that its code can depend on, besides values of parameters and buffers."""
    facts: dict[str, object] = {}
    for module_name, module in layer.named_modules():
        prefix = f"{module_name}." if module_name else ""
        facts[f"{prefix}class"] = type(module).__qualname__
        facts |= {prefix + key: list(getattr(module, key).values()) for key in _HOOKS}
        facts |= {prefix + key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        facts[name] = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    return facts


def _equal(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    try:
        if isinstance(a, Tensor) and isinstance(b, Tensor):  # one that is neither parameter nor buffer
            return a is b or torch.equal(a, b)
        return a is b or bool(a == b)
    except (RuntimeError, ValueError):  # tensors without values; containers of tensors or arrays
        return False


def _name_layers(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """Gives each layer's part of a stack its own name."""
    assert isinstance(module, StackedLayers)
    star = f"{prefix}{LAYER}."
    stacks = {name.removeprefix(star): state_dict.pop(name) for name in list(state_dict) if name.startswith(star)}
    for layer in range(module.num_layers):
        for name, stack in stacks.items():
            state_dict[f"{prefix}{layer}.{name}"] = stack[layer]
