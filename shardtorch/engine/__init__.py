"""The seam: the only package that touches a runtime."""

from ._contract import Argument as Argument
from ._contract import Engine as Engine
from ._contract import Index as Index
from ._contract import Inventory as Inventory
from ._contract import Kernel as Kernel
from ._contract import LayerBody as LayerBody
from ._contract import Lowered as Lowered
from ._contract import Origin as Origin
from ._contract import ReadShard as ReadShard
from ._contract import Shard as Shard
from ._start import running as running
from ._start import start as start
