"""Which of the layouts that a spec asks for a cluster could ever place."""

from collections.abc import Callable, Iterable

from orchestrator.contract.config import Layout
from orchestrator.contract.errors import UnplaceableError


def refused_layouts(layouts: Iterable[Layout], check: Callable[[int, int | None], None]) -> dict[Layout, str]:
    """Those that `check` refuses (see `orchestrator.sweep.ports.TrialPool`), with its reason.

    Raises UnplaceableError, that of the smallest, when it refuses all: the others may still be searched.
    """
    refused: dict[Layout, UnplaceableError] = {}
    layouts = list(layouts)
    for layout in layouts:
        try:
            check(layout.world_size, layout.nodes)
        except UnplaceableError as error:
            refused[layout] = error
    if len(refused) == len(layouts):
        raise refused[min(layouts, key=lambda layout: (layout.world_size, layout.nodes or 1))]
    return {layout: str(error) for layout, error in refused.items()}
