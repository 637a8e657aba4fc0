"""Mixes of real clients: the condensed files of ServeGen (alibaba/ServeGen, Apache-2.0) as an open-loop workload.

Two files in one folder, both CSV with a header, gzipped:

- ``client_windows.csv.gz``: ``client_id,t_s,rate_rps,cv,pattern,shape,scale`` for each window of 600 s in which the
  client was active, ``pattern`` (``Gamma`` or ``Weibull``) being the distribution of its gaps;
- ``length_quantiles.csv.gz``: ``client_id,t_s,field,mean,q0,q1,...,q100`` for each block of six hours, ``field`` being
  ``input_tokens`` or ``output_tokens`` (others are ignored), ``q99.9`` the 99.9th percentile.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from fleetpilot.workloads.arrivals import ArrivalProcess, Gamma, Weibull, Windows
from fleetpilot.workloads.lengths import Independent, Lengths, Quantiles
from fleetpilot.workloads.openloop import Client, OpenLoop

WINDOW_S = 600

_WINDOWS, _QUANTILES = "client_windows.csv.gz", "length_quantiles.csv.gz"


def read_servegen(
    folder: Path | str,
    *,
    start_s: float,
    duration_s: float,
    rate_rps: float | None = None,
    missing_lengths: Lengths | None = None,
) -> OpenLoop:
    """The clients that were active in a period, each with its windows of rate and burstiness and its lengths.

    A client's lengths are those of its six-hour block nearest to the middle of the period; a request has at least one
    token.

    Args:
        folder: holds the two files.
        start_s: start of the period in the files' seconds, a multiple of 600.
        duration_s: length of the period, a multiple of 600; after it the period repeats.
        rate_rps: mean rate to bring the whole service to; None keeps the rates of the files.
        missing_lengths: for clients without lengths; None leaves such clients out, which the table's ``meta`` reports
            as ``clients_without_lengths`` and their share of the rate.

    Raises:
        ValueError: naming what was expected, if the period is not whole windows or holds no client.
    """
    for name, value in (("start_s", start_s), ("duration_s", duration_s)):
        if value < 0 or value % WINDOW_S:
            raise ValueError(f"read_servegen: {name} = {value}: expected a multiple of {WINDOW_S} >= 0")
    count = int(duration_s // WINDOW_S)
    windows: dict[int, list[ArrivalProcess | None]] = defaultdict(lambda: [None] * count)
    for row in _rows(Path(folder) / _WINDOWS, ("client_id", "t_s", "rate_rps", "pattern")):
        index = (_number(_WINDOWS, row, "t_s") - start_s) // WINDOW_S
        if 0 <= index < count:
            windows[int(_number(_WINDOWS, row, "client_id"))][int(index)] = _process(row)
    lengths = _lengths(Path(folder) / _QUANTILES, start_s + duration_s / 2)
    arrivals = {client: Windows(float(WINDOW_S), tuple(processes)) for client, processes in sorted(windows.items())}
    missing = [client for client in arrivals if client not in lengths]
    if missing_lengths is not None:
        lengths |= dict.fromkeys(missing, missing_lengths)
    kept = [client for client in arrivals if client in lengths]
    if not kept:
        raise ValueError(
            f"read_servegen: start_s = {start_s}, duration_s = {duration_s}: expected a period in which a client with "
            f"lengths is active, {folder} has none"
        )
    total_rps = sum(process.mean_rps for process in arrivals.values())
    missing_share = sum(arrivals[client].mean_rps for client in missing) / total_rps
    return OpenLoop(
        tuple(Client(arrivals[client], lengths[client]) for client in kept),
        rate_rps,
        meta=(
            ("source", "ServeGen, condensed"),
            ("folder", Path(folder).name),
            ("start_s", start_s),
            ("duration_s", duration_s),
            ("clients", kept),
            ("clients_without_lengths", missing),
            ("clients_without_lengths_rate_share", missing_share),
        ),
    )


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path.name}: expected gzipped CSV ({error})") from error
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"{path.name}: expected a column {missing[0]!r}")
    return rows


def _number(file: str, row: dict[str, str], column: str) -> float:
    text = row.get(column)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{file}: {column} = {text!r}: expected a finite number")
    return value


def _process(row: dict[str, str]) -> ArrivalProcess:
    rate_rps = _number(_WINDOWS, row, "rate_rps")
    match row["pattern"]:
        case "Gamma":
            return Gamma(rate_rps, _number(_WINDOWS, row, "cv"))
        case "Weibull":
            return Weibull(rate_rps, _number(_WINDOWS, row, "shape"))
        case other:
            raise ValueError(f"{_WINDOWS}: pattern = {other!r}: expected Gamma or Weibull")


def _lengths(path: Path, time_s: float) -> dict[int, Lengths]:
    """Lengths of each client that has both, from the block whose middle is nearest to a time."""
    nearest: dict[tuple[int, str], tuple[float, dict[str, str]]] = {}
    for row in _rows(path, ("client_id", "t_s", "field", "mean")):
        key = (int(_number(_QUANTILES, row, "client_id")), row["field"])
        distance_s = abs(_number(_QUANTILES, row, "t_s") + 3 * 3600 - time_s)
        if key not in nearest or distance_s < nearest[key][0]:
            nearest[key] = (distance_s, row)
    return {
        client: Independent(
            _quantiles(nearest[client, "input_tokens"][1]), _quantiles(nearest[client, "output_tokens"][1])
        )
        for client, field in nearest
        if field == "input_tokens" and (client, "output_tokens") in nearest
    }


def _quantiles(row: dict[str, str]) -> Quantiles:
    columns = [column for column in row if column.startswith("q")]
    probabilities = tuple(float(column[1:]) / 100 for column in columns)
    values = tuple(max(_number(_QUANTILES, row, column), 1.0) for column in columns)
    low, high = Quantiles(probabilities, values).mean_range
    mean = _number(_QUANTILES, row, "mean")
    # The condensed quantiles are those of whole tokens: a narrow distribution's mean can lie just outside of what they
    # allow.
    return Quantiles(probabilities, values, mean if low < mean < high else None)
