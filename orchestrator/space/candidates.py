"""From a spec and the preflight's facts to the finite list of candidates, with reasons for what is left out."""

from dataclasses import dataclass

from orchestrator.contract.config import TrialConfig


@dataclass(frozen=True)
class Candidate:
    """One runnable configuration. `id` is the config's content hash, `label` its short name for people."""

    id: str
    label: str
    config: TrialConfig
    is_baseline: bool = False
