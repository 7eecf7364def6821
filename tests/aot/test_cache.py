"""The folder of compiled steps: when it spares a compilation, and what it does about whatever happens to its files.

The compiler is stood in for by a function that counts; tests/engine/test_libtpu.py holds what the real one returns.
"""

import errno
import gzip
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from jax._src.lib import xla_client
from processes import run_python

from shardtorch.aot import _cache
from shardtorch.aot._cache import cache_key, cached_compile
from shardtorch.engine import Argument, Lowered, Origin
from shardtorch.engine.libtpu import Compiled, OutOfMemory
from shardtorch.errors import ConfigError, ShardtorchError
from shardtorch.mesh import Mesh, NamedSharding, P, SliceTopology

TOPOLOGY = SliceTopology.parse("v5e:2x4")
COMPILED = Compiled("HloModule é", "AAA=", 1, 2, 3, 4, 5, 6, "a log\n", 1.5, "0.0.40")
OUT_OF_MEMORY = OutOfMemory("RESOURCE_EXHAUSTED: by 3.2G", "AAA=", 2.5, "0.0.40")


def argument(spec: P = P("fsdp"), mesh: Mesh = Mesh(fsdp=8), result: int | None = 0) -> Argument:  # noqa: B008
    return Argument("w", (8, 8), torch.float32, NamedSharding(mesh, spec), result)


@cache
def graph(constant: int) -> bytes:
    text = f"HloModule step\nENTRY %main () -> s32[] {{\n  ROOT %c = s32[] constant({constant})\n}}"
    return xla_client._xla.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def step(constant: int = 1, **fields: Any) -> Lowered:
    it = argument()
    return replace(Lowered(graph(constant), (it,), (it.sharding,), (Origin("layer"),)), **fields)


class Compiler:
    """Stands in for `compile_for`."""

    def __init__(self, result: Compiled | OutOfMemory = COMPILED) -> None:
        self.calls: list[tuple[Lowered, SliceTopology, Mapping[str, str] | None]] = []
        self.result = result

    def __call__(
        self, lowered: Lowered, topology: SliceTopology, flags: Mapping[str, str] | None = None
    ) -> Compiled | OutOfMemory:
        self.calls.append((lowered, topology, flags))
        return self.result


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(_cache, "compile_for", compiler)
    return compiler


@pytest.mark.parametrize("result", [COMPILED, OUT_OF_MEMORY])
def test_the_second_time_nothing_is_compiled(compiler: Compiler, result: Compiled | OutOfMemory, tmp_path: Path):
    compiler.result = result
    folder = tmp_path / "a" / "b"
    assert cached_compile(step(), TOPOLOGY, None, folder) == result
    assert cached_compile(step(), TOPOLOGY, None, folder) == result
    assert cached_compile(step(), TOPOLOGY, {}, folder) == result
    assert compiler.calls == [(step(), TOPOLOGY, None)]
    assert [path.name for path in folder.iterdir()] == [f"{cache_key(step(), TOPOLOGY, None)}.json.gz"]


def test_without_a_folder_everything_is_compiled(compiler: Compiler):
    flags = {"xla_a": "1"}
    for _ in range(2):
        assert cached_compile(step(), TOPOLOGY, flags, None) == COMPILED
    assert compiler.calls == [(step(), TOPOLOGY, flags)] * 2


def test_what_the_compiler_refuses_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    refused = ShardtorchError("libtpu must accept the step.", got="no", fix="none.")

    def refuse(*_: object) -> Compiled:
        raise refused

    monkeypatch.setattr(_cache, "compile_for", refuse)
    for _ in range(2):
        with pytest.raises(ShardtorchError) as caught:
            cached_compile(step(), TOPOLOGY, None, tmp_path)
        assert caught.value is refused
    assert list(tmp_path.iterdir()) == []


TWO_SLICES = SliceTopology.parse("2 x v5e:2x2")
OTHERS: dict[str, Callable[[], tuple[Lowered, SliceTopology, Mapping[str, str] | None]]] = {
    "another graph": lambda: (step(2), TOPOLOGY, None),
    "another spec": lambda: (step(arguments=(argument(P(None, "fsdp")),)), TOPOLOGY, None),
    "another mesh": lambda: (step(arguments=(argument(mesh=Mesh(data=2, fsdp=4)),)), TOPOLOGY, None),
    "an axis over slices": lambda: (
        step(arguments=(argument(mesh=Mesh(fsdp=8, dcn={"fsdp": 2})),)),
        TOPOLOGY,
        None,
    ),
    "no donation": lambda: (step(arguments=(argument(result=None),)), TOPOLOGY, None),
    "another donation": lambda: (step(arguments=(argument(result=1),)), TOPOLOGY, None),
    "a result that is left to the partitioner": lambda: (step(result_shardings=(None,)), TOPOLOGY, None),
    "another result": lambda: (step(result_shardings=(argument(P()).sharding,)), TOPOLOGY, None),
    "another shape of slice": lambda: (step(), SliceTopology.parse("v5e:4x2"), None),
    "another generation": lambda: (step(), SliceTopology.parse("v6e:2x4"), None),
    "two slices": lambda: (step(), TWO_SLICES, None),
    "a flag": lambda: (step(), TOPOLOGY, {"xla_a": "1"}),
    "another value of a flag": lambda: (step(), TOPOLOGY, {"xla_a": "2"}),
    "another flag": lambda: (step(), TOPOLOGY, {"xla_b": "1"}),
    "two flags": lambda: (step(), TOPOLOGY, {"xla_a": "1", "xla_b": "1"}),
}


def test_whatever_changes_the_program_has_a_key_of_its_own():
    keys = {"the step": cache_key(step(), TOPOLOGY, None)} | {name: cache_key(*make()) for name, make in OTHERS.items()}
    assert len(set(keys.values())) == len(keys), keys


def test_another_step_is_compiled_beside_the_first(compiler: Compiler, tmp_path: Path):
    cached_compile(step(), TOPOLOGY, None, tmp_path)
    for make in OTHERS.values():
        cached_compile(*make(), tmp_path)
    assert len(compiler.calls) == 1 + len(OTHERS) == len(list(tmp_path.iterdir()))


def test_another_libtpu_compiles_anew(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cached_compile(step(), TOPOLOGY, None, tmp_path)
    monkeypatch.setattr(_cache, "libtpu_version", lambda: "0.0.41")
    cached_compile(step(), TOPOLOGY, None, tmp_path)
    assert len(compiler.calls) == 2 == len(list(tmp_path.iterdir()))


def test_what_does_not_change_the_program_does_not_change_the_key():
    flags = {"xla_a": "1", "xla_b": "2"}
    assert cache_key(step(), TOPOLOGY, flags) == cache_key(step(), TOPOLOGY, dict(reversed(flags.items())))
    assert cache_key(step(), TOPOLOGY, None) == cache_key(step(origins=()), TOPOLOGY, {})


WHOLE = gzip.compress(json.dumps({"kind": "compiled"} | asdict(COMPILED)).encode())


def packed(value: object) -> bytes:
    return gzip.compress(json.dumps(value).encode())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        WHOLE[:9],
        WHOLE[: len(WHOLE) // 2],
        WHOLE[:-1],
        WHOLE[:30] + bytes(20) + WHOLE[50:],
        b"\0" * 100,
        b"not gzip",
        gzip.compress(b"not JSON"),
        gzip.compress(b'{"kind": "compiled"'),
        gzip.compress(b'"\xff\xfe"'),
        packed([]),
        packed("compiled"),
        packed(None),
        packed({}),
        packed({"kind": "compiled"}),
        packed({"kind": "another"} | asdict(COMPILED)),
        packed({"kind": ["compiled"]} | asdict(COMPILED)),
        packed({"kind": "out of memory"} | asdict(COMPILED)),
        packed({"kind": "compiled", "further": 1} | asdict(COMPILED)),
    ],
    ids=lambda content: f"{len(content)} bytes",
)
def test_a_file_that_cannot_be_read_is_made_again(compiler: Compiler, content: bytes, tmp_path: Path):
    cached_compile(step(), TOPOLOGY, None, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    assert cached_compile(step(), TOPOLOGY, None, tmp_path) == COMPILED
    assert cached_compile(step(), TOPOLOGY, None, tmp_path) == COMPILED
    assert len(compiler.calls) == 2
    assert list(tmp_path.iterdir()) == [path]


def assert_refused_before_compiling(compiler: Compiler, folder: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        cached_compile(step(), TOPOLOGY, None, folder)
    assert str(caught.value).startswith(f"{folder}: the cache of compiled steps must be writable.")
    assert "--cache" in caught.value.fix
    assert compiler.calls == []


def test_a_folder_that_is_a_file(compiler: Compiler, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    assert_refused_before_compiling(compiler, tmp_path / "file", "exists")
    assert_refused_before_compiling(compiler, tmp_path / "file" / "plans", "Not a directory")
    assert (tmp_path / "file").read_text() == "mine"


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may write anywhere, so as nobody, if this is root."""
    if os.getuid() != 0:
        yield
        return
    os.setresgid(65534, 65534, 0)
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


@pytest.mark.skipif(not hasattr(os, "setresuid"), reason="needs a system where root can step down")
def test_a_folder_without_permission_to_write(compiler: Compiler):
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders can't be entered by others
        folder = Path(name)
        folder.chmod(0o555)
        try:
            with without_privileges():
                assert_refused_before_compiling(compiler, folder, "Permission denied")
                assert_refused_before_compiling(compiler, folder / "plans", "Permission denied")
        finally:
            folder.chmod(0o755)


def test_a_full_disk_leaves_nothing(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_cache.os, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        cached_compile(step(), TOPOLOGY, None, tmp_path)
    assert len(compiler.calls) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_writer_leaves_nothing(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_cache.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached_compile(step(), TOPOLOGY, None, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_writer_leaves_no_file_under_the_final_name(compiler: Compiler, tmp_path: Path):
    path = tmp_path / f"{cache_key(step(), TOPOLOGY, None)}.json.gz"
    done = run_python(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from shardtorch.aot import _cache\n"
        # The last moment at which it can be killed: everything is written, and nothing has its name.
        "_cache.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"_cache._write(Path({str(path)!r}), {WHOLE!r})\n"
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 1  # it was writing
    assert cached_compile(step(), TOPOLOGY, None, tmp_path) == COMPILED
    assert len(compiler.calls) == 1
    assert path.exists()


def test_several_may_compile_the_same_thing(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    num_threads = 8
    barrier = Barrier(num_threads)

    def together(*words: Any) -> Compiled | OutOfMemory:
        barrier.wait(30)  # none is done before all have begun
        return compiler(*words)

    monkeypatch.setattr(_cache, "compile_for", together)
    with ThreadPoolExecutor(num_threads) as threads:
        asked = [threads.submit(cached_compile, step(), TOPOLOGY, None, tmp_path) for _ in range(num_threads)]
        assert [it.result() for it in asked] == [COMPILED] * num_threads
    assert len(compiler.calls) == num_threads
    assert len(list(tmp_path.iterdir())) == 1
    assert cached_compile(step(), TOPOLOGY, None, tmp_path) == COMPILED
    assert len(compiler.calls) == num_threads


def test_a_reader_never_sees_half_a_file(tmp_path: Path):
    path = tmp_path / "it.json.gz"
    results = [replace(COMPILED, text=str(n) * 200_000) for n in range(4)]
    contents = [packed({"kind": "compiled"} | asdict(result)) for result in results]
    _cache._write(path, contents[0])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            writers = [threads.submit(_cache._write, path, contents[n % 4]) for n in range(100)]
            while not all(writer.done() for writer in writers):
                assert _cache._read(path) in results
            assert [writer.result() for writer in writers] == [None] * 100
    finally:
        sys.setswitchinterval(interval)
    assert list(tmp_path.iterdir()) == [path]
