"""The spec names a model or data that cannot be used."""

from orchestrator.contract.errors import PreflightError


class Unusable(PreflightError):
    """`field` is the dotted place in the spec that has to change; the text says what is wrong and the mend."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
