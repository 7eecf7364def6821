"""TPU slices by name, with the public facts about their chips."""

import math
import re
from dataclasses import dataclass

from shardtorch.errors import TopologyError

from ._mesh import Mesh


@dataclass(frozen=True)
class _Generation:
    """What Google publishes about one generation of chips, and how the compiler's client shows it."""

    num_dims: int
    """Number of dims of the inter-chip network."""
    pod_chips: int
    """Largest number of chips in one slice."""
    hbm_gib: int
    """HBM per chip, in GiB."""
    bf16_tflops: int
    """Dense bfloat16 peak per chip, in 1e12 FLOP/s."""
    devices_per_chip: int
    """Devices that XLA's compile-only client shows per chip. Seen with libtpu 0.0.40."""
    hbm_gbytes_per_s: int
    """HBM bandwidth per chip, in 1e9 bytes/s."""
    ici_gbits_per_s: int
    """Bandwidth of all inter-chip links of a chip together, one way, in 1e9 bit/s."""
    dcn_gbits_per_s: float
    """Bandwidth of the data centre network per chip, one way, in 1e9 bit/s."""
    clock_ghz: float
    """Clock of the matrix units: the peak over the multiply-adds that they do in a cycle, 16,384 per 128x128 unit."""


# Source of chips per pod, HBM and peak: the tables of specifications in https://docs.cloud.google.com/tpu/docs/v4, v5e,
# v5p, v6e and tpu7x. The tables of v4 and tpu7x, which also lists v5p and v6e, give HBM in GiB; others say GB for it.
_GENERATIONS = {
    "v4": _Generation(
        num_dims=3,
        pod_chips=4096,
        hbm_gib=32,
        bf16_tflops=275,
        devices_per_chip=2,
        hbm_gbytes_per_s=1228,
        ici_gbits_per_s=2400,
        dcn_gbits_per_s=50,
        clock_ghz=1.05,
    ),
    "v5e": _Generation(
        num_dims=2,
        pod_chips=256,
        hbm_gib=16,
        bf16_tflops=197,
        devices_per_chip=1,
        hbm_gbytes_per_s=819,
        ici_gbits_per_s=1600,
        dcn_gbits_per_s=25,
        clock_ghz=1.5,
    ),
    # The largest v5p slice that can be rented is 16x16x24; a whole pod, 16x20x28, can be compiled for.
    "v5p": _Generation(
        num_dims=3,
        pod_chips=8960,
        hbm_gib=95,
        bf16_tflops=459,
        devices_per_chip=1,
        hbm_gbytes_per_s=2765,
        ici_gbits_per_s=4800,
        dcn_gbits_per_s=50,
        clock_ghz=1.75,
    ),
    "v6e": _Generation(
        num_dims=2,
        pod_chips=256,
        hbm_gib=32,
        bf16_tflops=918,
        devices_per_chip=1,
        hbm_gbytes_per_s=1640,
        ici_gbits_per_s=3584,
        dcn_gbits_per_s=100,
        clock_ghz=1.75,
    ),
    "tpu7x": _Generation(
        num_dims=3,
        pod_chips=9216,
        hbm_gib=192,
        bf16_tflops=2307,
        devices_per_chip=2,
        hbm_gbytes_per_s=7380,
        ici_gbits_per_s=4800,
        dcn_gbits_per_s=100,
        clock_ghz=2.2,
    ),
}
_CHIPS_PER_HOST = 4  # in a slice of several hosts, for every generation: 2x2 neighbours in the first two dims
_MAX_2D_DIM = 16  # a pod of v5e or v6e is 16x16
_CUBE = 4  # a slice with three dims is wired from cubes of 4x4x4 by switches, which close a ring for multiples of it
_ONE_HOST_2D = ((1, 1), (2, 2), (2, 4))  # the shapes of v5e and v6e that one host holds


@dataclass(frozen=True)
class SliceTopology:
    """One or more equal TPU slices: what can be rented, and what its chips can do. Pure data, equal by value.

    Raises:
      TopologyError: No such generation, the wrong number of dims, a size that isn't positive or that hosts can't make
        up, or more chips than a pod has.

    >>> topology = SliceTopology.parse("2 x v6e:16x16")
    >>> topology.num_chips, topology.num_hosts, topology.hbm_bytes // 2**30
    (512, 128, 32)
    >>> print(topology)
    2 x v6e:16x16
    """

    generation: str
    """v4, v5e, v5p, v6e or tpu7x."""
    ici_shape: tuple[int, ...]
    """Chips of one slice along each dim of its inter-chip network."""
    num_slices: int = 1
    """Number of slices, joined by the data centre network."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ici_shape", tuple(self.ici_shape))
        if self.generation not in _GENERATIONS:
            raise TopologyError(
                f"there is no TPU generation {self.generation!r}.",
                got=str(self),
                fix=f"use one of {', '.join(_GENERATIONS)}.",
            )
        facts = self._facts
        example = "4x4" if facts.num_dims == 2 else "4x4x4"
        if len(self.ici_shape) != facts.num_dims:
            raise TopologyError(
                f"a slice of {self.generation} has {facts.num_dims} dims.",
                got=str(self),
                fix=f"write it like {self.generation}:{example}.",
            )
        if min(*self.ici_shape, self.num_slices) < 1:
            raise TopologyError(
                "the number of slices and the sizes of a slice are positive.",
                got=str(self),
                fix=f"write it like {self.generation}:{example}.",
            )
        chips = math.prod(self.ici_shape)
        if chips > facts.pod_chips or (facts.num_dims == 2 and max(self.ici_shape) > _MAX_2D_DIM):
            square = f", {_MAX_2D_DIM}x{_MAX_2D_DIM}" if facts.num_dims == 2 else ""
            raise TopologyError(
                f"a slice of {self.generation} has at most {facts.pod_chips} chips{square}.",
                got=f"{self}, {chips} chips",
                fix=f"use several slices, such as 2 x {self.generation}:{example}.",
            )
        if self.ici_shape not in _ONE_HOST_2D and any(size % 2 for size in self.ici_shape[:2]):
            single = "; 1x1 is one chip" if facts.num_dims == 2 else ""
            raise TopologyError(
                f"hosts hold 2x2 chips, so the first two sizes of a slice are even{single}.",
                got=str(self),
                fix=f"write it like {self.generation}:{example}.",
            )

    @classmethod
    def parse(cls, text: str) -> "SliceTopology":
        """The topology that a name such as `v5p:4x4x4` or `2 x v6e:16x16` stands for.

        Raises:
          TopologyError: The name is not of that form, or there is no such slice.
        """
        match = re.fullmatch(r"\s*(?:(-?\d+)\s*x\s*)?(\w+)\s*:\s*(-?\d+(?:x-?\d+)*)\s*", text)
        if match is None:
            raise TopologyError(
                "a topology is written as generation:shape, after the number of slices if there are several.",
                got=repr(text),
                fix="write it like v5p:4x4x4 or 2 x v6e:16x16.",
            )
        num_slices, generation, shape = match.groups(default="1")
        return cls(generation, tuple(map(int, shape.split("x"))), int(num_slices))

    def __str__(self) -> str:
        slices = f"{self.num_slices} x " if self.num_slices != 1 else ""
        return f"{slices}{self.generation}:{'x'.join(map(str, self.ici_shape))}"

    @property
    def num_chips(self) -> int:
        """Number of chips, over all slices."""
        return self.num_slices * math.prod(self.ici_shape)

    @property
    def num_hosts(self) -> int:
        """Number of hosts, over all slices: one per 4 chips; one host for a v5e or v6e slice of 1x1 or 2x4."""
        return self.num_slices if self.ici_shape in _ONE_HOST_2D else self.num_chips // _CHIPS_PER_HOST

    @property
    def devices_per_chip(self) -> int:
        """Devices that XLA shows per chip: a v4 or tpu7x chip is two."""
        return self._facts.devices_per_chip

    @property
    def num_devices(self) -> int:
        """Number of devices that a mesh has on these slices."""
        return self.num_chips * self.devices_per_chip

    @property
    def hbm_bytes(self) -> int:
        """High-bandwidth memory per chip, in bytes. The runtime keeps a little of it for itself."""
        return self._facts.hbm_gib * 2**30

    @property
    def bf16_flops(self) -> float:
        """Dense bfloat16 peak per chip, in FLOP/s."""
        return self._facts.bf16_tflops * 1e12

    @property
    def hbm_bandwidth(self) -> float:
        """Of a chip's HBM, in bytes/s."""
        return self._facts.hbm_gbytes_per_s * 1e9

    @property
    def ici_link_bandwidth(self) -> float:
        """Of one link to a neighbouring chip, one way, in bytes/s; a chip has two links per dim."""
        return self._facts.ici_gbits_per_s * 1e9 / 8 / (2 * self._facts.num_dims)

    @property
    def dcn_bandwidth(self) -> float:
        """Of the data centre network, per chip, one way, in bytes/s."""
        return self._facts.dcn_gbits_per_s * 1e9 / 8

    @property
    def clock_hz(self) -> float:
        """Clock of a chip, in cycles/s."""
        return self._facts.clock_ghz * 1e9

    def wraps(self, dim: int) -> bool:
        """Whether the chips along a dim form a ring: both ends are linked."""
        size = self.ici_shape[dim]
        return size == _MAX_2D_DIM if self._facts.num_dims == 2 else size % _CUBE == 0

    def place(self, device_id: int) -> tuple[int, tuple[int, ...]]:
        """Where a device is: its slice, and its chip's place along each dim. The first dim varies fastest, as libtpu
        numbers them.

        Raises:
          TopologyError: There is no such device.

        >>> SliceTopology.parse("2 x v5e:4x8").place(37)
        (1, (1, 1))
        """
        if not 0 <= device_id < self.num_devices:
            raise TopologyError(
                f"{self} has devices 0 to {self.num_devices - 1}.", got=f"device {device_id}", fix="use one of these."
            )
        slice_index, rest = divmod(device_id // self.devices_per_chip, math.prod(self.ici_shape))
        places = []
        for size in self.ici_shape:
            rest, place = divmod(rest, size)
            places.append(place)
        return slice_index, tuple(places)

    def check(self, mesh: Mesh) -> None:
        """Raises unless a mesh covers these slices exactly.

        Raises:
          TopologyError: The mesh has another number of devices, or its DCN factors make up another number of slices.
        """
        if mesh.size != self.num_devices:
            raise TopologyError(
                f"{self} has {self.num_devices} devices, and the mesh {mesh.size}.",
                got=repr(mesh),
                fix=f"make the sizes of the mesh multiply to {self.num_devices}.",
            )
        if mesh.num_slices != self.num_slices:
            axis = mesh.axis_names[0] if mesh.axis_names else "data"
            raise TopologyError(
                f"{self} has {self.num_slices} slices, and the DCN factors of the mesh multiply to {mesh.num_slices}.",
                got=repr(mesh),
                fix=f"give the axis that crosses slices its DCN factor, such as dcn={{{axis!r}: {self.num_slices}}}.",
            )

    @property
    def _facts(self) -> _Generation:
        return _GENERATIONS[self.generation]
