"""What compares predictions with published results: the rows, and the statistics."""

import doctest
import importlib.util
import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import environment
from scipy import stats  # which jax brings along

from shardtorch.errors import TopologyError
from shardtorch.mesh import SliceTopology

BENCHMARK = Path(__file__).parents[1] / "benchmarks/calibrate.py"


def load() -> ModuleType:
    """The benchmark, which is in no package."""
    spec = importlib.util.spec_from_file_location("calibrate", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


calibrate = load()
COLUMNS = "source,model,chip,chips,slices,mesh,global_batch,seq,step_s,tokens_per_s_per_chip,note"


def write_rows(folder: Path, *lines: str) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join([COLUMNS, *lines]) + "\n")
    return path


def test_its_examples():
    result = doctest.testmod(calibrate)
    assert result.attempted >= 2
    assert result.failed == 0


# Rows


def test_the_published_rows_are_all_read():
    rows = calibrate.read_rows(calibrate.ROWS)
    assert [row.number for row in rows] == list(range(1, len(calibrate.ROWS.read_text().splitlines())))
    assert len(rows) == 15
    assert Counter(row.chip for row in rows) == {"v6e": 13, "v5p": 2}
    assert {row.model for row in rows} >= {"llama3-8b", "llama3.1-70b", "mixtral-8x7b", "llama2-7b"}
    first, last = rows[0], rows[-1]
    assert (first.source, first.mesh, first.chips, first.slices) == ("torchprime README d0d7f36", "fsdp=256", 256, 1)
    assert (first.batch, first.seq, first.step_s, first.tokens_per_s_per_chip) == (1024, 8192, 4.823, 6794)
    assert (last.mesh, last.batch, last.seq, last.step_s) == ("", 1024, 4096, 2.5)
    assert first.name == "llama3-8b v6e x 256, batch 1024 x 8192"
    assert all(
        SliceTopology.parse(calibrate.squarest_slice(row.chip, row.chips)).num_chips == row.chips for row in rows
    )


def test_every_published_row_was_measured_and_its_two_figures_agree():
    for row in calibrate.read_rows(calibrate.ROWS):
        assert row.measured == row.seq / row.tokens_per_s_per_chip
        if row.step_s and row.batch:
            by_step = row.step_s * row.chips * row.slices / row.batch
            assert by_step == pytest.approx(row.measured, rel=0.01), row.name


@pytest.mark.parametrize(
    ("line", "measured"),
    [
        ("s,m,v6e,256,1,,1024,8192,4.0,8192,", 1.0),  # tokens per second come first
        ("s,m,v6e,256,1,,1024,8192,4.0,,", 1.0),
        ("s,m,v6e,256,2,,1024,8192,4.0,,", 2.0),
        ("s,m,v6e,256,,,1024,8192,4.0,,", 1.0),
        ("s,m,v6e,256,1,,512,,4.0,,", 2.0),
        ("s,m,v5p,256,1,,,4096,,2048,", 2.0),
        ("s,m,v6e,256,1,,,8192,4.0,,", None),
        ("s,m,v6e,256,1,,1024,8192,,,", None),
        ("s,m,v6e,256,1,,1024,,,8192,", None),
        ("s,m,v6e,256,1,,1024,,4.0,8192,", 1.0),
    ],
)
def test_seconds_per_sequence_and_chip(tmp_path: Path, line: str, measured: float | None):
    (row,) = calibrate.read_rows(write_rows(tmp_path, line))
    assert row.measured == measured


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("s,mixtral-8x7b,v5p,256,1,,,4096,,2909,", "no preset for mixtral-8x7b"),
        ("s,mixtral-8x7b,v5p,256,1,,64,4096,,2909,", "no preset for mixtral-8x7b"),
        ("s,llama3-8b,v6e,256,1,,,8192,,5000,", "the source gives no batch"),
        ("s,llama3.1-8b,v6e,256,1,,,8192,,5000,", "the source gives no batch"),  # the preset of another name
        ("s,llama3-8b,v6e,512,1,,1024,8192,,5000,", "no slice of 512 chips of v6e"),
        ("s,llama3-8b,h100,8,1,,16,8192,,5000,", "no slice of 8 chips of h100"),
        ("s,llama3-8b,v6e,8,1,fsdp=3,16,8192,,5000,", "v6e:2x4 has 8 devices, and the mesh 3."),
    ],
)
def test_a_row_that_is_left_out_says_why(tmp_path: Path, line: str, why: str):
    (row,) = calibrate.read_rows(write_rows(tmp_path, line))
    assert calibrate.predict(row) == calibrate.Prediction(row, None, why)


@pytest.mark.slow
def test_rows_that_are_left_out_are_listed_with_the_reason(tmp_path: Path):
    rows = write_rows(
        tmp_path,
        "one,mixtral-8x7b,v5p,256,1,,,4096,,2909,",
        "two,llama3-8b,v6e,256,1,,,8192,,5000,",
        "three,llama3-8b,v6e,256,1,,,8192,4.0,,",
    )
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARK), "--rows", str(rows), "--fit", "--json", str(out)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no preset for mixtral-8x7b" in done.stdout
    assert "the source gives no batch" in done.stdout
    assert "three" not in done.stdout  # nothing was measured
    assert "median" not in done.stdout
    found = json.loads(out.read_text())["rows"]
    assert [(row["row"]["source"], row["simulated"], row["measured"]) for row in found] == [
        ("one", None, 4096 / 2909),
        ("two", None, 8192 / 5000),
    ]


# Slices


@pytest.mark.parametrize(
    ("chip", "chips", "want"),
    [
        ("v5e", 1, "v5e:1x1"),
        ("v6e", 4, "v6e:2x2"),
        ("v6e", 64, "v6e:8x8"),
        ("v6e", 128, "v6e:8x16"),
        ("v6e", 256, "v6e:16x16"),
        ("v5p", 4, "v5p:2x2x1"),
        ("v5p", 12, "v5p:2x2x3"),
        ("v5p", 24, "v5p:2x4x3"),
        ("v5p", 64, "v5p:4x4x4"),
        ("v5p", 256, "v5p:4x8x8"),
        ("tpu7x", 8, "tpu7x:2x2x2"),
    ],
)
def test_squarest_slice(chip: str, chips: int, want: str):
    assert calibrate.squarest_slice(chip, chips) == want


def exists(chip: str, shape: tuple[int, ...]) -> bool:
    try:
        SliceTopology(chip, shape)
    except TopologyError:
        return False
    return True


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
def test_no_slice_of_as_many_chips_is_squarer(chip: str):
    num_dims, most = (2, 16) if chip == "v5e" else (3, 10)
    ratios: dict[int, float] = {}
    for shape in itertools.product(range(1, most + 1), repeat=num_dims):
        if exists(chip, shape):
            chips = math.prod(shape)
            ratios[chips] = min(ratios.get(chips, math.inf), max(shape) / min(shape))
    assert len(ratios) > 20
    for chips, ratio in ratios.items():
        found = SliceTopology.parse(calibrate.squarest_slice(chip, chips))
        assert found.num_chips == chips
        assert max(found.ici_shape) / min(found.ici_shape) <= ratio, found


@pytest.mark.parametrize(("chip", "chips"), [("v6e", 3), ("v6e", 6), ("v6e", 512), ("v5p", 2), ("v5p", 5), ("h100", 8)])
def test_no_slice_of_that_many_chips(chip: str, chips: int):
    with pytest.raises(ValueError, match=f"no slice of {chips} chips of {chip}"):
        calibrate.squarest_slice(chip, chips)


# Statistics


positive = st.floats(1e-3, 1e3)


@given(st.lists(st.one_of(positive, st.sampled_from([1.0, 2.0])), max_size=20))
def test_ranks_are_scipys_if_only_equal_values_are_tied(values: list[float]):
    assert calibrate.ranks(values) == pytest.approx(list(stats.rankdata(values)))


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([], []),
        ([5.0], [1]),
        ([1.0, 1.02, 2.0], [1.5, 1.5, 3]),
        ([2.0, 1.02, 1.0], [3, 1.5, 1.5]),
        ([1.0, 1.03, 1.04], [1.5, 1.5, 3]),
        ([1.0, 1.02, 1.04, 1.06], [1.5, 1.5, 3.5, 3.5]),  # of the first of a group, not of one's neighbour
        ([1.0, 1.04, 1.08], [1, 2, 3]),
        ([3.0, 3.0, 3.05, 3.09, 1.0], [3.5, 3.5, 3.5, 3.5, 1]),
    ],
)
def test_ranks_of_what_is_within_3_percent_are_tied(values: list[float], want: list[float]):
    assert calibrate.TIED == 0.03
    assert calibrate.ranks(values, calibrate.TIED) == want


@given(st.lists(positive, max_size=20), st.sampled_from([0.0, 0.03, 0.5]))
def test_ranks_add_up_and_keep_the_order(values: list[float], tied: float):
    found = calibrate.ranks(values, tied)
    assert sum(found) == pytest.approx(len(values) * (len(values) + 1) / 2)
    by_value = [rank for _, rank in sorted(zip(values, found, strict=True))]
    assert by_value == sorted(by_value)


@given(st.data(), st.integers(2, 12), st.floats(1.04, 2.0))
def test_rank_correlation_is_spearmans_without_ties(data: st.DataObject, count: int, apart: float):
    steps = [apart**n for n in range(count)]
    predicted, measured = (data.draw(st.permutations(steps)) for _ in range(2))
    assert calibrate.rank_correlation(predicted, measured) == pytest.approx(stats.spearmanr(predicted, measured)[0])


def test_rank_correlation_does_not_tell_measurements_within_3_percent_apart():
    in_order = calibrate.rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 1.01, 2.0, 3.0])
    swapped = calibrate.rank_correlation([1.0, 2.0, 3.0, 4.0], [1.01, 1.0, 2.0, 3.0])
    assert in_order == swapped == pytest.approx(stats.spearmanr([1, 2, 3, 4], [1.5, 1.5, 3, 4])[0])


def test_fit_is_the_geometric_mean():
    assert calibrate.fit([(2.0, 1.0)]) == pytest.approx(2.0)
    assert calibrate.fit([(2.0, 1.0), (4.0, 8.0)]) == pytest.approx(1.0)
    assert calibrate.fit([(1.0, 1.0), (4.0, 1.0), (16.0, 2.0)]) == pytest.approx(32 ** (1 / 3))


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=10))
def test_predictions_that_are_divided_by_the_fit_are_right_on_average(pairs: list[tuple[float, float]]):
    factor = calibrate.fit(pairs)
    assert calibrate.fit([(simulated / factor, measured) for simulated, measured in pairs]) == pytest.approx(1.0)
    errors = [math.log(simulated / factor / measured) for simulated, measured in pairs]
    assert sum(errors) == pytest.approx(0.0, abs=1e-9)
