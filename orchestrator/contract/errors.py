"""Every error that Brimful raises on purpose, with the exit code that the command line gives it.

BrimfulError                        1
|-- UsageError                      2   the command line asks for something that does not exist or conflicts
|   |-- SpecError                   2   the spec is wrong; carries file, line, column and the mend
|   |-- SweepExistsError            2   a changed spec under an existing name
|   |-- SweepLockedError            2   another process works on the sweep
|   |-- UnplaceableError            2   no such devices exist in the cluster
|   `-- PreflightError              2   model or data cannot be used as the spec says
|-- StateError                      1   a file of the sweep's folder is damaged or missing
|-- StorageError                    1   a file cannot be written: the disk is full, read-only or broken
|-- StoppedAtOnceError        130, 143  a second signal ended the sweep without waiting for its trials
|-- ClusterUnreachableError         5   Ray cannot be reached, started or joined
`-- TrackingRefusedError            5   the tracking server refuses the credentials

What becomes of a trial is never an error: it is an `orchestrator.contract.outcome.Outcome`.
"""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOTHING_FITS = 3
EXIT_STOPPED = 4
EXIT_UNREACHABLE = 5
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class BrimfulError(Exception):
    """Base of every deliberate error; its text is complete and fit for a user."""

    exit_code = EXIT_FAILED


class UsageError(BrimfulError):
    """The command line asks for something that does not exist or that conflicts."""

    exit_code = EXIT_USAGE


class SpecError(UsageError):
    """The spec is wrong. The text is one line a fault: `file:line:col: where: what is wrong; the mend`."""


class SweepExistsError(UsageError):
    """A sweep of this name exists with another spec; the text holds the difference."""


class SweepLockedError(UsageError):
    """Another living process works on the sweep; the text names its host and process id."""


class UnplaceableError(UsageError):
    """No devices of the asked shape exist in the cluster; the text says what exists."""


class PreflightError(UsageError):
    """The model or the data cannot be used as the spec says."""


class StateError(BrimfulError):
    """A file of the sweep's folder is damaged or missing; the text names it."""


class StorageError(BrimfulError):
    """A file cannot be written; what was there before is whole. The text names the place, the cause and the mend."""


class StoppedAtOnceError(BrimfulError):
    """A second signal ended the sweep without waiting for its trials. `exit_code` tells which signal."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ClusterUnreachableError(BrimfulError):
    """Ray cannot be reached, started or joined."""

    exit_code = EXIT_UNREACHABLE


class TrackingRefusedError(BrimfulError):
    """The tracking server refuses the credentials."""

    exit_code = EXIT_UNREACHABLE
