"""What the dispatcher needs of stock vLLM, asked of vLLM itself: a failure here explains others."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any

import pytest
from engines import BLOCK_TOKENS, MODEL_NAME, Engine

GREEDY: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT_IDS = [97 + i * i % 23 for i in range(300)]
PIN = {"do_remote_decode": True, "do_remote_prefill": False}


def post(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to an unstreamed completion."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{engine.url}/v1/completions", json.dumps(GREEDY | body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def prompt_tokens_from(engine: Engine, source: str) -> float:
    """vLLM's count of prompt tokens by where their KV came from."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=120) as response:
        text = response.read().decode()
    found = re.search(rf'^vllm:prompt_tokens_by_source_total{{.*source="{source}".*}} (.*)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_greedy_output_is_the_same_on_both_engines_and_no_loop(engines: tuple[Engine, Engine]) -> None:
    ids = [post(engine, {"prompt": PROMPT_IDS, "max_tokens": 100})["choices"][0]["token_ids"] for engine in engines]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 100
    assert len({tuple(ids[0][i : i + 3]) for i in range(98)}) > 60


def test_pinned_blocks_are_copied_and_the_answer_goes_on_as_it_would_have(engines: tuple[Engine, Engine]) -> None:
    source, destination = engines
    prompt = [98, *PROMPT_IDS]  # no test before this one sent it: while a lease lasts, caches cannot be emptied
    whole = post(source, {"prompt": prompt, "max_tokens": 40})["choices"][0]["token_ids"]
    so_far = prompt + whole[:15]
    probe = post(source, {"prompt": so_far, "max_tokens": 1, "priority": -10, "kv_transfer_params": PIN})
    copied_before = prompt_tokens_from(destination, "external_kv_transfer")
    post(destination, {"prompt": so_far, "max_tokens": 1, "kv_transfer_params": probe["kv_transfer_params"]})
    assert prompt_tokens_from(destination, "external_kv_transfer") - copied_before == len(so_far)
    cached_before = prompt_tokens_from(destination, "local_cache_hit")
    rest = post(destination, {"prompt": so_far, "max_tokens": 25})["choices"][0]["token_ids"]
    assert whole[:15] + rest == whole
    whole_blocks_tokens = len(so_far) // BLOCK_TOKENS * BLOCK_TOKENS
    assert prompt_tokens_from(destination, "local_cache_hit") - cached_before == whole_blocks_tokens


def test_a_copy_from_a_dead_source_fails_and_harms_nothing(engines: tuple[Engine, Engine]) -> None:
    source, destination = engines
    expected = post(destination, {"prompt": PROMPT_IDS, "max_tokens": 5})["choices"][0]["token_ids"]
    destination.reset()
    probe = post(source, {"prompt": PROMPT_IDS, "max_tokens": 1, "kv_transfer_params": PIN})
    source.kill()
    with pytest.raises(urllib.error.HTTPError, match="500"):
        post(destination, {"prompt": PROMPT_IDS, "max_tokens": 1, "kv_transfer_params": probe["kv_transfer_params"]})
    assert post(destination, {"prompt": PROMPT_IDS, "max_tokens": 5})["choices"][0]["token_ids"] == expected
