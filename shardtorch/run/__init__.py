"""The commands as functions: settings in, one wiring of the parts, results out."""

from ._doctor import doctor as doctor
from ._generate import generate as generate
from ._inspect import inspect as inspect
from ._model import build_model as build_model
from ._plan import plan as plan
from ._train import train as train
