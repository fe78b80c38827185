"""The page about the spec says of each knob what its declaration says."""

from pathlib import Path

import pytest

from orchestrator.space.knobs import KNOBS, Knob
from orchestrator.spec.sweep import SweepSpec

PAGE = (Path(__file__).parents[2] / "docs" / "spec.md").read_text()


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_each_knob_is_described(knob: Knob) -> None:
    assert f"| `{knob.name}` | {knob.meaning} | {knob.condition} |" in PAGE.splitlines()


def test_each_section_is_described() -> None:
    described = {line.split("`")[1] for line in PAGE.partition("## Values")[0].splitlines() if line.startswith("| `")}
    assert described == set(SweepSpec.model_fields) - {"description"}
