"""Builds the model of the comparison: `.venv-vllm/bin/python benchmarks/vllm/_model.py FOLDER`.

That of the tests with 22 million parameters instead of 2.6: a step then takes tens of milliseconds on one core, and
what the client, the dispatcher and the engine's HTTP server take of the same cores weighs little beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "vllm"))
from tiny_model import MAX_CONTEXT_TOKENS, VOCABULARY_TOKENS, WEIGHT_SCALE, build_tokenizer


def build(folder: Path) -> None:
    """Writes the model into `folder`, once."""
    if (folder / "finished").exists():
        return
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        initializer_range=WEIGHT_SCALE,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    torch.manual_seed(20250101)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "finished").touch()


if __name__ == "__main__":
    build(Path(sys.argv[1]))
