"""Meshes of the 8 devices that the tests run on."""

from shardtorch.mesh import Mesh

MESHES = [
    Mesh(fsdp=8),
    Mesh(fsdp=4, tensor=2),
    Mesh(data=2, fsdp=2, tensor=2),
    Mesh(tensor=8),
    Mesh(data=8),
    Mesh(data=2, fsdp=4),
    Mesh(fsdp=2, tensor=4, dcn={"fsdp": 2}),
]
