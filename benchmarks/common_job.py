"""Requests simulated per CPU-second, beside the fastest of the published simulators, on the same requests.

The job: Poisson arrivals at 64 requests/s, log-normal prompts (mean 700, sigma 0.6, 16 to 3,500 tokens) and outputs
(mean 200, sigma 0.6, 8 to 1,000 tokens), on 8 instances of Llama-3.1-8B on an H100 with 26,000 KV blocks of 16 tokens.
Both simulators model continuous batching iteration by iteration, with paged KV memory and a prefix cache; fleetpilot
also polls the engines, keeps the dispatcher's ledger, counts every gap between tokens and samples the instances each
second.

The peer is the offline replay of NVIDIA Dynamo, in its own environment `.venv-peers`, which is made on first use. The
two have different timing models of the same hardware: latencies are printed to show that both simulated the same load.

Last, what a cache that all instances share and speculative decoding cost our speed, on the job and on sessions, whose
prompts the cache can hold.

Usage: python benchmarks/common_job.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _report import HERE, machine, print_table, run_json, spread
from numpy.typing import NDArray

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, SharedCache, simulate
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload
from fleetpilot.workloads.table import RequestTable, make_table

PEER = "ai-dynamo-runtime==1.6.1"
PEER_ENVIRONMENT = HERE.parent / ".venv-peers"
PEER_PYTHON = PEER_ENVIRONMENT / "bin" / "python"
ROUTERS = {"round-robin": "round_robin", "join-shortest-queue": "kv_router"}
"""Our policy and the peer's that is most like it: without shared prefixes its `kv_router` goes by load alone."""

REPEATS = 3
RUNS_PER_REPEAT = 5  # of ours: they are over in a tenth of a second
SEED = 7
TRACE_BLOCK_TOKENS = 512
PROFILE = load_profile("h100-llama-3.1-8b").replace(kv_blocks=26_000, max_num_seqs=256)
FLEET = FleetConfig.of(PROFILE, 8)
OPTIONS = {
    "as it is": FLEET,
    "shared cache of 200 GB": replace(FLEET, shared_cache=SharedCache(200e9)),
    "3 drafts, 70 % accepted": FleetConfig.of(PROFILE.replace(draft_tokens=3, acceptance=0.7), 8),
}
OPTION_POLICY = "join-shortest-queue"
SESSIONS = "sessions/chat?rate=12.8&turns=5&loop=open&think_s=20&n={n}"


class Run(NamedTuple):
    """One measurement."""

    requests_per_s: float  # per CPU-second
    ttft_s: float
    e2e_s: float


def requests(n: int) -> RequestTable:
    """The first `n` requests of the job; the order of the draws is part of it."""
    rng = np.random.default_rng(SEED)
    arrival_s = np.cumsum(rng.exponential(1 / 64, n))

    def lengths(mean: float, low: int, high: int) -> NDArray[np.int64]:
        sigma = 0.6
        return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, n), low, high).astype(np.int64)

    return make_table("common job", arrival_s, lengths(700, 16, 3_500), lengths(200, 8, 1_000))


def write_mooncake(table: RequestTable, path: Path) -> None:
    """The requests in the peer's format, no two sharing a block."""
    block = 0
    with path.open("w", encoding="utf-8") as file:
        for arrival_s, prompt, output in zip(table.arrival_s, table.prompt_tokens, table.output_tokens, strict=True):
            blocks = -(-int(prompt) // TRACE_BLOCK_TOKENS)
            line = {
                "timestamp": float(arrival_s) * 1e3,
                "input_length": int(prompt),
                "output_length": int(output),
                "hash_ids": list(range(block, block + blocks)),
            }
            file.write(json.dumps(line) + "\n")
            block += blocks


def slope(sizes: tuple[int, int], cpu_s: list[float]) -> float:
    """Requests per CPU-second between a small and a large run, so that what a run costs once is left out."""
    return (sizes[1] - sizes[0]) / (cpu_s[1] - cpu_s[0])


def run_fleetpilot(tables: tuple[RequestTable, RequestTable], policy: str, fleet: FleetConfig = FLEET) -> Run:
    """The rate between the two tables, and the latencies of the larger one."""
    cpu_s = []
    for table in tables:
        before_s = time.process_time()
        log = simulate(table, fleet, load_policy(policy))
        cpu_s.append(time.process_time() - before_s)
    arrival_s = log.requests["arrival_s"]
    return Run(
        slope((len(tables[0]), len(tables[1])), cpu_s),
        float(np.mean(log.requests["first_token_s"] - arrival_s)),
        float(np.mean(log.requests["finish_s"] - arrival_s)),
    )


def run_peer(traces: dict[int, Path], router: str) -> Run:
    """The same of the peer."""
    command = [str(PEER_PYTHON), str(HERE / "peers" / "dynamo_replay.py"), router, *map(str, traces.values())]
    found = run_json(command, {"DYN_LOG": "error"})  # its messages about each request would cost it time
    small, large = (found[str(path)] for path in traces.values())
    completed = (small["completed"], large["completed"])
    if completed != tuple(traces):
        raise RuntimeError(f"the peer completed {completed} requests, expected {tuple(traces)}")
    return Run(slope(completed, [small["cpu_s"], large["cpu_s"]]), large["ttft_s"], large["e2e_s"])


def peer_is_there() -> bool:
    """Whether the peer can be run; installs it on first use."""
    if not PEER_PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER_ENVIRONMENT)], check=True)
    if subprocess.run([str(PEER_PYTHON), "-c", "import dynamo._core"], stderr=subprocess.DEVNULL).returncode == 0:
        return True
    install = [str(PEER_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PEER]
    return subprocess.run(install).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    sizes = (5_000, 50_000) if parser.parse_args().quick else (10_000, 200_000)
    tables = (requests(sizes[0]), requests(sizes[1]))
    with_peer = peer_is_there()
    runs: dict[tuple[str, str], list[Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        traces = {size: Path(folder) / f"{size}.jsonl" for size in sizes}
        if with_peer:
            for table, path in zip(tables, traces.values(), strict=True):
                write_mooncake(table, path)
        for policy in ROUTERS:
            simulate(tables[0], FLEET, load_policy(policy))  # compiles
        for _ in range(REPEATS):
            for policy, router in ROUTERS.items():
                ours = [run_fleetpilot(tables, policy) for _ in range(RUNS_PER_REPEAT)]
                runs.setdefault(("fleetpilot", policy), []).extend(ours)
                if with_peer:
                    runs.setdefault((PEER, router), []).append(run_peer(traces, router))
    print(__doc__.partition("\n")[0])
    print(machine())
    print(f"A rate is the slope between {sizes[0]:,} and {sizes[1]:,} requests: what a run costs once is left out,")
    print("and so are starting, compiling and reading a trace file, for both. The simulators took turns.")
    print_report(runs)
    if not with_peer:
        print(f"{PEER} could not be installed, so there is nothing to compare with.")
    print_options({"the job": tables, "sessions": tuple(workload(SESSIONS.format(n=size)) for size in sizes)})


def print_options(workloads: dict[str, tuple[RequestTable, RequestTable]]) -> None:
    """The rates with and without each option, taken in turns."""
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(REPEATS * RUNS_PER_REPEAT):
        for name, tables in workloads.items():
            for option, fleet in OPTIONS.items():
                rates.setdefault((name, option), []).append(run_fleetpilot(tables, OPTION_POLICY, fleet).requests_per_s)
    rows = []
    for (name, option), measured in rates.items():
        ratio = statistics.median(measured) / statistics.median(rates[name, next(iter(OPTIONS))])
        rows.append([f"{name}, {option}", str(len(measured)), spread(measured), f"{ratio:.2f}"])
    print_table([OPTION_POLICY, "runs", "requests per CPU-second: min / median / max", "of the median as it is"], rows)


def print_report(runs: dict[tuple[str, str], list[Run]]) -> None:
    rows = []
    for (simulator, policy), measured in runs.items():
        rates = spread([run.requests_per_s for run in measured])
        ttft, e2e = f"{measured[0].ttft_s * 1e3:.1f} ms", f"{measured[0].e2e_s:.2f} s"
        rows.append([f"{simulator} {policy}", str(len(measured)), rates, ttft, e2e])
    print_table(["", "runs", "requests per CPU-second: min / median / max", "mean TTFT", "mean E2E"], rows)
    median = {key: statistics.median(run.requests_per_s for run in measured) for key, measured in runs.items()}
    for policy, router in ROUTERS.items():
        if (PEER, router) in runs:
            ratio = median["fleetpilot", policy] / median[PEER, router]
            print(f"{policy} against {router}: {ratio:.0f} times (of the medians)")


if __name__ == "__main__":
    main()
