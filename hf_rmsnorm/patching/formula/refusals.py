"""Why a module has no recipe, each with its cure."""

from typing import NamedTuple


class Refusal(NamedTuple):
    """Why a norm runs its own forward, and how a user may change that; "" if the user
    asked for it.
    """

    reason: str
    cure: str = ""


class Refused(Exception):
    """The reason, in words.

    Attributes:
        cure: how a user may remove it.
    """

    cure: str


class Unusable(Refused):
    """The module does not normalise over the last dimension of its input, or cannot be
    probed.
    """

    cure = "nothing, if it is no norm over the last dimension; otherwise let its forward run on one CPU tensor"


class NotPlain(Refused):
    """The module's forward is not plain arithmetic."""

    cure = "nothing breaks, it runs its own forward; to have it fused, write it in plain arithmetic: docs/supported.md"


class NotInFamily(Refused):
    """The module normalises over its last dimension by a formula that `NormSpec` cannot
    say.
    """

    cure = "nothing breaks, it runs its own forward; to have it fused, compute one of the formulas in docs/supported.md"
