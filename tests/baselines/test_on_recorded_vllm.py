"""Every baseline decides on what a dispatcher in front of stock vLLM knows: the engines' polls and its own ledger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleetpilot.baselines import BASELINES, load_policy
from fleetpilot.fleet.ledger import Ledger
from fleetpilot.fleet.view import FleetView, empty_view
from fleetpilot.fleet.vllm_metrics import apply_poll, read_metrics

RECORDED = (Path(__file__).parents[1] / "data" / "vllm_metrics.txt").read_text()


def edited(running: int, waiting: int, usage: float) -> str:
    """The recording with other gauges."""
    text = RECORDED
    for name, recorded, value in (
        ("vllm:num_requests_running", "6.0", running),
        ("vllm:num_requests_waiting", "4.0", waiting),
        ("vllm:kv_cache_usage_perc", "0.6171875", usage),
    ):
        sample = f'\n{name}{{engine="0",model_name="tiny"}} '
        assert sample + recorded + "\n" in text
        text = text.replace(sample + recorded + "\n", f"{sample}{value}\n")
    return text


@pytest.fixture
def view() -> FleetView:
    """Three instances of 256 blocks of 32 tokens: the recorded one, one lightly loaded, one almost full.

    The third was polled before its last two requests were sent.
    """
    view = empty_view(1, 3)
    instances = view.instances[0]
    for slot, (text, age_s) in enumerate([(RECORDED, 0.05), (edited(3, 0, 0.25), 0.02), (edited(1, 0, 0.875), 0.08)]):
        apply_poll(instances[slot], read_metrics(text), age_s)
    ledger = Ledger(instances)
    for slot, streams, unstarted, prompt_tokens in [(0, 6, 4, 850), (1, 3, 0, 600), (2, 1, 2, 300)]:
        for number in range(streams + unstarted):
            request_id = f"{slot}-{number}"
            ledger.dispatch(request_id, slot, prompt_tokens, predicted_output_tokens=200.0, matched_tokens=0)
            if number < streams:
                ledger.tokens(request_id, 50)
    instances["matched_tokens"] = [0, 0, 256]
    instances["indexed_tokens"] = [6000, 1900, 900]
    view.request["prompt_tokens"] = 640
    view.request["predicted_output_tokens"] = 300
    view.fleet["decisions"] = 16
    view.fleet["random_key"] = 12345
    return view


def test_nothing_is_missing_from_the_view(view: FleetView) -> None:
    for records in (view.instances, view.request, view.fleet):
        for field in records.dtype.names or ():
            assert not np.isnan(records[field]).any(), field
    assert np.isfinite(view.instances["poll_age_s"]).all()
    assert view.fleet["engine_reported"].tolist() == [0]


def test_the_load_fields_come_from_poll_and_ledger(view: FleetView) -> None:
    instances = view.instances[0]
    # 256 blocks x (1 - usage); ceil(850 / 32) = 27 blocks a prompt, ceil(300 / 32) = 10.
    assert instances["free_blocks"].tolist() == [98, 192, 32]
    assert instances["queued_demand_blocks"].tolist() == [4 * 27, 0, 2 * 10]
    assert instances["head_demand_blocks"].tolist() == [27, 0, 10]
    assert instances["queued"].tolist() == [4, 0, 2]
    assert instances["batched"].tolist() == [6, 3, 1]


@pytest.mark.parametrize("name", BASELINES)
def test_every_policy_decides(name: str, view: FleetView) -> None:
    expected = {
        # 16 decisions before this one, of 3 candidates
        "round-robin": 1,
        # in flight 10, 3, 3
        "join-shortest-queue": 1,
        "least-kv": 1,
        # 4 x 850 + 10 x 200 - 300 = 5100, 0 + 600 - 150 = 450, 600 + 600 - 50 = 1150
        "token-jsq": 1,
        "length-heuristic": 1,
        # 4 x 4 + 6 = 22, 4 x 0 + 3 = 3, 4 x (0 + 2) + 1 = 9
        "vllm-dp": 1,
        # tied slots 1 and 2, slot 16 % 3 = 1 is next in turn
        "least-conn": 1,
        # watermark 2: (98 - 2 - 108) / 10 = -1.2, (192 - 2) / 3 = 63.3, (32 - 2 - 20) / 3 = 3.3
        "freeness": 1,
        "infaas++": 1,
        "llumnix": 1,
        "llumnix-base": 1,
        # the head alone, over the batch: (98 - 27) / 6 = 11.8, 192 / 3 = 64, (32 - 10) / 1 = 22
        "llumnix-paper": 1,
        # (3400 + 640) x 10, (0 + 640) x 3 = 1920, (600 + 640 - 256) x 3 = 2952
        "lmetric": 1,
        # 256 of 640 tokens is more than 0.3
        "cache-aware": 2,
        # prefix 0, 0, 8 of 20 blocks; queue 0, 1, 1; kv 0.38, 0.75, 0.125: 2 x 0.4 + 1 + 0.125 is the most
        "llm-d": 2,
        # in 32nds: 3400 + 640 + 32 x 4 x 27 + 5400, 640 + 1950, 600 + 384 + 32 x 2 x 10 + 350
        "dynamo-kv": 2,
        # without constants of a profile all are done at once: fewest in flight
        "smetric": 1,
        # 8800, 1950, 950 tokens
        "balance-route": 2,
        # the first has no room; in flight 3, 3
        "past-future": 1,
        # 20 blocks fit in 98 - 108, 192, 32 - 20
        "polyserve": 1,
        # 4, 0, 2 wait
        "calibrated": 1,
        "splitwise": 1,
        # without constants of a profile all times are equal, and all decode something
        "mooncake": 0,
        "llumnix-v1": 0,
        "hpa-queue": 1,
        "hpa-kv": 1,
        "hpa-latency": 1,
    }
    (choice,) = load_policy(name).decide(view).choice
    assert choice in ([expected[name]] if name in expected else [0, 1, 2])
