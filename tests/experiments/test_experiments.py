"""Every shipped experiment loads and plans without a hub, on the machines that it is for."""

from pathlib import Path

import pytest

from orchestrator.contract.config import Precision
from orchestrator.contract.facts import DataFacts, Facts
from orchestrator.space.candidates import Space, build_space
from orchestrator.space.request import preflight_request
from orchestrator.spec.cluster import ClusterProfile, load_cluster
from orchestrator.spec.load import load_spec
from orchestrator.spec.model import shape_of
from orchestrator.spec.sweep import SweepSpec

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))
MACHINES = {
    "llama2-70b-lora-2x8h100": "2x8h100",
    "llama3-8b-lora-8xa100": "8xa100-80",
    "mistral-7b-1x24gb": "1x24gb",
    "quality": "this-machine",
    "quickstart": "this-machine",
    "qwen2.5-3b-2xa10": "2xa10",
}


def _facts(spec: SweepSpec) -> Facts:
    assert spec.model.config is not None
    length = spec.data.sequence_length
    data = DataFacts(
        directory="/prepared",
        digest="0" * 12,
        format="alpaca",
        rows=141,
        tokens=30_000,
        longest_row_tokens=length,
        mean_row_tokens=213.0,
        median_row_tokens=160.0,
        truncated_rows=0,
        vocab_size=4096,
        pad_token_id=0,
        tokenizer="trained from the data",
    )
    return Facts(
        model=shape_of(spec.model.config),
        data=data,
        device="cuda" if spec.resources.device == "cuda" else "cpu",
        device_name="as in the profile",
        peak_flops_per_s={Precision.FP32: 1e12},
        peak_source="given",
        versions={},
    )


def _plan(path: Path) -> tuple[SweepSpec, Space]:
    spec = load_spec(path).spec
    return spec, build_space(spec, _facts(spec))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_plans(path: Path) -> None:
    spec, space = _plan(path)
    assert spec.name == path.stem
    assert len(space.candidates) >= 24
    assert space.baseline is space.candidates[0]
    assert space.notes == ()
    assert not space.illegal
    assert Path(preflight_request(spec, ROOT).data.path or "").is_file()
    ranks = {candidate.config.world_size for candidate in space.candidates}
    assert ranks == {spec.resources.devices_per_trial}
    for candidate in space.candidates:
        config = candidate.config
        rows = config.knobs.micro_batch * config.gradient_accumulation * config.world_size
        assert rows == spec.train.global_batch


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_suits_its_machines(path: Path) -> None:
    profile: ClusterProfile = load_cluster(ROOT / "clusters" / f"{MACHINES[path.stem]}.yaml")
    spec = load_spec(path).spec
    assert spec.resources.devices_per_trial <= profile.devices
    capacities = [nodes.device_memory_bytes for nodes in profile.nodes if nodes.device_memory_bytes is not None]
    assert all((spec.limits.device_memory or 0) <= capacity for capacity in capacities)
    assert (spec.limits.host_memory or 0) <= min(nodes.host_memory for nodes in profile.nodes)


def test_the_quickstart_is_wide_enough() -> None:
    _, space = _plan(ROOT / "experiments" / "quickstart.yaml")
    knobs = [candidate.config.knobs for candidate in space.candidates]
    assert len({knob.method for knob in knobs}) == 2
    assert len({knob.zero_stage for knob in knobs}) >= 3
    assert len({knob.micro_batch for knob in knobs}) >= 3
