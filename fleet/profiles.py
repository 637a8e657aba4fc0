"""Hardware profiles: one engine on one kind of hardware, as the simulator and the policies know it.

A profile is a TOML file: what runs where, the scheduler's limits, the KV capacity, the coefficients of the
iteration-time form (`fleetpilot.fleet.cost_model`) in milliseconds, and the provenance of all of it. In memory the
coefficients are in seconds. docs/profiles.md tells where the built-in ones come from and what they leave out.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fleetpilot.fleet.cost_model import COST, base_time_s, leap_end_s, tokens_per_step

SCHEDULERS = ("chunked", "prefill_first")
PROVENANCE_KEYS = ("cost", "fitted_range", "host_overhead", "kv_capacity", "scheduler", "not_covered")
"""What a profile must say about itself, a sentence or more under each key."""

_TIME_COEFFICIENTS = tuple(name for name in COST.names or () if name.endswith("_s"))
_COUNTS = (
    "tp",
    "block_size",
    "kv_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "kv_bytes_per_token",
)


@dataclass(frozen=True)
class HardwareProfile:
    """An engine's limits and the time of its iterations.

    Attributes:
        name: How users and result files call it: lower case, as in ``h100-llama-3.1-8b``.
        gpu: The accelerator, one of `tp`.
        model: The model that is served.
        tp: Tensor-parallel size: GPUs per instance.
        engine: The engine whose rules and limits are meant.
        scheduler: ``"chunked"`` (vLLM V1) or ``"prefill_first"`` (vLLM <= 0.1.7); docs/model.md.
        block_size: Tokens per KV block.
        kv_blocks: Usable KV blocks.
        max_num_seqs: Most requests in a batch.
        max_num_batched_tokens: Token budget of one iteration.
        max_model_len: Most tokens of a request, prompt and output.
        prefix_cache: Whether finished blocks can be reused by later requests.
        watermark: Fraction of the blocks that admission leaves free (0 with ``"chunked"``).
        kv_bytes_per_token: KV bytes of one token over all layers, each KV head counted once: what a transfer moves.
        a_s: Constant part of an iteration.
        w_s: Reading the weights once, the floor under the compute term.
        b_s: Per token computed.
        w_e_s: Reading all experts of a mixture of experts; 0 for dense models.
        expert_share: Experts per token over experts (k/E); 0 for dense models.
        c_s: Per unit of ``Q = sum of chunk * (context + chunk / 2)``.
        d_s: Per decode.
        e_s: Per KV token read by the decodes.
        host_step_s: Host overhead of an iteration.
        host_per_seq_s: Host overhead per decode.
        provenance: A text under each of `PROVENANCE_KEYS`.
        priority_order: Whether waiting and victims are ordered by priority rather than first come, first served.
        jitter_sigma: Sigma of the log-normal factor on an iteration's time; 0 for none.
        draft_tokens: Tokens that speculative decoding drafts per decode and iteration; 0 for none.
        acceptance: Probability that a draft token is right, those before it being right.
        draft_s: To draft, per iteration with decodes: a draft model's steps, or those of heads.
        draft_per_seq_s: To draft, per decode.
    """

    name: str
    gpu: str
    model: str
    tp: int
    engine: str
    scheduler: str
    block_size: int
    kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefix_cache: bool
    watermark: float
    kv_bytes_per_token: int
    a_s: float
    w_s: float
    b_s: float
    w_e_s: float
    expert_share: float
    c_s: float
    d_s: float
    e_s: float
    host_step_s: float
    host_per_seq_s: float
    provenance: Mapping[str, str] = field(hash=False, repr=False)
    priority_order: bool = False
    jitter_sigma: float = 0.0
    draft_tokens: int = 0
    acceptance: float = 0.0
    draft_s: float = 0.0
    draft_per_seq_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no engine could be.

        Raises:
            ValueError: Naming the field, its value and what was expected.
        """
        for name, (holds, expectation) in _KINDS.items():
            self._require(holds(getattr(self, name)), name, expectation)
        self._require(self.w_e_s == 0 or self.expert_share > 0, "expert_share", "> 0 where w_e is > 0")
        if all(getattr(self, name) == 0 for name in _TIME_COEFFICIENTS if name != "c_s"):
            self._fail("every cost coefficient but c", "0", "a decode step that takes time")
        self._check_scheduler_limits()
        self._check_provenance()

    def __hash__(self) -> int:  # of all fields it takes as long as 50 decisions of a dispatcher's
        return hash(self.name)

    def _check_scheduler_limits(self) -> None:
        if self.scheduler == "chunked":
            self._require(self.watermark == 0, "watermark", "0 with the chunked scheduler, which keeps none")
            times = f" x {1 + self.draft_tokens} (1 + draft_tokens)" if self.draft_tokens else ""
            self._require(
                self.max_num_batched_tokens > self.max_num_seqs * (1 + self.draft_tokens),
                "max_num_batched_tokens",
                f"> max_num_seqs ({self.max_num_seqs}){times}, or a full batch of decodes leaves no budget for prefill",
            )
        else:
            self._require(
                self.max_num_batched_tokens >= self.max_model_len,
                "max_num_batched_tokens",
                f">= max_model_len ({self.max_model_len}), as whole prompts must fit an iteration",
            )
        admissible_tokens = (self.kv_blocks - self.watermark_blocks) * self.block_size
        self._require(
            self.max_model_len <= admissible_tokens,
            "max_model_len",
            f"<= {admissible_tokens}, the tokens that the KV blocks hold above the watermark",
        )

    def _check_provenance(self) -> None:
        for key in PROVENANCE_KEYS:
            text = self.provenance.get(key)
            if not _is_text(text):
                self._fail(f"provenance.{key}", repr(text), "a text that says where this comes from")
        for key in self.provenance:
            if key not in PROVENANCE_KEYS:
                self._fail("provenance", repr(key), f"only the keys {', '.join(PROVENANCE_KEYS)}")

    def _require(self, holds: bool, name: str, expectation: str) -> None:
        if not holds:
            self._fail(name, repr(getattr(self, name)), expectation)

    def _fail(self, name: str, value: str, expectation: str) -> NoReturn:
        raise ValueError(f"profile {self.name!r}: {name} = {value}: expected {expectation}")

    @property
    def kv_capacity_tokens(self) -> int:
        """KV capacity in tokens."""
        return self.kv_blocks * self.block_size

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free."""
        return int(self.watermark * self.kv_blocks)

    def cost_record(self) -> NDArray[np.void]:
        """The (1,) record of `COST` that kernels take."""
        return np.array([tuple(getattr(self, name) for name in COST.names or ())], COST)

    def iteration_s(self, prefill_tokens: int, attention_tokens2: float, decodes: int, kv_tokens: float) -> float:
        """Time of one iteration without jitter, by the function that the simulator's kernel uses.

        Args:
            prefill_tokens: Prefill tokens computed (P).
            attention_tokens2: Sum over prefill chunks of ``chunk * (context + chunk / 2)``, tokens squared (Q).
            decodes: Requests that decode (B).
            kv_tokens: KV tokens that they read (K).

        Raises:
            ValueError: If one of them is negative.
        """
        if min(prefill_tokens, attention_tokens2, decodes, kv_tokens) < 0:
            raise ValueError(
                f"iteration_s({prefill_tokens}, {attention_tokens2}, {decodes}, {kv_tokens}): expected counts >= 0"
            )
        base_s = base_time_s(self.cost_record().view(np.recarray)[0], prefill_tokens, float(attention_tokens2), decodes)
        return float(leap_end_s(0.0, base_s, self.e_s, float(kv_tokens), decodes, 1))

    def prefill_s(self, prompt_tokens: int) -> float:
        """Time to prefill one prompt on an idle instance, in as many iterations as the token budget asks for.

        Raises:
            ValueError: If `prompt_tokens` is negative.
        """
        if prompt_tokens < 0:
            raise ValueError(f"prefill_s({prompt_tokens}): expected a count of tokens >= 0")
        full, rest = divmod(prompt_tokens, self.max_num_batched_tokens)
        time_s = full * self.iteration_s(self.max_num_batched_tokens, 0.0, 0, 0) if full else 0.0
        if rest:
            time_s += self.iteration_s(rest, 0.0, 0, 0)
        # However a prompt is cut, its chunks' Q add up to n^2 / 2.
        return time_s + self.c_s * prompt_tokens * prompt_tokens / 2

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """Time of a decode step of `batch` requests with `context_tokens` of context each."""
        return self.iteration_s(0, 0.0, batch, batch * context_tokens)

    @cached_property
    def prefill_s_per_token(self) -> float:
        """Prefill time per token of a 1,024-token prompt."""
        return self.prefill_s(1024) / 1024

    @cached_property
    def tokens_per_step(self) -> float:
        """Tokens that a decode generates in an iteration on average; 1 without speculative decoding."""
        return float(tokens_per_step(self.cost_record().view(np.recarray)[0]))

    @cached_property
    def decode_step_s(self) -> float:
        """Time per token in a batch of one with 1,024 tokens of context."""
        return self.decode_s(1, 1024) / self.tokens_per_step

    @cached_property
    def decode_s_per_seq(self) -> float:
        """Growth of the time per token per request, between batches of 1 and 32 with 1,024 tokens of context each."""
        return (self.decode_s(32, 1024) - self.decode_s(1, 1024)) / 31 / self.tokens_per_step

    def replace(self, **changes: Any) -> HardwareProfile:
        """A copy with some fields changed, validated as a whole.

        Raises:
            ValueError: If the result is no valid profile.
            TypeError: If there is no such field.
        """
        return dataclasses.replace(self, **changes)


_COST_KEYS = tuple(name.removesuffix("_s") + "_ms" if name in _TIME_COEFFICIENTS else name for name in COST.names or ())
_TABLES = {"cost": _COST_KEYS, "provenance": PROVENANCE_KEYS}
_FIELDS = {f.name: f for f in dataclasses.fields(HardwareProfile)}
_TOP_KEYS = tuple(name for name in _FIELDS if name not in (COST.names or ()) and name not in _TABLES)


def profile_from_dict(data: Mapping[str, Any], source: str = "profile") -> HardwareProfile:
    """The profile that a TOML file's content describes.

    Args:
        data: Top-level fields and the tables ``cost`` (coefficients in milliseconds) and ``provenance``.
        source: What errors call it: the file.

    Raises:
        ValueError: Naming source, field, value and expectation: a field missing or unknown, a value out of range.
    """
    cost = _table(data, "cost", source)
    _check_keys(data, (*_TOP_KEYS, *_TABLES), "", source)
    _check_keys(cost, _COST_KEYS, "cost.", source)
    values = {key: data[key] for key in (*_TOP_KEYS, "provenance") if key in data}
    values["provenance"] = dict(_table(data, "provenance", source))
    for key, value in cost.items():
        if not (_is_number(value) and value >= 0):
            raise ValueError(f"{source}: cost.{key} = {value!r}: expected a finite number >= 0")
        if key.endswith("_ms"):
            values[key.removesuffix("_ms") + "_s"] = value / 1e3
        else:
            values[key] = value
    try:
        return HardwareProfile(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _table(data: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    expectation = f"expected a table [{key}] of {', '.join(_TABLES[key])}"
    if key not in data:
        raise ValueError(f"{source}: {key} is missing: {expectation}")
    table = data[key]
    if not isinstance(table, Mapping):
        raise ValueError(f"{source}: {key} = {table!r}: {expectation}")
    return table


def _check_keys(data: Mapping[str, Any], known: tuple[str, ...], prefix: str, source: str) -> None:
    for key in data:
        if key not in known:
            fields = ", ".join(known)
            raise ValueError(f"{source}: {prefix}{key} = {data[key]!r}: unknown field: expected one of {fields}")
    for key in known:
        name = key.removesuffix("_ms") + "_s" if key.endswith("_ms") else key
        optional = name in _FIELDS and _FIELDS[name].default is not dataclasses.MISSING
        if key not in data and not optional:
            expectation = _KINDS[key.removesuffix("_ms") + "_s" if key.endswith("_ms") else key][1]
            raise ValueError(f"{source}: {prefix}{key} is missing: expected {expectation}")


def profile_to_toml(profile: HardwareProfile) -> str:
    """The profile as the text of a TOML file that `load_profile` reads back (coefficients to 12 digits)."""
    lines = [f"{key} = {_toml(getattr(profile, key))}" for key in _TOP_KEYS]
    lines += ["", "[cost]"]
    for name, key in zip(COST.names or (), _COST_KEYS, strict=True):
        value = getattr(profile, name)
        lines.append(f"{key} = {_toml(float(f'{value * 1e3:.12g}') if key.endswith('_ms') else value)}")
    lines += ["", "[provenance]"]
    lines += [f"{key} = {_toml(profile.provenance[key])}" for key in PROVENANCE_KEYS]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    return repr(value)


def list_profiles() -> tuple[str, ...]:
    """The names of the built-in profiles, sorted."""
    data = files("fleetpilot.fleet.data")
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in data.iterdir() if entry.name.endswith(".toml")))


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """A built-in profile by its name, or a profile of your own by the path of its TOML file.

    Raises:
        ValueError: If there is no such built-in profile, or the file is no valid profile.
        FileNotFoundError: If there is no such file.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".toml") or os.sep in text:
        source, content = text, _own_file(text)
    else:
        if text not in list_profiles():
            close = ", ".join(difflib.get_close_matches(text, list_profiles(), n=3) or list_profiles())
            raise ValueError(f"profile {text!r}: expected a built-in profile ({close}) or the path of a .toml file")
        source = f"{text}.toml"
        content = files("fleetpilot.fleet.data").joinpath(source).read_text(encoding="utf-8")
    try:
        data = tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: expected TOML: {error}") from None
    return profile_from_dict(data, source)


def _own_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected TOML, a text: {error}") from None


def profile_rows() -> list[dict[str, str]]:
    """What a table of the built-in profiles shows: one row a profile, column title to text."""
    rows = []
    for profile in map(load_profile, list_profiles()):
        row = {
            "profile": profile.name,
            "GPU": profile.gpu if profile.tp == 1 else f"{profile.tp} x {profile.gpu}",
            "engine": profile.engine,
            "scheduler": profile.scheduler,
            "KV tokens": f"{profile.kv_capacity_tokens:,}",
            "prefill 1,024 (ms)": f"{profile.prefill_s(1024) * 1e3:.1f}",
            "decode 1 x 1,024 (ms)": f"{profile.decode_s(1, 1024) * 1e3:.2f}",
            "decode 32 x 1,024 (ms)": f"{profile.decode_s(32, 1024) * 1e3:.2f}",
        }
        rows.append(row)
    return rows


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_COUNT


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


_LARGEST_COUNT = 2**31 - 1
_MOST_DRAFT_TOKENS = 63
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("name", "gpu", "model", "engine"), (_is_text, "a text that is not empty")),
    "draft_tokens": (
        lambda value: value == 0 or (_is_count(value) and value <= _MOST_DRAFT_TOKENS),
        f"a whole number from 0 to {_MOST_DRAFT_TOKENS}",
    ),
    "scheduler": (lambda value: value in SCHEDULERS, f"one of {', '.join(SCHEDULERS)}"),
    **dict.fromkeys(_COUNTS, (_is_count, f"a whole number from 1 to {_LARGEST_COUNT}")),
    **dict.fromkeys(("prefix_cache", "priority_order"), (lambda value: isinstance(value, bool), "true or false")),
    **dict.fromkeys(
        (*_TIME_COEFFICIENTS, "jitter_sigma"), (lambda value: _is_number(value) and value >= 0, "a finite number >= 0")
    ),
    **dict.fromkeys(
        ("expert_share", "watermark", "acceptance"),
        (lambda value: _is_number(value) and 0 <= value < 1, "a number in [0, 1)"),
    ),
}
"""By field: whether a value will do, and what will in words."""
