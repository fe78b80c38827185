"""What `plan` finds out, as JSON."""

from pydantic import JsonValue

from orchestrator.contract.config import Frozen
from orchestrator.contract.facts import Facts
from orchestrator.contract.outcome import Phase
from orchestrator.placement.preview import Preview
from orchestrator.predict.verdict import LIKELY
from orchestrator.search.cost import TrainingCost


class Predicted(Frozen):
    """What is predicted for one candidate; nothing is measured. Bytes are of the device with the most."""

    probability_fits: float | None
    """None without a limit."""
    is_rejected: bool
    """`run` would not launch it."""
    peak_allocated_bytes: int
    needed_bytes: int
    """What is held against the limit: with the allocator's share, on CPU with the process' own address space."""
    peak_host_bytes: int
    binding_phase: Phase
    binding_term: str
    tokens_per_second: float | None
    step_s: float | None
    mfu: float | None
    training: TrainingCost | None
    """The whole training with it; None where its length is not planned or no speed is predicted."""

    @property
    def is_likely(self) -> bool:
        """Whether it fits more likely than not, or nothing bounds it."""
        return self.probability_fits is None or self.probability_fits >= LIKELY


class PlanCandidate(Frozen):
    """One candidate of a plan. `predicted` is None where there are no predictions."""

    candidate: str
    label: str
    is_baseline: bool
    config: dict[str, JsonValue]
    world_size: int
    gradient_accumulation: int
    predicted: Predicted | None = None


class Plan(Frozen):
    """What `run` would do. `illegal` counts points by reason."""

    name: str
    trials: int
    """How many trials the budget and the space allow."""
    candidates: tuple[PlanCandidate, ...]
    """The baseline first, then those that are likely to fit by predicted speed, then the others by probability. The
    sampler chooses the order of all but the baseline."""
    points: int
    duplicates: int
    illegal: dict[str, int]
    rejected: dict[str, int]
    """Candidates that `run` would not launch, by what they would need most of."""
    preview: Preview | None
    """Predicted cost of the sweep."""
    planned_tokens: int | None
    """Length of the whole training; None where the spec does not plan it."""
    currency: str | None
    """Of all sums of money; None without a price."""
    is_sampled: bool
    is_default: bool
    choices: dict[str, tuple[str, ...]]
    sizes: dict[str, tuple[int, ...]]
    """Sizes in elements that the candidates run with, also those that the spec leaves to Brimful."""
    limit_bytes: int | None
    notes: tuple[str, ...]
    facts: Facts
