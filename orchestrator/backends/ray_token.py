"""Ray's token as Ray itself looks it up, and what to do when a cluster wants another one.

Ray's client tells a wrong, a missing and an unreadable token by the same bare ConnectionError, or ends the process: so
they are looked at before it is used.
"""

import os
from pathlib import Path

from ray._raylet import Config  # type: ignore[attr-defined]  # an extension module, its stub is incomplete

from orchestrator.contract.errors import ClusterUnreachableError

MODE_VARIABLE, TOKEN_VARIABLE, PATH_VARIABLE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
DEFAULT_FILE = Path("~/.ray/auth_token")
"""Where Ray looks last (ray/_private/authentication, and `ray get-auth-token`, which prints it)."""
MEND = (
    f"set {MODE_VARIABLE}=token and {PATH_VARIABLE} to a file with the cluster's token, or {TOKEN_VARIABLE} to the "
    "token itself (`ray get-auth-token` on the cluster's head prints it)"
)


def find_token() -> str | None:
    """The token of this process, from where Ray takes it: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or
    `~/.ray/auth_token`; None without any.

    Raises ClusterUnreachableError when the file that RAY_AUTH_TOKEN_PATH names holds none or cannot be read.
    """
    if token := os.environ.get(TOKEN_VARIABLE, "").strip():
        return token
    named = os.environ.get(PATH_VARIABLE)
    file = Path(named) if named else DEFAULT_FILE.expanduser()
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        if named is None:
            return None
        cause = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ClusterUnreachableError(
            f"the file of {PATH_VARIABLE}, {named}, cannot be read ({cause}); {MEND}"
        ) from error
    if not token and named is not None:
        raise ClusterUnreachableError(f"the file of {PATH_VARIABLE}, {named}, is empty; {MEND}")
    return token or None


def refused(where: str, has_sent: bool) -> ClusterUnreachableError:
    """The error for a cluster that wants a token: another one than was sent, or any at all."""
    if has_sent:
        return ClusterUnreachableError(f"the Ray cluster at {where} refuses the token; {MEND}")
    if os.environ.get(MODE_VARIABLE, "token") != "token":
        return ClusterUnreachableError(
            f"the Ray cluster at {where} wants a token, but {MODE_VARIABLE} is {os.environ[MODE_VARIABLE]} here; {MEND}"
        )
    return ClusterUnreachableError(f"the Ray cluster at {where} wants a token and there is none here; {MEND}")


def read_mode_again() -> None:
    """Ray reads RAY_AUTH_MODE when it is imported; make it read again (as `ray._private.authentication` does)."""
    if MODE_VARIABLE in os.environ:
        Config.initialize("")
