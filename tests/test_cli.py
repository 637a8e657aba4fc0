"""The ``fleetpilot`` command: what it prints, and what it says when it is asked for the impossible."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpilot.agents import load_policy
from fleetpilot.baselines import BASELINES
from fleetpilot.cli import _parser, main
from fleetpilot.cluster import FleetConfig
from fleetpilot.evaluation import Interrupted, Scenario, capacity_rps, evaluate, run_one, runner, runs
from fleetpilot.evaluation.tuned import OURS, read_tuned
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload as make_workload

SMALL = "poisson?rate=4&n=300&prompt=uniform:50:900&output=uniform:2:200"


def run(*argv: str) -> int:
    """The exit status, however the command ends."""
    try:
        return main(argv)
    except SystemExit as stop:
        return int(stop.code or 0)


def refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} in JSON")


# --- bad input ---------------------------------------------------------------------------------------------------

BAD = {
    "": "the following arguments are required: COMMAND",
    "simulat": "invalid choice: 'simulat'.*did you mean simulate",
    "simulate --polcy random": "unrecognized arguments: --polcy random",
    "simulate --policy": "expected one argument",
    f"simulate --workload {SMALL} --policy lmetrik": "'lmetrik' is not known; did you mean lmetric.*known: random",
    f"simulate --workload {SMALL} --policy ./": "expected the folder of an exported policy, with a file policy.json",
    "train": "one of the arguments --config --resume is required",
    "train --config fast": "config 'fast' is not known; expected one of dispatch, fleet, quick, scale, or a .toml file",
    "train --config missing.toml": "missing.toml: No such file or directory",
    "train --config quick --seed -1": "--seed: '-1': expected a whole number from 0",
    "train --resume missing": "checkpoint.pt.gz: no such file; expected the folder of a run that was begun",
    "train --resume missing --seed 3": "--seed: expected none with --resume",
    "export missing": "expected the folder of a training run",
    "explain lmetric": "FOLDER 'lmetric': expected the folder of an exported policy",
    "explain missing/export": "expected the folder of an exported policy, with a file policy.json",
    "simulate": "--workload: expected a trace file or the name of a workload",
    "simulate --workload poison": r"workload \(and no file .*\) 'poison' is not known; did you mean poisson",
    "simulate --workload twin/azur-conv": "'twin/azur-conv' is not known; did you mean .*, servegen:PATH, file:PATH",
    "simulate --workload missing.csv": "missing.csv: no such file",
    "simulate --workload traces/missing": "traces/missing: no such file",
    "simulate --workload .": r"\.: no such file",
    "simulate --workload file:/dev/zero": "/dev/zero: expected a regular file",
    "simulate --workload file:missing.csv": "missing.csv: No such file or directory",
    "simulate --workload poisson?rate=fast": "rate = 'fast': expected a number from 1e-09 to 1e\\+09",
    "simulate --workload poisson?rate=1e-300": "rate = '1e-300': expected a number from 1e-09 to 1e\\+09",
    "simulate --workload poisson?n=9&rate=1e-9": "s on 4 instances: .* samples, .*: expected at most 100,000,000",
    "simulate --workload poisson?n=100000000": "n = '100000000': expected a whole number from 1 to 20,000,000",
    "simulate --workload poisson?n=1e23": "n = '1e23': expected a whole number from 1 to 20,000,000",
    f"simulate --workload poisson?n={10**23}": f"n = '{10**23}': expected a whole number from 1 to 20,000,000",
    f"simulate --workload {SMALL} --instances 1000000": "'1000000': expected a whole number from 1 to 4096",
    f"simulate --workload {SMALL} --instances 2P+4": "'2P\\+4': expected a whole number from 1 to 4096, or so many for",
    f"simulate --workload {SMALL} --instances 4D": r"roles = .*: expected a prefill instance, and one that decodes",
    f"simulate --workload {SMALL} --instances 1P+1D": "pools with a10-llama-7b: expected engines with chunked prefill",
    f"simulate --workload {SMALL} --fleet tiny-cpu:2P,tiny-cpu:0D": "'tiny-cpu:0D': expected NAME:N.*, or with pool",
    f"simulate --workload {SMALL} --decode-choice after-prefill": "--decode-choice after-prefill: expected with insta",
    f"simulate --workload {SMALL} --superpose 100000000": "'100000000': expected a whole number from 1 to 1000",
    f"simulate --workload {SMALL} --load 0.00001": "--load 1e-05: .* instances; expected at most 4096",
    f"simulate --workload {SMALL} --fleet a10-llama-7b:9999999999": "'a10-llama-7b:9999999999': expected NAME:N",
    f"simulate --workload {SMALL} --fleet a10-llama-7b:4000,tiny-cpu:97": "N from 1 to 4096 in all, as a10-llama-7b:4",
    f"simulate --workload {SMALL} --fleet=": "argument --fleet: '': expected NAME:N",
    f"simulate --workload {SMALL} --slo=": "--slo: '': expected different names joined by commas, as chat,tight",
    f"simulate --workload {SMALL} --load 0.8,0.8": "'0.8,0.8': expected one number > 0",
    f"simulate --workload {SMALL} --fail 600": "--fail: '600': expected INSTANCE@SECONDS, joined by commas",
    f"simulate --workload {SMALL} --fail 0@9,1@soon": "--fail: '1@soon': expected INSTANCE@SECONDS",
    f"simulate --workload {SMALL} --poll-delay-s x": "--poll-delay-s: 'x': expected a number of seconds from 0 to 1e",
    f"simulate --workload {SMALL} --poll-delay-s nan": "--poll-delay-s: 'nan': expected a number of seconds from 0",
    f"simulate --workload {SMALL} --poll-delay-s 1e5": "--poll-delay-s 100000: expected at most 10,000 times",
    f"simulate --workload {SMALL} --poll-interval-s 1e-9": "'1e-9': expected a number of seconds from 0.001 to",
    "simulate --workload piecewise?rates=1,2,3": "rates = '1,2,3': expected as many numbers as durations_s = '600,600'",
    "simulate --workload piecewise?rates=0,0": "workload 'piecewise': rates = '0,0': expected at least one number > 0",
    "simulate --workload piecewise?durations_s=-1,2": "durations_s = '-1,2': expected numbers from 1e-09 to",
    "simulate --workload weibull?cv=2000": "workload 'weibull': cv = '2000': expected a number from 0.01 to 1000",
    "simulate --workload poisson?speed=2": "unknown parameter 'speed'",
    f"simulate --workload {SMALL} --profile a10-lama": "'a10-lama' is not known; did you mean a10-llama",
    f"simulate --workload {SMALL} --profile missing.toml": "missing.toml: No such file or directory",
    f"simulate --workload {SMALL} --fleet a10-llama-7b": "'a10-llama-7b': expected NAME:N",
    f"simulate --workload {SMALL} --fleet a10-llama-7b:0": "'a10-llama-7b:0': expected NAME:N,... with whole numbers N",
    f"simulate --workload {SMALL} --fleet a10-llama-7b:2 --instances 3": "--instances 3: expected without --fleet",
    f"simulate --workload {SMALL} --fleet tiny-cpu:1 --profile tiny-cpu": "not allowed with argument",
    f"simulate --workload {SMALL} --instances 0": "'0': expected a whole number from 1 to 4096",
    f"simulate --workload {SMALL} --instances many": "'many': expected a whole number from 1",
    f"simulate --workload {SMALL} --seed -1": "'-1': expected a whole number from 0 to",
    f"simulate --workload {SMALL} --load 0": "'0': expected one number > 0 and <= 100, as 0.9",
    f"simulate --workload {SMALL} --load 0.9 --instances 900": "would have to run .* times as fast",
    f"simulate --workload {SMALL} --warmup-share 1": "'1': expected a number >= 0 and < 1",
    f"simulate --workload {SMALL} --slo tigt": "SLO class 'tigt' is not known; did you mean tight",
    f"simulate --workload {SMALL} --poll-delay-s -1": "--poll-delay-s: '-1': expected a number of seconds",
    "simulate --workload poisson?n=9&prompt=14000": "9 of 9 requests have more than the 12,288 tokens of a10-llama-7b; "
    "--drop-over-length",
    "simulate --workload poisson?n=9&prompt=14000 --drop-over-length": "9 of 9 requests .*; expected some that fit",
    "evaluate": "--workload: expected a trace file",
    f"evaluate --workload {SMALL} --policies random,random": "expected different names",
    f"evaluate --workload {SMALL} --policies random,": "expected different names joined by commas, as round-robin",
    f"evaluate --workload {SMALL} --policies all,random": "--policies all,random: expected all alone",
    f"evaluate --workload {SMALL} --baseline=": "--baseline '': expected one of",
    "evaluate --experiment=": "experiment '' is not known",
    f"evaluate --workload {SMALL} --load 0.8,0.80": "'0.8,0.80': expected different numbers joined by commas",
    f"evaluate --workload {SMALL} --seeds 1000000000": "'1000000000': expected a whole number from 1 to 1000",
    f"evaluate --workload {SMALL} --policies random,nobody": r"no folder .*'nobody' is not known.*, learned, oracle",
    f"evaluate --workload {SMALL} --policies random --baseline lmetric": "--baseline 'lmetric': expected one of",
    f"evaluate --workload {SMALL} --segments 9999": "has no request; expected fewer segments",
    f"evaluate --workload {SMALL} --segments 0": "'0': expected a whole number from 1",
    f"evaluate --workload {SMALL} --load 0.8,x": "'x': expected one number > 0",
    f"evaluate --workload {SMALL} --family chat": "--family chat: expected with --tuned",
    f"evaluate --workload {SMALL} --tuned nowhere.json": "nowhere.json: No such file",
    f"evaluate --workload {SMALL} --segments 1 --windows test": "windows for test: none of 1; expected at least 2",
    f"tune --workload {SMALL} --policies llumnix?of=3": "parameter 'of' is not known",
    f"evaluate --workload {SMALL} --tuned": "family 'default' is not there; expected one of bursty, chat_and_batch",
    f"tune --workload {SMALL} --policies nobody": "'nobody' is not known",
    f"tune --workload {SMALL} --trials 0": "'0': expected a whole number from 1",
    "tune": "--workload: expected a trace file",
    "evaluate --experiment lumnix": "experiment 'lumnix' is not known.*known: llumnix-motivation",
    "trace": "the following arguments are required: ACTION",
    "trace inspect missing.csv": "missing.csv: no such file",
    f"trace convert {SMALL} out.parquet": "'out.parquet': expected a name that ends in .jsonl or .csv",
    "trace convert sessions/chat?n=50 out.csv": "expected a table without closed-loop rows",
    "trace fetch azure_2023": "trace 'azure_2023' is not known; did you mean azure_2023",
    "list policys": "invalid choice: 'policys'.*did you mean policies",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_gets_one_line_and_status_2(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.match(f"fleetpilot: error: .*{BAD[command]}", err), err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "fleetpilot: error: "),
        (b"when,what\n1,2\n", "no known trace format has the fields"),
        (b"\x00\xff\xfe\x80", r"trace.csv: begins with '\x00\ufffd\ufffd\ufffd': expected CSV or JSON lines"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,44\n", "trace.csv: line 2: ContextTokens"),
    ],
)
def test_a_broken_trace_is_bad_input(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_bytes(content)
    assert run("trace", "inspect", str(trace)) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "trace.csv: no requests: 0 rows read, 0 emitted, dropped: none; expected at least one"),
        ("0,0,5\n1,3,0\n", "2 rows read, 0 emitted, dropped: zero_prompt_tokens 1, zero_output_tokens 1; expected"),
    ],
)
@pytest.mark.parametrize("command", ["simulate --workload", "evaluate --workload", "trace inspect", "trace convert"])
def test_a_trace_without_requests_is_bad_input(
    command: str,
    rows: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.csv").write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{rows}")
    target = ["copy.csv"] if command == "trace convert" else []
    assert run(*command.split(), "trace.csv", *target) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert (out, err.count("\n")) == ("", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


def test_what_comes_from_outside_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "--workload", "\x1b[31m\u202ered" + 9999 * "x") == 2
    err = capsys.readouterr().err
    assert r"\x1b[31m" in err
    assert err.rstrip("\n").isprintable()
    assert len(err) < 3000


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETPILOT_DEBUG", "1")
    with pytest.raises(ValueError, match="'nobody' is not known"):
        main(["simulate", "--policy", "nobody"])


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run("simulate", "--workload", SMALL, "-o", str(tmp_path)) == 2
    assert "pip install 'fleetpilot[eval]'" in capsys.readouterr().err


# Numbers only where they are impossible: a possible one would be simulated.
WORDS = st.text(st.characters(exclude_characters="0123456789"), max_size=12)
OPTIONS = st.sampled_from(
    [
        "--policy",
        "--policies",
        "--workload",
        "--profile",
        "--fleet",
        "--instances",
        "--load",
        "--slo",
        "--seed",
        "--seeds",
        "--segments",
        "--superpose",
        "--experiment",
        "--baseline",
        "--json",
        "--url",
        "-o",
        "inspect",
        "convert",
        "fetch",
    ]
)
EXTREMES = st.sampled_from(["-1", "1e23", "1e300", "1e-300", "9" * 30, "nan", "inf"])
PARAMETERS = st.sampled_from(["poisson?n=", "poisson?rate=", "piecewise?rates=", "onoff?on_s=", "sessions/chat?turns="])
SCHEMES = st.sampled_from(["file:", "servegen:", "twin/", "llumnix/", "poisson?", "gamma?cv=", "sessions/chat?turns="])
NAMES = st.builds(str.__add__, SCHEMES, WORDS) | st.builds(str.__add__, PARAMETERS, EXTREMES)
ARGUMENTS = st.lists(OPTIONS | WORDS | EXTREMES | NAMES, max_size=6)


@given(st.sampled_from(["simulate", "evaluate", "trace", "list", "demo"]), ARGUMENTS)
def test_garbage_never_ends_in_a_traceback(command: str, arguments: list[str]) -> None:
    if command == "demo":
        arguments = ["--garbage", *arguments]
    assert run(command, *arguments) in (0, 2)


NUMERIC = {
    "simulate": "--instances --superpose --load --warmup-share --poll-interval-s --poll-delay-s --seed --fleet",
    "evaluate": "--segments --seeds --workers --load --instances --superpose",
}
IMPOSSIBLE = ["-1", "-1e-300", "1e9", "1e300", "nan", "inf", "-inf", "9" * 30, "9" * 5000, "0x", "1,1", "x", ""]


@given(st.sampled_from([(command, option) for command in NUMERIC for option in NUMERIC[command].split()]), st.data())
def test_impossible_numbers_are_bad_input(option: tuple[str, str], data: st.DataObject) -> None:
    value = data.draw(st.sampled_from(IMPOSSIBLE))
    assert run(option[0], "--workload", SMALL, f"{option[1]}={value}") == 2


# --- what it prints ----------------------------------------------------------------------------------------------


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert re.fullmatch(r"fleetpilot \d+\.\d+\.\d+\n", capsys.readouterr().out)
    for command in ([], ["simulate"], ["evaluate"], ["tune"], ["demo"], ["list"], ["trace"], ["trace", "convert"]):
        assert run(*command, "--help") == 0
        assert capsys.readouterr().out.startswith("usage: fleetpilot")


HELP = [
    ["simulate"],
    ["evaluate"],
    ["tune"],
    ["trace"],
    ["emulate"],
    ["train"],
    ["export"],
    ["explain"],
    ["serve"],
    ["replay-log"],
]


@pytest.mark.parametrize("command", HELP)
def test_examples_in_help_are_understood(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    examples = re.findall(r"^  fleetpilot (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert examples
    for example in examples:
        assert _parser().parse_args(shlex.split(example)).run


@pytest.mark.parametrize(
    "page", ["README.md", "docs/cli.md", "docs/evaluation.md", "docs/emulator.md", "docs/training.md", "docs/tuning.md"]
)
def test_commands_in_the_documentation_are_understood(page: str) -> None:
    text = (Path(__file__).parent.parent / page).read_text(encoding="utf-8")
    fenced = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).replace("\\\n", "")
    examples = re.findall(r"^fleetpilot (.*?)(?: *#.*| *> .*)?$", fenced, re.MULTILINE)
    examples += re.findall(r"`fleetpilot ([a-z][^`A-Z]*)`", text)
    assert examples
    for example in examples:
        if example not in ("trace", "calibrate", "validate", "train", "replay-log"):  # named, without what they need
            assert _parser().parse_args(shlex.split(example)).run


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("policies", "join-shortest-queue"),
        ("profiles", "a10-llama-7b"),
        ("workloads", "twin/azure-conv"),
        ("traces", "azure_2023_conv"),
        ("experiments", "llumnix-motivation"),
    ],
)
def test_lists_name_things(what: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", what) == 0
    one = capsys.readouterr().out
    assert name in one.split()
    assert run("list") == 0
    everything = capsys.readouterr().out
    assert all(line in everything for line in one.splitlines())


def test_simulate_prints_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "--workload", SMALL, "--policy", "freeness", "--slo", "chat,tight") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"freeness on {SMALL}, 4 x a10-llama-7b\n")
    assert "goodput" in out
    assert err == "", "quiet where stderr is no terminal"


def test_simulate_with_pools(capsys: pytest.CaptureFixture[str]) -> None:
    of = "h100-llama-3.1-8b"
    for fleet in (["--profile", of, "--instances", "1P+2D"], ["--fleet", f"{of}:1P,{of}:2D"]):
        assert run("simulate", "--workload", SMALL, *fleet, "--first-token-from", "prefill") == 0
        assert f"1 x {of} (prefill), 2 x {of} (decode)" in capsys.readouterr().out


def test_simulate_with_a_shared_cache(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workload", "sessions/chat?n=50&loop=open", "--shared-cache-gb", "64", "--json"]
    assert run("simulate", *options, "--profile", "h100-llama-3.1-8b") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["config"]["fleet"]["shared_cache"]["capacity_bytes"] == 64e9
    assert run("simulate", *options, "--profile", "a10-llama-7b") == 2
    assert "shared_cache with a10-llama-7b: expected engines with chunked prefill" in capsys.readouterr().err


def test_simulate_prints_json_in_vllms_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "--workload", SMALL, "--fleet", "a10-llama-7b:1,tiny-cpu:1", "--json", "--seed", "3") == 0
    summary = json.loads(capsys.readouterr().out, parse_constant=refuse_constant)
    assert summary["completed"] == summary["num_prompts"] > 200
    assert summary["mean_ttft_ms"] > 0
    assert summary["config"]["fleet"]["instances"] == ["a10-llama-7b", "tiny-cpu"]
    assert summary["metrics"]["requests"]["finished"] == summary["completed"]
    assert summary["seed"] == 3


def test_simulate_writes_its_files(tmp_path: Path) -> None:
    assert run("simulate", "--workload", SMALL, "-o", str(tmp_path)) == 0
    stored = runs.StoredRun.read(tmp_path / "run")
    assert stored is not None
    assert len(stored.requests()) == 300
    assert stored.summary["config"]["warmup_share"] == 0.1


def test_a_load_sizes_the_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    workload = "poisson?rate=20&n=3000&prompt=uniform:50:900&output=uniform:2:200"
    assert run("simulate", "--workload", workload, "--load", "0.8", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    fleet = FleetConfig((load_profile("a10-llama-7b"),) * len(summary["config"]["fleet"]["instances"]))
    assert len(fleet.profiles) > 2
    assert summary["request_rate"] == pytest.approx(0.8 * capacity_rps(make_workload(workload), fleet), rel=0.05)


def test_requests_that_are_left_out_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    workload = "poisson?rate=4&n=300&prompt=uniform:10:20000&output=5"
    assert run("simulate", "--workload", workload, "--drop-over-length", "--json") == 0
    out, err = capsys.readouterr()
    left_out = int(re.match(r"fleetpilot: warning: .*: left out (\d+) of 300 requests: they have more than", err)[1])  # type: ignore[index]
    assert 0 < left_out < 200
    # the window starts after the warm-up
    assert json.loads(out)["num_prompts"] < 300 - left_out


def test_nothing_finished_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none_finished(*arguments: Any, **options: Any) -> Any:
        outcome = run_one(*arguments, **options)
        outcome.summary["completed"] = 0
        return outcome

    monkeypatch.setattr(runs, "run_one", none_finished)
    assert run("simulate", "--workload", SMALL) == 1


def test_evaluate_a_real_trace(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = traces / "azure_2023" / "AzureLLMInferenceTrace_conv.csv"
    out = tmp_path / "run"
    command = ["evaluate", "--policies", "round-robin,freeness,lmetric", "--workload", f"{trace}?n=3000"]
    command += ["--drop-over-length", "--load", "0.7,0.95", "--segments", "3", "--seeds", "1", "--workers", "1"]
    assert run(*command, "-o", str(out), "--baseline", "lmetric") == 0
    printed = capsys.readouterr().out
    assert "differences to lmetric" in printed
    assert "at load 0.7:" in printed
    assert "at load 0.95:" in printed
    assert str(out / "report.html") in printed.splitlines()
    for name in ("report.html", "report.md", "runs.csv"):
        assert (out / name).stat().st_size
    summaries = [json.loads(path.read_text(), parse_constant=refuse_constant) for path in (out / "runs").glob("*.json")]
    assert len(summaries) == 2 * 3 * 3
    assert {summary["completed"] == summary["num_prompts"] for summary in summaries} == {True}

    assert run(*command, "-o", str(out)) == 0, "the same again only makes the report"
    assert "differences to round-robin" in capsys.readouterr().out


def test_parameters_are_tuned_on_some_windows_and_scored_on_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--policies", "cache-aware,lmetric", "--workload", SMALL, "--segments", "2", "--instances", "2"]
    assert run("tune", *common, "--trials", "3", "--workers", "1", "-o", str(tmp_path)) == 0
    assert "parameters chosen on the development windows" in capsys.readouterr().out
    tuned = tmp_path / "tuned.json"
    chosen = json.loads(tuned.read_text())["families"]["default"]["cache-aware"]["chosen"]
    command = ["evaluate", *common, "--tuned", str(tuned), "--windows", "test", "--baseline", "cache-aware"]
    assert run(*command, "--seeds", "1", "--workers", "1", "-o", str(tmp_path / "runs")) == 0
    runs = [json.loads(path.read_text()) for path in (tmp_path / "runs" / "runs").glob("*.json")]
    assert sorted(each["config"]["policy"] for each in runs) == sorted([chosen, "lmetric"])
    assert {each["workload"][-6:] for each in runs} == {" [2/2]"}


@pytest.mark.parametrize(
    ("workload", "options", "said"),
    [
        ("poisson?rate=40&n=2000", [], r"requests come at (\d+\.\d) times the rate .* takes (\d+) such instances"),
        ("poisson?rate=2&n=300", [], None),
        ("poisson?rate=40&n=4000", ["--load", "4"], None),
        ("sessions/chat?rate=60&n=3000", ["--drop-over-length"], None),
    ],
)
def test_an_overloaded_fleet_is_told_from_poor_policies(
    workload: str, options: list[str], said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["evaluate", "--policies", "random", "--segments", "2", "--seeds", "1", "--workers", "1"]
    assert run(*common, "--workload", workload, "--instances", "4", *options, "-o", str(tmp_path)) == 0
    err = capsys.readouterr().err
    if said is None:
        assert "times the rate" not in err
        return
    found = re.search(said, err)
    assert found is not None
    load, instances = float(found[1]), int(found[2])
    table = make_workload(workload)
    carried_rps = capacity_rps(table, FleetConfig.of(load_profile("a10-llama-7b"), instances))
    assert carried_rps > len(table) / table.span_s, "so many carry it"
    assert 4 * load <= instances + 0.2


def test_tuned_without_a_file_takes_the_parameters_that_come_with_fleetpilot(tmp_path: Path) -> None:
    common = ["--policies", "calibrated,lmetric", "--workload", SMALL, "--segments", "2", "--instances", "2"]
    command = ["evaluate", *common, "--tuned", "--family", "azure-conv", "--seeds", "1", "--workers", "1"]
    assert run(*command, "-o", str(tmp_path)) == 0
    runs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*.json")]
    chosen = read_tuned(OURS)["azure-conv"]["calibrated"]["chosen"]
    assert chosen != "calibrated"
    assert {each["config"]["policy"] for each in runs} == {chosen, "lmetric"}


def test_the_motivation_of_llumnix_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("evaluate", "--experiment", "llumnix-motivation", "-o", str(tmp_path)) == 0
    as_the_paper_states, as_the_artifact_sets = capsys.readouterr().out.split("\n\n")[:2]
    assert "13,616" in as_the_paper_states
    assert "12,672" in as_the_artifact_sets
    rows = [re.split(r"  +", line.strip()) for line in as_the_paper_states.splitlines()[2:]]
    judged = {figure: (paper, within) for figure, paper, _, _, _, within in rows}
    assert judged == {
        "mean KV use %": ("62.0", "yes"),
        "preempted requests %": ("8.00", "yes"),
        "decode latency P99 / P50": ("3.80", "-"),
    }


def test_ctrl_c_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(_: Any, policies: list[str], *__: Any, **___: Any) -> Any:
        assert policies == [*BASELINES, "learned"], "all, by default"
        raise Interrupted(3, 9)

    monkeypatch.setattr(runner, "evaluate", interrupted)
    assert run("evaluate", "--workload", SMALL, "--segments", "2", "-o", str(tmp_path)) == 130
    assert capsys.readouterr().err == (
        f"fleetpilot: interrupted: 3 of 9 runs are done and kept in {tmp_path}; the same command goes on from there\n"
    )


def test_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetpilot.dispatcher import demo as serving
    from fleetpilot.evaluation import demo

    def one_segment(scenarios: list[Scenario], policies: list[str], *arguments: Any, **options: Any) -> Any:
        assert policies == [name for name in BASELINES if not name.startswith(("infaas", "llumnix", "hpa"))]
        short = [Scenario(s.name, s.segments[:1], s.fleet) for s in scenarios]
        return evaluate(short, policies[:3], *arguments, **options, workers=1)

    monkeypatch.setattr(demo, "evaluate", one_segment)
    monkeypatch.setattr(serving, "serve_for_a_while", partial(serving.serve_for_a_while, span_s=1.0))
    assert run("demo", "-o", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"serving 4 emulated engines with llumnix for 1 s; watch it at http://[\d.:]+/dashboard", printed)
    assert re.search(r"[1-9]\d* requests answered", printed)
    assert "join-shortest-queue" in printed
    shown = [Path(line) for line in printed.splitlines() if line.endswith((".html", ".png"))]
    assert {path.suffix for path in shown} == {".html", ".png"}
    assert all(path.stat().st_size for path in shown)
    latency = next(path.name for path in shown if path.name.endswith("-latency.png"))
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert latency.replace("-latency", "-differences") in readme


def test_serve_with_emulated_engines_loads_each_policy_once_before_it_compiles(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleetpilot.dispatcher import service
    from fleetpilot.dispatcher.emulator import engine

    loaded: list[str] = []

    def load(name: str) -> Any:
        loaded.append(name)
        return load_policy(name)

    async def start(_: Any) -> None:
        raise OSError("here it would serve")

    monkeypatch.setattr(service, "load_policy", load)
    monkeypatch.setattr(service.Dispatcher, "start", start)
    assert run("serve", "--emulate", "1", "--policy", "learned", "--port", "0") == 2
    assert "here it would serve" in capsys.readouterr().err
    assert sorted(loaded) == ["join-shortest-queue", "learned"]
    loaded.clear()
    monkeypatch.setattr(engine, "warm_up", None)
    assert run("serve", "--emulate", "1", "--policy", "learned", "--fallback", "preble") == 2
    assert "fallback = 'preble': expected a compiled policy" in capsys.readouterr().err
    assert loaded == ["preble"]


# --- traces ------------------------------------------------------------------------------------------------------


def test_inspect_describes_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trace", "inspect", "gamma?rate=8&cv=3&n=4000", "--json") == 0
    summary = json.loads(capsys.readouterr().out, parse_constant=refuse_constant)
    assert summary["requests"] == 4000
    assert summary["rate_rps"] == pytest.approx(8, rel=0.05)
    assert summary["gap_cv"] == pytest.approx(3, rel=0.15)
    assert summary["idc_60s"] > 3
    assert run("trace", "inspect", "poisson?n=1") == 0
    assert "1 requests" in capsys.readouterr().out


def test_inspect_holds_no_bins_without_arrivals(capsys: pytest.CaptureFixture[str]) -> None:
    """A span of thousands of years; alone in its second, almost every arrival has an index of dispersion of 1."""
    assert run("trace", "inspect", "poisson?rate=1e-9&n=300", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["span_s"] > 1e11
    assert summary["idc_1s"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize("action", ["convert", "generate"])
def test_what_is_written_reads_back(
    action: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / f"trace{suffix}"
    assert run("trace", action, SMALL, str(target)) == 0
    assert capsys.readouterr().out == f"{target}: 300 requests\n"
    assert run("trace", "inspect", str(target), "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert run("trace", "inspect", SMALL, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    for name in ("requests", "prompt_tokens", "output_tokens"):
        assert read[name] == made[name]


def test_a_file_and_its_parameters(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = traces / "azure_2023" / "AzureLLMInferenceTrace_code.csv"
    assert run("trace", "inspect", f"{trace}?n=100&load_factor=2") == 0
    out = capsys.readouterr().out
    assert "6621 rows read, 100 emitted" in out
    assert "AzureLLMInferenceTrace_code.csv?n=100&load_factor=2" in out
    assert str(traces) not in out


# --- as a process ------------------------------------------------------------------------------------------------


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fleetpilot", "list", "workloads"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert (process.wait(), process.stderr.read()) == (0, b"")
    process.stderr.close()


def test_help_and_errors_load_nothing_heavy() -> None:
    code = "import sys; from fleetpilot.cli import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "numba", "scipy", "matplotlib", "pyarrow", "fleetpilot.cluster"} & set(loaded)


def test_an_experiment_takes_no_other_setup(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--experiment", "llumnix-motivation", "--segments", "3"]) == 2
    assert "--segments 3: expected none, an experiment sets its own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--protocol", "vllm"], "--protocol vllm: expected with --rebalance-s"),
        (["--start-up-s", "5"], "--start-up-s 5.0: expected with --ready"),
        (["--notice-s", "5"], "--notice-s 5.0: expected with --fail"),
        (["--fail", "9@5"], "a failure of instance 9: expected 0 to 3"),
        (["--policy", "llumnix?low=60&high=10"], "low = 60: expected at most high, 10"),
    ],
)
def test_options_that_contradict_or_say_nothing(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["simulate", "--workload", "poisson?n=50", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [["--mtbf-s", "500"], ["--fail", "0@9,1@20", "--notice-s", "5"], ["--instances", "4", "--ready", "2"]],
)
def test_a_load_is_of_the_fleet_without_failures_and_scaling(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert (
        main(["simulate", "--policy", "llumnix", "--workload", "twin/azure-conv?n=300", "--load", "0.8", *options]) == 0
    )
    assert "instances on average" in capsys.readouterr().out
