"""`inspect`: how a model lies on a mesh, from its plan alone."""

import json
import math
from dataclasses import asdict, dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from shardtorch.aot._quantities import bytes_text
from shardtorch.config import InspectConfig
from shardtorch.errors import ConfigError
from shardtorch.mesh import Mesh
from shardtorch.models import LlamaConfig
from shardtorch.run._model import model_config, parameter_shardings

_ITEMSIZE = 4  # parameters, gradients and moments are float32
_COPIES = {"parameters": 1, "gradients": 1, "optimizer": 2}


@dataclass(frozen=True)
class Row:
    """One parameter, or one that all layers have."""

    parameter: str
    """Its name; with `*` for the layer, it stands for `num_layers` of them."""
    num_layers: int
    """How many of them there are."""
    shape: tuple[int, ...]
    """Global shape of one."""
    spec: str
    shard_shape: tuple[int, ...]
    """What a device holds of one."""
    replicas: int
    """Devices that hold the same piece."""
    bytes_per_device: int
    """Of all layers together, stored in float32."""


def rows(shape: LlamaConfig, mesh: Mesh) -> list[Row]:
    """The parameters of a model on a mesh.

    Raises:
      ShardingError: The plan does not fit the mesh.
    """
    table = []
    for name, (whole, sharding) in parameter_shardings(shape, mesh).items():
        num_layers = shape.num_layers if "*" in name else 1
        table.append(
            Row(
                name,
                num_layers,
                whole,
                repr(sharding.spec),
                sharding.shard_shape(whole),
                sharding.num_replicas,
                num_layers * sharding.bytes_per_device(whole, _ITEMSIZE),
            )
        )
    return table


def inspect(config: InspectConfig, console: Console | None = None) -> None:
    """Prints the plan as a table, or as JSON.

    Raises:
      ShardtorchError: No such model, or a mesh that does not fit it.
    """
    console = console or Console()
    shape, mesh = model_config(config.model), Mesh.parse(config.mesh)
    if not mesh.is_bound:
        raise ConfigError(
            "the sizes of all mesh axes must be given: there are no devices to infer one from.",
            got=f"mesh={config.mesh}",
            fix="write it like fsdp=4,tensor=2.",
        )
    table = rows(shape, mesh)
    per_device = sum(row.bytes_per_device for row in table)
    totals = {
        "num_parameters": sum(math.prod(row.shape) * row.num_layers for row in table),
        "bytes_per_device": {what: copies * per_device for what, copies in _COPIES.items()},
    }
    if config.json:
        facts = {"model": config.model, "mesh": repr(mesh), **totals, "parameters": [asdict(row) for row in table]}
        console.print_json(json.dumps(facts))
        return
    out = Table(title=f"{config.model} on {mesh!r}, {mesh.size} device(s)", title_justify="left", box=SIMPLE)
    for column in ("parameter", "shape", "spec", "shard"):
        out.add_column(column, no_wrap=True)
    for column in ("copies", "per device"):
        out.add_column(column, justify="right", no_wrap=True)
    for row in table:
        layers = f"{row.num_layers} x " if row.num_layers > 1 else ""
        out.add_row(
            row.parameter,
            f"{layers}{list(row.shape)}",
            row.spec,
            str(list(row.shard_shape)),
            str(row.replicas),
            bytes_text(row.bytes_per_device),
        )
    # The table is as wide as it needs to be: a terminal can scroll or wrap, and a cut name says nothing.
    needed = Measurement.get(console, console.options.update(width=10_000), out).maximum
    console.width = max(console.width, needed)
    console.print(out)
    state = sum(_COPIES.values()) * per_device
    console.print(
        f"{totals['num_parameters']:,} parameters. Per device, in float32: "
        f"parameters {bytes_text(per_device)}, gradients {bytes_text(per_device)}, AdamW moments "
        f"{bytes_text(2 * per_device)}; together {bytes_text(state)}, activations not counted.",
        highlight=False,
        soft_wrap=True,
    )
