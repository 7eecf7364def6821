"""The command line: a verb, its settings, one call."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from shardtorch import run
from shardtorch.config import (
    DoctorConfig,
    GenerateConfig,
    InspectConfig,
    PlanConfig,
    TrainConfig,
    read_train_settings,
)
from shardtorch.errors import ShardtorchError


@dataclass(frozen=True)
class TrainCommand(TrainConfig):
    __doc__ = TrainConfig.__doc__

    config: Path | None = None
    """JSON file of these settings, such as `shardtorch plan --search --out` writes. What the command line says wins."""

    @property
    def settings(self) -> TrainConfig:
        """What the file and the command line say together."""
        return TrainConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(TrainConfig)})


# tyro 1.0 puts what the constructor of a class raises into a box of its own making. What any other callable raises it
# leaves to us, so that an error looks the same wherever it comes from.
VERBS: Mapping[str, Callable[..., object]] = {
    "train": partial(TrainCommand),
    "generate": partial(GenerateConfig),
    "plan": partial(PlanConfig),
    "inspect": partial(InspectConfig),
    "doctor": DoctorConfig,
}
"""Settings by verb."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: Words of the command line, without the program's name; those of the process by default.

    Returns:
      The exit code: 0, 1 if `doctor` finds something wrong, 2 for a mistake in what was asked, 130 if interrupted.
    """
    console = Console()
    try:
        words = sys.argv[1:] if argv is None else argv
        config = tyro.extras.subcommand_cli_from_dict(
            {**VERBS, "train": partial(TrainCommand, **_settings_in_file(words))},
            prog="shardtorch",
            description="SPMD for PyTorch on TPUs: pretrain, plan for a slice without one, see shardings, generate.",
            args=words,
        )
        match config:
            case TrainCommand():
                return 130 if run.train(config.settings, console).interrupted else 0
            case GenerateConfig():
                run.generate(config, console)
            case PlanConfig():
                run.plan(config, console)
            case InspectConfig():
                run.inspect(config, console)
            case DoctorConfig():
                return 0 if run.doctor(console) else 1
    except ShardtorchError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _settings_in_file(words: Sequence[str]) -> Mapping[str, Any]:
    """What the file says that `train --config` names, to stand in for what the command line doesn't say."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?", type=Path)  # tyro says what is wrong if no name follows
    path = parser.parse_known_args(words[1:])[0].config if list(words[:1]) == ["train"] else None
    return {} if path is None else read_train_settings(path)


if __name__ == "__main__":
    sys.exit(main())
