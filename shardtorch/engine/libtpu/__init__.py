"""The only place that compiles for a TPU slice that isn't there.

The engine itself is in `_engine`, which loads torch_xla: `shardtorch.start("libtpu", topology=...)` imports it.
"""

from ._compile import Compiled as Compiled
from ._compile import OutOfMemory as OutOfMemory
from ._compile import compile_for as compile_for
from ._compile import graph_text as graph_text
from ._compile import libtpu_version as libtpu_version
from ._compile import prepare_environment as prepare_environment
