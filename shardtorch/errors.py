"""Errors that teach: each states the law, what came, and what to do.

Every error a user can cause is a `ShardtorchError`; the command line prints it and exits with code 2.
"""

from functools import partial


class ShardtorchError(ValueError):
    """A law was broken.

    Args:
      law: What must hold, in the user's own names (parameter path, dim, axis, sizes).
      got: What came instead.
      fix: What to do about it.

    >>> raise ShardtorchError("the mesh must have 8 devices.", got="Mesh(fsdp=4)", fix="use fsdp=8.")
    Traceback (most recent call last):
      ...
    shardtorch.errors.ShardtorchError: the mesh must have 8 devices.
      got: Mesh(fsdp=4)
      fix: use fsdp=8.
    """

    def __init__(self, law: str, *, got: str, fix: str) -> None:
        super().__init__(f"{law}\n  got: {got}\n  fix: {fix}")
        self.law, self.got, self.fix = law, got, fix

    def __reduce__(self):  # an exception is pickled by its args, of which keywords are none
        return partial(type(self), got=self.got, fix=self.fix), (self.law,)

    def within(self, name: str) -> "ShardtorchError":
        """The same error, its law prefixed with the name of the user's thing that broke it.

        Inner code raises the short fact; the public function adds the context once.
        """
        return type(self)(f"{name}: {self.law}", got=self.got, fix=self.fix)


class ShardingError(ShardtorchError):
    """A mesh, a spec, a rule or a plan does not fit what it is applied to."""


class TopologyError(ShardtorchError):
    """A TPU slice that does not exist, or does not match the mesh."""


class EngineUnavailableError(ShardtorchError):
    """The engine can't start, or can't do what was asked, in this process."""


class CheckpointError(ShardtorchError):
    """A checkpoint is incomplete, damaged, or not of this model."""


class DataError(ShardtorchError):
    """The text to train on is missing, unreadable or too short."""


class ConfigError(ShardtorchError):
    """Settings that contradict each other or the machine."""
