"""Which format a trace file has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleetpilot.workloads.readers import azure, bailian, burstgpt, decision_log, mooncake, timed_trace, vidur, weka
from fleetpilot.workloads.readers.source import TraceFile, TraceRows, shown

READERS: dict[str, Callable[..., TraceRows]] = {
    "azure": azure.read,
    "bailian": bailian.read,
    "burstgpt": burstgpt.read,
    "decision_log": decision_log.read,
    "mooncake": mooncake.read,
    "timed_trace": timed_trace.read,
    "vidur": vidur.read,
    "weka": weka.read_sessions,
    "weka_requests": weka.read_requests,
}

_CSV_COLUMNS: dict[str, set[str]] = {
    "azure": set(azure.COLUMNS),
    "burstgpt": set(burstgpt.COLUMNS),
    "vidur": set(vidur.COLUMNS),
}
_JSON_KEYS: dict[str, set[str]] = {
    "bailian": {"chat_id", "timestamp", "input_length", "output_length"},
    "decision_log": decision_log.KEYS,
    "weka": {"requests", "block_size"},
    "weka_requests": {"request_arrival_delta_s", "input_tokens", "output_tokens"},
}
_PLAIN_MOONCAKE = {"input_length", "output_length"}
_SURE_MOONCAKE = {"hash_ids", "session_id", "delay"}


def detect_format(path: str | Path) -> str:
    """The format of a trace file, from the names of its columns or the keys of its first object, never from positions.

    Returns:
        A key of `READERS`, except "timed_trace": such files look like Mooncake's and must be asked for.

    Raises:
        ValueError: if no format fits, or if the unit of the times would be a guess.
    """
    file = TraceFile(path)
    line = file.first_line()
    if line.lstrip().startswith("{"):
        names = set(file.json_object(0, line))
        fitting = [name for name, keys in _JSON_KEYS.items() if keys <= names]
        if not fitting and names >= _PLAIN_MOONCAKE:
            if not names & _SURE_MOONCAKE:
                raise ValueError(
                    f"{file.path.name}: keys {shown(sorted(names))} fit Mooncake (milliseconds) and GuideLLM "
                    "(seconds): expected format='mooncake', or format='timed_trace' with chunk_tokens and "
                    "seconds_per_unit"
                )
            fitting = ["mooncake"]
    else:
        names = set(file.csv_header(line))
        fitting = [name for name, columns in _CSV_COLUMNS.items() if columns <= names]
    if not fitting and ("\0" in line or "\ufffd" in line):
        raise ValueError(f"{file.path.name}: begins with {shown(line[:16])}: expected CSV or JSON lines, plain or gzip")
    if not fitting:
        raise ValueError(
            f"{file.path.name}: no known trace format has the fields {shown(sorted(names))}: {_known_fields()}"
        )
    return fitting[0]


def _known_fields() -> str:
    known = {**_CSV_COLUMNS, **_JSON_KEYS, "mooncake": _PLAIN_MOONCAKE | {"timestamp", "hash_ids"}}
    return "expected those of " + "; ".join(f"{name}: {', '.join(sorted(known[name]))}" for name in sorted(known))
