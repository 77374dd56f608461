"""What a rule answers: how often it was put to the test, and where it was broken.

Every rule module makes these, `rules.check` gathers them. A finding without premises says nothing: it is the
caller (`rules.missing_premises`) who decides whether silence is a failure.
"""

from __future__ import annotations

import msgspec
from typing_extensions import override


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One broken rule. `entity` and `id` are what `story` takes; `seq` is where in commit order it shows."""

    rule: str
    entity: str
    id: str
    message: str
    seq: int

    @override
    def __str__(self) -> str:
        return f"{self.rule} {self.entity} {self.id} at seq {self.seq}: {self.message}"


class Finding(msgspec.Struct, kw_only=True):
    """One rule's answer over one history; rules fill it while they read."""

    rule: str
    premises: int = 0  #: how often the rule's condition occurred
    violations: list[Violation] = []

    def broken(self, entity: str, id: str, seq: int, message: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(rule=self.rule, entity=entity, id=id, message=message, seq=seq))
