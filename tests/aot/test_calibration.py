"""What predicted times are divided by."""

import pytest

from shardtorch.aot import efficiency_of
from shardtorch.aot._calibration import EFFICIENCY
from shardtorch.aot._compile_report import _assumptions
from shardtorch.aot._schedule import Schedule
from shardtorch.mesh import SliceTopology


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_a_report_says_what_its_times_were_divided_by_and_where_that_comes_from(topology: str):
    slices = SliceTopology.parse(topology)
    efficiency, fitted = efficiency_of(slices.generation)
    assert efficiency == EFFICIENCY[fitted]
    assert fitted == (slices.generation if slices.generation in EFFICIENCY else "v6e")
    (text,) = (each for each in _assumptions(Schedule(), slices, efficiency) if "divided" in each)
    assert text.startswith(f"All times are divided by {efficiency:.2f}, fitted on published step times of {fitted}")
    assert ("too few of" in text) == (fitted != slices.generation)


def test_at_most_one_factor_a_generation_and_none_that_turns_an_estimate_upside_down():
    assert set(EFFICIENCY) <= {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    assert all(0.5 < factor < 2 for factor in EFFICIENCY.values())
