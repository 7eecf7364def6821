"""What a report says of parameters that lie unexpectedly."""

import pytest
import torch

from shardtorch.aot._layout import layout_notes
from shardtorch.engine import Argument, Lowered
from shardtorch.mesh import Mesh, NamedSharding, P


def notes(shape: tuple[int, ...], spec: P, kind: str = "parameter", mesh: Mesh | None = None) -> tuple[str, ...]:
    sharding = NamedSharding(mesh or Mesh(fsdp=512), spec)
    return layout_notes(Lowered(b"", (Argument("w", shape, torch.float32, sharding, 0),), (), ()), {"w": kind})


def test_a_vocabulary_that_can_not_be_divided_is_named_with_what_is_sharded_instead():
    (note,) = notes((128256, 8192), P(None, "fsdp"))
    assert note.startswith(
        "w [128256, 8192] is sharded by P(None, 'fsdp'), 7.83 MiB a device: its largest dim, 128,256"
    )
    assert note.endswith("can't be divided over 512.")


def test_what_is_large_and_whole_is_named_with_its_bytes():
    (note,) = notes((128256, 8192), P())
    assert note == "w [128256, 8192] is whole on every device, 3.91 GiB each: give it a spec."


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((128000, 8192), P("fsdp")),  # as one would guess
        ((131072, 8192), P(None, "fsdp")),  # by choice
        ((8192,), P()),  # small
        ((), P()),
    ],
)
def test_nothing_else_is_worth_a_word(shape: tuple[int, ...], spec: P):
    assert notes(shape, spec) == ()
    assert notes((128256, 8192), P(), kind="optimizer") == ()
    assert notes((128256, 8192), P(), mesh=Mesh(fsdp=1)) == ()


def test_the_largest_comes_first():
    sharding = NamedSharding(Mesh(fsdp=8), P())
    arguments = tuple(Argument(name, (n, 2**20), torch.float32, sharding, 0) for name, n in (("a", 8), ("b", 16)))
    found = layout_notes(Lowered(b"", arguments, (), ()), {"a": "parameter", "b": "parameter"})
    assert [note[0] for note in found] == ["b", "a"]
