"""Predictors of output length: what a dispatcher is told about a request before it has run.

A policy never sees the true length. What it sees is a column of the table, filled here; each draw is keyed by (seed,
row in the source), so a prediction depends neither on what a policy does nor on which other requests are in the table.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleetpilot.workloads.checks import require, require_positive
from fleetpilot.workloads.seeding import Purpose, uniform_by_row
from fleetpilot.workloads.table import RequestTable

Predictions = NDArray[np.float32]


class Predictor(ABC):
    """Something that fills ``predicted_output_tokens``."""

    @abstractmethod
    def predict(self, table: RequestTable, seed: int) -> Predictions:
        """(n,) predicted output tokens, > 0."""


def with_predictions(table: RequestTable, predictor: Predictor, seed: int = 0) -> RequestTable:
    """The table with this predictor's column."""
    return table.replace(predicted_output_tokens=predictor.predict(table, seed))


@dataclass(frozen=True)
class Constant(Predictor):
    """The same for every request.

    Attributes:
        output_tokens: > 0.
    """

    output_tokens: float

    def __post_init__(self) -> None:
        require_positive(self, "output_tokens", self.output_tokens)

    def predict(self, table: RequestTable, seed: int) -> Predictions:
        """(n,) times the constant."""
        return np.full(len(table), self.output_tokens, np.float32)


@dataclass(frozen=True)
class GlobalMean(Predictor):
    """The mean output of the whole table for every request: what a dispatcher learns from a long history."""

    def predict(self, table: RequestTable, seed: int) -> Predictions:
        """(n,) times the mean."""
        return np.full(len(table), _mean_output(table), np.float32)


@dataclass(frozen=True)
class ClassMean(Predictor):
    """The mean output of the earlier requests of the same class, and of one request of the table's mean length.

    Only earlier rows count: the mean of a whole class would hand the true length of a class's only request to the
        policy.

    Attributes:
        by: the column that tells classes apart. Requests without a session (-1) are one class.
    """

    by: Literal["session", "slo_class", "priority"] = "session"

    def __post_init__(self) -> None:
        require(self.by in ("session", "slo_class", "priority"), self, "by", self.by, "session, slo_class or priority")

    def predict(self, table: RequestTable, seed: int) -> Predictions:
        """(n,) running means; ``seed`` is not used."""
        order = np.argsort(getattr(table, self.by), kind="stable")
        classes = getattr(table, self.by)[order]
        output = table.output_tokens[order].astype(np.float64)
        starts = np.flatnonzero(np.diff(classes, prepend=classes[:1] - 1))
        sizes = np.diff(np.append(starts, len(classes)))
        before = np.cumsum(output) - output
        seen_tokens = before - np.repeat(before[starts], sizes)
        seen = np.arange(len(classes)) - np.repeat(starts, sizes)
        predicted = np.empty(len(table), np.float32)
        predicted[order] = (seen_tokens + _mean_output(table)) / (seen + 1)
        return predicted


@dataclass(frozen=True)
class LogNormalError(Predictor):
    """The true length times a log-normal error of median 1: too high as often as too low.

    Attributes:
        sigma: standard deviation of the error's logarithm, >= 0; 0 is an oracle, 0.7 errs by a factor of 2 or more in
            one request of three.
    """

    sigma: float

    def __post_init__(self) -> None:
        require(0 <= self.sigma < math.inf, self, "sigma", self.sigma, "a finite number >= 0")

    def predict(self, table: RequestTable, seed: int) -> Predictions:
        """(n,) lengths with their errors."""
        return (table.output_tokens * np.exp(self.sigma * _normal_by_row(table.source_row, seed))).astype(np.float32)


def _mean_output(table: RequestTable) -> float:
    return float(table.output_tokens.mean()) if len(table) else 1.0


def _normal_by_row(rows: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """A standard normal number for each row (Box-Muller), a function of (seed, row) alone."""
    radius = np.sqrt(-2 * np.log1p(-uniform_by_row(seed, Purpose.PREDICTION_RADII, rows)))
    return radius * np.cos(2 * np.pi * uniform_by_row(seed, Purpose.PREDICTION_ANGLES, rows))
