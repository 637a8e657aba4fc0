"""Decisions per CPU-second of fleetpilot/Dispatch-v0, and of Fleet-v0 with migrations going on.

python benchmarks/environment.py

The scenario is `steady`, the default: load 0.8, chunked prefill, prefix cache on, half of the prompts with one of 16
shared prefixes. Actions are random legal ones, drawn by a compiled function whose time is included. Resets, with the
warm-up inside them, are included too; their share is printed, and so are the requests completed per decision: a
decision is worth nothing if no work goes with it. In Fleet-v0, on the same scenario, the sampler goes on to a legal
destination whenever a source was chosen, and changes the fleet at one SCALE tick in ten; the migrations that this
completes are printed.

What a second thread costs depends on the machine, so two controls are printed with it: one thread beside another
process that does the same, with which it shares nothing but the hardware (caches, memory, the host of a virtual
machine), and what it takes to hand work to a thread that sleeps, there and back once in a step. The more rows, the
less that is of a step: short ones are not shared, whatever `threads` says, and are measured shared, too.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import numba
import numpy as np
from _report import HERE, machine, spread
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from fleetpilot.envs import ENVIRONMENTS, FleetVectorEnv, threads
from fleetpilot.fleet.features import KINDS

ROWS, INSTANCES = 64, 16
MANY_ROWS = 256
REPEATS = 5
SECONDS = 2.0


@numba.njit
def legal_actions(mask: Any, draws: Any, actions: Any) -> None:
    """In each row one of the actions whose mask is 1, by a draw from [0, 1)."""
    for row in range(len(mask)):
        rank = int(draws[row] * mask[row].sum())
        for action in range(mask.shape[1]):
            if mask[row, action] > 0:
                if rank == 0:
                    actions[row] = action
                    break
                rank -= 1


@numba.njit
def fleet_actions(mask: Any, kind: Any, draws: Any, actions: Any) -> None:
    """The same, but no source is without a destination, and nine SCALE decisions of ten are none."""
    none = mask.shape[1] - 1
    for row in range(len(mask)):
        choices = mask[row, :none].sum()
        if kind[row, 0] > 0 or kind[row, 3] > 0:
            choices += mask[row, none]
        elif choices == 0 or (kind[row, 5] > 0 and draws[row] < 0.9):
            choices = 0
        if choices == 0:
            actions[row] = none
        rank = int((draws[row] * 10.0 - 9.0 if kind[row, 5] > 0 else draws[row]) * choices)
        for action in range(none + 1):
            if mask[row, action] > 0 and choices > 0:
                if rank == 0:
                    actions[row] = action
                    break
                rank -= 1


class Sampler:
    """Random legal actions for a batch."""

    def __init__(self, rows: int):
        self.rng = np.random.default_rng(0)
        self.rows = rows

    def __call__(self, observations: dict[str, NDArray[np.float32]]) -> NDArray[np.int64]:
        """One action per row."""
        actions = np.empty(self.rows, np.int64)
        legal_actions(observations["action_mask"], self.rng.random(self.rows), actions)
        return actions


class FleetSampler(Sampler):
    """See `fleet_actions`; counts what it was asked."""

    def __init__(self, rows: int):
        super().__init__(rows)
        self.kinds = np.zeros(6)

    def __call__(self, observations: dict[str, NDArray[np.float32]]) -> NDArray[np.int64]:
        """One action per row."""
        actions = np.empty(self.rows, np.int64)
        fleet_actions(observations["action_mask"], observations["kind"], self.rng.random(self.rows), actions)
        self.kinds += observations["kind"].sum(axis=0)
        return actions


class Rate(NamedTuple):
    """What one measurement found."""

    decisions_per_cpu_s: float
    decisions_per_wall_s: float
    requests_per_decision: float
    migrations_per_decision: float


def made(rows: int, instances: int, threads: int = 1, **changes: Any) -> FleetVectorEnv:
    """An environment whose episodes are at different points: the first ends are spread as all later ones are."""
    envs = FleetVectorEnv(rows, instances=instances, threads=threads, autoreset_mode=AutoresetMode.SAME_STEP, **changes)
    envs.reset(seed=0)
    return envs


def measured(envs: FleetVectorEnv, stepper: Any, seconds: float = SECONDS, sampler: Sampler | None = None) -> Rate:
    """Step for some CPU-seconds. `stepper` is the environment or an adapter around it."""
    sampler = sampler or Sampler(envs.num_envs)
    observations = stepper.step(np.zeros(envs.num_envs, np.int64))[0]
    completed, steps = -_completed(envs), 0
    moved = -_moved(envs)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    while time.process_time() - cpu_s < seconds:
        for _ in range(50):
            observations, _, *_, infos = stepper.step(sampler(observations))
            steps += 1
            if isinstance(infos, dict) and "final_info" in infos:
                metrics = infos["final_info"]["episode_metrics"]
                completed += float(metrics["finished"][infos["_final_info"]].sum())
                moved += float(metrics["migrations"][infos["_final_info"]].sum())
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    decisions = steps * envs.num_envs
    completed, moved = completed + _completed(envs), moved + _moved(envs)
    return Rate(decisions / cpu_s, decisions / wall_s, completed / decisions, moved / decisions)


def _completed(envs: FleetVectorEnv) -> float:
    """Requests completed by the episodes in progress."""
    episodes = envs._episodes
    return float((episodes["costs"][:, 3] - episodes["start"][:, 3]).sum())


def _moved(envs: FleetVectorEnv) -> float:
    """Migrations completed by the episodes in progress."""
    return float((envs._cluster.state.env["migrations_completed"] - envs._episodes["moved"]).sum())


def measure_fleet() -> None:
    """Fleet-v0 on `steady`."""
    fleet = made(ROWS, INSTANCES, **{**ENVIRONMENTS["fleetpilot/Fleet-v0"], "scenario": "steady"})
    sampler = FleetSampler(fleet.num_envs)
    measured(fleet, fleet, 5.0, sampler)
    rates = [measured(fleet, fleet, SECONDS, sampler) for _ in range(REPEATS)]
    print(f"Fleet-v0: decisions per CPU-s {spread([r.decisions_per_cpu_s for r in rates])}")
    moved = 1_000 * float(np.mean([r.migrations_per_decision for r in rates]))
    print(f"  migrations completed per 1,000 decisions {moved:.1f}")
    print(f"  completed requests per decision {np.mean([r.requests_per_decision for r in rates]):.2f}")
    shares = ", ".join(
        f"{name} {share:.1%}" for name, share in zip(KINDS, sampler.kinds / sampler.kinds.sum(), strict=True) if share
    )
    print(f"  asked: {shares}")
    fleet.close()


def measure_threads(envs: FleetVectorEnv) -> None:
    """``threads=2`` against the one of `envs`, and the controls."""
    rows = envs.num_envs
    both = made(rows, INSTANCES, threads=2)
    measured(both, both, 2.0)
    with neighbour() as other:
        runs = [(measured(envs, envs), measured(both, both), beside(other, envs)) for _ in range(REPEATS)]
    both.close()
    cpu, wall, control = (
        spread([getattr(run[k], rate) / getattr(run[j], rate) for run in runs], ".2f")
        for rate, k, j in (
            ("decisions_per_cpu_s", 0, 1),
            ("decisions_per_wall_s", 1, 0),
            ("decisions_per_cpu_s", 0, 2),
        )
    )
    cpu_s, wall_s = hand_over_s()
    step_s = rows / float(np.median([run[0].decisions_per_wall_s for run in runs]))
    print(f"{rows} x {INSTANCES}, {both.threads} threads: CPU time over that of one {cpu}")
    print(f"  control: one thread beside another process that does the same {control}")
    print(f"  speed-up in wall time {wall}")
    print(f"  hand-over to a sleeping thread: {1e6 * wall_s:.0f} us, {1e6 * cpu_s:.0f} us of CPU", end="")
    print(f"; a step of one thread: {1e6 * step_s:.0f} us")


def keep_busy() -> None:
    """Step an environment without end."""
    envs = made(ROWS, INSTANCES)
    measured(envs, envs)
    print("stepping", flush=True)
    while True:
        measured(envs, envs)


@contextmanager
def neighbour() -> Iterator[subprocess.Popen[str]]:
    """A process that does `keep_busy`, stopped."""
    command = [sys.executable, "-c", "from environment import keep_busy; keep_busy()"]
    with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def beside(other: subprocess.Popen[str], envs: FleetVectorEnv) -> Rate:
    """Measured while the other process runs too."""
    other.send_signal(signal.SIGCONT)
    try:
        return measured(envs, envs)
    finally:
        other.send_signal(signal.SIGSTOP)


def hand_over_s(times: int = 5_000) -> tuple[float, float]:
    """CPU and wall time of waking a thread that waits for work."""
    there: SimpleQueue[bool] = SimpleQueue()
    back: SimpleQueue[bool] = SimpleQueue()

    def answer() -> None:
        while there.get():
            back.put(True)

    threading.Thread(target=answer).start()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for _ in range(times):
        there.put(True)
        back.get()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    there.put(False)
    return cpu_s / times / 2, wall_s / times / 2


def reset_share(envs: FleetVectorEnv, rate: float) -> float:
    """CPU time of an episode's reset over that of its decisions."""
    started = time.process_time()
    envs.reset()
    reset_s = (time.process_time() - started) / envs.num_envs
    _, scored = (envs.scenario.limits(INSTANCES)[name][0] for name in ("warmup_requests", "scored_requests"))
    return reset_s / (0.93 * scored * INSTANCES / rate)


def main() -> None:
    print(machine())
    envs = made(ROWS, INSTANCES)
    measured(envs, envs, 10.0)  # compile, spread the episodes
    rates = [measured(envs, envs) for _ in range(REPEATS)]
    rate = float(np.median([r.decisions_per_cpu_s for r in rates]))
    print(f"{ROWS} x {INSTANCES}: decisions per CPU-s {spread([r.decisions_per_cpu_s for r in rates])}")
    print(f"  completed requests per decision {np.mean([r.requests_per_decision for r in rates]):.2f}")
    print(f"  resets: {reset_share(envs, rate):.1%} of the CPU time of an episode's decisions, included above")
    sampler, observations = Sampler(ROWS), envs.reset()[0]
    started = time.process_time()
    for _ in range(2_000):
        sampler(observations)
    print(f"  sampling of actions: {(time.process_time() - started) / 2_000 / ROWS * rate:.1%}, included above")

    measure_fleet()

    try:
        from fleetpilot.envs.sb3 import SB3VecEnv
    except ModuleNotFoundError as missing:
        print(f"Stable-Baselines3 adapter: not measured, {missing.name} is not installed", file=sys.stderr)
    else:
        adapter = SB3VecEnv(envs)
        adapter.reset()
        pairs = [(measured(envs, envs), measured(envs, adapter)) for _ in range(REPEATS)]
        print(f"Stable-Baselines3 adapter: decisions per CPU-s {spread([b.decisions_per_cpu_s for _, b in pairs])}")
        ratios = [b.decisions_per_cpu_s / a.decisions_per_cpu_s for a, b in pairs]
        print(f"  of the environment's own rate {spread(ratios, '.2f')}")

    measure_threads(envs)
    threads.LEAST_US = 1e-9
    print("the same, shared all the same:")
    measure_threads(envs)
    many = made(MANY_ROWS, INSTANCES)
    measured(many, many, 4.0)
    measure_threads(many)
    many.close()

    for instances in (4, 16, 64, 256):
        rows = max(2, 1024 // instances // 4)
        some = made(rows, instances, scored_requests=400)
        measured(some, some, 1.0)
        rates = [measured(some, some, 1.0).decisions_per_cpu_s for _ in range(3)]
        us = [1e6 / rate for rate in rates]
        per_instance = f"ns per instance {1e3 * np.median(us) / instances:.0f}"
        print(f"{rows} x {instances}: us per decision {spread(us, '.2f')}, {per_instance}")


if __name__ == "__main__":
    main()
