"""A memory bill as tables: terms by phase, with a bar for each term of the phase that binds."""

from collections.abc import Iterable

from orchestrator.contract.units import format_bytes
from orchestrator.predict.memory import Bill
from orchestrator.predict.terms import Terms, total
from orchestrator.report.tables import NOTHING, Table

BAR_COLUMNS = 24


def bill_tables(bill: Bill) -> tuple[Table, ...]:
    """The device's table, and the host's."""
    return (_device_table(bill), _host_table(bill.host))


def bar(size_bytes: int, whole_bytes: int) -> str:
    """`size_bytes` as a share of `whole_bytes`; at least one mark for anything at all."""
    if size_bytes <= 0 or whole_bytes <= 0:
        return ""
    return "#" * max(1, round(BAR_COLUMNS * size_bytes / whole_bytes))


def _device_table(bill: Bill) -> Table:
    """A row for each term, in the order of its greatest phase; what lies outside of the allocator below the sum."""
    phases = tuple(bill.phases)
    binding = bill.phases[bill.binding_phase]
    names = sorted(_names(bill.phases.values()), key=lambda name: _rank(name, binding, bill), reverse=True)
    largest_bytes = max(binding.values(), default=0)
    rows = [
        (
            _words(name),
            *(_cell(bill.phases[phase].get(name, 0)) for phase in phases),
            bar(binding.get(name, 0), largest_bytes),
        )
        for name in names
    ]
    rows.append(("allocated", *(_cell(total(bill.phases[phase])) for phase in phases), ""))
    rows += [
        (f"{_words(name)} (outside of it)", *(_cell(size) for _ in phases), "")
        for name, size in bill.device_overhead.items()
    ]
    columns = ("term", *(_words(phase.value) for phase in phases), f"in {_words(bill.binding_phase.value)}")
    title = f"Bytes of one device at the highest moment of each phase; {_words(bill.binding_phase.value)} binds"
    return Table(title, columns, tuple(rows), frozenset({columns[0], columns[-1]}))


def _host_table(terms: Terms) -> Table:
    largest_bytes = max(terms.values(), default=0)
    rows = tuple(
        (_words(name), _cell(size), bar(size, largest_bytes))
        for name, size in sorted(terms.items(), key=lambda item: -item[1])
    )
    return Table("Bytes of one node's host memory", ("term", "host", "share"), rows, frozenset({"term", "share"}))


def _names(phases: Iterable[Terms]) -> set[str]:
    return {name for terms in phases for name, size in terms.items() if size}


def _rank(name: str, binding: Terms, bill: Bill) -> tuple[int, int, str]:
    greatest_bytes = max(terms.get(name, 0) for terms in bill.phases.values())
    return binding.get(name, 0), greatest_bytes, name


def _cell(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else NOTHING


def _words(name: str) -> str:
    return name.replace("_", " ")
