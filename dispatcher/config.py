"""How a dispatcher is set up: flags, environment variables and one TOML file say the same things."""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from fleetpilot.fleet.slo import SLO_CLASSES

ENVIRONMENT = "FLEETPILOT_SERVE_"
"""Prefix of the environment variables: ``FLEETPILOT_SERVE_PORT=8000``."""

_NEEDED = {
    "scale_command": "process",
    "kubernetes_workload": "kubernetes",
    "kubernetes_service": "kubernetes",
}
"""Settings that a scaler cannot be without, and nothing else has a use for."""
SCALERS = ("process", "kubernetes", "sleep")
RELOADED = ("policy", "fallback", "shadow", "dry_run", "explore")
"""Settings that a running dispatcher takes up anew."""
_SECRETS = ("api_keys", "engine_api_key")


@dataclass(frozen=True)
class ServeConfig:
    """A dispatcher's settings.

    Attributes:
        engines: base URLs of vLLM servers.
        engines_file: a file of such URLs, one per line, read every second: new ones join, missing ones drain and leave.
        emulate: instead of engines, so many emulated ones of `profile`; needs no vLLM and no GPU.
        policy: a baseline's name, ``learned``, or the folder of an exported policy, with parameters behind a ``?``.
        fallback: the baseline that decides where the policy cannot.
        profile: of the engines, by name or TOML file: the constants that policies read.
        slo: class of targets that policies are told all requests have: `chat`, `tight`, `loose` or `length-scaled`.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        workers: processes that serve clients, with one ledger; more than one need Linux and a policy that is compiled.
        api_keys: a client must present one of them; none: no key is asked for.
        engine_api_key: presented to the engines instead of the client's.
        tls_cert: PEM file of the server's certificate; empty: plain HTTP.
        tls_key: PEM file of its key.
        poll_interval_s: between two readings of an engine's metrics.
        rebalance_interval_s: between two questions whether requests should move.
        migration: running requests may move.
        failover: running requests go on elsewhere when their engine fails.
        client_kv_transfer: clients may send ``kv_transfer_params`` of their own; wrong ones can kill an engine.
        max_migrations: most at the same time; every instance takes part in one at a time.
        probe_deadline_s: a source that has not pinned the blocks by then is left alone.
        copy_deadline_s: a destination that has not pulled them by then is given up. At most 25: a source holds pinned
            blocks for 30 s, and a copy that comes later reads whatever is there then, without a word.
        max_stages: copies of a migration before the request stops.
        last_stage_tokens: it stops when no more than so many are left to copy.
        max_hold_s: a request may wait this long for an engine.
        hold_interval_s: between two questions about the request that waits longest.
        decision_deadline_s: the fallback decides if the policy takes longer.
        max_failovers: of one request.
        retry_share: retries may be so many per request on the whole.
        stalled_s: an engine with requests that sends nothing for so long has failed, whatever its health says.
        decision_log: file for every decision and what became of it, one JSON object a line; empty: none.
        decision_log_bytes: most on disk, the file and its three older ones together.
        otlp_endpoint: OpenTelemetry collector that gets a span for every request (OTLP over HTTP), as
            http://127.0.0.1:4318/v1/traces; empty: none. Needs fleetpilot[otel].
        shadow: a policy that is asked what the policy is asked; its choices are compared and logged, and never carried
            out; empty: none.
        dry_run: requests go where `fallback` sends them, and none moves: what `policy` would do is only logged.
        explore: share of requests placed at random, so that the log can tell what other choices lead to.
        max_body_bytes: of a client's request.
        max_connections: of clients.
        seed: of the policies' tie breaks.
        scaler: what starts and stops engines as the policy says: ``process``, ``kubernetes`` or ``sleep``, which puts
            `engines` to sleep and wakes them up; empty: nothing does.
        scale_command: with ``process``, how an engine is started on this host: a command with ``{port}`` in it, where
            the engine listens on 127.0.0.1; ``{side_port}`` is another free port, ``{index}`` a number from 0 on.
        kubernetes_workload: with ``kubernetes``, what the engines are replicas of: ``deployment/NAME`` or
            ``statefulset/NAME``.
        kubernetes_service: with ``kubernetes``, the service that selects them.
        kubernetes_namespace: of both; empty: that of this pod, or ``default``.
        kubernetes_api: URL of the API server, as of ``kubectl proxy``; empty: that of the cluster this pod is in.
        min_instances: the fleet is kept at so many, those of `engines` included; no more are drained.
        max_instances: never more, starting and draining ones and those of `engines` included; needed with a scaler.
        scale_interval_s: between two questions what to start or drain.
        scale_out_cooldown_s: after a start, before the next; doubled after each start that came to nothing.
        scale_in_cooldown_s: after a start or the beginning of a drain, before an instance may drain.
        scale_in_load: an instance drains only if the others would then use at most this share of their KV blocks and of
            their places in batches.
        start_deadline_s: an instance that is not up by then is given up.
        drain_deadline_s: then the requests of a draining instance go on elsewhere by recompute; those that cannot are
            waited for.
        stop_grace_s: a process that has not ended so long after SIGTERM is killed.
    """

    engines: tuple[str, ...] = ()
    engines_file: str = ""
    emulate: int = 0
    policy: str = "llumnix"
    fallback: str = "join-shortest-queue"
    profile: str = "h100-llama-3.1-8b"
    slo: str = "chat"
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    api_keys: tuple[str, ...] = ()
    engine_api_key: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    poll_interval_s: float = 0.1
    rebalance_interval_s: float = 0.2
    migration: bool = True
    failover: bool = True
    client_kv_transfer: bool = False
    max_migrations: int = 8
    probe_deadline_s: float = 2.0
    copy_deadline_s: float = 20.0
    max_stages: int = 3
    last_stage_tokens: int = 128
    max_hold_s: float = 30.0
    hold_interval_s: float = 0.05
    decision_deadline_s: float = 0.05
    max_failovers: int = 3
    retry_share: float = 0.1
    stalled_s: float = 60.0
    decision_log: str = ""
    decision_log_bytes: int = 256 * 1024 * 1024
    otlp_endpoint: str = ""
    shadow: str = ""
    dry_run: bool = False
    explore: float = 0.0
    max_body_bytes: int = 64 * 1024 * 1024
    max_connections: int = 16_384
    seed: int = 0
    scaler: str = ""
    scale_command: str = ""
    kubernetes_workload: str = ""
    kubernetes_service: str = ""
    kubernetes_namespace: str = ""
    kubernetes_api: str = ""
    min_instances: int = 1
    max_instances: int = 0
    scale_interval_s: float = 10.0
    scale_out_cooldown_s: float = 30.0
    scale_in_cooldown_s: float = 300.0
    scale_in_load: float = 0.7
    start_deadline_s: float = 1200.0
    drain_deadline_s: float = 300.0
    stop_grace_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: naming the field, its value and what was expected.
        """
        if not all(self.api_keys):
            raise ValueError("api_keys: one is empty; expected texts")
        for name, low, high in (
            ("poll_interval_s", 0.01, 60.0),
            ("rebalance_interval_s", 0.01, 3600.0),
            ("probe_deadline_s", 0.01, 3600.0),
            ("copy_deadline_s", 0.01, 25.0),
            ("max_hold_s", 0.0, 86_400.0),
            ("hold_interval_s", 0.001, 60.0),
            ("decision_deadline_s", 0.001, 60.0),
            ("stalled_s", 1.0, 86_400.0),
            ("retry_share", 0.0, 1.0),
            ("explore", 0.0, 1.0),
            ("emulate", 0, 1_024),
            ("port", 0, 65_535),
            ("workers", 1, 64),
            ("max_migrations", 1, 10_000),
            ("max_stages", 1, 100),
            ("last_stage_tokens", 1, 1_000_000),
            ("max_failovers", 0, 1_000),
            ("decision_log_bytes", 65_536, 2**50),
            ("max_body_bytes", 1_024, 2**40),
            ("max_connections", 1, 10**7),
            ("seed", 0, 2**63 - 1),
            ("min_instances", 1, 4_096),
            ("max_instances", 0, 4_096),
            ("scale_interval_s", 0.01, 86_400.0),
            ("scale_out_cooldown_s", 0.0, 86_400.0),
            ("scale_in_cooldown_s", 0.0, 86_400.0),
            ("scale_in_load", 0.01, 1.0),
            ("start_deadline_s", 0.1, 86_400.0),
            ("drain_deadline_s", 0.0, 86_400.0),
            ("stop_grace_s", 0.0, 3600.0),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ValueError(f"{name} = {value!r}: expected a number from {low:g} to {high:,.10g}")
        if self.slo not in SLO_CLASSES:
            raise ValueError(f"slo = {self.slo!r}: expected one of {', '.join(SLO_CLASSES)}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key: expected both or none")
        if bool(self.engines) + bool(self.engines_file) + bool(self.emulate) > 1:
            raise ValueError("engines, engines_file and emulate: expected one of them")
        if self.dry_run and self.explore:
            raise ValueError(f"explore = {self.explore:g}: expected 0 in a dry run, in which no choice is carried out")
        if len(set(self.engines)) != len(self.engines):
            raise ValueError(f"engines = {list(self.engines)!r}: expected each URL once")
        self._check_scaler()

    def _check_scaler(self) -> None:
        if self.scaler not in ("", *SCALERS):
            raise ValueError(f"scaler = {self.scaler!r}: expected one of {', '.join(SCALERS)}")
        for name, scaler in _NEEDED.items():
            if bool(getattr(self, name)) != (self.scaler == scaler):
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: expected with scaler = {scaler!r}, and there alone"
                )
        if not self.scaler:
            return
        if self.engines_file:
            raise ValueError(f"engines_file = {self.engines_file!r}: expected none, as scaler is set")
        if self.scaler == "sleep" and not self.min_instances <= self.max_instances <= len(self.engines):
            raise ValueError(
                f"max_instances = {self.max_instances!r}: expected from min_instances, {self.min_instances}, to the "
                f"number of engines, {len(self.engines)}, with scaler = 'sleep'"
            )
        if not max(self.min_instances, len(self.fixed_engines), 1) <= self.max_instances:
            raise ValueError(
                f"max_instances = {self.max_instances!r}: expected at least min_instances, {self.min_instances}, and "
                f"as many as there are engines, {len(self.fixed_engines)}, as scaler is set"
            )

    @property
    def engine_key_headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """What an engine that wants a key is shown."""
        return ((b"authorization", b"Bearer " + self.engine_api_key.encode()),) if self.engine_api_key else ()

    @property
    def fixed_engines(self) -> tuple[str, ...]:
        """URLs of engines that nothing starts or stops."""
        return () if self.scaler == "sleep" else self.engines

    def reloaded(self, other: ServeConfig) -> tuple[ServeConfig, list[str]]:
        """These settings with what a running dispatcher takes over from others, and the names of what it cannot."""
        changes = {name: getattr(other, name) for name in RELOADED}
        rest = [
            field.name
            for field in dataclasses.fields(self)
            if field.name not in RELOADED and getattr(self, field.name) != getattr(other, field.name)
        ]
        return dataclasses.replace(self, **changes), rest

    def public(self) -> dict[str, object]:
        """All settings, secrets left out."""
        return {
            name: ("set" if value else "not set") if name in _SECRETS else value
            for name, value in dataclasses.asdict(self).items()
        }


def load_config(
    flags: Mapping[str, Any], file: str | None, environment: Mapping[str, str] | None = None
) -> ServeConfig:
    """The settings: flags before environment variables before the file before the defaults.

    Args:
        flags: by field; None for those not given.
        file: a TOML file with the fields of `ServeConfig` at its top level; None for none.
        environment: `os.environ` if None.

    Raises:
        ValueError: a field is not known, or its value not of its type or range.
        OSError: the file cannot be read.
    """
    kinds = get_type_hints(ServeConfig)
    values: dict[str, Any] = {}
    if file is not None:
        try:
            table = tomllib.loads(Path(file).read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: expected TOML: {error}") from None
        for name, value in table.items():
            if name not in kinds:
                raise ValueError(f"{file}: {name!r} is not known; expected one of {', '.join(kinds)}")
            values[name] = _of_kind(f"{file}: {name}", value, kinds[name])
    for key, text in (os.environ if environment is None else environment).items():
        if key.startswith(ENVIRONMENT):
            name = key.removeprefix(ENVIRONMENT).lower()
            if name not in kinds:
                raise ValueError(f"environment variable {key} is not known; expected {ENVIRONMENT}<FIELD>")
            values[name] = _from_text(key, text, kinds[name])
    values |= {name: value for name, value in flags.items() if value is not None}
    return ServeConfig(**values)


def _of_kind(name: str, value: Any, kind: Any) -> Any:
    """A value of a TOML file."""
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        if isinstance(value, list) and all(isinstance(item, inner) for item in value):
            return tuple(value)
        raise ValueError(f"{name} = {value!r}: expected a list of texts")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise ValueError(f"{name} = {value!r}: expected {words}")
    return value


def _from_text(name: str, text: str, kind: Any) -> Any:
    """A value of an environment variable."""
    if get_origin(kind) is tuple:
        parts = tuple(part.strip() for part in text.split(","))
        if not all(parts):
            raise ValueError(f"{name}: expected texts with commas between them, none of them empty")
        return parts
    if kind is bool:
        if text.lower() not in ("1", "0", "true", "false"):
            raise ValueError(f"{name} = {text!r}: expected true or false")
        return text.lower() in ("1", "true")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} = {text!r}: expected {'a whole number' if kind is int else 'a number'}") from None
