"""Options and arguments that several verbs share."""

import re
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.contract.units import parse_duration


def _checked_name(name: str | None) -> str | None:
    """Names are folders: refuse what no spec could be called."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise typer.BadParameter(f"{name!r} is not the name of a sweep; `brimful list` shows them")
    return name


def _checked_duration(duration: str) -> str:
    try:
        parse_duration(duration)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return duration


Home = Annotated[
    Path,
    typer.Option("--home", envvar="BRIMFUL_HOME", help="Folder that holds sweeps, caches and the tracking store."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing while running.")]
Name = Annotated[str, typer.Argument(metavar="NAME", callback=_checked_name, help="The sweep: `name` in its spec.")]
OptionalName = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", callback=_checked_name, help="One sweep; without it all of them."),
]
Spec = Annotated[Path, typer.Argument(metavar="SPEC", help="The sweep's YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the spec, e.g. budget.trials=8."),
]
AllowRemoteCode = Annotated[
    bool, typer.Option("--allow-remote-code", help="Let a model that the spec trusts run its own code.")
]
Address = Annotated[str | None, typer.Option(help="A running Ray cluster to join, e.g. auto or 10.0.0.1:6379.")]

NodeTimeout = Annotated[
    str,
    typer.Option(
        "--node-timeout",
        metavar="DURATION",
        callback=_checked_duration,
        help="How long to wait for nodes that the next trial needs while nothing runs.",
    ),
]

DEFAULT_HOME = Path(".brimful")
DEFAULT_NODE_TIMEOUT = "10m"
DEFAULT_REMOTE_HOME = "~/.brimful"
"""The home in a cluster that is asked from outside; all of its nodes must see it."""
PYTHON = "python"
"""What runs Brimful in such a cluster."""
