"""Constraints on the tensors that go into and come out of modules."""

from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.errors import ShardingError
from shardtorch.mesh import NamedSharding


def constrain_output(module: nn.Module, path: str, sharding: NamedSharding, engine: Engine) -> None:
    """Constrains what a module returns, and its gradient."""

    def hook(_: nn.Module, args: tuple, output: object) -> Tensor:
        return _constrained(output, f"output of {path}", sharding, engine)

    module.register_forward_hook(hook)


def constrain_input(module: nn.Module, path: str, sharding: NamedSharding, engine: Engine) -> None:
    """Constrains the first positional argument of a module, and its gradient."""

    def hook(_: nn.Module, args: tuple) -> tuple:
        if not args:
            raise ShardingError(
                f"input of {path}: the plan shards the first positional argument.",
                got="none",
                fix="pass the tensor by position, or shard the output of the module before.",
            )
        return (_constrained(args[0], f"input of {path}", sharding, engine), *args[1:])

    module.register_forward_pre_hook(hook)


def _constrained(value: object, name: str, sharding: NamedSharding, engine: Engine) -> Tensor:
    if not isinstance(value, Tensor):
        raise ShardingError(
            f"{name}: a plan shards modules that take and return a tensor.",
            got=type(value).__name__,
            fix="name a module inside or around it, or use mark_sharding in its code.",
        )
    sharding.validate(tuple(value.shape), name)
    return engine.constrain(value, sharding)
