"""When two specs are the same sweep, and in what they differ."""

from collections.abc import Iterator

from pydantic import JsonValue

from orchestrator.contract.config import content_hash
from orchestrator.spec.sweep import SweepSpec

FREE_SECTIONS = frozenset({"name", "description", "budget", "tracking"})
"""Sections that may change when a sweep is resumed: how it is called, how long it may take and where it is shown do
not change what a trial is or which trials are comparable."""

WORTH_WORDS = {
    "train": {"planned_tokens", "planned_epochs"},
    "search": {"stop_below_gain"},
    "resources": {"price_per_device_hour", "currency"},
}
"""Words that say what a trial or a gain is worth: beside the budget they decide only when a sweep ends."""


def spec_digest(spec: SweepSpec) -> str:
    """12 hex digits over everything that may not change on resume. Paths count as they are, files' content does not."""
    return content_hash(_kept(spec))


def ends_alike(old: SweepSpec, new: SweepSpec) -> bool:
    """Whether two specs of one sweep also agree on when it ends."""

    def rules(spec: SweepSpec) -> JsonValue:
        return spec.model_dump(mode="json", include={"budget": True, **WORTH_WORDS})

    return rules(old) == rules(new)


def _kept(spec: SweepSpec) -> dict[str, JsonValue]:
    return spec.model_dump(mode="json", exclude={**dict.fromkeys(FREE_SECTIONS, True), **WORTH_WORDS})


def describe_difference(old: SweepSpec, new: SweepSpec) -> list[str]:
    """What differs between two specs and may not change on resume: one `dotted.key: old -> new` each, by key."""
    before = dict(_leaves(_kept(old), ""))
    after = dict(_leaves(_kept(new), ""))
    return [
        f"{key}: {_told(before.get(key))} -> {_told(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _leaves(value: JsonValue, dotted: str) -> Iterator[tuple[str, JsonValue]]:
    """Every value that is no mapping, by its dotted key as a spec writes it; a list is one value."""
    if not isinstance(value, dict):
        yield dotted, value
        return
    for key, item in value.items():
        is_home = (dotted, key) in (("train", "fixed"), ("search", "knobs"))
        below = dotted if is_home else f"{dotted}.{key}" if dotted else key
        yield from _leaves(item, below)


def _told(value: JsonValue) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return f"[{', '.join(_told(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_told(item)}' for key, item in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
