"""Runs that several tests look at. Each is done once, in three processes, two of them at a time."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import Runs, finish, start_in_turn

REFERENCE = {"reference": "--engine reference --steps 40"}
ONE_DEVICE = {"one device": "--devices 1 --steps 40"}
EIGHT_DEVICES = {
    "fsdp=4,tensor=2": "--devices 8 --mesh fsdp=4,tensor=2 --steps 40",
    "fsdp=8": "--devices 8 --mesh fsdp=8 --steps 40",
    "data=2,fsdp=2,tensor=2": "--devices 8 --mesh data=2,fsdp=2,tensor=2 --steps 40",
    "tensor=8": "--devices 8 --mesh tensor=8 --steps 10",
    "remat and chunks on data=2,fsdp=2,context=2": (
        "--devices 8 --mesh data=2,fsdp=2,context=2 --steps 10 --remat full --loss-chunks 4"
    ),
    "bfloat16 on fsdp=4,tensor=2": "--devices 8 --mesh fsdp=4,tensor=2 --steps 10 --compute-dtype bfloat16",
}
"""Options by the name of a run. All of them are the same run, but on other meshes."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def trained(runs: Runs) -> Iterator[Callable[[str], Path]]:
    """The folder of a finished run, by its name. It must not be changed."""
    processes = []

    def train(options: dict[str, str]) -> None:
        processes.append(start_in_turn([runs.words(name, *words.split()) for name, words in options.items()]))
        done = finish(processes[-1])
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""

    groups = (REFERENCE, EIGHT_DEVICES, ONE_DEVICE)
    pool = ThreadPoolExecutor(max_workers=2)
    try:
        futures = [pool.submit(train, group) for group in groups]

        def folder(name: str) -> Path:
            (future,) = (future for future, group in zip(futures, groups, strict=True) if name in group)
            future.result()
            return runs.root / name

        yield folder
    finally:  # the tests that were selected may not need all of them
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
