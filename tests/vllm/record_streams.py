"""Records vLLM's answers into tests/data/vllm_streams: `.venv/bin/python tests/vllm/record_streams.py`.

`make test` reads them, so that what is written for vLLM's streams is tested against vLLM's own bytes without vLLM.
"""

from __future__ import annotations

import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from engines import MODEL_NAME, ROOT, Engine, build_tiny_model

FOLDER = ROOT / "tests" / "data" / "vllm_streams"
COMMON: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
COMPLETION = COMMON | {"prompt": "Hello"}
CHAT = COMMON | {"messages": [{"role": "user", "content": "Hello"}]}
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
E_ACUTE = list("é".encode())
"""Token ids of the two halves of one character."""

BODIES: dict[str, dict[str, Any]] = {
    "completion": COMPLETION,
    "completion_ids": COMPLETION | {"return_token_ids": True},
    "completion_ids_usage": COMPLETION | {"return_token_ids": True} | USAGE,
    "completion_ids_continuous_usage": COMPLETION | {"return_token_ids": True} | CONTINUOUS_USAGE,
    "completion_ids_logprobs": COMPLETION | {"return_token_ids": True, "logprobs": 2},
    "completion_ids_stop": COMPLETION | {"return_token_ids": True, "stop": ["ZZZZ", "w +"]},
    "completion_ids_stop_included": COMPLETION
    | {"return_token_ids": True, "stop": ["w +"], "include_stop_str_in_output": True},
    "completion_ids_stop_token": COMPLETION | {"return_token_ids": True, "stop_token_ids": [479]},
    "completion_ids_split_characters": COMPLETION | {"return_token_ids": True, "allowed_token_ids": E_ACUTE},
    "completion_ids_unstreamed": COMPLETION | {"return_token_ids": True, "stream": False},
    "chat": CHAT,
    "chat_ids": CHAT | {"return_token_ids": True},
    "chat_ids_usage": CHAT | {"return_token_ids": True} | USAGE,
    "chat_ids_continuous_usage": CHAT | {"return_token_ids": True} | CONTINUOUS_USAGE,
    "chat_ids_logprobs": CHAT | {"return_token_ids": True, "logprobs": True, "top_logprobs": 2},
    "chat_ids_stop": CHAT | {"return_token_ids": True, "stop": ["is`"]},
    "chat_ids_unstreamed": CHAT | {"return_token_ids": True, "stream": False},
}
"""Name of the file (`chat...` or `completion...`) and the request."""


def answer(engine: Engine, name: str, body: dict[str, Any]) -> bytes:
    """The body of the engine's response."""
    path = "/v1/chat/completions" if name.startswith("chat") else "/v1/completions"
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    request = urllib.request.Request(engine.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return response.read()


def main() -> None:
    """Starts an engine and writes `NAME.txt`, as sent, and `NAME.json`, the request."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(build_tiny_model(Path(folder) / "model"), Path(folder))
        try:
            engine.start()
            for name, body in BODIES.items():
                (FOLDER / f"{name}.json").write_text(json.dumps(body) + "\n")
                (FOLDER / f"{name}.txt").write_bytes(answer(engine, name, body))
        finally:
            engine.stop()


if __name__ == "__main__":
    main()
