"""Which nodes are not used any longer, and why; which trials are not run any longer. Pure: from the records alone.

What failed on a node says little by itself: the candidate may be to blame. Two failures exclude a node (as Determined's
`exclude_node` does) when each of them shows what the node is like: the device reports an error of its own or holds
memory of others, or the same trial went on elsewhere. A trial that has taken down two nodes is not tried on a third.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.contract.outcome import Cancelled, Crashed, Infra, LostNode, Outcome, Preempted
from orchestrator.contract.record import AttemptRecord, TrialRecord

STRIKES = 2
"""Failures after which a node is excluded."""
KILLED_NODES = 2
"""Nodes that one trial may take down."""
CRASHES_ELSEWHERE = 1
"""How often a crash that may be the node's fault is tried on another one."""


@dataclass(frozen=True)
class ExcludedNode:
    """A node that gets no more trials, and what was seen there, a line for each failure."""

    node: str
    evidence: tuple[str, ...]


def blamed_node(outcome: Outcome | None) -> str | None:
    """The node that may be to blame for `outcome`; None where it cannot be."""
    match outcome:
        case Infra(node=node, blames=blames) if blames is not None:
            return node
        case LostNode(node=node) | Crashed(node=node):
            return node
        case _:
            return None


def failed_nodes(record: TrialRecord) -> frozenset[str]:
    """Nodes on which this trial failed for what may be their fault: its next attempt goes elsewhere."""
    nodes = (blamed_node(attempt.outcome) for attempt in record.attempts)
    return frozenset(node for node in nodes if node is not None)


def excluded_nodes(records: Iterable[TrialRecord]) -> tuple[ExcludedNode, ...]:
    """The nodes with STRIKES failures that are their own, by name."""
    records = list(records)
    strikes: dict[str, list[str]] = {}
    lines: set[tuple[str, str]] = set()
    for record in records:
        for attempt, node in _blamed(record):
            if _is_of_the_node(record, attempt, node):
                strikes.setdefault(node, []).append(_words(record, attempt))
                lines.add((node, _line(attempt.outcome)))
    for record in records:
        for attempt, node in _blamed(record):
            # another trial that met the very error which a third one met there alone
            is_alike = isinstance(attempt.outcome, Crashed) and (node, _line(attempt.outcome)) in lines
            if is_alike and not _is_of_the_node(record, attempt, node) and len(failed_nodes(record)) == 1:
                strikes[node].append(_words(record, attempt))
    return tuple(ExcludedNode(node, tuple(seen)) for node, seen in sorted(strikes.items()) if len(seen) >= STRIKES)


def poison(record: TrialRecord) -> str:
    """Why the trial is not run again: it took down KILLED_NODES nodes; else empty."""
    lost = (attempt.outcome.node for attempt in record.searches if isinstance(attempt.outcome, LostNode))
    nodes = list(dict.fromkeys(lost))
    if len(nodes) < KILLED_NODES:
        return ""
    return f"quarantined: it took down {len(nodes)} nodes ({', '.join(nodes)}) and is not run again"


def wants_another_node(record: TrialRecord, records: Sequence[TrialRecord]) -> bool:
    """Whether the crash that the trial has just met may be its node's fault, so that another node is asked.

    Where trials have passed on other nodes, that is a crash without an error of its own, or with one that another
    trial met on the same node and none elsewhere. A candidate that crashes by itself costs one more launch at most.
    """
    crashes = [attempt.outcome for attempt in record.searches if isinstance(attempt.outcome, Crashed)]
    if len(crashes) != CRASHES_ELSEWHERE or not isinstance(record.outcome, Crashed) or record.outcome.node is None:
        return False
    node, line = record.outcome.node, _line(record.outcome)
    others = [attempt for each in records if each.trial != record.trial for attempt in each.searches]
    if not any(_passed(attempt) and _first_node(attempt) != node for attempt in others):
        return False
    if record.outcome.signal is not None:
        return True
    met = {_place(attempt) for attempt in others if _line(attempt.outcome) == line}
    return met == {node}


def _blamed(record: TrialRecord) -> Iterator[tuple[AttemptRecord, str]]:
    for attempt in record.attempts:
        node = blamed_node(attempt.outcome)
        if node is not None:
            yield attempt, node


def _is_of_the_node(record: TrialRecord, failed: AttemptRecord, node: str) -> bool:
    if isinstance(failed.outcome, Infra) and failed.outcome.blames == "device":
        return True
    return any(_went_on(attempt, failed.outcome) and _place(attempt) != node for attempt in record.attempts)


def _went_on(attempt: AttemptRecord, failure: Outcome | None) -> bool:
    """Whether an attempt ended in another way than by `failure` or for want of a sound node."""
    outcome = attempt.outcome
    if outcome is None or isinstance(outcome, Infra | LostNode | Preempted | Cancelled):
        return False
    return not (isinstance(outcome, Crashed) and (_line(outcome) == _line(failure) or outcome.signal is not None))


def _passed(attempt: AttemptRecord) -> bool:
    return attempt.outcome is not None and attempt.outcome.kind in ("ok", "over_limit", "oom_device")


def _place(attempt: AttemptRecord) -> str | None:
    return blamed_node(attempt.outcome) or _first_node(attempt)


def _first_node(attempt: AttemptRecord) -> str | None:
    return attempt.node.partition(" + ")[0] if attempt.node is not None else None


def _line(outcome: Outcome | None) -> str:
    match outcome:
        case Crashed(error=text) | Infra(cause=text):
            return text.strip().partition("\n")[0]
        case LostNode():
            return "the node was lost"
        case _:
            return ""


def _words(record: TrialRecord, attempt: AttemptRecord) -> str:
    return f"trial {record.trial}, attempt {attempt.attempt}: {_line(attempt.outcome)}"
