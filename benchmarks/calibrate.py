"""Predicts published step times and says how well that went.

    python benchmarks/calibrate.py                  # tests/data/published_step_times.csv, with today's factors
    python benchmarks/calibrate.py --rows my.csv    # other rows of the same columns
    python benchmarks/calibrate.py --fit            # also fits a factor per chip generation, on every second row

What a source leaves open is assumed, and printed: no remat where that fits, else full; FSDP over all chips where no
mesh is given; the squarest slice of that many chips; our model code and kernels, with float32 state and bfloat16
compute. A configuration whose state does not fit (its source keeps some of it elsewhere) is predicted from the same
step with fewer layers: time is linear in their number. A row is left out, with the reason, if its model has no preset
or it gives no batch.

Times are compared per sequence and chip. Compiled steps are kept in ~/.cache/shardtorch/plans, so a second run is fast.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from shardtorch.aot import CompileReport
from shardtorch.config import PlanConfig

ROWS = Path(__file__).parent.parent / "tests/data/published_step_times.csv"
ALIASES = {"llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b", "llama3.1-405b": "llama3-405b"}
TIED = 0.03
"""Measured times this close to each other count as equal in a ranking."""
FEWER_LAYERS = (2, 4)


@dataclass(frozen=True)
class Row:
    """One published result."""

    number: int
    source: str
    model: str
    chip: str
    chips: int
    slices: int
    mesh: str
    batch: int | None
    seq: int
    step_s: float | None
    tokens_per_s_per_chip: float | None

    @property
    def measured(self) -> float | None:
        """Seconds per sequence and chip."""
        if self.tokens_per_s_per_chip and self.seq:
            return self.seq / self.tokens_per_s_per_chip
        if self.step_s and self.batch:
            return self.step_s * self.chips * self.slices / self.batch
        return None

    @property
    def name(self) -> str:
        return f"{self.model} {self.chip} x {self.chips * self.slices}, batch {self.batch} x {self.seq}"


@dataclass(frozen=True)
class Prediction:
    """What came of a row."""

    row: Row
    simulated: float | None
    """Seconds per sequence and chip, before any factor."""
    note: str
    """What was assumed, or why there is no prediction."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file with the columns of `ROWS`; numbers may be missing."""
    with path.open(newline="") as file:
        return [
            Row(
                number,
                line["source"],
                line["model"],
                line["chip"],
                int(line["chips"]),
                int(line["slices"] or 1),
                line["mesh"],
                int(line["global_batch"]) if line["global_batch"] else None,
                int(line["seq"] or 0),
                float(line["step_s"]) if line["step_s"] else None,
                float(line["tokens_per_s_per_chip"]) if line["tokens_per_s_per_chip"] else None,
            )
            for number, line in enumerate(csv.DictReader(file), start=1)
        ]


def squarest_slice(chip: str, chips: int) -> str:
    """The slice of that many chips whose sides differ least.

    >>> squarest_slice("v6e", 32), squarest_slice("v5p", 256), squarest_slice("v6e", 8)
    ('v6e:4x8', 'v5p:4x8x8', 'v6e:2x4')
    """
    from shardtorch.errors import TopologyError
    from shardtorch.mesh import SliceTopology

    sides = [n for n in range(1, chips + 1) if chips % n == 0]
    shapes: list[tuple[int, ...]] = [(a, b) for a in sides for b in sides if a * b == chips and a <= b]
    shapes += [(a, b, c) for a in sides for b in sides for c in sides if a * b * c == chips and a <= b <= c]
    fitting = []
    for shape in shapes:
        for order in set(itertools.permutations(shape)):  # an odd side of a v5p slice comes last
            try:
                fitting.append(SliceTopology(chip, order))
            except TopologyError:
                continue
    if not fitting:
        raise ValueError(f"no slice of {chips} chips of {chip}")
    best = min(fitting, key=lambda t: (max(t.ici_shape) / min(t.ici_shape), t.ici_shape))
    return str(best)


def may_fit_without_remat(config: PlanConfig) -> bool:
    """Whether it is worth compiling, by the search's rough estimate of memory."""
    from shardtorch.aot._memory import memory_limit
    from shardtorch.models import PRESETS
    from shardtorch.run._search_space import search_space

    topology = config.parse_topology()
    shape = PRESETS[config.model]
    mesh = config.parse_mesh(shape.embed_dim)
    return any(
        each.mesh == mesh
        and (each.remat, each.microbatches) == ("none", 1)
        and each.likely_bytes <= memory_limit(topology)
        for each in search_space(shape, topology, config).candidates
    )


def predict(row: Row) -> Prediction:
    """Compiles a row's configuration."""
    from shardtorch.errors import ShardtorchError
    from shardtorch.models import PRESETS
    from shardtorch.run._plan import compile_plan

    model = ALIASES.get(row.model, row.model)
    if model not in PRESETS:
        return Prediction(row, None, f"no preset for {row.model}")
    if not row.batch:
        return Prediction(row, None, "the source gives no batch")
    try:
        topology = squarest_slice(row.chip, row.chips)
        if row.slices > 1:
            topology = f"{row.slices} x {topology}"
        mesh = row.mesh or f"fsdp={row.chips * row.slices}"
        config = PlanConfig(model, topology, mesh, global_batch_size=row.batch, seq_len=row.seq)
        shape = PRESETS[model]

        def compiled(remat: str, num_layers: int = shape.num_layers) -> CompileReport:
            changed = dataclasses.replace(config, remat=remat)
            layers = dataclasses.replace(shape, num_layers=num_layers)
            return compile_plan(layers, config.parse_mesh(shape.embed_dim), changed)

        remat = "none"
        if not may_fit_without_remat(config) or not (report := compiled(remat)).fits:
            remat, report = "full", compiled("full")
        note = f"{topology}, {mesh}, remat {remat}" + ("" if row.mesh else " (mesh assumed)")
        time = report.step_time
        if time is not None:
            total, efficiency = time.total, time.efficiency
        else:
            few, more = (compiled(remat, num_layers).step_time for num_layers in FEWER_LAYERS)
            if few is None or more is None:
                return Prediction(row, None, f"{note}: {report.verdict}")
            per_layer = (more.total - few.total) / (FEWER_LAYERS[1] - FEWER_LAYERS[0])
            total, efficiency = few.total + per_layer * (shape.num_layers - FEWER_LAYERS[0]), few.efficiency
            note += f"; does not fit as it is, so from {FEWER_LAYERS[0]} and {FEWER_LAYERS[1]} layers"
        return Prediction(row, total * efficiency * row.chips * row.slices / row.batch, note)
    except (ShardtorchError, ValueError) as error:
        return Prediction(row, None, str(error).splitlines()[0])


def ranks(values: Sequence[float], tied: float = 0.0) -> list[float]:
    """Ranks from 1, the mean rank for those that are within `tied` of the first of their group."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] <= values[order[start]] * (1 + tied):
            end += 1
        for place in order[start:end]:
            found[place] = (start + 1 + end) / 2
        start = end
    return found


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks; both sides tied within `TIED`.

    >>> rank_correlation([1, 2, 3], [10, 10.1, 30]) > 0.8
    True
    """
    return statistics.correlation(ranks(predicted, TIED), ranks(measured, TIED))


def fit(pairs: Sequence[tuple[float, float]]) -> float:
    """The factor that simulated times are divided by: the geometric mean of simulated over measured."""
    return math.exp(statistics.mean(math.log(simulated / measured) for simulated, measured in pairs))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS, help="CSV of published results (default: %(default)s)")
    parser.add_argument("--fit", action="store_true", help="fit a factor per chip generation on every second row")
    parser.add_argument("--json", type=Path, help="also write what came out here")
    args = parser.parse_args(argv)
    from shardtorch.aot import efficiency_of

    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    rows = [row for row in read_rows(args.rows) if row.measured is not None]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:  # a compilation leaves memory behind
        predictions = list(track(pool.map(predict, rows), "compiling", len(rows), console=Console(stderr=True)))
    generations = sorted({row.chip for row in rows})
    factors = {generation: efficiency_of(generation)[0] for generation in generations}
    fitted: set[int] = set()
    if args.fit:
        chosen = {each: [p for p in predictions if p.row.chip == each and p.simulated][::2] for each in generations}
        enough = [generation for generation in generations if len(chosen[generation]) > 1]
        fitted = {p.row.number for generation in enough for p in chosen[generation]}
        for generation in generations:  # one with too few rows takes what fits the others
            of = [generation] if generation in enough else enough
            pairs = [(p.simulated or 1.0, p.row.measured or 1.0) for each in of for p in chosen[each]]
            factors[generation] = fit(pairs) if pairs else factors[generation]

    table = Table(
        "row",
        "configuration",
        "source",
        "measured",
        "predicted",
        "error",
        "assumed",
        title="seconds per sequence and chip",
    )
    errors: dict[int, float] = {}
    for p in predictions:
        measured = p.row.measured or math.nan
        cells = [f"{p.row.number}{' *' if p.row.number in fitted else ''}", p.row.name, p.row.source, f"{measured:.3f}"]
        if p.simulated:
            predicted = p.simulated / factors[p.row.chip]
            errors[p.row.number] = predicted / measured - 1
            cells += [f"{predicted:.3f}", f"{errors[p.row.number]:+.1%}"]
        else:
            cells += ["-", "-"]
        table.add_row(*cells, p.note)
    console.print(table)
    if fitted:
        console.print("* used to fit")
    summary: dict[str, object] = {"factors": factors}
    for generation in generations:
        known = [p for p in predictions if p.row.chip == generation and p.simulated]
        if not known:
            continue
        simulated, measured = (
            [getter(p) for p in known] for getter in (lambda p: p.simulated, lambda p: p.row.measured)
        )
        text = f"{generation}: divided by {factors[generation]:.3f}"
        if len(known) > 1:
            text += f"; rank correlation {rank_correlation(simulated, measured):.3f} over {len(known)} rows"
        console.print(text, highlight=False)
    held_out = [abs(error) for number, error in errors.items() if number not in fitted]
    for name, group in (("rows that were not fitted", held_out), ("all rows", [abs(e) for e in errors.values()])):
        if group:
            console.print(
                f"median absolute error on {name}: {statistics.median(group):.1%} ({len(group)} rows)", highlight=False
            )
    if args.json:
        summary["rows"] = [dataclasses.asdict(p) | {"measured": p.row.measured} for p in predictions]
        args.json.write_text(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
