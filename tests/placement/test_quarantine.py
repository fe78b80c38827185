"""Which nodes the records condemn, and which trials."""

import itertools

from fakes import candidate, ok, oom

from orchestrator.contract.outcome import Crashed, Infra, LostNode, Outcome, Phase, Preempted
from orchestrator.contract.record import AttemptRecord, TrialRecord
from orchestrator.placement.quarantine import excluded_nodes, failed_nodes, poison, wants_another_node

_numbers = itertools.count()


def ecc(node: str) -> Infra:
    return Infra(cause="the device reports a hardware error: ECC", node=node, blames="device")


def broken(node: str) -> Infra:
    return Infra(cause="the template ended", node=node, blames="node")


def crash(node: str, error: str = "ValueError: bad bucket", signal: str | None = None) -> Crashed:
    return Crashed(phase=Phase.INIT, rank=0, error=error, node=node, signal=signal)


def trial(*ends: tuple[str, Outcome]) -> TrialRecord:
    """A trial whose attempts ended on these nodes."""
    made = candidate(1)
    attempts = tuple(
        AttemptRecord(attempt=i, token=str(next(_numbers)), dispatched_s=0.0, node=node, ended_s=1.0, outcome=outcome)
        for i, (node, outcome) in enumerate(ends, start=1)
    )
    return TrialRecord(trial=next(_numbers), candidate=made.id, label=made.label, config=made.config, attempts=attempts)


def excluded(*records: TrialRecord) -> list[str]:
    return [each.node for each in excluded_nodes(records)]


def test_two_hardware_errors_exclude_a_node_with_their_evidence() -> None:
    first, second = trial(("x", ecc("x"))), trial(("x", ecc("x")))
    assert excluded(first) == []
    (found,) = excluded_nodes([first, second])
    assert found.node == "x"
    assert found.evidence == (
        f"trial {first.trial}, attempt 1: the device reports a hardware error: ECC",
        f"trial {second.trial}, attempt 1: the device reports a hardware error: ECC",
    )


def test_other_failures_count_only_where_the_trial_went_on_elsewhere() -> None:
    stuck = [trial(("x", broken("x")), ("x", broken("x"))), trial(("x", broken("x")))]
    assert excluded(*stuck) == []
    passed = [trial(("x", broken("x")), ("y", ok())), trial(("x", LostNode(node="x")), ("y", oom()))]
    assert excluded(*passed) == ["x"]
    also_broken_elsewhere = trial(("x", broken("x")), ("y", broken("y")), ("y", broken("y")))
    assert excluded(also_broken_elsewhere, *stuck) == []


def test_nothing_of_the_place_and_preemptions_never_count() -> None:
    port = Infra(cause="a port was taken", node="x")
    assert excluded(*(trial(("x", port), ("y", ok())) for _ in range(3))) == []
    assert excluded(*(trial(("x", Preempted(node="x")), ("y", ok())) for _ in range(3))) == []


def test_a_crash_is_tried_elsewhere_once_where_it_may_be_the_nodes_fault() -> None:
    passed = trial(("y", ok()))
    silent = trial(("x", crash("x", "rank 0 was ended by SIGBUS", signal="SIGBUS")))
    assert wants_another_node(silent, [passed, silent])
    assert not wants_another_node(silent, [silent]), "no other node is known to work"

    first, second = trial(("x", crash("x"))), trial(("x", crash("x")))
    assert not wants_another_node(first, [passed, first])
    assert wants_another_node(second, [passed, first, second])
    elsewhere = trial(("y", crash("y")))
    assert not wants_another_node(second, [passed, first, elsewhere, second]), "the error is known elsewhere too"
    again = trial(("x", crash("x")), ("y", crash("y")))
    assert not wants_another_node(again, [passed, first, again])


def test_an_error_that_another_node_does_not_share_counts_for_all_who_met_it() -> None:
    first, second = trial(("x", crash("x"))), trial(("x", crash("x")), ("y", ok()))
    assert excluded(first, second) == ["x"]
    candidates_own = trial(("x", crash("x")), ("y", crash("y")))
    assert excluded(first, candidates_own) == []


def test_the_next_attempt_avoids_nodes_that_failed() -> None:
    assert failed_nodes(trial(("x", broken("x")), ("y", oom()), ("z", crash("z")))) == {"x", "z"}


def test_a_trial_that_takes_down_two_nodes_is_poison() -> None:
    assert poison(trial(("x", LostNode(node="x")), ("x", LostNode(node="x")))) == ""
    assert poison(trial(("x", Preempted(node="x")), ("y", LostNode(node="y")))) == ""
    lethal = trial(("x", LostNode(node="x")), ("y", LostNode(node="y")))
    assert poison(lethal) == "quarantined: it took down 2 nodes (x, y) and is not run again"
