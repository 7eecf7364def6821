"""One XLA runtime of 8 virtual devices for the whole session, and the engines that the tests run on."""

import os

import processes  # noqa: F401  remembers the environment as it is now
import pytest
from hypothesis import settings

os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
# The tests compile much and compute little.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

from shardtorch import engine as engines
from shardtorch.engine import Engine
from shardtorch.engine._reference import ReferenceEngine

settings.register_profile("untimed", deadline=None)  # a busy machine is not a failure
settings.load_profile("untimed")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the engine that some test needs before any test runs: after a backward pass it is too late."""
    needed = any({"xla", "engine"} & set(getattr(item, "fixturenames", ())) for item in session.items)
    if needed and not session.config.option.collectonly:
        engines.start(num_devices=8)


@pytest.fixture(scope="session")
def xla() -> Engine:
    """The torch_xla engine, which is also the one that is running."""
    return engines.start(num_devices=8)


@pytest.fixture(scope="session")
def reference() -> Engine:
    """The reference engine, not running: it is passed by hand."""
    return ReferenceEngine()


@pytest.fixture(scope="session", params=["reference", "torch_xla"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn, the reference first."""
    return request.getfixturevalue({"reference": "reference", "torch_xla": "xla"}[request.param])
