"""Pretraining: state, step, loop, data, checkpoints, metrics."""

from ._checkpoint import Placed as Placed
from ._checkpoint import latest_checkpoint as latest_checkpoint
from ._checkpoint import load_checkpoint as load_checkpoint
from ._checkpoint import read_extra as read_extra
from ._checkpoint import read_tensors as read_tensors
from ._checkpoint import save_checkpoint as save_checkpoint
from ._data import Batch as Batch
from ._data import Corpus as Corpus
from ._data import bits_per_byte as bits_per_byte
from ._data import heldout_batches as heldout_batches
from ._data import prepare as prepare
from ._data import train_loader as train_loader
from ._data import zlib_bits_per_byte as zlib_bits_per_byte
from ._display import Display as Display
from ._loop import Evaluation as Evaluation
from ._loop import Loop as Loop
from ._loop import Summary as Summary
from ._metrics import MetricsLog as MetricsLog
from ._metrics import StepMetrics as StepMetrics
from ._optim import Schedule as Schedule
from ._optim import adamw as adamw
from ._state import TrainState as TrainState
from ._step import make_eval_step as make_eval_step
from ._step import make_step as make_step
from ._tokenizer import load_tokenizer as load_tokenizer
