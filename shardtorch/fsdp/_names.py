"""Names of stacked layers: what the model calls `layers.0.w`, `layers.1.w`, ... is stored as `layers.*.w`."""

from dataclasses import dataclass

from torch import Tensor

LAYER = "*"
"""Stands for the number of a layer in the name of what all layers have."""


@dataclass(frozen=True)
class Names:
    """How the names of a model change when layers are stacked."""

    stack: str | None
    """Path of the stacked `ModuleList`; None if there is none."""
    num_layers: int = 0

    def is_stacked(self, name: str) -> bool:
        """Whether a stored parameter, buffer or module stands for one per layer."""
        return self.stack is not None and f"{name}.".startswith(f"{self.stack}.{LAYER}.")

    def stored(self, name: str) -> str | None:
        """The stored name of what the model calls `name`; None for layers after the first, which it stands for too."""
        if self.stack is None or not name.startswith(f"{self.stack}."):
            return name
        number, dot, rest = name.removeprefix(f"{self.stack}.").partition(".")
        return f"{self.stack}.{LAYER}{dot}{rest}" if number == "0" else None

    def singles(self, stored: str) -> list[str]:
        """The model's names for a stored one: one per layer, or just the name itself."""
        if not self.is_stacked(stored):
            return [stored]
        rest = stored.removeprefix(f"{self.stack}.{LAYER}")
        return [f"{self.stack}.{layer}{rest}" for layer in range(self.num_layers)]


def layer_ndim(name: str, parameter: Tensor) -> int:
    """Number of dims of a stored parameter as the model's code sees it: a stack has one more."""
    return parameter.ndim - (LAYER in name.split("."))
