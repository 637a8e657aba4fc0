"""The coefficients of the iteration-time form (`fleetpilot.fleet.cost_model`) from measured times.

A measured time is the sum of the iterations in it, plus the request's way to the engine and back where that is part of
it. With the *knee* ``k = w / b`` fixed, the form is linear in the others:

    t = a n + b sum(max(k, P + B)) + c sum(Q) + d sum(B) + e sum(K) + r

so they come from non-negative least squares on relative residuals, for every knee on a grid; outliers are weighted
down (Huber). The constants ``a`` and ``host_step``, and ``d`` and ``host_per_seq``, cannot be told apart by times that
HTTP clients see: ``a`` and ``d`` stand for the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_TERMS = ("a_s", "b_s", "c_s", "d_s", "e_s", "request_s")
_ROUNDS = 20
_HUBER_SCALES = 1.345
_LEAST_SCALE = 0.01


@dataclass(frozen=True)
class Measurement:
    """A time, and the iterations that passed in it.

    Attributes:
        time_s: measured.
        iterations: (m, 4) of each: prefill tokens P, Q, decodes B and the KV tokens K that they read.
        is_request: the time is one from sending a request to its first token.
        held_out: it tests the fit and takes no part in it.
        label: what errors and reports call it.
    """

    time_s: float
    iterations: NDArray[np.float64]
    is_request: bool
    held_out: bool
    label: str


@dataclass(frozen=True)
class Errors:
    """Relative errors of predicted times: absolute values, and what the worst one is of."""

    count: int
    median: float
    p90: float
    worst: float
    worst_of: str


@dataclass(frozen=True)
class Fit:
    """Fitted coefficients in seconds.

    Attributes:
        cost: by name, as in `COST`: a, w, b, c, d, e.
        request_s: a request's way to the engine and back, outside of all iterations.
        fitted: errors on what was fitted.
        held_out: errors on what was not; None where nothing was held out.
    """

    cost: dict[str, float]
    request_s: float
    fitted: Errors
    held_out: Errors | None

    def predicted_s(self, measurements: Sequence[Measurement]) -> NDArray[np.float64]:
        """The times that the form gives."""
        knee = self.cost["w_s"] / self.cost["b_s"] if self.cost["b_s"] else 0.0
        theta = np.array([*(self.cost[name] for name in _TERMS[:-1]), self.request_s])
        return _columns(measurements, knee) @ theta


def prefill_iterations(tokens: int, budget: int) -> NDArray[np.float64]:
    """The iterations that prefill one prompt alone."""
    rows = []
    for done in range(0, tokens, budget):
        chunk = min(budget, tokens - done)
        rows.append((chunk, chunk * (done + chunk / 2), 0, 0))
    return np.array(rows, np.float64)


def fit(measurements: Sequence[Measurement]) -> Fit:
    """Fit the form.

    Raises:
        ValueError: fewer points to fit than coefficients, or a time that is not positive.
    """
    used = [m for m in measurements if not m.held_out]
    if len(used) < len(_TERMS):
        raise ValueError(f"{len(used)} measured points: expected at least {len(_TERMS)}, one per coefficient")
    for measurement in measurements:
        if not measurement.time_s > 0:
            raise ValueError(f"{measurement.label}: time_s = {measurement.time_s!r}: expected a time > 0")
    largest = max(float((m.iterations[:, 0] + m.iterations[:, 2]).max()) for m in used)
    knees = [0.0, *(2.0**exponent for exponent in np.arange(0, np.log2(largest) + 0.01, 0.5))]
    _, knee, theta = min((_at_knee(used, knee) for knee in knees), key=lambda found: found[0])
    cost = dict(zip(_TERMS[:-1], map(float, theta[:-1]), strict=True))
    cost["w_s"] = cost["b_s"] * knee
    unrated = Fit(cost, float(theta[-1]), *[_NO_ERRORS] * 2)
    held_out = [m for m in measurements if m.held_out]
    return Fit(cost, float(theta[-1]), _errors(unrated, used), _errors(unrated, held_out) if held_out else None)


def _at_knee(measurements: Sequence[Measurement], knee: float) -> tuple[float, float, NDArray[np.float64]]:
    """The sum of the relative errors, the knee, the coefficients."""
    from scipy.optimize import nnls

    times_s = np.array([m.time_s for m in measurements])
    relative = _columns(measurements, knee) / times_s[:, None]
    scale = relative.max(axis=0)
    scale[scale == 0] = 1.0
    weights = np.ones(len(times_s))
    for _ in range(_ROUNDS):
        theta, _ = nnls(relative / scale * weights[:, None], weights)
        residuals = np.abs(relative / scale @ theta - 1)
        limit = _HUBER_SCALES * max(_LEAST_SCALE, 1.4826 * float(np.median(residuals)))
        weights = np.sqrt(limit / np.maximum(residuals, limit))
    return float(residuals.sum()), knee, theta / scale


def _columns(measurements: Sequence[Measurement], knee: float) -> NDArray[np.float64]:
    """(n, 6) what each coefficient is multiplied by."""
    rows = []
    for measurement in measurements:
        prefill, attention, decodes, kv_tokens = measurement.iterations.T
        computed = np.maximum(knee, prefill + decodes).sum()
        sums = (attention.sum(), decodes.sum(), kv_tokens.sum())
        rows.append((len(prefill), computed, *sums, float(measurement.is_request)))
    return np.array(rows, np.float64)


_NO_ERRORS = Errors(0, 0.0, 0.0, 0.0, "")


def _errors(fitted: Fit, measurements: Sequence[Measurement]) -> Errors:
    times_s = np.array([m.time_s for m in measurements])
    errors = np.abs(fitted.predicted_s(measurements) / times_s - 1)
    worst = int(np.argmax(errors))
    return Errors(
        len(errors),
        float(np.median(errors)),
        float(np.percentile(errors, 90)),
        float(errors[worst]),
        measurements[worst].label,
    )
