"""Lets a verb be asked of a cluster from outside: `--address URL` beside its own options."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from orchestrator.cli.options import DEFAULT_REMOTE_HOME, PYTHON
from orchestrator.contract.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.cli.remote import Remote

WATCH_EVERY_S = 5.0
_JOINING = frozenset({"resume"})
"""Verbs whose own `--address HOST:PORT` joins a cluster from one of its machines."""
_EPILOG = (
    "In a cluster, from outside: --address URL of its Ray dashboard (http://HOST:8265), --remote-home FOLDER there "
    f"(else {DEFAULT_REMOTE_HOME}), --remote-python PROGRAM that runs Brimful there (else {PYTHON}), --headers and "
    "--verify as `submit` has them, --insecure: no warning of a token in clear text."
)
_VALUED = frozenset({"--address", "--remote-home", "--remote-python", "--home", "--headers", "--verify"})
_FLAGS = frozenset({"--insecure"})
_VALUES_OF_LOGS = frozenset({"--rank", "--attempt", "--tail"})
_VALUES_OF_RESUME = frozenset({"--pool", "--node-timeout"})


class OutsideCommand(TyperCommand):
    """A verb of the home at hand, or with the URL of a Ray dashboard of a home in that cluster."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "epilog": _EPILOG})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave with the cluster's answer when it is asked for."""
        remote, words = _split(args)
        if remote is None or "--help" in words:
            rest: list[str] = super().parse_args(ctx, args)
            return rest
        if "://" not in remote.url and self.name in _JOINING:
            return list(super().parse_args(ctx, args))
        raise typer.Exit(_asked(remote, self.name or "", words))


def _split(args: Sequence[str]) -> "tuple[Remote | None, list[str]]":
    """The cluster that is asked, None without one; and the words that the verb there gets."""
    values: dict[str, str] = {}
    words: list[str] = []
    rest = iter(args)
    for word in rest:
        option, has_value, value = word.partition("=")
        if option in _VALUED:
            values[option] = value if has_value else next(rest, "")
        elif option in _FLAGS:
            values[option] = "yes"
        else:
            words.append(word)
    url = values.get("--address")
    if url is None:
        return None, words
    from orchestrator.cli.remote import Remote, parse_headers, parse_verify

    home = values.get("--remote-home", DEFAULT_REMOTE_HOME)
    python = values.get("--remote-python", PYTHON)
    headers, verify = parse_headers(values.get("--headers")), parse_verify(values.get("--verify", "true"))
    return Remote(url, home, python, "--insecure" in values, headers, verify), words


def _asked(remote: "Remote", verb: str, words: list[str]) -> int:
    from orchestrator.cli.remote import driver_log, relayed, resume, watched

    if verb == "logs":
        names = _positional(words, _VALUES_OF_LOGS)
        if len(names) == 1:
            return driver_log(remote, names[0], follow=bool({"--follow", "-f"} & set(words)))
        if {"--follow", "-f"} & set(words):
            raise UsageError("a trial's log in a cluster is brought whole: leave --follow out, or the trial's number")
    if verb == "resume":
        names = _positional(words, _VALUES_OF_RESUME)
        if len(names) == 1:
            return resume(remote, names[0], words)
    if verb == "status" and ("--watch" in words or "-w" in words):
        names = _positional(words, frozenset())
        if len(names) != 1 or "--json" in words:
            raise UsageError("--watch goes with the name of one sweep and without --json")
        rest = [word for word in words if word not in ("--watch", "-w")]
        return watched(remote, names[0], [verb, *rest], WATCH_EVERY_S)
    return relayed(remote, [verb, *words])


def _positional(words: Sequence[str], valued: frozenset[str]) -> list[str]:
    """Words that are neither options nor their values."""
    found = []
    rest = iter(words)
    for word in rest:
        if word in valued:
            next(rest, None)
        elif not word.startswith("-"):
            found.append(word)
    return found
