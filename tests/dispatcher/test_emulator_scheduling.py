"""An emulated engine schedules as the simulator does, and what it can do besides loses no block and no request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import FleetConfig, conservation, simulate
from fleetpilot.cluster.state import NIL
from fleetpilot.dispatcher.emulator.engine import Engine, Job
from fleetpilot.fleet.profiles import HardwareProfile, load_profile
from fleetpilot.workloads.table import make_table

PROFILE = load_profile("tiny-cpu").replace(kv_blocks=64, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=256)


def tokens(count: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 500, count).astype(np.int32)


def nothing(job: Job, first: int, last: int) -> None:
    """Nobody listens."""


@dataclass
class Client:
    """When the tokens of its jobs came."""

    engine: Engine
    came: dict[Job, list[float]] = field(default_factory=dict)

    def job(self, prompt: NDArray[np.int32], answer: NDArray[np.int32], **fields: object) -> Job:
        job = Job(prompt, answer, self.on_tokens, **fields)  # type: ignore[arg-type]
        self.came[job] = []
        return job

    def on_tokens(self, job: Job, first: int, last: int) -> None:
        assert first == len(self.came[job])
        self.came[job] += [self.engine.time_s] * (last - first)

    def until(self, time_s: float) -> None:
        while self.engine.next_s < time_s:
            self.engine.step()


@pytest.mark.parametrize(
    "profile",
    [
        PROFILE,
        PROFILE.replace(priority_order=True),
        PROFILE.replace(prefix_cache=False),
        PROFILE.replace(jitter_sigma=0.3),
        PROFILE.replace(scheduler="prefill_first", max_num_batched_tokens=1024, watermark=0.01),
    ],
    ids=["chunked", "priority", "no_cache", "jitter", "prefill_first"],
)
def test_tokens_come_when_the_simulator_says(profile: HardwareProfile) -> None:
    random = np.random.default_rng(3)
    n = 120
    arrival_s = np.sort(random.uniform(0, 25, n))
    prompt, output = random.integers(1, 500, n), random.integers(1, 200, n)
    priority = random.integers(-2, 3, n)
    table = make_table("mixed", arrival_s, prompt, output, priority=priority)
    log = simulate(table, FleetConfig((profile,)), load_policy("round-robin"), sample_interval_s=None)
    assert log.requests["preemptions"].sum() > 10, "expected a workload with pressure"

    client = Client(Engine(profile))
    jobs = []
    for i in range(n):
        client.until(arrival_s[i])
        jobs.append(client.job(tokens(prompt[i], i), tokens(output[i], i), priority=int(priority[i])))
        client.engine.submit(jobs[-1], float(arrival_s[i]))
    client.until(math.inf)

    assert [len(client.came[job]) for job in jobs] == output.tolist()
    np.testing.assert_array_equal([client.came[job][0] for job in jobs], log.requests["first_token_s"])
    np.testing.assert_array_equal([client.came[job][-1] for job in jobs], log.requests["finish_s"])
    assert client.engine.counter("preemptions") == log.instances["preemptions"].sum()
    assert client.engine.used_blocks == 0


def test_a_prompt_that_was_served_before_is_in_the_prefix_cache() -> None:
    client = Client(Engine(PROFILE))
    first = client.job(tokens(320), tokens(40, 1))
    client.engine.submit(first, 0.0)
    client.until(math.inf)
    longer = client.job(np.concatenate([tokens(320), tokens(40, 1)]), tokens(4, 2))
    salted = client.job(tokens(320), tokens(4, 2), salt=b"other")
    for job in (longer, salted):
        client.engine.submit(job, client.engine.time_s)
    client.until(math.inf)
    assert (first.cached_tokens, longer.cached_tokens, salted.cached_tokens) == (0, 352, 0)


def test_blocks_of_a_running_request_are_shared_while_it_decodes() -> None:
    client = Client(Engine(PROFILE))
    running = client.job(tokens(100), tokens(300, 1))
    client.engine.submit(running, 0.0)
    while len(client.came[running]) < 150:
        client.engine.step()
    probe = client.job(np.concatenate([tokens(100), tokens(300, 1)[:150]]), tokens(1), keep=True)
    client.engine.submit(probe, client.engine.time_s)
    while not probe.ended:
        client.engine.step()
    assert probe.cached_tokens == 224
    assert probe.lease != NIL
    conservation.check(client.engine.state)


def test_leased_blocks_are_in_use_until_they_are_released() -> None:
    client = Client(Engine(PROFILE.replace(kv_blocks=36)))
    job = client.job(tokens(320), tokens(1), keep=True)
    client.engine.submit(job, 0.0)
    client.until(math.inf)
    assert client.engine.used_blocks == 10
    blocked = client.job(tokens(900, 7), tokens(2))
    client.engine.submit(blocked, client.engine.time_s)
    client.until(math.inf)
    assert client.came[blocked] == []
    client.engine.release(job.lease, client.engine.time_s)
    client.until(math.inf)
    assert len(client.came[blocked]) == 2
    assert client.engine.used_blocks == 0
    conservation.check(client.engine.state)


def test_pulled_blocks_are_not_computed_again() -> None:
    client = Client(Engine(PROFILE))
    started: list[int] = []
    job = client.job(tokens(330), tokens(5))
    client.engine.pull(job, 330, 0.0, lambda job, missing: started.append(missing))
    assert started == [330]
    assert (client.engine.used_blocks, client.engine.waiting) == (10, 1)
    conservation.check(client.engine.state)
    client.engine.end_pull(job, True, 1.0)
    client.until(math.inf)
    assert (job.cached_tokens, job.pulled_tokens) == (330, 330)
    assert len(client.came[job]) == 5
    assert client.engine.used_blocks == 0
    conservation.check(client.engine.state)


def test_a_failed_pull_is_computed() -> None:
    client = Client(Engine(PROFILE))
    job = client.job(tokens(330), tokens(5))
    client.engine.pull(job, 330, 0.0, lambda job, missing: None)
    client.engine.end_pull(job, False, 1.0)
    client.until(math.inf)
    assert (job.cached_tokens, len(client.came[job])) == (0, 5)
    conservation.check(client.engine.state)


def test_a_pull_waits_for_free_blocks() -> None:
    client = Client(Engine(PROFILE.replace(kv_blocks=36)))
    held = client.job(tokens(960, 9), tokens(30), keep=True)
    client.engine.submit(held, 0.0)
    client.until(math.inf)
    started: list[int] = []
    job = client.job(tokens(330), tokens(5))
    client.engine.pull(job, 330, client.engine.time_s, lambda job, missing: started.append(missing))
    assert (started, client.engine.waiting, client.engine.copying) == ([], 1, 0)
    client.engine.release(held.lease, client.engine.time_s)
    assert started == [330]


def test_pulled_blocks_cannot_keep_each_other_out() -> None:
    client = Client(Engine(PROFILE.replace(kv_blocks=36)))
    jobs = [client.job(tokens(18 * 32, i), tokens(3)) for i in range(2)]
    for job in jobs:
        client.engine.pull(job, 18 * 32, 0.0, lambda job, missing: None)
    assert client.engine.used_blocks == 36
    for job in jobs:
        client.engine.end_pull(job, True, 1.0)
    client.until(math.inf)
    assert [len(client.came[job]) for job in jobs] == [3, 3]
    assert client.engine.used_blocks == 0
    conservation.check(client.engine.state)


def test_any_number_of_requests_may_wait() -> None:
    client = Client(Engine(PROFILE))
    jobs = [client.job(tokens(200, i), tokens(2)) for i in range(600)]
    for job in jobs:
        client.engine.submit(job, 0.0)
    conservation.check(client.engine.state)
    client.until(math.inf)
    assert all(len(client.came[job]) == 2 for job in jobs)
    conservation.check(client.engine.state)


def test_what_was_seen_long_ago_takes_no_memory() -> None:
    client = Client(Engine(PROFILE))
    before = len(client.engine.state.node)
    for i in range(300):
        job = client.job(tokens(320, i), tokens(2))
        client.engine.submit(job, client.engine.time_s)
        client.until(math.inf)
    assert len(client.engine.state.node) == before
    again = client.job(tokens(320, 299), tokens(2))
    client.engine.submit(again, client.engine.time_s)
    client.until(math.inf)
    assert again.cached_tokens == 288
    conservation.check(client.engine.state)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "keep", "pull", "abort", "release", "land", "fail"]),
        st.floats(0, 0.2),
        st.integers(0, 3),
        st.integers(1, 400),
        st.integers(1, 60),
        st.integers(-1, 1),
    ),
    min_size=1,
    max_size=60,
)


@given(events=EVENTS, priority_order=st.booleans())
def test_nothing_is_lost_whatever_clients_do(
    events: list[tuple[str, float, int, int, int, int]], priority_order: bool
) -> None:
    client = Client(Engine(PROFILE.replace(kv_blocks=40, priority_order=priority_order)))
    engine = client.engine
    live: list[Job] = []
    aborted: set[Job] = set()
    copying: list[Job] = []
    leases: list[int] = []
    time_s = 0.0

    def settle(until_s: float) -> None:
        client.until(until_s)
        leases.extend(job.lease for job in live if job.lease != NIL)
        live[:] = [job for job in live if not job.ended]

    for what, later_s, number, prompt, output, priority in events:
        time_s += later_s
        settle(time_s)
        if what in ("submit", "keep", "pull"):
            job = client.job(
                tokens(400, number)[:prompt], tokens(output, number), priority=priority, keep=what == "keep"
            )
            live.append(job)
            if what == "pull":
                engine.pull(job, prompt, time_s, lambda job, missing: copying.append(job))
            else:
                engine.submit(job, time_s)
        elif what == "abort" and live:
            aborted.add(live[prompt % len(live)])
            engine.abort(live.pop(prompt % len(live)), time_s)
        elif what == "release" and leases:
            engine.release(leases.pop(), time_s)
        elif what in ("land", "fail") and copying:
            engine.end_pull(copying.pop(0), what == "land", time_s)
        conservation.check(engine.state)
    while live or leases or copying or math.isfinite(engine.next_s):
        while copying:
            engine.end_pull(copying.pop(), True, max(time_s, engine.time_s))
        settle(math.inf)
        while leases:
            engine.release(leases.pop(), max(time_s, engine.time_s))
        conservation.check(engine.state)
    assert engine.used_blocks == 0
    assert (engine.running, engine.waiting) == (0, 0)
    for job, came in client.came.items():
        assert len(came) == len(job.answer) or job in aborted
