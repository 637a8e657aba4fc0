"""Evaluations: paired, stored, resumed, interrupted; and the reports made of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetpilot.baselines import load_policy
from fleetpilot.cluster import Failures, FleetConfig, Rebalancing
from fleetpilot.evaluation import Scenario, StoredRun, cut, evaluate, provenance, run_one, write_report
from fleetpilot.evaluation.comparison import COMPARED, collect, differences_table, notes, rescored_table, values_table
from fleetpilot.evaluation.plots import labels, legend
from fleetpilot.evaluation.runner import Cell
from fleetpilot.evaluation.tables import markdown, number, plain
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.fleet.slo import CHAT, TIGHT
from fleetpilot.workloads import workload
from fleetpilot.workloads.table import RequestTable, make_table

ROOT = Path(__file__).parents[2]
A10 = load_profile("a10-llama-7b")
POLICIES = ["round-robin", "random", "join-shortest-queue"]


def busy(n: int = 240, rate: float = 2.5, seed: int = 1) -> RequestTable:
    """More than two A10s can carry for a while: policies differ."""
    rng = np.random.default_rng(seed)
    arrival = np.sort(rng.uniform(0, n / rate, n))
    classes = rng.integers(0, 2, n)
    return make_table("busy", arrival, rng.integers(50, 2000, n), rng.integers(1, 300, n), slo_class=classes)


def scenario(**changes: Any) -> Scenario:
    fleet = FleetConfig((A10, A10), slo_classes=(CHAT, TIGHT))
    return Scenario(**{"name": "busy A10s", "segments": cut(busy(), 3), "fleet": fleet, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[StoredRun]]:
    out = tmp_path_factory.mktemp("evaluation")
    return out, evaluate([scenario()], POLICIES, out, seeds=(0, 1), workers=2, command="the command")


def valid_json(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {path.name}")

    return json.loads(path.read_text(), parse_constant=refuse)


# --- runs --------------------------------------------------------------------------------------------------------


def test_every_cell_is_run_in_order_and_stored(finished: tuple[Path, list[StoredRun]]) -> None:
    out, runs = finished
    configs = [run.summary["config"] for run in runs]
    expected = [(segment, policy, seed) for segment in range(3) for policy in POLICIES for seed in (0, 1)]
    assert [(c["segment"], c["policy"], c["seed"]) for c in configs] == expected
    assert sorted(path.name for path in (out / "runs").iterdir()) == sorted(
        f"{run.stem.name}.{kind}"
        for run in runs
        for kind in ("json", "requests.parquet", "samples.parquet", "itl.parquet", "migrations.parquet")
    )


def test_a_summary_says_what_it_was_made_by(finished: tuple[Path, list[StoredRun]]) -> None:
    out, _ = finished
    for path in (out / "runs").glob("*.json"):
        summary = valid_json(path)
        assert summary["command"] == "the command"
        assert set(summary["versions"]) == {"fleetpilot", "python", "numpy", "numba"}
        assert summary["config"]["fleet"]["instances"] == ["a10-llama-7b"] * 2
        assert summary["config"]["fleet"]["profiles"]["a10-llama-7b"]["kv_blocks"] == A10.kv_blocks
        assert summary["completed"] == summary["num_prompts"] == summary["metrics"]["requests"]["offered"]
        assert "commit" in summary


def test_the_files_agree_with_the_summary(finished: tuple[Path, list[StoredRun]]) -> None:
    run = finished[1][0]
    requests, metrics = run.scored_requests(), run.summary["metrics"]
    assert len(run.requests()) == len(scenario().segments[0])
    assert len(requests) == metrics["requests"]["offered"]
    ttft = requests["first_token_s"] - requests["arrival_s"]
    assert np.percentile(ttft, 99) == metrics["latency"]["ttft_s"]["p99"]
    assert run.itl()["count"].sum() == metrics["latency"]["itl_s"]["count"]
    # one gap less than tokens for each request, over the whole run
    assert run.itl()["count"].sum() == (run.requests()["generated"] - 1).sum()


def test_policies_meet_the_same_requests(finished: tuple[Path, list[StoredRun]]) -> None:
    by_policy = {policy: [run for run in finished[1] if run.summary["label"] == policy] for policy in POLICIES}
    for runs in zip(*by_policy.values(), strict=True):
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "predicted_output_tokens", "slo_class", "scored"):
            columns = [run.requests()[name] for run in runs]
            assert all(np.array_equal(columns[0], column) for column in columns)


def test_the_number_of_workers_does_not_matter(finished: tuple[Path, list[StoredRun]], tmp_path: Path) -> None:
    _, runs = finished
    again = evaluate([scenario()], POLICIES[:2], tmp_path, seeds=(0,), workers=1)
    by_name = {run.stem.name: run for run in runs}
    for run in again:
        assert run.summary["metrics"] == by_name[run.stem.name].summary["metrics"]
        assert run.requests().tobytes() == by_name[run.stem.name].requests().tobytes()


def test_the_pooled_gaps_are_there_for_a_run_in_memory_too() -> None:
    from fleetpilot.baselines import load_policy

    segment = scenario().segments[0]
    outcome = run_one(segment, scenario().fleet, load_policy("round-robin"), seed=3)
    assert outcome.summary["num_prompts"] == outcome.scored.sum() < len(segment)


# --- resuming ----------------------------------------------------------------------------------------------------


def test_what_is_on_disk_is_not_run_again(finished: tuple[Path, list[StoredRun]]) -> None:
    out, runs = finished
    said: list[str] = []
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    again = evaluate([scenario()], POLICIES, out, seeds=(0, 1), workers=1, command="another", progress=said.append)
    assert said == ["18 of 18 runs are on disk already"]
    assert [run.summary for run in again] == [run.summary for run in runs]
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()} == before


def test_only_what_is_missing_or_broken_is_run(tmp_path: Path) -> None:
    first = evaluate([scenario()], POLICIES[:1], tmp_path, seeds=(0,), workers=1)
    first[0].stem.with_name(f"{first[0].stem.name}.json").unlink()
    first[1].stem.with_name(f"{first[1].stem.name}.json").write_text('{"half of it')
    said: list[str] = []
    again = evaluate([scenario()], POLICIES[:1], tmp_path, seeds=(0,), workers=1, progress=said.append)
    assert [re.sub(r"/.*segment", " segment", line) for line in said] == [
        "1 of 3 runs are on disk already",
        "2 segment 0 round-robin seed 0",
        "3 segment 1 round-robin seed 0",
    ]
    assert [run.summary["metrics"] for run in again] == [run.summary["metrics"] for run in first]


@pytest.mark.parametrize(
    "changes",
    [
        {"warmup_share": 0.2},
        {"sample_interval_s": 2.0},
        {"fleet": FleetConfig((A10, A10, A10))},
        {"fleet": FleetConfig((A10, A10), slo_classes=(TIGHT,))},
        {"fleet": FleetConfig((A10, A10.replace(kv_blocks=800)), slo_classes=(CHAT, TIGHT))},
        {"segments": cut(busy(seed=2), 3)},
        {"name": "another"},
    ],
)
def test_another_configuration_is_another_run(changes: dict[str, Any], tmp_path: Path) -> None:
    one, other = (Cell(s, 0, "random", 0) for s in (scenario(), scenario(**changes)))
    assert one.stem(tmp_path, one.config()) != other.stem(tmp_path, other.config())


@pytest.mark.parametrize("source", ["runtime.py", "schema.py"])
def test_what_decides_for_exports_tells_their_runs_apart(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell(scenario(), 0, policy, 0) for policy in ("learned", "lmetric")]
    learned, baseline = (cell.config() for cell in cells)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b"#" if path.name == source else b""))
    provenance.code_version.cache_clear()
    try:
        assert cells[0].config() != learned
        assert cells[1].config() == baseline
    finally:
        provenance.code_version.cache_clear()


def test_failures_may_differ_between_segments(tmp_path: Path) -> None:
    of_segments = (None, Failures(at=((1.0, 0),)), Failures(at=((2.0, 1),)))
    runs = evaluate([scenario(failures=of_segments)], POLICIES[:2], tmp_path, seeds=(0,), workers=1)
    stored = [run.summary["config"]["fleet"]["failures"] for run in runs]
    assert [failures and failures["at"] for failures in stored] == [None] * 2 + [[[1.0, 0]]] * 2 + [[[2.0, 1]]] * 2
    restarts = [run.summary["metrics"]["migrations"]["restarts"] for run in runs]
    assert restarts[:2] == [0, 0]
    assert sum(restarts[2:4]) > 0  # a policy may have sent nothing to the instance that failed
    assert sum(restarts[4:]) > 0
    with pytest.raises(ValueError, match="got failures of 1 segments, expected 3"):
        scenario(failures=(None,))


INTERRUPTED = """
    import sys
    from pathlib import Path
    import numpy as np
    from fleetpilot.cluster import FleetConfig
    from fleetpilot.evaluation import Interrupted, Scenario, cut, evaluate
    from fleetpilot.fleet.profiles import load_profile
    from fleetpilot.workloads.table import make_table

    if __name__ == "__main__":
        n = 2000
        table = make_table("t", np.arange(n) / 3.0, np.full(n, 500), np.full(n, 100))
        scenario = Scenario("s", cut(table, 40), FleetConfig((load_profile("a10-llama-7b"),) * 2))
        try:
            runs = evaluate([scenario], ["random"], Path(sys.argv[1]), workers=int(sys.argv[2]),
                            progress=lambda line: print(line, flush=True))
        except Interrupted as interrupted:
            print("kept", interrupted.done, interrupted.total, flush=True)
            sys.exit(130)
        print("complete", len(runs))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_keeps_what_is_done_and_the_next_call_goes_on(tmp_path: Path, workers: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(INTERRUPTED))
    command = [sys.executable, str(script), str(tmp_path / "out"), str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert " segment " in process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group gets it
        rest = process.stdout.read()
    assert process.returncode == 130
    _, done, total = rest.splitlines()[-1].split()
    assert 3 <= int(done) < int(total) == 40 * 3
    stored = list((tmp_path / "out" / "runs").glob("*.json"))
    assert len(stored) == int(done)
    before = {path: path.stat().st_mtime_ns for path in stored}

    resumed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert resumed[0] == f"{done} of {total} runs are on disk already"
    assert resumed[-1] == f"complete {total}"
    assert {path: path.stat().st_mtime_ns for path in stored} == before
    assert not list((tmp_path / "out" / "runs").glob("*.part"))


# --- errors ------------------------------------------------------------------------------------------------------


def test_more_samples_than_memory_holds_are_refused() -> None:
    """The last of two requests comes, or is released, in a billion seconds."""
    for late in (
        make_table("late", [0.0, 1e9], [1, 1], [1, 1]),
        make_table("late", [0.0, np.nan], [1, 1], [1, 1], parent=[-1, 0], think_s=[np.nan, 1e9]),
    ):
        with pytest.raises(ValueError, match=r"late: requests over 1e\+09 s .*: expected at most 100,000,000"):
            scenario(segments=(late,))
        with pytest.raises(ValueError, match="expected at most 100,000,000"):
            run_one(late, scenario().fleet, load_policy("random"))


def test_an_unknown_policy_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'nonsense' is not known"):
        evaluate([scenario()], ["random", "nonsense"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_scenarios_have_different_names_and_requests(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected different names"):
        evaluate([scenario(), scenario()], ["random"], tmp_path)
    with pytest.raises(ValueError, match="expected at least one segment"):
        scenario(segments=())
    with pytest.raises(ValueError, match="each with at least one request"):
        scenario(segments=(make_table("empty", [], [], []),))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_run_fails_the_evaluation(tmp_path: Path, workers: int) -> None:
    too_long = make_table("too long", [0.0, 1.0], [20_000, 10], [1, 1])
    broken = scenario(name="too long", segments=(too_long,) * 2)
    with pytest.raises(ValueError, match="expected at most"):
        evaluate([broken], ["random"], tmp_path, seeds=(0,), workers=workers)


def test_a_worker_that_is_killed_fails_the_evaluation_and_keeps_what_is_done(tmp_path: Path) -> None:
    def kill_workers(_: str) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(ChildProcessError, match="a worker process was ended from outside"):
        evaluate([scenario()], POLICIES, tmp_path, seeds=range(9), workers=2, progress=kill_workers)
    done = len(list((tmp_path / "runs").glob("*.json")))
    assert 1 <= done < 81


def test_there_is_something_to_run(tmp_path: Path) -> None:
    for nothing in ({"scenarios": []}, {"policies": []}, {"seeds": ()}):
        with pytest.raises(ValueError, match="expected at least one scenario, one policy and one seed"):
            evaluate(**{"scenarios": [scenario()], "policies": ["random"], "out": tmp_path, **nothing})  # type: ignore[arg-type]


# --- comparison and report ---------------------------------------------------------------------------------------


def test_pooling_is_over_requests_not_over_percentiles(finished: tuple[Path, list[StoredRun]]) -> None:
    (result,) = collect(finished[1])
    baseline = result.baseline
    runs = [run for run in finished[1] if run.summary["label"] == "round-robin"]
    together = np.concatenate([run.scored_requests() for run in runs])
    ttft = together["first_token_s"] - together["arrival_s"]
    assert baseline.pooled["latency"]["ttft_s"]["p99"] == np.percentile(ttft, 99)
    assert baseline.pooled["requests"]["offered"] == sum(run.summary["num_prompts"] for run in runs)
    first = [run.scored_requests() for run in runs if run.summary["config"]["segment"] == 0]
    assert baseline.segments[0]["requests"]["offered"] == sum(map(len, first))


def test_the_goodput_from_the_files_is_that_of_the_runs(finished: tuple[Path, list[StoredRun]]) -> None:
    (result,) = collect(finished[1])
    for policy in result.policies:
        met = sum(run.summary["metrics"]["goodput"]["met"] for run in policy.runs)
        assert policy.pooled["goodput"]["met"] == met
        assert set(policy.pooled["goodput"]["by_class"]) == {"chat", "tight"}


def test_columns_of_moves_and_losses_are_there_where_they_tell_something(
    finished: tuple[Path, list[StoredRun]], tmp_path: Path
) -> None:
    (calm,) = collect(finished[1])
    assert not {"instances", "migrations", "restarts"} & set(values_table(calm).header)
    failures = Failures(at=((3.0, 0), (9.0, 0)), repair_s=2.0)
    fleet = FleetConfig((A10, A10), slo_classes=(CHAT, TIGHT), failures=failures)
    runs = evaluate([scenario(fleet=fleet)], ["round-robin"], tmp_path, seeds=(0, 1), workers=1)
    (result,) = collect(runs)
    table = values_table(result)
    row = dict(zip(table.header, (cell.text for cell in table.rows[0]), strict=True))
    counts = [run.summary["metrics"]["migrations"]["restarts"] for run in runs]
    assert 0 < np.mean(counts) == pytest.approx(float(row["restarts"]), rel=1e-2)  # shown with three digits
    assert 1.5 < float(row["instances"]) < 2
    assert "migrations" not in row


def test_the_best_of_a_column_is_marked(finished: tuple[Path, list[StoredRun]]) -> None:
    (result,) = collect(finished[1])
    table = values_table(result)
    goodputs = [policy.pooled["goodput"]["share"] for policy in result.policies]
    marked = [row[1].best for row in table.rows]
    assert marked[int(np.argmax(goodputs))]
    assert not all(marked)
    assert not any(row[table.header.index("KV use %")].best for row in table.rows)
    best = table.rows[marked.index(True)][1].text
    assert f"**{best}**" in markdown(table)
    assert f"{best}*" in plain(table)
    assert len({len(line.split("|")) for line in markdown(table).splitlines() if "|" in line}) == 1


def test_differences_are_to_the_baseline_that_was_asked_for(finished: tuple[Path, list[StoredRun]]) -> None:
    (result,) = collect(finished[1], "join-shortest-queue")
    assert result.baseline.policy == "join-shortest-queue"
    table = differences_table(result)
    assert [row[0].text for row in table.rows] == ["round-robin", "random"]
    with pytest.raises(ValueError, match="baseline = 'x': expected one of round-robin, random"):
        collect(finished[1], "x")


def test_goodput_with_other_targets(finished: tuple[Path, list[StoredRun]]) -> None:
    (result,) = collect(finished[1])
    table = rescored_table(result)
    assert table.header == ["policy", "0.5x", "0.75x", "1x", "1.5x", "2x", "3x", "chat", "tight"]
    for row, policy in zip(table.rows, result.policies, strict=True):
        shares = [float(cell.text) for cell in row[1:7]]
        assert shares == sorted(shares), "looser targets are met by more requests"
        assert shares[2] == pytest.approx(100 * policy.pooled["goodput"]["share"], abs=0.05)


def test_unpaired_runs_are_refused(finished: tuple[Path, list[StoredRun]]) -> None:
    with pytest.raises(ValueError, match="join-shortest-queue has other segments or seeds than the rest"):
        collect(finished[1][:-1])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (1.2345, "1.23"),
        (-0.0123, "-0.0123"),
        (99.94, "99.9"),
        (99.99, "100"),
        (1234.5, "1234"),
    ],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_weak_evidence_is_named(finished: tuple[Path, list[StoredRun]]) -> None:
    said = " ".join(notes(collect(finished[1])[0]))
    assert "only 3 segments" in said
    assert "scored requests" in said


def test_policies_that_cannot_be_told_apart_are_named(tmp_path: Path) -> None:
    names = ["round-robin", "infaas++", "llumnix", "hpa-kv", "join-shortest-queue"]
    (asked_to_dispatch,) = collect(evaluate([scenario()], names, tmp_path, seeds=(0,), workers=1))
    said = [note for note in notes(asked_to_dispatch) if "the same in every run" in note]
    assert said == [
        "infaas++, llumnix: the same in every run; with --rebalance-s llumnix would move requests; with --ready "
        "infaas++, llumnix would scale",
        "hpa-kv, join-shortest-queue: the same in every run; with --ready hpa-kv would scale",
    ]
    moving = FleetConfig((A10, A10), slo_classes=(CHAT, TIGHT), rebalancing=Rebalancing())
    (asked_to_move,) = collect(evaluate([scenario(fleet=moving)], names[:3], tmp_path, seeds=(0,), workers=1))
    assert not any("the same" in note for note in notes(asked_to_move))


def test_the_report_is_complete_and_needs_no_other_file(finished: tuple[Path, list[StoredRun]], tmp_path: Path) -> None:
    report = write_report(finished[1], tmp_path)
    html = report.html.read_text()
    for policy in POLICIES:
        assert policy in html
        assert policy in report.text
        assert policy in report.markdown.read_text()
    keys, latencies, kv_use, differences = len(POLICIES), 3, 3, len(COMPARED)  # the fleet, the baseline and the best
    assert html.count("<svg") == keys + latencies + kv_use + differences
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", html), "nothing is loaded from elsewhere"
    assert "the command" in html
    images = re.findall(r"!\[.*?\]\((.*?)\)", report.markdown.read_text())
    assert sorted(images) == sorted(path.name for path in report.plots)
    assert all((tmp_path / name).stat().st_size for name in images)
    rows = report.csv.read_text().splitlines()
    assert len(rows) == 1 + len(finished[1])
    assert rows[0].startswith("scenario,segment,policy,seed,goodput %")


def test_one_policy_has_a_report_too(finished: tuple[Path, list[StoredRun]], tmp_path: Path) -> None:
    alone = [run for run in finished[1] if run.summary["label"] == "random"]
    report = write_report(alone, tmp_path)
    assert "differences" not in report.text


def test_plots_call_policies_of_long_names_by_their_rows(tmp_path: Path) -> None:
    tuned = "calibrated?backlog=0.181&queue=3.48&pressure=15.8"
    names = ["round-robin", "calibrated", tuned, f"{tuned}&sampled=1"]
    assert labels(names) == ["round-robin", "calibrated", "calibrated (row 3)", "calibrated (row 4)"]
    assert labels(["runs/train/ppo/Dispatch-v0_1/export/"]) == ["ppo/Dispatch-v0_1/export (row 1)"]
    runs = evaluate([scenario(segments=cut(busy(120), 2))], names, tmp_path, seeds=(0,), workers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Matplotlib's, where names leave no room for a plot
        html = write_report(runs, tmp_path).html.read_text()
    drawn = re.findall(r"<text [^>]*>([^<]*)</text>", html)
    assert "calibrated (row 4)" in drawn
    assert not any("backlog" in text for text in drawn)


def test_forty_policies_have_forty_kinds_of_lines() -> None:
    keys = legend([f"policy {number}" for number in range(40)])
    assert len({(key.colour, key.dashes) for key in keys}) == 40


def test_names_from_outside_are_escaped(tmp_path: Path) -> None:
    named = scenario(name="<script>alert(1)</script>", segments=(busy(60),))
    runs = evaluate([named], ["random"], tmp_path, seeds=(0,), workers=1)
    assert "<script>alert" not in write_report(runs, tmp_path).html.read_text()


def test_loads_and_migrations_are_drawn(tmp_path: Path) -> None:
    """One family at two loads: a curve over the load and a profile; where requests move, on whose instances."""
    fleet = FleetConfig((A10, A10), rebalancing=Rebalancing())
    scenarios = [
        Scenario(f"load {load:g}", cut(workload(f"llumnix/M-M?n=200&rate={load}"), 2), fleet, family="M-M", load=load)
        for load in (1.5, 2.0)
    ]
    runs = evaluate(scenarios, ["round-robin", "random", "llumnix"], tmp_path, seeds=(0,), workers=1)
    moved = runs[2].migrations()
    assert len(moved) == sum(runs[2].summary["metrics"]["migrations"]["outcomes"].values()) > 0
    report = write_report(runs, tmp_path)
    html = report.html.read_text()
    completed = runs[2].summary["metrics"]["migrations"]["outcomes"]["completed"]
    assert f"llumnix: {completed} migrations" in html
    assert "Goodput over load." in html
    assert "Performance profile." in html
    assert (
        html.count('class="line-2"') == 2 + 2 * 4
    )  # of llumnix: two over all, three latencies and KV use of each load
    assert "All 2 scenarios" in report.markdown.read_text()


def test_the_page_is_whole_in_a_browser(finished: tuple[Path, list[StoredRun]], tmp_path: Path) -> None:
    """At both widths, light and dark: nothing runs over, no text leaves its plot, nothing is too small to read."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright (pip install playwright)")
    look = runpy.run_path(str(ROOT / "tools" / "screenshot_report.py"))["look"]
    html = write_report(finished[1], tmp_path).html
    with playwright.sync_playwright() as browsers:
        own = Path(browsers.chromium.executable_path)
        found = str(own) if own.exists() else shutil.which("chromium")
        if found is None:
            pytest.skip("needs Chromium (playwright install chromium)")
        browser = browsers.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            assert look(browser, html, tmp_path) == []
        finally:
            browser.close()
