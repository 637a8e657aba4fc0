"""The simulator against two real vLLM engines, each pinned to a core: latencies, rankings of policies, wrong constants.

Usage: python benchmarks/vllm/validate.py [-o FOLDER] (needs .venv-vllm, which `make test-vllm` installs)

The engines serve a model of 22 million random weights. One has a quarter of the other's KV blocks and places in the
batch, arrivals come in bursts, lengths have heavy tails: policies that see memory or queues fare better than those
that do not. A second comparison gives one policy calibrated constants, and constants that are seven times off.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "vllm"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from _report import machine
from engines import PYTHON, Engine

from fleetpilot.baselines import load_policy
from fleetpilot.calibration import Validation, calibrate, validate
from fleetpilot.calibration.facts import Given
from fleetpilot.calibration.measure import Calibration, Request, calibration_text
from fleetpilot.calibration.report import verdict, write_validation
from fleetpilot.calibration.validation import Setup
from fleetpilot.cluster import FleetConfig
from fleetpilot.evaluation import capacity_rps
from fleetpilot.fleet.policy import Policy
from fleetpilot.fleet.profiles import HardwareProfile
from fleetpilot.fleet.view import Decision, FleetView
from fleetpilot.workloads import RequestTable, workload

ROOT = Path(__file__).parents[2]
SIZES = ((65, 8), (257, 32))
"""KV blocks of 32 tokens (one is reserved) and most requests in a batch, by engine."""
MAX_MODEL_LEN = 1024
BUDGET_TOKENS = 256
WORKLOAD = "gamma?rate=1&cv=2&prompt=lognormal:200:1:700&output=lognormal:80:1:300&n={n}&seed={seed}"
POLICIES = ("round-robin", "join-shortest-queue", "least-kv", "llumnix")
TIMES_OFF = 7.0


class PredictedLatency:
    """The instance whose answer is predicted to end first, by constants that may be off.

    Args:
        name: in reports.
        prefill: factor on the calibrated prefill time.
        decode: factor on the calibrated decode times.
    """

    def __init__(self, name: str, prefill: float = 1.0, decode: float = 1.0):
        self.name = name
        self._prefill = prefill
        self._decode = decode

    def reset(self, batch: int, seed: int) -> None:
        """It has no memory."""

    def decide(self, view: FleetView) -> Decision:
        """Backlog and prompt at the prefill rate, then the answer at the pace of the batch it joins."""
        i, r = view.instances, view.request[:, None]
        tokens = i["unstarted_uncached_tokens"] + np.maximum(0.0, r["prompt_tokens"] - i["matched_tokens"])
        step_s = i["decode_step_s"] + i["decode_s_per_seq"] * i["in_flight"]
        latency_s = self._prefill * tokens * i["prefill_s_per_token"]
        latency_s = latency_s + self._decode * r["predicted_output_tokens"] * step_s
        return Decision(np.where(i["candidate"] > 0, latency_s, np.inf).argmin(axis=1))


def wait_until_quiet(load: float, limit_s: float) -> None:
    """Wait for a load average below `load`, and say so if it does not come."""
    deadline_s = time.monotonic() + limit_s
    while os.getloadavg()[0] > load and time.monotonic() < deadline_s:
        time.sleep(10.0)
    if os.getloadavg()[0] > load:
        print(
            f"the load average is {os.getloadavg()[0]:.1f}, above {load:g}: what follows is measured on a busy machine"
        )


def start(folder: Path) -> list[Engine]:
    """Both engines, up."""
    model = folder / "model"
    subprocess.run([PYTHON, Path(__file__).with_name("_model.py"), model], check=True, capture_output=True)
    flags = ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", str(BUDGET_TOKENS)]
    engines = [
        Engine(model, folder, core=core, blocks=blocks, max_num_seqs=seqs, flags=flags)
        for core, (blocks, seqs) in enumerate(SIZES)
    ]
    for engine in engines:
        engine.launch()
    for engine in engines:
        engine.wait_ready()
    return engines


def calibrated(engines: list[Engine], folder: Path) -> tuple[Calibration, tuple[str, ...]]:
    """The engines' profiles; their paths."""
    hardware = f"1 core of {machine().split(',')[0].removeprefix('machine: ')}"
    given = Given(max_num_batched_tokens=BUDGET_TOKENS)
    urls = tuple(engine.url for engine in engines)
    found = calibrate(Request(urls, folder / "pinned.toml", given=given, hardware=hardware), said)
    return found, tuple(map(str, found.paths))


def said(text: str) -> None:
    """Progress."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def table_at_load(profiles: tuple[HardwareProfile, ...], load: float, span_s: float, seed: int) -> RequestTable:
    """Arrivals over about `span_s`, at a share of what the fleet can carry by the calibrated profiles."""
    long = workload(WORKLOAD.format(n=2000, seed=seed))
    rate_rps = load * capacity_rps(long, FleetConfig(profiles))
    table = workload(WORKLOAD.format(n=max(20, round(rate_rps * span_s)), seed=seed))
    return table.replace(
        name=f"{table.name} at {rate_rps:.2f} requests/s, load {load:g}", arrival_s=table.arrival_s / rate_rps
    )


def compare(setup: Setup, folder: Path, command: str) -> Validation:
    """Replay, simulate, write and print."""
    found = validate(setup, said)
    said("")
    print(verdict(found))
    print(write_validation(found, folder, command))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "runs" / "vllm")
    parser.add_argument("--load", type=float, default=0.75, help="share of the fleet's capacity")
    parser.add_argument("--span-s", type=float, default=60.0, help="of the arrivals of a replay")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet-load", type=float, default=2.0, help="load average that is waited for")
    parser.add_argument("--wait-s", type=float, default=0.0, help="for how long")
    parser.add_argument("--only", choices=("policies", "constants"), help="one of the two comparisons")
    arguments = parser.parse_args()
    folder = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/vllm/validate.py {shlex.join(sys.argv[1:])}".strip()
    wait_until_quiet(arguments.quiet_load, arguments.wait_s)
    print(machine())
    engines: list[Engine] = []
    try:
        engines = start(folder)
        found, paths = calibrated(engines, folder)
        said("")
        print(calibration_text(found))
        table = table_at_load(found.profiles, arguments.load, arguments.span_s, arguments.seed)
        setup = Setup(
            table,
            tuple(engine.url for engine in engines),
            paths if len(paths) > 1 else paths * len(engines),
            tuple(map(load_policy, POLICIES)),
            repeats=arguments.repeats,
            seed=arguments.seed,
        )
        if arguments.only != "constants":
            compare(setup, folder / "policies", command)
        if arguments.only != "policies":
            constants(setup, folder / "constants", command)
    finally:
        for engine in engines:
            engine.stop()


def constants(setup: Setup, folder: Path, command: str) -> None:
    """The same policy with calibrated constants, and with constants that are off either way."""
    from dataclasses import replace

    policies: tuple[Policy, ...] = (
        PredictedLatency("calibrated"),
        PredictedLatency("prefill x 7", prefill=TIMES_OFF),
        PredictedLatency("prefill / 7", prefill=1 / TIMES_OFF),
    )
    found = compare(replace(setup, policies=policies), folder, command)
    for name, used in found.engines.items():
        print(
            f"goodput, {name}: {used.goodput:.1%} on the engines, {found.simulator[name].goodput:.1%} in the simulator"
        )


if __name__ == "__main__":
    main()
