"""Strategies on small tables whose best is known by hand, and how their searches are scored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import replay
from benchmarks.landscapes.table import Landscape, UnreadableLandscape, landscape, read_landscape, write_landscape
from benchmarks.strategies import page
from benchmarks.strategies.__main__ import STRATEGIES, TABLES, kinds_of, report, tables_at
from benchmarks.strategies.__main__ import main as strategies_main
from benchmarks.strategies.play import Result, Run, Unplayable, play
from benchmarks.strategies.scores import scores
from benchmarks.strategies.stages import reachable
from orchestrator.contract.units import GIB

LIMIT_GIB = 24.0
BUCKETS = (50_000_000, 500_000_000)
SIZES = tuple(range(1, 17))
LARGEST = {0: 0, 1: 4, 2: 5, 3: 8}
"""Micro-batches that fit, by stage; nothing does at stage 0."""


def tokens_per_s(stage: int, size: int, bucket: int) -> float:
    """Grows with the micro-batch; stage 2 with small buckets is the fastest."""
    factor = {0: 1.2, 1: 0.9, 2: 1.0, 3: 0.4}[stage] * (1.1 if bucket == BUCKETS[0] else 1.0)
    return 1000.0 * size / (size + 1.0) * factor


def table(
    speed: Callable[[int, int, int], float] = tokens_per_s, noise: float = 0.0, params: float = 0.4e9, **facts: Any
) -> Landscape:
    """ZeRO stages by micro-batches by buckets on four devices, with a prediction that is right but for a constant."""
    rows = []
    for stage, largest in LARGEST.items():
        for bucket in BUCKETS:
            for size in SIZES:
                fits = size <= largest
                need = LIMIT_GIB * (0.9 + 0.1 * (size - largest + 0.5))
                rows.append(
                    {
                        "zero_stage": stage,
                        "reduce_bucket": bucket,
                        "micro_batch": size,
                        "feasible": int(fits),
                        "oom_kind": "" if fits else "gpu",
                        "tokens_per_s": speed(stage, size, bucket),
                        "peak_gib": need,
                        "host_gib": 1.0,
                        "prior_tokens_per_s": 2 * speed(stage, size, bucket),
                        "prior_peak_gib": need,
                        "prior_host_gib": 1.0,
                    }
                )
    about = {"name": "small", "kind": "simulated", "mem_limit_gib": LIMIT_GIB, "host_limit_gib": 64.0, "noise": noise}
    about |= {"n_gpus": 4, "params": params, "knobs": ["zero_stage", "reduce_bucket", "micro_batch"]}
    return landscape(about | facts, rows)


class Watched:
    """A strategy beside the list of what it launched."""

    def __init__(self, name: str) -> None:
        self.launched: list[dict[str, Any]] = []
        self._name = name

    def __call__(self, land: Landscape, seed: int) -> Any:
        strategy, launched = STRATEGIES[self._name](land, seed), self.launched

        class Spy:
            first_launches = strategy.first_launches

            def ask(self) -> int | None:
                return strategy.ask()

            def tell(self, candidate: int, result: Result) -> None:
                launched.append(dict(land.candidates[candidate]) | {"ok": result.is_ok})
                strategy.tell(candidate, result)

        return Spy()


def watch(name: str, land: Landscape, budget: int = 60, seed: int = 0) -> tuple[Run, list[dict[str, Any]]]:
    watched = Watched(name)
    return play(land, watched, seed, budget), watched.launched


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"gp_constraint"}))
@pytest.mark.parametrize("workers", [1, 4])
def test_every_strategy_plays_within_its_budget(name: str, workers: int) -> None:
    run = play(table(noise=0.01), STRATEGIES[name], seed=1, budget=25, workers=workers)
    assert 1 <= len(run.regrets) == len(run.ooms) <= 25
    assert all(0 <= regret <= 1 for regret in run.regrets)


def test_a_gaussian_process_plays_too() -> None:
    run = play(table(), STRATEGIES["gp_constraint"], seed=1, budget=14)
    assert len(run.regrets) == 14
    assert run.regrets[-1] < 1


def test_binary_search_finds_the_largest_micro_batch_of_each_stage_that_it_draws() -> None:
    run, launched = watch("dsat_binary", table(), budget=64)
    for stage in {each["zero_stage"] for each in launched}:
        assert (
            max(each["micro_batch"] for each in launched if each["zero_stage"] == stage and each["ok"])
            == LARGEST[stage]
        )
    assert run.regrets[-1] == pytest.approx(0.0)
    assert {each["zero_stage"] for each in launched} == {1, 2, 3}


def test_random_search_of_dsat_starts_again_above_the_best_of_a_stage() -> None:
    land = table(speed=lambda stage, size, bucket: tokens_per_s(stage, size, BUCKETS[1]))
    _, launched = watch("dsat_random", land, budget=64)
    largest = {1: 0, 2: 0, 3: 0}
    for each in launched:
        assert each["micro_batch"] > largest[each["zero_stage"]]
        if each["ok"]:
            largest[each["zero_stage"]] = each["micro_batch"]
    assert min(largest.values()) > 0


def test_asha_gives_lineages_that_do_well_more_trials() -> None:
    _, launched = watch("dsat_asha", table(), budget=64)
    counts = {stage: sum(each["zero_stage"] == stage for each in launched) for stage in (1, 2, 3)}
    assert sum(counts.values()) == len(launched)
    assert max(counts.values()) > 3


def test_the_autotuner_tries_the_profile_run_first_and_only_stages_that_its_memory_model_lets_through() -> None:
    # 16 bytes a weight, divided by stage over four devices: 20e9 weights fit in no stage
    run, launched = watch("deepspeed_fast", table(params=20e9))
    assert launched == []
    assert len(run.regrets) == 1
    # of 3e9 weights stages 2 and 3 leave room for a row
    stages = {0: 16, 1: 8 + 8 / 4, 2: 4 + 12 / 4, 3: 16 / 4}
    _, launched = watch("deepspeed_fast", table(params=3e9))
    let_through = {stage for stage, kind in stages.items() if kind * 3e9 / GIB + 0.1 * LIMIT_GIB < LIMIT_GIB}
    assert let_through == {2, 3}
    assert {each["zero_stage"] for each in launched} <= let_through


def test_the_autotuner_finds_the_largest_micro_batch_and_its_fast_form_leaves_buckets_alone() -> None:
    run, launched = watch("deepspeed_fast", table())
    stage_1 = [each["micro_batch"] for each in launched if each["zero_stage"] == 1 and each["ok"]]
    assert max(stage_1) == LARGEST[1]
    assert {each["reduce_bucket"] for each in launched} == {BUCKETS[1]}
    assert run.regrets[-1] > 0.05


def test_the_full_form_of_the_autotuner_tunes_buckets() -> None:
    run, launched = watch("deepspeed_full", table())
    assert {each["reduce_bucket"] for each in launched} == set(BUCKETS)
    fast, _ = watch("deepspeed_fast", table())
    assert run.regrets[-1] < fast.regrets[-1]


def test_prior_order_begins_with_the_fastest_that_is_predicted_to_fit() -> None:
    run, launched = watch("prior_order", table(), budget=3)
    assert launched[0] == {"zero_stage": 2, "reduce_bucket": BUCKETS[0], "micro_batch": 5, "ok": True}
    assert run.regrets == [0.0, 0.0, 0.0]


def test_random_fit_spends_nothing_on_what_is_predicted_not_to_fit() -> None:
    run, _ = watch("random_fit", table(), budget=30)
    assert run.oom_share == 0.0
    everything, _ = watch("random", table(), budget=200)
    assert len(everything.regrets) == len(table().candidates)
    assert everything.regrets[-1] == 0.0


def test_grid_walks_the_table_in_its_order() -> None:
    _, launched = watch("grid", table(), budget=3)
    assert [each["micro_batch"] for each in launched] == [1, 2, 3]


def test_guided_needs_few_launches_where_the_prediction_is_right() -> None:
    run, _ = watch("guided", table(noise=0.01), budget=10)
    assert (run.launches_to(0.03) or 99) <= 5


@pytest.mark.parametrize("name", ["tpe_fail", "tpe_constraint"])
def test_a_sampler_of_optuna_proposes_rows_of_a_space_with_holes(name: str) -> None:
    whole = table()
    # buckets have no effect at stage 0: one row stands for both
    kept = [n for n, each in enumerate(whole.candidates) if each["zero_stage"] or each["reduce_bucket"] == BUCKETS[1]]
    land = Landscape(
        whole.facts,
        tuple(whole.candidates[n] for n in kept),
        whole.feasible[kept],
        tuple(whole.oom_kinds[n] for n in kept),
        whole.tokens_per_s[kept],
        whole.peak_gib[kept],
        whole.host_gib[kept],
        {key: values[kept] for key, values in whole.prior.items()},
    )
    run, launched = watch(name, land, budget=30)
    assert len(run.regrets) == 30
    assert all(each["reduce_bucket"] == BUCKETS[1] for each in launched if each["zero_stage"] == 0)


class Repeating:
    """Asks for the same three again and again."""

    first_launches = 0

    def __init__(self) -> None:
        self.told: list[int] = []

    def ask(self) -> int | None:
        return len(self.told) % 3

    def tell(self, candidate: int, result: Result) -> None:
        self.told.append(candidate)


def test_what_is_asked_for_again_is_no_launch_and_tells_the_same() -> None:
    strategy = Repeating()
    run = play(table(), lambda land, seed: strategy, 0, budget=5)
    assert len(run.regrets) == 3
    assert len(strategy.told) == len(run.asks_s) == 50


class Parallel:
    """Counts how many of its launches run at once."""

    first_launches = 0

    def __init__(self) -> None:
        self.running = self.most = self.next = 0

    def ask(self) -> int | None:
        self.running, self.next = self.running + 1, self.next + 1
        self.most = max(self.most, self.running)
        return self.next

    def tell(self, candidate: int, result: Result) -> None:
        self.running -= 1


def test_as_many_launches_run_at_once_as_there_are_workers() -> None:
    strategy = Parallel()
    run = play(table(), lambda land, seed: strategy, 0, budget=12, workers=4)
    assert strategy.most == 4
    assert strategy.running == 0
    assert len(run.regrets) == 12


def test_the_incumbent_is_the_fastest_as_measured_and_is_judged_by_the_table() -> None:
    land = table(speed=lambda stage, size, bucket: 1000.0 + size, noise=0.3)
    run, launched = watch("random_fit", land, budget=40)
    # noise drowns the differences, so that the incumbent is some row, never better than the best
    assert 0 < run.regrets[-1] <= 8 / 1009 + 1e-9
    assert len(launched) == 40


def test_scores_by_hand() -> None:
    reached = Run(regrets=[1.0, 0.04, 0.02, 0.0], ooms=[True, False, False, False], asks_s=[0.001, 0.003])
    never = Run(regrets=[1.0, 0.5], ooms=[True, True], asks_s=[])
    found = scores([reached, never, reached])
    assert found["launches_to_5_pct_median"] == 2
    assert found["launches_to_3_pct_median"] == 3
    assert found["launches_to_3_pct_p90"] is None
    assert found["solved_3_pct"] == pytest.approx(2 / 3)
    assert found["oom_share"] == pytest.approx((0.25 + 1 + 0.25) / 3)
    assert found["regret_after_10"] == 0.0
    assert found["ask_ms_mean"] == pytest.approx(2.0)


def test_a_landscape_without_stages_cannot_be_played_by_tuners_of_stages(capsys: pytest.CaptureFixture[str]) -> None:
    whole = table()
    land = Landscape(
        dict(whole.facts) | {"knobs": ["micro_batch"]},
        *(getattr(whole, name) for name in ("candidates", "feasible", "oom_kinds", "tokens_per_s", "peak_gib")),
        whole.host_gib,
        whole.prior,
    )
    with pytest.raises(Unplayable, match="small has no knobs zero_stage and micro_batch"):
        STRATEGIES["dsat_binary"](land, 0)


def test_the_autotuner_s_part_of_a_landscape() -> None:
    part = reachable(table())
    assert len(part.candidates) == 4 * len(SIZES)
    assert {each["reduce_bucket"] for each in part.candidates} == {BUCKETS[1]}
    assert part.best == pytest.approx(tokens_per_s(2, 5, BUCKETS[1]))
    run = play(part, STRATEGIES["deepspeed_fast"], seed=0, budget=60)
    assert run.regrets[-1] == pytest.approx(0.0)


def test_measured_and_simulated_tables_are_pooled_apart() -> None:
    measured, simulated = table(kind="measured", name="m"), table()
    kinds = kinds_of([measured, simulated])
    assert kinds == {"measured": ["m"], "simulated": ["small"]}
    run = Run(regrets=[0.0], ooms=[False])
    found = report({"grid": {"m": [run], "small": [run, run]}}, kinds)
    assert found["pooled"]["measured"]["grid"]["searches"] == 1
    assert found["pooled"]["simulated"]["grid"]["searches"] == 2


def test_the_page_has_every_table(tmp_path: Path) -> None:
    rows = [
        dict(each)
        | {"feasible": int(fits), "oom_kind": kind, "tokens_per_s": speed, "peak_gib": need, "host_gib": 1.0}
        | {"prior_tokens_per_s": speed, "prior_peak_gib": need, "prior_host_gib": 1.0}
        for land in [table(noise=0.01)]
        for each, fits, kind, speed, need in zip(
            land.candidates, land.feasible, land.oom_kinds, land.tokens_per_s, land.peak_gib, strict=True
        )
    ]
    write_landscape(tmp_path, dict(table(noise=0.01, name="s00_toy_2xA100").facts), rows)
    output = tmp_path / "page.md"
    chosen = ["--simulated", str(tmp_path), "--seeds", "1", "--slow-seeds", "0", "--budget", "4"]
    assert page.main([*chosen, "--output", str(output)]) == 0
    text = output.read_text()
    assert "128 configurations in all: toy on 2xA100" in text
    assert text.count("\n## ") == 5
    # without seeds a strategy has no row
    assert "tpe_fail |" not in text
    assert text.count("| guided_stop |") == 4


def test_what_is_no_landscape_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("micro_batch,feasible\n1,1\n")
    (tmp_path / "t.json").write_text('{"name": "t", "knobs": ["micro_batch"]}')
    with pytest.raises(UnreadableLandscape, match=r"t.csv: .* lacks 'oom_kind'"):
        read_landscape(tmp_path / "t.csv")
    assert strategies_main(["--tables", str(tmp_path)]) == 2
    assert replay.main([str(tmp_path / "absent.csv")]) == 2
    assert replay.main([str(tmp_path)]) == 2
    assert "there is no sweep named" in capsys.readouterr().err


def test_the_measured_landscape_has_the_real_outcomes_of_a_whole_space(capsys: pytest.CaptureFixture[str]) -> None:
    land = next(land for land in tables_at([TABLES]) if land.name == "cpu")
    assert land.facts["kind"] == "measured"
    assert len(land.candidates) == len({tuple(each.values()) for each in land.candidates}) >= 300
    assert set(land.facts["outcomes"]) == {"ok", "oom_device"}
    assert land.feasible.sum() == land.facts["outcomes"]["ok"]
    assert np.all(land.peak_gib[land.feasible] <= land.limits["peak_gib"])
    assert np.all(np.isnan(land.tokens_per_s[~land.feasible]))
    assert all(kind == "gpu" for kind, fits in zip(land.oom_kinds, land.feasible, strict=True) if not fits)
    assert np.all(np.isfinite(land.prior["tokens_per_s"]) & (land.prior["peak_gib"] > 0))
    assert replay.main([str(TABLES / "cpu.csv"), "--strategy", "prior_order", "random", "--seeds", "2"]) == 0
    assert "cpu (measured): 360 configurations, 239 fit" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("--seeds", "0"), ("--budget", "-1"), ("--workers", "2.5")])
def test_counts_of_a_benchmark_are_whole_and_above_zero(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for main, first in ((strategies_main, ()), (replay.main, (str(TABLES / "cpu.csv"),))):
        with pytest.raises(SystemExit, match="2"):
            main([*first, *words])
        assert f"{words[0]}: must be a whole number of at least 1, not '{words[1]}'" in capsys.readouterr().err
