"""What was compiled, kept on disk: by graph, topology, flags and libtpu's version."""

import gzip
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from shardtorch.engine import Lowered
from shardtorch.engine.libtpu import Compiled, OutOfMemory, compile_for, graph_text, libtpu_version
from shardtorch.errors import ConfigError
from shardtorch.mesh import SliceTopology

_KINDS = {"compiled": Compiled, "out of memory": OutOfMemory}


def cache_key(lowered: Lowered, topology: SliceTopology, flags: Mapping[str, str] | None) -> str:
    """What identifies a compilation."""
    digest = hashlib.sha256(graph_text(lowered).encode())
    shardings = [(a.name, str(a.sharding), a.result) for a in lowered.arguments]
    results = [str(sharding) for sharding in lowered.result_shardings]
    versions = [libtpu_version(), version("jaxlib"), version("shardtorch")]
    environment = [os.environ.get(name, "") for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")]
    facts = [shardings, results, str(topology), sorted((flags or {}).items()), environment, versions]
    digest.update(json.dumps(facts).encode())
    return digest.hexdigest()


def cached_compile(
    lowered: Lowered, topology: SliceTopology, flags: Mapping[str, str] | None, folder: Path | None
) -> Compiled | OutOfMemory:
    """`compile_for`, unless the folder has the result; it is put there afterwards.

    Raises:
      ConfigError: The folder can't be written.
    """
    if folder is None:
        return compile_for(lowered, topology, flags)
    path = folder / f"{cache_key(lowered, topology, flags)}.json.gz"
    if (kept := _read(path)) is not None:
        return kept
    with _explained(folder):  # before a minute of compiling
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    result = compile_for(lowered, topology, flags)
    kind = "compiled" if isinstance(result, Compiled) else "out of memory"
    text = gzip.compress(json.dumps({"kind": kind} | asdict(result)).encode(), compresslevel=4)
    with _explained(folder):
        _write(path, text)
    return result


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder}: the cache of compiled steps must be writable.",
            got=str(error),
            fix="make room, or choose another folder with --cache.",
        ) from error


def _write(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: several may compile the same thing, and any of them may be killed."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _read(path: Path) -> Compiled | OutOfMemory | None:
    """What a file holds; None if there is none that can be read, and it is made again."""
    try:
        fields = json.loads(gzip.decompress(path.read_bytes()))
        return _KINDS[fields.pop("kind")](**fields)
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, zlib.error):
        return None
