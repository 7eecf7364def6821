"""Checkpoints: nothing is lost, nothing damaged is loaded, and a kill at any moment leaves a complete one."""

import errno
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint import filesystem

from shardtorch.engine._reference import ReferenceEngine
from shardtorch.errors import CheckpointError, ShardingError
from shardtorch.mesh import Mesh, NamedSharding, P
from shardtorch.train import _checkpoint_reader
from shardtorch.train._checkpoint import Placed, latest_checkpoint, load_checkpoint, read_tensors, save_checkpoint
from shardtorch.train._checkpoint_manifest import Chunk, Manifest, StoredTensor
from shardtorch.train._checkpoint_reader import ChunkReader

ENGINE = ReferenceEngine()
MESH = Mesh(data=2, fsdp=2, tensor=2)


def placed(tensor: Tensor, *spec: str | tuple[str, ...] | None, mesh: Mesh = MESH) -> Placed:
    return Placed(tensor, NamedSharding(mesh, P(*spec)))


def some_tensors(seed: int = 0) -> dict[str, Placed]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "model.embed.weight": placed(normal(16, 8), ("data", "fsdp"), "tensor"),
        "model.norm.weight": placed(normal(8), "fsdp"),
        "model.head.weight": placed(normal(16, 8)),
        "model.layers.*.attention.wq.weight": placed(normal(3, 8, 4).bfloat16(), None, "fsdp", "tensor"),
        "optimizer.exp_avg.layers.*.attention.wq.weight": placed(normal(3, 8, 4), None, "tensor"),
        "optimizer.step": placed(torch.tensor(seed)),
    }


def assert_equal_bits(loaded: Mapping[str, Tensor], saved: Mapping[str, Placed]) -> None:
    assert loaded.keys() == saved.keys()
    for key, source in saved.items():
        assert loaded[key].dtype == source.tensor.dtype, key
        assert loaded[key].shape == source.tensor.shape, key
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (loaded[key], source.tensor)]
        assert torch.equal(*bits), key


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- saved on one mesh, loaded on another ---


@st.composite
def spec_on_a_mesh(draw: st.DrawFn, rank: int) -> NamedSharding:
    """Any sharding of up to 8 devices; fits dims that are multiples of 8."""
    sizes = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (2, 1, 2), (1,)]))
    mesh = Mesh(dict(zip(("a", "b", "c"), sizes, strict=False)))
    entries: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(0, rank))  # the last stands for "nowhere"
        if dim < rank:
            entries[dim].append(axis)
    return NamedSharding(mesh, P(*entries))


@st.composite
def moves(draw: st.DrawFn) -> tuple[Tensor, NamedSharding, NamedSharding]:
    """A tensor and two ways to shard it."""
    rank = draw(st.integers(0, 3))
    shape = [8 * draw(st.integers(1, 2)) for _ in range(rank)]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape), draw(spec_on_a_mesh(rank)), draw(spec_on_a_mesh(rank))


@settings(max_examples=40)
@given(st.lists(moves(), min_size=1, max_size=3))
def test_any_mesh_to_any_mesh_gives_equal_bits(cases: list[tuple[Tensor, NamedSharding, NamedSharding]]):
    saved = {f"t{i}.weight": Placed(tensor, sharding) for i, (tensor, sharding, _) in enumerate(cases)}
    target = {f"t{i}.weight": Placed(tensor.to("meta"), sharding) for i, (tensor, _, sharding) in enumerate(cases)}
    with tempfile.TemporaryDirectory() as directory:
        path = save_checkpoint(Path(directory), 1, saved, {}, ENGINE)
        loaded, _ = load_checkpoint(path, target, ENGINE)
        for key, tensor in Manifest.read(path).tensors.items():
            assert len(tensor.chunks) == saved[key].sharding.num_shards  # each distinct shard once
    assert_equal_bits(loaded, saved)


@pytest.mark.parametrize("extra", [{}, {"rng": [1, 2**40], "data": {"position": 0.1, "name": "größer", "none": None}}])
def test_extra_and_step_come_back(tmp_path: Path, extra: dict):
    path = save_checkpoint(tmp_path / "new" / "folder", 20, some_tensors(), extra, ENGINE)
    assert path == tmp_path / "new" / "folder" / "step_00000020"
    loaded, back = load_checkpoint(path, some_tensors(), ENGINE)
    assert back == extra
    assert Manifest.read(path).step == 20
    assert_equal_bits(loaded, some_tensors())
    assert names_in(path) == [".metadata", "__0_0.distcp", "manifest.json"]


def test_a_stack_is_stored_by_layer_and_loads_either_way(tmp_path: Path):
    stack = torch.randn(3, 8, 4)
    stacked = {"layers.*.w": placed(stack, None, "fsdp")}
    unstacked = {f"layers.{i}.w": placed(stack[i], None, "tensor") for i in range(3)}
    assert_equal_bits(
        load_checkpoint(save_checkpoint(tmp_path, 1, stacked, {}, ENGINE), unstacked, ENGINE)[0], unstacked
    )
    assert_equal_bits(load_checkpoint(save_checkpoint(tmp_path, 2, unstacked, {}, ENGINE), stacked, ENGINE)[0], stacked)


def test_read_tensors_gives_whole_layers_under_their_own_names(tmp_path: Path):
    tensors = some_tensors()
    path = save_checkpoint(tmp_path, 1, tensors, {}, ENGINE)
    state = read_tensors(path, "model.")
    assert sorted(state) == [
        "embed.weight",
        "head.weight",
        *[f"layers.{i}.attention.wq.weight" for i in range(3)],
        "norm.weight",
    ]
    stack = tensors["model.layers.*.attention.wq.weight"].tensor
    assert torch.equal(state["layers.2.attention.wq.weight"], stack[2])
    assert "optimizer.step" in read_tensors(path)
    with pytest.raises(CheckpointError, match=r"(?s)no name that starts with 'modle\.'.*model, optimizer"):
        read_tensors(path, "modle.")


PLAIN_TORCH = """
import sys, torch
import torch.distributed.checkpoint as dcp
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(0.0))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(8)

model = Model().bfloat16()
state = {"model." + name: tensor for name, tensor in model.state_dict().items()}
dcp.load(state, checkpoint_id=sys.argv[1])
want = torch.load(sys.argv[2])
assert state.keys() == want.keys()
assert all(torch.equal(state[name], want[name]) for name in want)
assert not {"shardtorch", "torch_xla", "jax"} & set(sys.modules)
print("equal")
"""


def test_plain_torch_loads_it_without_shardtorch(tmp_path: Path):
    tensors = {
        "model.layers.*.up.weight": placed(torch.randn(3, 4, 8).bfloat16(), None, "fsdp", "tensor"),
        "model.layers.*.up.bias": placed(torch.randn(3, 4).bfloat16()),
        "model.layers.*.scale": placed(torch.randn(3).bfloat16()),
        "model.norm.weight": placed(torch.randn(8).bfloat16(), ("tensor", "data", "fsdp")),
        "model.norm.bias": placed(torch.randn(8).bfloat16(), "data"),
    }
    path = save_checkpoint(tmp_path, 1, tensors, {}, ENGINE)
    torch.save({f"model.{name}": tensor for name, tensor in read_tensors(path, "model.").items()}, tmp_path / "want.pt")
    command = [sys.executable, "-I", "-c", PLAIN_TORCH, str(path), str(tmp_path / "want.pt")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "equal\n"


def test_a_box_is_read_from_the_chunks_that_hold_it_and_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    x = torch.arange(64.0).reshape(8, 8)
    path = save_checkpoint(tmp_path, 1, {"x": placed(x, "fsdp", mesh=Mesh(fsdp=8))}, {}, ENGINE)
    starts = []

    def counted(file: Path, start: int, num_bytes: int) -> bytes:
        starts.append(start)
        return read_bytes(file, start, num_bytes)

    read_bytes = _checkpoint_reader.read_bytes
    monkeypatch.setattr(_checkpoint_reader, "read_bytes", counted)
    reader = ChunkReader(path, Manifest.read(path))
    assert torch.equal(reader.read("x", (slice(2, 4), slice(1, 5))), x[2:4, 1:5])
    assert len(starts) == 2
    assert torch.equal(reader.read("x", (slice(3, 4), slice(0, 8))), x[3:4])
    assert len(starts) == 2  # out of the chunks that were just read

    monkeypatch.setattr(_checkpoint_reader, "_CACHE_BYTES", 0)
    reader = ChunkReader(path, Manifest.read(path))
    reader.read("x", (slice(0, 8), slice(0, 8)))
    assert len(reader._cache) <= 2


# --- what is not a good checkpoint is refused ---


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("pristine"), 1, some_tensors(), {"seed": 1}, ENGINE)


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / pristine.name)


def load_some(path: Path) -> dict[str, Tensor]:
    return load_checkpoint(path, some_tensors(), ENGINE)[0]


def test_missing_and_unexpected_tensors_are_named(checkpoint: Path):
    tensors = some_tensors()
    tensors["model.hat.weight"] = tensors.pop("model.head.weight")
    with pytest.raises(CheckpointError, match=r"lacks model\.hat\.weight; it also has model\.head\.weight"):
        load_checkpoint(checkpoint, tensors, ENGINE)


def test_another_number_of_layers_is_refused(checkpoint: Path):
    tensors = some_tensors()
    tensors["model.layers.*.attention.wq.weight"] = placed(torch.zeros(2, 8, 4).bfloat16())
    with pytest.raises(CheckpointError, match=r"it also has model\.layers\.2\.attention\.wq\.weight"):
        load_checkpoint(checkpoint, tensors, ENGINE)


@pytest.mark.parametrize("other", [torch.zeros(8, 2), torch.zeros(8, dtype=torch.bfloat16), torch.zeros(16)])
def test_another_shape_or_dtype_is_refused(checkpoint: Path, other: Tensor):
    with pytest.raises(CheckpointError, match=r"(?s)model\.norm\.weight: .*shape \(8,\), torch\.float32 in"):
        load_checkpoint(checkpoint, some_tensors() | {"model.norm.weight": placed(other)}, ENGINE)


def test_a_folder_without_a_manifest_is_no_checkpoint(checkpoint: Path, tmp_path: Path):
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"a checkpoint is a folder with a manifest\.json"):
        load_some(checkpoint)
    with pytest.raises(CheckpointError, match="which is no folder"):
        read_tensors(tmp_path / "nowhere")


def test_a_newer_version_is_refused(checkpoint: Path):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    with pytest.raises(CheckpointError, match=r"(?s)up to version 1\..*got: version 2"):
        load_some(checkpoint)


@pytest.mark.parametrize(("old", "new"), [('"seed":1', '"seed":2'), ('"step":1', '"step":3'), ("{", ""), ("}", "")])
def test_a_changed_manifest_is_refused(checkpoint: Path, old: str, new: str):
    text = (checkpoint / "manifest.json").read_text()
    (checkpoint / "manifest.json").write_text(text.replace(old, new, 1))
    with pytest.raises(CheckpointError, match="the manifest must be as it was written"):
        load_some(checkpoint)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_is_refused(checkpoint: Path, change: int):
    data = (checkpoint / "__0_0.distcp").read_bytes()
    (checkpoint / "__0_0.distcp").write_bytes(data[:-1] if change < 0 else data + b"x")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: the file must have the \d+ bytes"):
        load_some(checkpoint)


def test_a_missing_file_is_named(checkpoint: Path):
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)__0_0\.distcp: every file.*no such file"):
        load_some(checkpoint)


@settings(max_examples=40)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_changed_bit_of_the_shards_is_found(pristine: Path, position: float, bit: int):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(shutil.copytree(pristine, Path(directory) / "step_00000001"))
        data = bytearray((path / "__0_0.distcp").read_bytes())
        data[int(position * len(data))] ^= 1 << bit
        (path / "__0_0.distcp").write_bytes(data)
        with pytest.raises(
            CheckpointError, match=r"(?s)(model|optimizer)\.[^ ]+: the bytes of a tensor must be as .*CRC"
        ):
            load_some(path)


class Exploit:
    def __reduce__(self):
        return (Path.touch, (Path("exploited"),))


def test_no_pickle_is_executed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(checkpoint)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Exploit()))
    load_some(checkpoint)
    torch.save(Exploit(), "__0_0.distcp")  # with a manifest that vouches for it
    data = Path("__0_0.distcp").read_bytes()
    chunk = Chunk((0,), (4,), "__0_0.distcp", 0, len(data), zlib.crc32(data))
    forged = Manifest(1, {}, {chunk.file: len(data)}, {"x": StoredTensor((4,), torch.float32, (chunk,))})
    forged.write(checkpoint)
    with pytest.raises(CheckpointError, match="x: a chunk must be what the manifest says"):
        read_tensors(checkpoint)
    assert not Path("exploited").exists()


def test_a_manifest_may_not_point_out_of_its_folder(checkpoint: Path):
    text = (checkpoint / "manifest.json").read_text().replace("__0_0.distcp", "../__0_0.distcp")
    content = json.loads(text)["content"]
    crc32 = zlib.crc32(json.dumps(content, separators=(",", ":")).encode())
    (checkpoint / "manifest.json").write_text(json.dumps({"version": 1, "crc32": crc32, "content": content}))
    with pytest.raises(CheckpointError, match="not the name of a file in the folder"):
        load_some(checkpoint)


Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.mark.parametrize(
    "boxes",
    [
        [],
        [((0, 0), (2, 4))],
        [((0, 0), (4, 4)), ((3, 3), (1, 1))],
        [((0, 0), (4, 2)), ((0, 2), (4, 4))],
        [((0, 0), (2, 4)), ((0, 0), (2, 4))],
        [((0, 0), (2, 4)), ((2, 0), (2, 3))],
        [((-1, 0), (5, 4))],
    ],
)
def test_chunks_that_do_not_cover_a_tensor_exactly_once_are_refused(boxes: Boxes):
    chunks = tuple(Chunk(offsets, sizes, "f", 0, 1, 0) for offsets, sizes in boxes)
    with pytest.raises(CheckpointError, match="w: the chunks of a tensor cover it exactly once"):
        StoredTensor((4, 4), torch.float32, chunks).check_coverage("w")


def test_uneven_chunks_may_cover_a_tensor():
    boxes: Boxes = [((0, 0), (1, 4)), ((1, 0), (3, 1)), ((1, 1), (3, 3))]
    chunks = tuple(Chunk(offsets, sizes, "f", 0, 1, 0) for offsets, sizes in boxes)
    StoredTensor((4, 4), torch.float32, chunks).check_coverage("w")


# --- what can't be saved is refused, and nothing is left of it ---


@pytest.mark.parametrize("extra", [{"a": (1, 2)}, {"a": float("nan")}, {1: None}, {"a": torch.zeros(1)}, {"a": {2: 3}}])
def test_extra_that_json_would_change_is_refused(tmp_path: Path, extra: dict):
    with pytest.raises(CheckpointError, match="beside its tensors is JSON"):
        save_checkpoint(tmp_path, 1, some_tensors(), extra, ENGINE)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(("step", "keep"), [(-1, None), (1, 0)])
def test_senseless_numbers_are_refused(tmp_path: Path, step: int, keep: int | None):
    with pytest.raises(CheckpointError, match=f"got: step={step}, keep={keep}"):
        save_checkpoint(tmp_path, step, some_tensors(), {}, ENGINE, keep=keep)


@pytest.mark.parametrize(
    ("key", "spec", "error", "match"),
    [
        ("layers.*.w", ("fsdp",), ShardingError, r"layers\.\*\.w: dim 0 of a stack counts the layers"),
        ("layers.w*", (), CheckpointError, "the layer in a key is one"),
        ("layers.*.*.w", (), CheckpointError, "the layer in a key is one"),
        ("layers.0.v", (), CheckpointError, r"(?s)layers\.0\.v: a checkpoint holds a name once.*layers\.\*\.v"),
        ("w", (None, None, "fsdp"), ShardingError, "w: "),
    ],
)
def test_keys_and_shardings_are_checked(tmp_path: Path, key: str, spec: tuple, error: type, match: str):
    tensors = {"layers.*.v": placed(torch.zeros(4, 2)), key: placed(torch.zeros(4, 2), *spec)}
    with pytest.raises(error, match=match):
        save_checkpoint(tmp_path, 1, tensors, {}, ENGINE)
    assert names_in(tmp_path) == []


def test_a_step_is_saved_once(tmp_path: Path):
    path = save_checkpoint(tmp_path, 1, some_tensors(), {}, ENGINE)
    with pytest.raises(CheckpointError, match=r"(?s)never written over.*step_00000001 exists"):
        save_checkpoint(tmp_path, 1, some_tensors(seed=1), {}, ENGINE)
    assert names_in(tmp_path) == ["step_00000001"]
    assert_equal_bits(load_some(path), some_tensors())


def test_a_tensor_that_lost_its_sharding_is_named(tmp_path: Path):
    class Careless(ReferenceEngine):
        def local_shards(self, x, sharding):
            return super().local_shards(x.float(), sharding)

    with pytest.raises(
        CheckpointError, match=r"attention\.wq\.weight: a tensor must lie on the devices as its sharding"
    ):
        save_checkpoint(tmp_path, 1, some_tensors(), {}, Careless())
    assert names_in(tmp_path) == []


class FaultyStream:
    """A file that fails, or changes a byte, after some bytes."""

    def __init__(self, stream, good_bytes: int, error: OSError | None) -> None:
        self.stream, self.left, self.error = stream, good_bytes, error

    def write(self, data) -> int:
        data = bytes(data)
        if self.left < len(data):
            if self.error is not None:
                raise self.error
            if self.left >= 0:
                data = data[: self.left] + bytes([data[self.left] ^ 1]) + data[self.left + 1 :]
        self.left -= len(data)
        return self.stream.write(data)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def break_writes(monkeypatch: pytest.MonkeyPatch, good_bytes: int, error: OSError | None) -> None:
    def open_faulty(path: Path, mode: str):
        stream = open(path, mode)  # noqa: SIM115
        return FaultyContext(FaultyStream(stream, good_bytes, error))

    class FaultyContext:
        def __init__(self, stream: FaultyStream) -> None:
            self.stream = stream

        def __enter__(self) -> FaultyStream:
            return self.stream

        def __exit__(self, *_: object) -> None:
            self.stream.close()

    monkeypatch.setattr(filesystem.FileSystem, "create_stream", lambda self, path, mode: open_faulty(path, mode))


@pytest.mark.parametrize("good_bytes", [0, 5000, 14_000])
def test_a_full_disk_says_what_is_needed_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good_bytes: int
):
    save_checkpoint(tmp_path, 1, some_tensors(), {}, ENGINE)
    tensors = some_tensors() | {"big": placed(torch.zeros(2**20), "fsdp")}
    break_writes(monkeypatch, good_bytes, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(CheckpointError, match=r"(?s)step_00000002: .*takes 4\.0 MiB.*No space left.*MiB are free"):
        save_checkpoint(tmp_path, 2, tensors, {}, ENGINE, keep=1)
    assert names_in(tmp_path) == ["step_00000001"]
    monkeypatch.undo()
    save_checkpoint(tmp_path, 2, tensors, {}, ENGINE, keep=1)
    assert names_in(tmp_path) == ["step_00000002"]


def test_a_byte_that_changes_on_the_way_to_the_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    x = placed(torch.zeros(4096), "fsdp")
    break_writes(monkeypatch, 3000, None)
    with pytest.raises(CheckpointError, match="x: what was written must read back the same"):
        save_checkpoint(tmp_path, 1, {"x": x}, {}, ENGINE)
    assert names_in(tmp_path) == []


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="must be written"):
        save_checkpoint(tmp_path / "file" / "checkpoints", 1, some_tensors(), {}, ENGINE)


def test_an_interrupt_stays_an_interrupt(tmp_path: Path):
    class Interrupted(ReferenceEngine):
        def local_shards(self, x, sharding):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, some_tensors(), {}, Interrupted())
    assert names_in(tmp_path) == []


# --- which checkpoints there are ---


def test_keep_removes_the_oldest_and_nothing_newer(tmp_path: Path):
    for step in (30, 1, 2, 3):
        save_checkpoint(tmp_path, step, some_tensors(), {}, ENGINE)
    save_checkpoint(tmp_path, 4, some_tensors(), {}, ENGINE, keep=2)
    assert names_in(tmp_path) == ["step_00000003", "step_00000004", "step_00000030"]


def test_the_latest_is_the_newest_complete_one(tmp_path: Path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    for name in ("step_00000009", ".tmp-step_00000008", "step_7", "notes"):
        (tmp_path / name).mkdir()
    for name in (".tmp-step_00000008", "step_7", "notes"):
        (tmp_path / name / "manifest.json").write_text("{}")
    assert latest_checkpoint(tmp_path) is None
    save_checkpoint(tmp_path, 100_000_000, some_tensors(), {}, ENGINE)
    newest = save_checkpoint(tmp_path, 100_000_001, some_tensors(), {}, ENGINE)
    save_checkpoint(tmp_path, 3, some_tensors(), {}, ENGINE)
    assert latest_checkpoint(tmp_path) == newest
    assert ".tmp-step_00000008" not in names_in(tmp_path)  # a kill's leftover, cleaned by the save
    assert "notes" in names_in(tmp_path)


# Forks itself, so that every trial is cheap: the child saves, and is killed at its n-th file operation or after a
# random time; the parent looks at what is left, and saves again.
KILLED = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from shardtorch.engine._reference import ReferenceEngine
from shardtorch.mesh import Mesh, NamedSharding, P
from shardtorch.train._checkpoint import Placed, latest_checkpoint, load_checkpoint, save_checkpoint

directory, engine = Path(sys.argv[1]) / "run", ReferenceEngine()
events = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}

def tensors(step):
    sharding = NamedSharding(Mesh(fsdp=4), P(None, "fsdp"))
    return {"layers.*.w": Placed(torch.full((2, 4096), float(step)), sharding)}

def save(step):
    save_checkpoint(directory, step, tensors(step), {"step": step}, engine, keep=1)

def trial(kill_itself=lambda: None, kill_after_s=None):
    shutil.rmtree(directory, ignore_errors=True)
    save(1)
    child = os.fork()
    if child == 0:
        kill_itself()
        save(2)
        os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    finished = os.waitpid(child, 0)[1] == 0
    loaded, extra = load_checkpoint(latest_checkpoint(directory), tensors(0), engine)
    step = extra["step"]
    assert step == 2 if finished else step in (1, 2), step
    assert torch.equal(loaded["layers.*.w"], tensors(step)["layers.*.w"].tensor)
    save(3)
    assert os.listdir(directory) == ["step_00000003"], os.listdir(directory)
    return finished, step

def kill_at_event(number):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in events:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
    return lambda: sys.addaudithook(hook)

number, outcomes, finished = 0, [], False
while not finished:
    number += 1
    finished, step = trial(kill_at_event(number))
    outcomes.append(step)
assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}, outcomes

began = time.monotonic()
trial()
whole = time.monotonic() - began
generator = random.Random(0)
for _ in range(20):
    trial(kill_after_s=generator.random() * whole / 2)
print(number)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10  # moments


# --- several processes ---

# An engine that holds half of the mesh's devices in each of two processes, as two hosts of a slice would.
TWO_PROCESSES = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from shardtorch.engine import Inventory
from shardtorch.engine._reference import ReferenceEngine
from shardtorch.errors import CheckpointError
from shardtorch.mesh import Mesh, NamedSharding, P
from shardtorch.train._checkpoint import Placed, load_checkpoint, save_checkpoint

process, directory = int(sys.argv[1]), Path(sys.argv[2])

class Half(ReferenceEngine):
    def inventory(self):
        return Inventory("cpu", "cpu", num_devices=8, process_index=process, process_count=2)

    def local_shards(self, x, sharding):
        return super().local_shards(x, sharding)[4 * process : 4 * process + 4]

class HalfWithFullDisk(Half):
    def local_shards(self, x, sharding):
        if process == 1:
            raise OSError(28, "No space left on device")
        return super().local_shards(x, sharding)

def placed(x, *spec):
    return Placed(x, NamedSharding(Mesh(data=2, fsdp=2, tensor=2), P(*spec)))

def refused(engine, match):
    try:
        save_checkpoint(directory, 2, tensors, {}, engine)
    except CheckpointError as error:
        assert match in str(error), error
    else:
        raise AssertionError("saved")

torch.manual_seed(0)
tensors = {
    "layers.*.w": placed(torch.randn(3, 8, 16), None, "data", "fsdp"),
    "partly": placed(torch.randn(16).bfloat16(), "fsdp"),
    "whole": placed(torch.tensor(7)),
    "sharded": placed(torch.randn(8, 8), ("data", "fsdp"), "tensor"),
}
refused(Half(), "not initialised")
dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=process, world_size=2)
save_checkpoint(directory, 0, tensors, {}, Half())
path = save_checkpoint(directory, 1, tensors, {"a": 1}, Half(), keep=1)
assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
loaded, extra = load_checkpoint(path, tensors, Half())
assert extra == {"a": 1}
assert all(torch.equal(loaded[key], tensors[key].tensor) for key in tensors)
refused(HalfWithFullDisk(), "No space left on device")
dist.barrier()
"""


@pytest.mark.slow
def test_two_processes_write_one_checkpoint_and_fail_together(tmp_path: Path):
    commands = [[sys.executable, "-c", TWO_PROCESSES, str(process), str(tmp_path)] for process in range(2)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    assert [name for name in names_in(tmp_path) if name != "rendezvous"] == ["step_00000001"]
