"""The command line: a verb, its settings, one call."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import tyro
from rich.console import Console

from shardtorch import run
from shardtorch.config import DoctorConfig, GenerateConfig, InspectConfig, TrainConfig
from shardtorch.errors import ShardtorchError

# tyro 1.0 puts what the constructor of a class raises into a box of its own making. What any other callable raises it
# leaves to us, so that an error looks the same wherever it comes from.
VERBS: Mapping[str, Callable[..., object]] = {
    "train": partial(TrainConfig),
    "generate": partial(GenerateConfig),
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
        config = tyro.extras.subcommand_cli_from_dict(
            dict(VERBS),
            prog="shardtorch",
            description="SPMD for PyTorch on TPUs: pretrain, look at plans, generate.",
            args=argv,
        )
        match config:
            case TrainConfig():
                return 130 if run.train(config, console).interrupted else 0
            case GenerateConfig():
                run.generate(config, console)
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


if __name__ == "__main__":
    sys.exit(main())
