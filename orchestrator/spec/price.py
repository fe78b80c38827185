"""The price of a device-hour where the spec names a cluster profile for it."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import JsonValue

from orchestrator.contract.errors import SpecError
from orchestrator.spec.checks import existing_path
from orchestrator.spec.places import Fault, Places
from orchestrator.spec.sweep import DOLLARS

_PRICE = ("resources", "price_per_device_hour")
_MEND = "write a number, or the path of a profile such as clusters/1xh200.yaml"


def resolve_price(
    value: dict[str, JsonValue], places: Places, spec_path: Path, overridden: Iterable[str]
) -> list[Fault]:
    """Put the profile's price, in US dollars, in the place of the profile's path; a fault where there is none.

    The path is looked for as those of the model and the data are.
    """
    section = value.get("resources")
    written = section.get(_PRICE[1]) if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(written, str):
        return []
    bases = [spec_path.absolute().parent, Path.cwd()]
    found = existing_path(written, bases[::-1] if ".".join(_PRICE) in overridden else bases)
    price, why = (None, f"no cluster profile {written!r}; {_MEND}") if found is None else _price_of(found, written)
    if price is not None and section.get("currency", DOLLARS) != DOLLARS:
        why = f"{written} is in {DOLLARS}, resources.currency is {section['currency']}; write the price as a number"
    if why:
        value["resources"] = {key: item for key, item in section.items() if key != _PRICE[1]}
        return [places.fault(_PRICE, why)]
    value["resources"] = {**section, _PRICE[1]: price}
    return []


def _price_of(profile: Path, written: str) -> tuple[float | None, str]:
    """The profile's price, or why there is none."""
    from orchestrator.spec.cluster import load_cluster  # brings numpy in: only who names a profile pays it

    try:
        price = load_cluster(profile).price_per_device_hour
    except SpecError as error:
        return None, f"is no cluster profile: {str(error).splitlines()[0]}; {_MEND}"
    return price, "" if price else f"{written} states no price_per_device_hour; add it there, or write a number here"
