"""One function over many items: results, errors and dead workers, the same on every backend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetpilot.cluster import FleetConfig
from fleetpilot.evaluation import Scenario, cut, evaluate
from fleetpilot.evaluation.backends import map_over_workers
from fleetpilot.evaluation.runner import Cell, run_job
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload


@pytest.fixture(params=["one process", "local", pytest.param("ray", marks=pytest.mark.ray)])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        return {"backend": "ray", "workers": 2}
    return {"workers": 1 if request.param == "one process" else 2}


def test_every_item_has_its_result(where: dict[str, Any]) -> None:
    found: dict[int, float] = {}
    map_over_workers(np.sqrt, [4.0, 9.0, 16.0, 25.0, 36.0], found.__setitem__, **where)
    assert found == {0: 2.0, 1: 3.0, 2: 4.0, 3: 5.0, 4: 6.0}


def test_an_error_is_that_of_the_function(where: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="install the same everywhere"):
        map_over_workers(run_job, [foreign_job(), foreign_job()], lambda *_: None, **where)


def foreign_job() -> Any:
    """Of other sources than these."""
    segment = workload("poisson?n=20")
    scenario = Scenario("s", (segment,), FleetConfig.of(load_profile("a10-llama-7b"), 1))
    one = Cell(scenario, 0, "random", 0)
    return one.job({**one.config(), "code": {"package": "0.0.0"}}, "")


DIES_WHILE_IT_ANSWERS = """
    import os, signal, threading, time
    from pathlib import Path
    from fleetpilot.evaluation.backends import map_over_workers

    def written():
        return Path("/proc/self/io").read_text().splitlines()[1]  # wchar: bytes

    def die_after_the_next_write(before):
        while written() == before:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    class Large:
        def __reduce__(self):
            threading.Thread(target=die_after_the_next_write, args=(written(),)).start()
            return bytes, (b"x" * 500_000_000,)

    def answer(item):
        return Large() if item == 2 else item

    if __name__ == "__main__":
        found = {}
        try:
            map_over_workers(answer, [0, 1, 2], found.__setitem__, workers=2)
        except ChildProcessError as error:
            print(error)
        print(sorted(found.items()))
"""


def test_a_worker_that_dies_within_a_result_is_not_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(DIES_WHILE_IT_ANSWERS))
    said = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=300).stdout
    assert "a worker process was ended from outside" in said
    assert said.splitlines()[-1] == "[(0, 0), (1, 1)]"


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend = 'slurm': expected one of local, ray"):
        map_over_workers(np.sqrt, [1.0], lambda *_: None, backend="slurm")


@pytest.mark.ray
def test_runs_made_by_ray_are_those_made_here(ray_cluster: Any, tmp_path: Path) -> None:
    fleet = FleetConfig.of(load_profile("a10-llama-7b"), 2)
    scenario = Scenario("two", cut(workload("poisson?n=120&rate=2"), 2), fleet)
    here = evaluate([scenario], ["random", "lmetric"], tmp_path / "here", seeds=(0, 1), workers=1)
    there = evaluate([scenario], ["random", "lmetric"], tmp_path / "there", seeds=(0, 1), backend="ray")
    assert [run.stem.name for run in here] == [run.stem.name for run in there]
    for ours, theirs in zip(here, there, strict=True):
        assert ours.summary["metrics"] == theirs.summary["metrics"]
        assert ours.requests().tobytes() == theirs.requests().tobytes()


@pytest.mark.ray
def test_a_killed_ray_worker_is_replaced(ray_cluster: Any, tmp_path: Path) -> None:
    def die_once(tried: Path) -> str:
        if not tried.exists():
            tried.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    found: dict[int, str] = {}
    map_over_workers(die_once, [tmp_path / "tried"], found.__setitem__, backend="ray")
    assert found == {0: "done"}


@pytest.mark.ray
def test_a_ray_worker_that_dies_again_and_again_is_an_error_and_the_rest_is_kept(ray_cluster: Any) -> None:
    found: dict[int, Any] = {}

    def die_of_three(item: int) -> int:
        if item == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with pytest.raises(ChildProcessError, match="what was done is kept"):
        map_over_workers(die_of_three, [1, 2, 3], found.__setitem__, backend="ray", workers=1)
    assert found == {0: 1, 1: 2}
