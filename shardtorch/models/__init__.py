"""Models in plain torch, with their logical axes and initial values as data."""

from ._init import Constant as Constant
from ._init import Normal as Normal
from ._llama import DEFAULT_RULES as DEFAULT_RULES
from ._llama import Llama as Llama
from ._llama import LlamaConfig as LlamaConfig
from ._loss import IGNORED_TARGET as IGNORED_TARGET
from ._loss import chunked_cross_entropy as chunked_cross_entropy
from ._presets import PRESETS as PRESETS
from ._presets import preset as preset
from ._rope import RopeScaling as RopeScaling
