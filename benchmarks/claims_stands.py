"""When a configuration agrees with a claim, and the stand that follows from all of them, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from orchestrator.contract.outcome import Phase
from orchestrator.predict.memory import Bill
from orchestrator.predict.terms import Terms
from orchestrator.predict.verdict import Verdict
from orchestrator.spec.hardware import BY_KEY

GB = 10**9
AGREEMENT = 0.15
"""Relative: how far a figure may be from a claimed one to agree with it."""


@dataclass(frozen=True)
class Priced:
    """A configuration with its bill."""

    label: str
    verdict: Verdict
    device: str | None

    def phase(self, names: Sequence[str] = ()) -> Phase:
        """The phase in which `names` come to most; without names the binding one."""
        bill = self.verdict.bill
        if not names:
            return bill.binding_phase
        return max(bill.phases, key=lambda phase: sum(bill.phases[phase].get(name, 0) for name in names))

    def terms(self, names: Sequence[str] = ()) -> Terms:
        """Of that phase, with what the device holds beside the allocator."""
        bill = self.verdict.bill
        return {**bill.phases[self.phase(names)], **bill.device_overhead}

    def largest(self, names: Sequence[str] = (), count: int = 2) -> str:
        """The largest terms in words, of `names` where there are any."""
        terms = {name: size for name, size in self.terms(names).items() if not names or name in names}
        found = sorted(terms, key=lambda name: -terms[name])[:count]
        return " and ".join(f"{name.replace('_', ' ')} {terms[name] / GB:.1f} GB" for name in found)

    def as_json(self) -> JsonValue:
        """With the whole bill."""
        verdict = self.verdict
        return {
            "label": self.label,
            "device": self.device,
            "fits": verdict.fits,
            "probability_fits": verdict.probability_fits,
            "needed_bytes": verdict.needed_bytes,
            "reserved_bytes": list(verdict.reserved_bytes),
            "binding_phase": verdict.bill.binding_phase.value,
            "binding_term": verdict.bill.binding_term,
            "bill": verdict.bill.model_dump(mode="json"),
        }


@dataclass(frozen=True)
class Stand:
    """`verdict`: Holds., Holds only if, or Does not hold: ...; `reason` ends the sentence with figures."""

    verdict: str
    reason: str


class Test(Protocol):
    """How a claim is judged."""

    @property
    def terms(self) -> tuple[str, ...]:
        """What the claim counts; empty: the whole device."""

    def stand(self, rows: Sequence[Priced]) -> Stand:
        """The stand on the claim."""


@dataclass(frozen=True)
class Amount:
    """A number of bytes is claimed: of the whole device, or of the sum of `terms` at its highest in any phase."""

    claimed: tuple[float, float]
    quantity: str
    terms: tuple[str, ...] = ()

    def of(self, row: Priced) -> int:
        """What is compared, in bytes."""
        if not self.terms:
            return row.verdict.needed_bytes
        terms = row.terms(self.terms)
        return sum(terms.get(name, 0) for name in self.terms)

    def stand(self, rows: Sequence[Priced]) -> Stand:
        """Agreement is within AGREEMENT of the claimed range."""
        figures = [f"{row.label}: {self.of(row) / GB:.1f} GB {self.quantity}" for row in rows]
        agrees = [is_near(self.of(row), self.claimed) for row in rows]
        found = _stand(figures, agrees, rows, self.terms)
        if any(agrees) or self.terms:
            return found
        return Stand(found.verdict, found.reason + self._parts(rows[0]))

    def _parts(self, row: Priced) -> str:
        """What of a bill comes near the claimed amount by itself."""
        terms = row.terms()
        names = sorted(terms, key=lambda name: -terms[name])
        for count in range(1, len(names)):
            size = sum(terms[name] for name in names[:count])
            if is_near(size, self.claimed):
                words = " and ".join(name.replace("_", " ") for name in names[:count])
                return f" What comes near is {words} alone: {size / GB:.1f} GB."
        return ""


@dataclass(frozen=True)
class Fit:
    """The device holds the run, and the amount is as claimed (None: no amount is claimed)."""

    claimed: tuple[float, float] | None
    terms: tuple[str, ...] = ()

    def stand(self, rows: Sequence[Priced]) -> Stand:
        """A run that fits but needs another amount than claimed does not agree."""
        figures, agrees = [], []
        for row in rows:
            assert row.device is not None
            usable = BY_KEY[row.device].usable_memory_bytes or 0
            needed = row.verdict.needed_bytes
            word = "fits" if row.verdict.fits else "does not fit"
            figures.append(
                f"{row.label}: {needed / GB:.1f} GB, {word} in {usable / GB:.1f} GB" + self._host(row.verdict.bill)
            )
            agrees.append(bool(row.verdict.fits) and (self.claimed is None or is_near(needed, self.claimed)))
        return _stand(figures, agrees, rows)

    def _host(self, bill: Bill) -> str:
        if self.claimed is not None:
            return ""
        disk = f" and {bill.disk_bytes / GB:.0f} GB of NVMe" if bill.disk_bytes else ""
        return f", with {bill.peak_host_bytes / GB:.0f} GB of host memory{disk}"


@dataclass(frozen=True)
class Share:
    """A method needs a share of what full training needs; rows come in pairs, full training first."""

    claimed: tuple[float, float]
    terms: tuple[str, ...] = ()

    def stand(self, rows: Sequence[Priced]) -> Stand:
        """The share of the whole device."""
        pairs = list(zip(rows[::2], rows[1::2], strict=True))
        shares = [method.verdict.needed_bytes / full.verdict.needed_bytes for full, method in pairs]
        figures = [
            f"{method.label}: {100 * share:.0f} % of {full.label.split(';')[0]}"
            for (full, method), share in zip(pairs, shares, strict=True)
        ]
        agrees = [self.claimed[0] - 0.005 <= share <= self.claimed[1] + 0.005 for share in shares]
        return _stand(figures, agrees, [method for _, method in pairs])


def is_near(figure: float, claimed: tuple[float, float]) -> bool:
    """Within AGREEMENT of the range."""
    return claimed[0] * (1 - AGREEMENT) <= figure <= claimed[1] * (1 + AGREEMENT)


def _stand(figures: Sequence[str], agrees: Sequence[bool], rows: Sequence[Priced], names: Sequence[str] = ()) -> Stand:
    if all(agrees):
        return Stand("Holds:", _joined(figures))
    against = [
        f"{figure} ({row.largest(names)})"
        for figure, row, agreed in zip(figures, rows, agrees, strict=True)
        if not agreed
    ]
    if not any(agrees):
        return Stand("Does not hold, because", _joined(against))
    those = [figure for figure, agreed in zip(figures, agrees, strict=True) if agreed]
    return Stand("Holds only if", f"{_joined(those)} But not with {_joined(against)}")


def _joined(parts: Sequence[str]) -> str:
    return "; ".join(parts) + "."
