"""Host memory of offload and of loading: what killed runs with exit code -9 (field cases A10, A11)."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from field.pricing import GB, deep, numel, zero
from orchestrator.contract.outcome import Phase
from orchestrator.contract.profile import Point, Profile
from orchestrator.predict.job import Job
from orchestrator.predict.memory import Bill, bill
from orchestrator.predict.overhead import CUDA

Profiles = Mapping[str, Profile]
BOTH = {"offload_optimizer": "cpu", "offload_param": "cpu"}
SHORT = Point(1, 512)


@dataclass(frozen=True)
class Report:
    """A run that was killed, and its node's memory. `needs_gb`: what was said to be enough."""

    thread: str
    structure: str
    layers: int
    parameters: int
    job: Job
    host_gb: float
    term: str
    needs_gb: tuple[float, float] | None = None


REPORTS = (
    Report("LlamaFactory 6755", "qwen25_32b_full", 64, 32_763_876_352, zero(3, 1, SHORT, **BOTH), 744,
           "offloaded_optimizer"),
    Report("LlamaFactory 4629", "glm4_9b_full", 40, 9_399_951_360, zero(3, 1, SHORT, **BOTH), 252,
           "offloaded_optimizer"),
    Report("DeepSpeed 3160", "gptj_6b_full", 28, 6_050_882_784, zero(2, 1, SHORT, offload_optimizer="cpu"), 126,
           "offloaded_optimizer"),
    Report("DeepSpeed 3448", "llama_33b_full", 60, 32_528_943_616, zero(3, 8, Point(1, 2048), **BOTH), 600,
           "offloaded_optimizer", (750, 800)),
    Report("axolotl 1439", "llama_70b_full", 80, 68_976_648_192, zero(3, 8, SHORT, **BOTH), 1024,
           "offloaded_optimizer"),
    Report("DeepSpeed 4571", "opt_7b_full", 32, 6_658_473_984,
           zero(3, 1, SHORT, offload_optimizer="nvme", offload_param="nvme"), 31, "pinned_buffers"),
)  # fmt: skip


def priced(profiles: Profiles, report: Report) -> Bill:
    weights = deep(profiles[report.structure], report.layers)
    assert numel(weights) == report.parameters
    return bill(weights, report.job, CUDA)


@pytest.mark.structures(*(report.structure for report in REPORTS))
@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.thread)
def test_a10_a_node_that_ran_out_is_foretold(profiles: Profiles, report: Report) -> None:
    made = priced(profiles, report)
    assert made.peak_host_bytes > report.host_gb * GB
    assert made.host_phase in (Phase.INIT, Phase.OPTIMIZER_STEP)
    assert max(made.host, key=lambda term: made.host[term]) == report.term
    if report.needs_gb is not None:
        # pinned buffers grow to powers of two by the installed PyTorch, so it may take more than it took them
        assert 0.85 * report.needs_gb[0] * GB < made.peak_host_bytes < 1.15 * report.needs_gb[1] * GB


@pytest.mark.structures("llama_33b_full")
def test_a10_ranks_of_a_node_share_its_memory(profiles: Profiles) -> None:
    weights = deep(profiles["llama_33b_full"], 60)
    one, eight = (bill(weights, zero(3, ranks, SHORT, pin_memory=False, **BOTH), CUDA) for ranks in (1, 8))
    of_states = [made.host["offloaded_optimizer"] for made in (one, eight)]
    assert of_states[1] == pytest.approx(of_states[0], rel=0.001)
    assert eight.host["process"] == 8 * one.host["process"]


@pytest.mark.structures("qwen3_30b_a3b_lora")
@pytest.mark.parametrize("ranks", [2, 8])
def test_a11_loading_copies_the_model_for_every_rank_unless_it_is_born_in_shards(
    profiles: Profiles, ranks: int
) -> None:
    weights = deep(profiles["qwen3_30b_a3b_lora"], 48)
    point = Point(1, 512, 16)
    copies = bill(weights, zero(3, ranks, point, loads_sharded=False), CUDA)
    shards = bill(weights, zero(3, ranks, point, loads_sharded=True), CUDA)
    whole_bytes = shards.host["load_copy"]
    assert whole_bytes == pytest.approx(2 * 30_532_122_624, rel=0.002)
    assert copies.host["load_copy"] == ranks * whole_bytes
    # what came to 95 % of a node with two ranks did so with eight: more devices do not help
    assert copies.host_phase is Phase.LOAD
    assert max(copies.host, key=lambda term: copies.host[term]) == "load_copy"
