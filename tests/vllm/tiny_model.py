"""Builds the tiny Llama that the tests' engines serve: `.venv-vllm/bin/python tests/vllm/tiny_model.py FOLDER`.

No weights can be downloaded where the tests run, and none are needed: what a migration must keep is the engine's state,
not its sense. The weights are random from a fixed seed and scaled so that greedy output depends on the whole context
(it does not fall into a loop), is mostly printable, with some broken characters, and does not end by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY_TOKENS = 512
MAX_CONTEXT_TOKENS = 8192
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
PAIRED_LETTERS = "etaoinshrdlucmfw"
WEIGHT_SCALE = 0.08
"""Standard deviation of the weights: with the usual 0.02 the context hardly matters and greedy output is one loop."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_names() -> list[str]:
    """How byte-level tokenizers write each byte: as itself where it is printable, else as a character from 256 on."""
    printable = {ord(name) for name in pre_tokenizers.ByteLevel.alphabet()}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: id = byte for 0-255, then pairs of common letters, then the special tokens."""
    tokens = byte_names()
    n_pairs = VOCABULARY_TOKENS - len(tokens) - len(SPECIAL_TOKENS)
    pairs = [(first, second) for first in PAIRED_LETTERS for second in PAIRED_LETTERS][:n_pairs]
    tokens += [first + second for first, second in pairs] + SPECIAL_TOKENS
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        model_max_length=MAX_CONTEXT_TOKENS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """2.6 million parameters; special tokens are never the likeliest, unprintable bytes seldom."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_TOKENS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        initializer_range=WEIGHT_SCALE,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    torch.manual_seed(20250101)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[-len(SPECIAL_TOKENS) :] = 0
        model.lm_head.weight[[byte for byte in range(256) if not 32 <= byte < 127]] *= 0.6
    return model


def build(folder: Path) -> None:
    """Writes the model into `folder`, once: a finished folder is left as it is."""
    if (folder / "finished").exists():
        return
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "finished").touch()


if __name__ == "__main__":
    build(Path(sys.argv[1]))
