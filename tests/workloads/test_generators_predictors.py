"""Length predictors: unbiased, keyed by row, and no leak of the truth beyond the error that was configured."""

from __future__ import annotations

import numpy as np
import pytest

from fleetpilot.workloads.arrivals import Poisson
from fleetpilot.workloads.lengths import Geometric, Independent
from fleetpilot.workloads.openloop import Client, OpenLoop
from fleetpilot.workloads.predictors import ClassMean, Constant, GlobalMean, LogNormalError, with_predictions
from fleetpilot.workloads.seeding import Purpose, uniform_by_row
from fleetpilot.workloads.table import RequestTable, make_table

GENERATOR = OpenLoop((Client(Poisson(1.0), Independent(Geometric(500), Geometric(200))),))


def table(n: int = 50_000) -> RequestTable:
    return GENERATOR.table(n, 1)


def test_error_is_median_unbiased_and_of_the_size_configured() -> None:
    requests = table()
    predicted = with_predictions(requests, LogNormalError(0.7), seed=3).predicted_output_tokens
    error = np.log(predicted / requests.output_tokens)
    assert np.mean(error > 0) == pytest.approx(0.5, abs=0.01)
    assert error.std() == pytest.approx(0.7, rel=0.02)
    assert abs(np.corrcoef(error, np.log(requests.output_tokens))[0, 1]) < 0.02
    assert np.mean(np.abs(error) > np.log(2)) == pytest.approx(0.32, abs=0.01)


def test_no_error_is_an_oracle() -> None:
    requests = table(1000)
    assert np.array_equal(LogNormalError(0.0).predict(requests, 0), requests.output_tokens)


def test_error_is_keyed_by_seed_and_source_row() -> None:
    """Whoever is in the table beside it, and however the table is cut, a request is predicted the same."""
    predictor = LogNormalError(0.5)
    whole = predictor.predict(table(1000), 7)
    parts = [predictor.predict(part, 7) for part in GENERATOR.parts(1000, 13, 1)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(predictor.predict(table(1000), 8), whole)


def test_row_numbers_are_uniform_and_independent() -> None:
    rows = np.arange(200_000)
    first = uniform_by_row(1, Purpose.PREDICTION_RADII, rows)
    second = uniform_by_row(1, Purpose.PREDICTION_ANGLES, rows)
    assert np.histogram(first, 20, (0, 1))[0] == pytest.approx(10_000, rel=0.05)
    for other in (second, np.roll(first, 1), uniform_by_row(2, Purpose.PREDICTION_RADII, rows)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.01


def test_class_mean_learns_from_earlier_rows_only() -> None:
    requests = make_table(
        "t", np.arange(6.0), np.full(6, 10), [10, 1000, 30, 2000, 50, 3000], session=[1, 2, 1, 2, 1, 2]
    )
    mean = requests.output_tokens.mean()
    expected = [mean, mean, (mean + 10) / 2, (mean + 1000) / 2, (mean + 10 + 30) / 3, (mean + 1000 + 2000) / 3]
    assert ClassMean("session").predict(requests, 0) == pytest.approx(expected)


def test_class_mean_does_not_give_away_the_only_request_of_a_class() -> None:
    """The mean over a whole class would be the true length of each of these requests."""
    requests = table(2000).replace(session=np.arange(2000))
    assert len(set(ClassMean("session").predict(requests, 0).tolist())) == 1


def test_class_mean_tells_classes_apart() -> None:
    output = np.where(np.arange(2000) % 2, 900, 30)
    requests = make_table("t", np.arange(2000.0), np.full(2000, 10), output, slo_class=np.arange(2000) % 2)
    late = ClassMean("slo_class").predict(requests, 0)[-200:]
    assert late == pytest.approx(output[-200:], rel=0.05)


def test_constant_and_global_mean() -> None:
    requests = table(1000)
    assert set(Constant(128).predict(requests, 0)) == {128.0}
    assert GlobalMean().predict(requests, 0) == pytest.approx(requests.output_tokens.mean())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(0), "Constant: output_tokens = 0: expected a finite number > 0"),
        (lambda: LogNormalError(-0.1), r"LogNormalError: sigma = -0\.1: expected a finite number >= 0"),
        (lambda: ClassMean("client"), "ClassMean: by = 'client': expected session, slo_class or priority"),  # type: ignore[arg-type]
    ],
)
def test_errors_name_parameter_value_and_expectation(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
