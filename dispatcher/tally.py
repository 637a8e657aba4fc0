"""What a process of the dispatcher has counted and shows; several add up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from fleetpilot.dispatcher.decisions import Decided


@dataclass
class Tally:
    """Counts since the start, and what is there to look at now.

    Attributes:
        outcomes: of requests.
        events: what happened, by name.
        fallbacks: reason -> how often the fallback decided.
        decided: (kind, by whom) -> decisions.
        records: of the decision log, by what became of them.
        downtimes_s: of the latest migrations.
        migrations: those that go on and the latest that ended, as the live page has them.
        recent: decisions for the live page, oldest first.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    decided: Counter[tuple[str, str]] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)
    downtimes_s: list[float] = field(default_factory=list)
    migrations: list[dict[str, Any]] = field(default_factory=list)
    recent: list[Decided] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Those of another process as well."""
        for mine, theirs in zip(self._counters(), other._counters(), strict=True):
            mine.update(theirs)
        self.downtimes_s += other.downtimes_s
        self.migrations += other.migrations
        self.recent = sorted([*self.recent, *other.recent], key=lambda decided: decided.number)

    def _counters(self) -> tuple[Counter[Any], ...]:
        return self.outcomes, self.events, self.fallbacks, self.decided, self.records

    def past(self) -> Tally:
        """What stays when the process is gone."""
        return replace(self, migrations=[], recent=[])
