"""Emulated engines hand KV over to each other, and fail as they are told to."""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from emulated import FAST, SLOW, Emulated, eventually
from test_emulator import ENDLESS, generate

from fleetpilot.fleet.vllm_metrics import read_metrics

Start = Callable[..., Emulated]

PROMPT = list(range(100)) * 4
"""25 blocks of 16 tokens."""
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}


def by_source(fleet: Emulated, engine: int = 0) -> dict[str, float]:
    return {
        source: fleet.metric(f'vllm:prompt_tokens_by_source_total{{source="{source}"}}', engine)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }


def used_blocks(fleet: Emulated, engine: int = 0) -> int:
    metrics = read_metrics(fleet.get("/metrics", engine).body.decode())
    return round(metrics.kv_usage * metrics.kv_capacity_blocks) if metrics.kv_capacity_blocks else 0


def probe(fleet: Emulated, tokens: list[int], engine: int = 0, **body: Any) -> dict[str, Any]:
    """Ask an engine to keep the blocks of these tokens."""
    answer = fleet.complete(engine, prompt=tokens, max_tokens=1, kv_transfer_params=KEEP, **body)
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def test_blocks_are_kept_under_a_lease_until_they_are_read(emulate: Start) -> None:
    fleet = emulate(2)
    params = probe(fleet, PROMPT)
    assert (params["do_remote_prefill"], params["do_remote_decode"], params["remote_num_tokens"]) == (True, False, 400)
    assert len(params["remote_block_ids"][0]) == 25
    assert used_blocks(fleet) == 25
    answer = fleet.complete(1, prompt=PROMPT, max_tokens=5, ignore_eos=True, kv_transfer_params=params)
    assert (
        answer["choices"][0]["text"]
        == fleet.complete(prompt=PROMPT, max_tokens=5, ignore_eos=True)["choices"][0]["text"]
    )
    assert by_source(fleet, 1) == {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 400}
    eventually(lambda: used_blocks(fleet) == 0, "the source has released what was read")
    assert used_blocks(fleet, 1) == 0


def test_what_is_there_already_is_not_pulled(emulate: Start) -> None:
    fleet = emulate(2)
    fleet.complete(1, prompt=PROMPT[:160], max_tokens=1)
    fleet.complete(1, prompt=PROMPT, max_tokens=1, kv_transfer_params=probe(fleet, PROMPT))
    assert by_source(fleet, 1) == {"local_compute": 160, "local_cache_hit": 160, "external_kv_transfer": 240}


def test_a_lease_ends_by_itself(emulate: Start) -> None:
    fleet = emulate(2, lease_s=0.3)
    params = probe(fleet, PROMPT)
    assert used_blocks(fleet) == 25
    eventually(lambda: used_blocks(fleet) == 0, "the lease has ended")
    assert fleet.metric("vllm:nixl_num_kv_expired_reqs_total") == 1
    fleet.complete(1, prompt=PROMPT, max_tokens=1, kv_transfer_params=params)
    assert by_source(fleet, 1)["local_compute"] == 400
    assert fleet.metric("vllm:nixl_num_failed_transfers_total", 1) == 1


def test_a_dead_source_means_recompute(emulate: Start) -> None:
    fleet = emulate(2)
    params = probe(fleet, PROMPT)
    fleet.run(fleet.fleet.engines[0].kill())
    answer = fleet.complete(1, prompt=PROMPT, max_tokens=5, ignore_eos=True, kv_transfer_params=params)
    assert answer["usage"]["completion_tokens"] == 5
    assert by_source(fleet, 1)["local_compute"] == 400


def test_tokens_that_fill_no_block_are_pulled_and_not_cached(emulate: Start) -> None:
    fleet = emulate(2)
    params = probe(fleet, PROMPT[:12])
    assert (len(params["remote_block_ids"][0]), params["remote_num_tokens"], used_blocks(fleet)) == (1, 12, 1)
    fleet.complete(1, prompt=PROMPT[:12], max_tokens=1, kv_transfer_params=params)
    assert by_source(fleet, 1)["external_kv_transfer"] == 12
    fleet.complete(1, prompt=PROMPT[:12], max_tokens=1)
    assert by_source(fleet, 1)["local_compute"] == 12


@pytest.mark.parametrize("streamed", [True, False])
def test_a_failed_pull_may_fail_the_request(emulate: Start, streamed: bool) -> None:
    fleet = emulate(2, kv_load_failure_policy="fail")
    params = probe(fleet, PROMPT)
    fleet.run(fleet.fleet.engines[0].kill())
    body = {"prompt": PROMPT, "max_tokens": 5, "kv_transfer_params": params}
    if streamed:
        stream = fleet.stream("/v1/completions", body, 1)
        errors = [event["error"] for event in stream]
        assert stream.done
    else:
        answer = fleet.post("/v1/completions", body, 1)
        assert answer.status == 500
        errors = [answer.json["error"]]
    assert errors == [{"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}]
    eventually(lambda: used_blocks(fleet, 1) == 0, "nothing is held")


def test_a_copy_from_a_wedged_source_hangs_as_long_as_it_does(emulate: Start) -> None:
    fleet = emulate(2)
    params = probe(fleet, PROMPT)
    fleet.do(lambda engine: engine.wedge())
    late = fleet.pool.submit(fleet.complete, 1, prompt=PROMPT, max_tokens=1, kv_transfer_params=params)
    eventually(lambda: fleet.metric("vllm:num_requests_waiting", 1) == 1, "it waits for the copy")
    fleet.complete(1, prompt="others go on", max_tokens=5)
    assert not late.done()
    fleet.do(lambda engine: engine.unwedge())
    late.result()
    assert by_source(fleet, 1)["external_kv_transfer"] == 400


def test_parameters_that_are_not_complete_mean_recompute(emulate: Start) -> None:
    fleet = emulate(2)
    params = probe(fleet, PROMPT)
    del params["remote_host"]
    fleet.complete(1, prompt=PROMPT, max_tokens=1, kv_transfer_params=params)
    assert by_source(fleet, 1)["local_compute"] == 400


def test_blocks_of_other_tokens_are_not_taken(emulate: Start) -> None:
    fleet = emulate(2)
    params = probe(fleet, PROMPT)
    fleet.complete(1, prompt=[*PROMPT[:-50], *range(50)], max_tokens=1, kv_transfer_params=params)
    assert by_source(fleet, 1)["external_kv_transfer"] == 0


def test_a_request_that_is_refused_gives_the_blocks_back(emulate: Start) -> None:
    fleet = emulate(2)
    params = probe(fleet, PROMPT)
    body = {"prompt": PROMPT, "max_tokens": 0, "kv_transfer_params": params}
    assert fleet.post("/v1/completions", body, 1).status == 400
    eventually(lambda: used_blocks(fleet) == 0, "the source has released them")


def test_a_client_that_goes_away_while_blocks_are_pulled_frees_them(emulate: Start) -> None:
    fleet = emulate(2, round_trip_s=2.0)
    params = probe(fleet, PROMPT)
    connection = http.client.HTTPConnection("127.0.0.1", fleet.fleet.engines[1].port)
    body = str({"prompt": PROMPT, "max_tokens": 5, "kv_transfer_params": params}).replace("'", '"')
    body = body.replace("True", "true").replace("False", "false").replace("None", "null")
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    eventually(lambda: used_blocks(fleet, 1) == 25, "blocks are taken for the copy")
    assert fleet.metric("vllm:num_requests_waiting", 1) == 1
    assert fleet.metric('vllm:num_requests_kv_fetch_by_stage{stage="in_progress"}', 1) == 1
    connection.close()
    eventually(lambda: used_blocks(fleet, 1) == 0, "the destination has released them")
    eventually(lambda: used_blocks(fleet) == 0, "so has the source")


def test_a_running_request_moves_without_losing_a_token(emulate: Start) -> None:
    fleet = emulate(3, profile=SLOW)
    count = 120
    whole = generate(fleet, PROMPT, count, engine=2)
    body = {"prompt": PROMPT, "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
    stream = fleet.stream("/v1/completions", body, headers={"X-Request-Id": "moves"})
    tokens: list[int] = []
    events = iter(stream)
    while len(tokens) < 40:
        tokens += next(events)["choices"][0]["token_ids"]
    params = probe(fleet, PROMPT + tokens, priority=-10)
    assert by_source(fleet)["local_cache_hit"] == 432
    fleet.complete(1, prompt=PROMPT + tokens, max_tokens=1, kv_transfer_params=params)
    fleet.post("/inference/v1/abort_requests", {"request_ids": ["cmpl-moves-0"]})
    tokens += [token for event in events for token in event["choices"][0]["token_ids"]]
    before = by_source(fleet, 1)
    tokens += generate(fleet, PROMPT + tokens, count - len(tokens), engine=1)
    assert tokens == whole
    after = by_source(fleet, 1)
    assert after["local_cache_hit"] - before["local_cache_hit"] >= 432
    eventually(lambda: used_blocks(fleet) + used_blocks(fleet, 1) == 0, "both have released everything")


def test_a_stalled_line_does_not_keep_a_probe_of_high_priority(emulate: Start) -> None:
    tight = SLOW.replace(kv_blocks=64, max_model_len=1024, max_num_seqs=64)
    fleet = emulate(profile=tight)
    streams = [
        fleet.stream_later("/v1/completions", {"prompt": [i] * 300, "ignore_eos": True, "max_tokens": 400})
        for i in range(8)
    ]
    eventually(lambda: fleet.metric("vllm:num_requests_waiting") >= 3, "requests wait")
    probe(fleet, [0] * 32, priority=-10)
    assert fleet.metric("vllm:num_requests_waiting") > 0
    assert not all(stream.done() for stream in streams)


# --- between processes ---------------------------------------------------------------------------------------------


@pytest.fixture
def other_process() -> Iterator[int]:
    """The port of an engine that another process emulates."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "fleetpilot", "emulate", "--engines", "1", "--profile", "tiny-cpu"]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert re.match(rf"http://127\.0\.0\.1:{port} +tiny-cpu", process.stdout.readline())
    yield port
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_blocks_come_from_another_process(emulate: Start, other_process: int) -> None:
    fleet = emulate(profile=FAST.replace(block_size=32))
    engine = fleet.fleet.engines[0]
    own = engine.port
    engine.port = other_process  # the client's next request goes there
    params = probe(fleet, PROMPT)
    engine.port = own
    assert params["remote_port"] == other_process
    fleet.complete(prompt=PROMPT, max_tokens=1, kv_transfer_params=params)
    assert by_source(fleet)["external_kv_transfer"] == 400
    engine.port = other_process
    eventually(lambda: fleet.metric("vllm:kv_cache_usage_perc") == 0, "the source has released them")
    engine.port = own


# --- faults --------------------------------------------------------------------------------------------------------


def test_a_killed_engine_cuts_its_streams_and_its_port(emulate: Start) -> None:
    fleet = emulate(profile=SLOW)
    stream = fleet.stream("/v1/completions", {"prompt": "Hello", **ENDLESS})
    events = iter(stream)
    next(events)
    fleet.run(fleet.fleet.engines[0].kill())
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        list(events)
    assert not stream.done
    with pytest.raises(ConnectionRefusedError):
        fleet.get("/health")


def test_an_engine_whose_scheduler_dies_says_so_in_its_streams(emulate: Start) -> None:
    fleet = emulate(profile=SLOW)
    stream = fleet.stream("/v1/completions", {"prompt": "Hello", **ENDLESS})
    events = iter(stream)
    next(events)
    fleet.run(fleet.fleet.engines[0].crash())
    *_, last = events
    assert last["error"]["type"] == "InternalServerError"
    assert stream.done
    with pytest.raises(ConnectionRefusedError):
        fleet.get("/health")


def test_a_wedged_engine_looks_healthy_and_makes_no_progress(emulate: Start) -> None:
    fleet = emulate(profile=SLOW)
    stream = fleet.stream("/v1/completions", {"prompt": "Hello", "ignore_eos": True, "max_tokens": 10})
    events = iter(stream)
    next(events)
    fleet.do(lambda engine: engine.wedge())
    before = fleet.metric("vllm:generation_tokens_total")
    late = fleet.stream_later("/v1/completions", {"prompt": "Hallo", "max_tokens": 1})
    eventually(lambda: fleet.metric("vllm:num_requests_waiting") == 1, "the late one waits")
    assert fleet.get("/health").status == 200
    assert fleet.metric("vllm:generation_tokens_total") == before
    assert not late.done()
    fleet.do(lambda engine: engine.unwedge())
    assert len(list(events)) == 9
    assert len(list(late.result())) == 1


def test_an_engine_that_lies_refuses_or_is_unhealthy(emulate: Start) -> None:
    fleet = emulate()
    fleet.do(lambda engine: setattr(engine.faults, "metrics", lambda text: text.replace("} 0.0", "} 7.0")))
    assert fleet.metric("vllm:num_requests_running") == 7
    fleet.do(lambda engine: setattr(engine.faults, "unhealthy", True))
    assert fleet.get("/health").status == 503
    fleet.do(lambda engine: setattr(engine.faults, "refuse", 503))
    answer = fleet.post("/v1/completions", {"prompt": "Hello"})
    assert (answer.status, answer.json["error"]["code"]) == (503, 503)


def test_a_fleet_whose_ports_are_taken_says_so(emulate: Start) -> None:
    fleet = emulate()
    taken = fleet.fleet.engines[0].port
    command = [sys.executable, "-m", "fleetpilot", "emulate", "--engines", "1", "--profile", "tiny-cpu"]
    run = subprocess.run([*command, "--port", str(taken)], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "address already in use" in run.stderr
