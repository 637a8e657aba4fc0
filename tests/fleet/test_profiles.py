"""Hardware profiles: the built-in ones hold what their sources say, and a wrong one is refused with a reason."""

from __future__ import annotations

import math
import pickle
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fleetpilot.fleet.data as data_package
from fleetpilot.fleet.cost_model import COST, base_time_s, leap_end_s
from fleetpilot.fleet.profiles import (
    HardwareProfile,
    list_profiles,
    load_profile,
    profile_from_dict,
    profile_rows,
    profile_to_toml,
)
from fleetpilot.fleet.slo import CHAT, LENGTH_SCALED, LOOSE, SLO_CLASSES, TIGHT, SLOClass

PROFILES = {name: load_profile(name) for name in list_profiles()}
every_profile = pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
DOCS = Path(__file__).parents[2] / "docs" / "profiles.md"


def toml_of(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(data_package.__path__[0]) / f"{name}.toml").read_text(encoding="utf-8"))


# --- the files --------------------------------------------------------------------------------------------------------


def test_the_profiles_that_users_expect_are_there() -> None:
    expected = {
        "a10-llama-7b",
        "a10-llama-7b-13616",
        "a10-llama-30b-tp4",
        "a40-qwen2.5-3b",
        "tiny-cpu",
        "a100-llama-2-7b",
        "h100-llama-3.1-8b",
        "h100-llama-3.1-70b-tp4",
        "b200-qwen3-30b-a3b",
        "h200-qwen3-235b-a22b-tp8",
        "l40s-llama-3.1-8b",
    }
    assert expected <= set(PROFILES)
    assert not [name for name in PROFILES if name.startswith("l40s") and name.endswith(("tp4", "tp8"))]


@every_profile
def test_every_file_is_a_profile_of_its_name_and_survives_a_round_trip(profile: HardwareProfile) -> None:
    assert load_profile(profile.name) is not profile
    assert profile_from_dict(tomllib.loads(profile_to_toml(profile))) == profile
    assert profile_from_dict(toml_of(profile.name)).name == profile.name
    assert profile.tp == 1 or profile.name.endswith(f"-tp{profile.tp}")
    assert pickle.loads(pickle.dumps(profile)) == profile


def test_a_file_of_ones_own_loads_by_its_path(tmp_path: Path) -> None:
    mine = PROFILES["tiny-cpu"].replace(name="mine", kv_blocks=300, jitter_sigma=0.1)
    path = tmp_path / "mine.toml"
    path.write_text(profile_to_toml(mine), encoding="utf-8")
    assert load_profile(path) == load_profile(str(path)) == mine


@pytest.mark.parametrize(
    ("name", "expected_ms"),
    [
        (
            "h100-llama-3.1-8b",
            {"a": 3.36597, "w": 3.33443, "b": 0.0189456, "c": 8.45787e-07, "d": 0.00675706, "e": 4.03145e-05},
        ),
        (
            "a100-llama-3.1-70b-tp4",
            {"a": 19.4577, "w": 9.8305, "b": 0.153602, "c": 3.35249e-06, "d": 0.00173828, "e": 6.40823e-05},
        ),
        (
            "b200-llama-3.1-8b",
            {"a": 2.76022, "w": 0.740558, "b": 0.00925697, "c": 3.8372e-07, "d": 0.0, "e": 1.821e-05},
        ),
        (
            "h100-llama-2-7b",
            {"a": 5.9867, "w": 0.0222206, "b": 0.0222206, "c": 4.38211e-06, "d": 0.00400699, "e": 0.000291662},
        ),
        (
            "h100-qwen3-30b-a3b",
            {"a": 3.50694, "w": 0, "w_e": 17.6026, "b": 0.0129463, "c": 7.9176e-07, "d": 0.00845975, "e": 2.7479e-05},
        ),
    ],
)
def test_coefficients_are_the_databases(name: str, expected_ms: dict[str, float]) -> None:
    profile = PROFILES[name]
    for key, value_ms in expected_ms.items():
        assert getattr(profile, f"{key}_s") == pytest.approx(value_ms * 1e-3, rel=1e-9)
    assert (profile.host_step_s, profile.host_per_seq_s) == pytest.approx((126e-6, 4.42e-6))
    assert profile.expert_share == (8 / 128 if "a3b" in name else 0)


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [("a100-llama-3.1-8b", (12.0909, 15.0066, 26.675)), ("h200-llama-3.1-8b", (5.2253, 6.3518, 9.84034))],
)
def test_decode_steps_agree_with_the_source_less_the_host(name: str, milliseconds: tuple[float, ...]) -> None:
    """Steps of 1, 32 and 128 requests with 1,024 tokens each, as the source's own cross-check computes them."""
    kernels = PROFILES[name].replace(host_step_s=0.0, host_per_seq_s=0.0)
    for batch, time_ms in zip((1, 32, 128), milliseconds, strict=True):
        assert kernels.decode_s(batch, 1024) * 1e3 == pytest.approx(time_ms, rel=1e-4)


# --- the engines that were measured by hand ---------------------------------------------------------------------------


def test_the_a10_reproduces_figure_10_of_llumnix() -> None:
    profile = PROFILES["a10-llama-7b-vllm0.2"]
    for prompt, time_ms in {256: 58, 512: 110, 1024: 220, 2048: 436, 4096: 940, 8192: 1995}.items():
        assert profile.prefill_s(prompt) * 1e3 == pytest.approx(time_ms, rel=0.02)
        assert PROFILES["a10-llama-7b"].prefill_s(prompt) == profile.prefill_s(prompt)
    for batch, step_ms in {1: 43.6, 2: 42.9, 4: 42.9, 8: 43.3, 16: 44.4, 32: 46.8}.items():
        assert profile.decode_s(batch, 8192 // batch) * 1e3 == pytest.approx(step_ms, rel=0.02)


def test_the_a10_of_figure_11_decodes_as_its_constants_say() -> None:
    for name, base_ms in {"a10-llama-7b": 43, "a10-llama-7b-13616": 43, "a10-llama-7b-base41": 41}.items():
        assert PROFILES[name].decode_s(16, 512) * 1e3 == pytest.approx(base_ms + 0.35 * 16 + 0.00087 * 8192, rel=1e-9)
    assert PROFILES["a10-llama-7b"].kv_capacity_tokens == 12_672
    assert PROFILES["a10-llama-7b-13616"].kv_capacity_tokens == 13_616


def test_a_short_prefill_reads_the_weights_too() -> None:
    profile = PROFILES["a10-llama-7b"]
    assert profile.prefill_s(1) * 1e3 == pytest.approx(43, rel=1e-3)
    assert profile.prefill_s(1) <= profile.prefill_s(100) < profile.prefill_s(256)


def test_the_30b_model_is_within_the_errors_it_states() -> None:
    profile = PROFILES["a10-llama-30b-tp4"]
    for prompt, time_ms in {256: 115, 512: 235, 1024: 443, 2048: 829, 4096: 1712, 8192: 3546}.items():
        assert profile.prefill_s(prompt) * 1e3 == pytest.approx(time_ms, rel=0.05)
    for batch, step_ms in {1: 65.8, 2: 60.6, 4: 58.9, 8: 59.2, 16: 61.8, 32: 65.7}.items():
        assert profile.decode_s(batch, 8192 // batch) * 1e3 == pytest.approx(step_ms, rel=0.08)
    assert profile.kv_bytes_per_token == pytest.approx(1.52 * 2**20, rel=0.003)


def test_the_a40_keeps_the_physics_it_was_derived_from() -> None:
    profile = PROFILES["a40-qwen2.5-3b"]
    assert profile.kv_capacity_tokens == 60_000
    assert profile.kv_bytes_per_token == 36 * 1024
    assert profile.prefill_s_per_token == pytest.approx(57e-6, rel=0.15)
    assert profile.decode_step_s > 8.9e-3
    assert profile.prefill_s(4096) > 0.175


def test_the_tiny_engine_is_within_the_errors_it_states() -> None:
    profile = PROFILES["tiny-cpu"]
    errors = [profile.prefill_s(n) * 1e3 / t - 1 for n, t in {512: 65, 1024: 163, 2048: 440, 4096: 1350}.items()]
    for context, steps_ms in {
        128: {1: 4.8, 4: 6.8, 8: 8.2, 16: 10.8},
        1024: {1: 5.1, 4: 8.9, 8: 12.1, 16: 22.3},
    }.items():
        errors += [profile.decode_s(batch, context) * 1e3 / t - 1 for batch, t in steps_ms.items()]
    errors.append(profile.prefill_s(64) * 1e3 / 23 - 1)
    assert np.abs(errors[:-1]).max() < 0.17
    assert errors[-1] == pytest.approx(-0.47, abs=0.01)
    assert f"{np.median(np.abs(errors)):.1%}" in profile.provenance["cost"]
    assert (profile.kv_blocks, profile.block_size) == (511, 32)


# --- KV capacity, by hand ---------------------------------------------------------------------------------------------


def test_kv_capacity_of_one_gpu() -> None:
    """Llama-3.1-8B on an H100: 32 layers, 8 KV heads of 128, 2 bytes; within 2 % of the 53.29 GiB that vLLM logs."""
    per_token = 2 * 32 * 8 * 128 * 2
    free = 0.9 * 81_559 * 2**20 - 8_030_261_248 * 2 - 3 * 2**30
    profile = PROFILES["h100-llama-3.1-8b"]
    assert profile.kv_bytes_per_token == per_token == 131_072
    assert profile.kv_blocks == free // (per_token * 16) - 1 == 27_506
    assert profile.kv_capacity_tokens * per_token == pytest.approx(53.29 * 2**30, rel=0.02)


def test_kv_capacity_with_more_gpus_than_kv_heads() -> None:
    """Qwen3-235B-A22B on 8 H100: 4 KV heads, so each GPU holds one and every head lies on two GPUs."""
    per_token_and_gpu = 2 * 94 * 1 * 128 * 2
    free = 0.9 * 81_559 * 2**20 - 235_093_634_560 * 2 / 8 - 3 * 2**30
    profile = PROFILES["h100-qwen3-235b-a22b-tp8"]
    assert profile.kv_blocks == free // (per_token_and_gpu * 16) - 1 == 19_444
    assert profile.kv_bytes_per_token == 4 * per_token_and_gpu


# --- the form ---------------------------------------------------------------------------------------------------------


@every_profile
def test_times_are_finite_and_positive_far_outside_the_fitted_range(profile: HardwareProfile) -> None:
    for count in (0, 1, 10**6, 10**12):
        assert 0 < profile.iteration_s(count, float(count) ** 2, count, count) < math.inf
        assert 0 <= profile.prefill_s(count) < math.inf
    assert 0 < profile.decode_s(1, 0) < profile.decode_s(10**6, 10**6) < math.inf
    assert min(profile.prefill_s_per_token, profile.decode_step_s, profile.decode_s_per_seq) > 0


counts = st.integers(0, 50_000)


@given(st.sampled_from(sorted(PROFILES)), counts, counts, counts, counts, st.integers(0, 3), st.integers(1, 20_000))
def test_more_work_never_takes_less_time(
    name: str, prefill: int, attention: int, decodes: int, kv: int, which: int, more: int
) -> None:
    work = [prefill, attention, decodes, kv]
    before_s = PROFILES[name].iteration_s(*work)
    work[which] += more
    assert PROFILES[name].iteration_s(*work) >= before_s


@given(st.sampled_from(sorted(PROFILES)), st.integers(1, 30_000))
def test_a_prompt_takes_the_iterations_that_its_chunks_take(name: str, prompt: int) -> None:
    profile = PROFILES[name]
    time_s, context = 0.0, 0
    while context < prompt:
        chunk = min(profile.max_num_batched_tokens, prompt - context)
        time_s += profile.iteration_s(chunk, chunk * (context + chunk / 2), 0, 0)
        context += chunk
    assert profile.prefill_s(prompt) == pytest.approx(time_s, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in PROFILES if "-a3b" in name or "-a22b" in name])
def test_the_experts_saturate(name: str) -> None:
    """A mixture of experts reads more experts with each request until all are read: the step grows ever more slowly."""
    profile = PROFILES[name].replace(b_s=0.0, d_s=0.0, e_s=0.0, host_per_seq_s=0.0)
    steps_s = np.array([profile.decode_s(batch, 1) for batch in range(1, 2000)])
    growth_s = np.diff(steps_s)
    assert (np.diff(growth_s) <= 1e-15).all()
    assert growth_s[0] == pytest.approx(profile.w_e_s * (1 / 16) * (15 / 16))
    assert steps_s[-1] == pytest.approx(profile.a_s + profile.w_e_s + profile.host_step_s)


@every_profile
def test_the_record_is_what_kernels_compute_with(profile: HardwareProfile) -> None:
    record = profile.cost_record()
    assert (record.dtype, record.shape) == (COST, (1,))
    base_s = base_time_s(record[0], 300, 45_000.0, 7)
    expected_s = leap_end_s(0.0, base_s, record[0]["e_s"], 9_000.0, 7, 1)
    assert profile.iteration_s(300, 45_000.0, 7, 9_000) == expected_s
    by_hand_s = profile.a_s + max(profile.w_s, profile.b_s * 307)
    by_hand_s += profile.w_e_s * (1 - (1 - profile.expert_share) ** 307) + profile.c_s * 45_000 + profile.d_s * 7
    by_hand_s += profile.e_s * 9_000 + profile.host_step_s + profile.host_per_seq_s * 7
    assert expected_s == pytest.approx(by_hand_s, rel=1e-12)


def test_speculative_decoding_costs_and_pays() -> None:
    plain = PROFILES["h100-llama-3.1-8b"]
    changes = {"draft_tokens": 3, "acceptance": 0.5, "draft_s": 0.002, "draft_per_seq_s": 0.0001}
    drafting = plain.replace(**changes, max_num_seqs=256)
    assert (plain.tokens_per_step, drafting.tokens_per_step) == (1.0, 1 + 0.5 + 0.25 + 0.125)
    assert drafting.iteration_s(500, 0.0, 0, 0) == plain.iteration_s(500, 0.0, 0, 0)
    # 8 decodes compute as many tokens as 32, but 24 of these cost neither `d` nor `host_per_seq`
    more_s = 0.002 + 8 * 0.0001 - 24 * (plain.d_s + plain.host_per_seq_s)
    assert drafting.iteration_s(500, 0.0, 8, 9_000) == pytest.approx(plain.iteration_s(500, 0.0, 32, 9_000) + more_s)
    assert drafting.decode_step_s == pytest.approx(drafting.decode_s(1, 1024) / 1.875)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_blocks": 0}, r"kv_blocks = 0: expected a whole number from 1 to 2147483647"),
        ({"kv_blocks": 10**30}, r"kv_blocks = 10+: expected a whole number from 1 to 2147483647"),
        ({"a_s": 10**400}, r"a_s = 10+: expected a finite number >= 0"),
        ({"tp": 1.5}, r"tp = 1.5: expected a whole number from 1"),
        ({"gpu": " "}, r"gpu = ' ': expected a text"),
        ({"prefix_cache": 1}, r"prefix_cache = 1: expected true or false"),
        ({"scheduler": "fcfs"}, r"scheduler = 'fcfs': expected one of chunked, prefill_first"),
        ({"watermark": 0.01}, r"watermark = 0.01: expected 0 with the chunked scheduler"),
        ({"max_num_batched_tokens": 1024}, r"max_num_batched_tokens = 1024: expected > max_num_seqs \(1024\)"),
        ({"max_model_len": 440_112}, r"max_model_len = 440112: expected <= 440096"),
        ({"a_s": math.nan}, r"a_s = nan: expected a finite number >= 0"),
        ({"jitter_sigma": -0.1}, r"jitter_sigma = -0.1: expected a finite number >= 0"),
        ({"draft_tokens": 64}, r"draft_tokens = 64: expected a whole number from 0 to 63"),
        (
            {"draft_tokens": 7},
            r"max_num_batched_tokens = 8192: expected > max_num_seqs \(1024\) x 8 \(1 \+ draft_tokens\)",
        ),
        ({"acceptance": 1.0}, r"acceptance = 1.0: expected a number in \[0, 1\)"),
        ({"w_e_s": 0.01}, r"expert_share = 0.0: expected > 0 where w_e is > 0"),
        ({"expert_share": 1.5}, r"expert_share = 1.5: expected a number in \[0, 1\)"),
        ({"provenance": {}}, r"provenance.cost = None: expected a text"),
        (dict.fromkeys(("a_s", "w_s", "b_s", "d_s", "e_s", "host_step_s", "host_per_seq_s"), 0.0), r"takes time"),
    ],
)
def test_an_impossible_profile_is_refused_by_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"profile 'h100-llama-3.1-8b': .*{message}"):
        PROFILES["h100-llama-3.1-8b"].replace(**changes)


def test_whole_prompts_must_fit_an_iteration_and_stay_above_the_watermark() -> None:
    profile = PROFILES["a10-llama-7b"]
    with pytest.raises(ValueError, match=r"max_num_batched_tokens = 12000: expected >= max_model_len \(12288\)"):
        profile.replace(max_num_batched_tokens=12_000)
    # 792 blocks less floor(1 %) = 7 hold 12,560 tokens.
    assert profile.replace(max_model_len=12_560).watermark_blocks == 7
    with pytest.raises(ValueError, match=r"max_model_len = 12561: expected <= 12560"):
        profile.replace(max_model_len=12_561)


def test_a_wrong_file_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    text = profile_to_toml(PROFILES["tiny-cpu"])
    for old, new, message in (
        ("a_ms = 4.609", "a_ms = -1", r"wrong.toml: cost.a_ms = -1: expected a finite number >= 0"),
        ("a_ms = 4.609", "a_ms = nan", r"wrong.toml: cost.a_ms = nan: expected a finite number >= 0"),
        ("a_ms = 4.609", "", r"wrong.toml: cost.a_ms is missing: expected a finite number >= 0"),
        ("a_ms = 4.609", "a_ms = 1\na_s = 1", r"wrong.toml: cost.a_s = 1: unknown field: expected one of a_ms, "),
        ("tp = 1", "tp = 1\npp = 2", r"wrong.toml: pp = 2: unknown field"),
        ("tp = 1\n", "", r"wrong.toml: tp is missing: expected a whole number from 1"),
        ('name = "tiny-cpu"', "", r"wrong.toml: name is missing: expected a text that is not empty"),
        ("[cost]", "[costs]", r"wrong.toml: cost is missing: expected a table \[cost\] of a_ms, w_ms"),
        (
            "block_size = 32",
            "block_size = 0",
            r"wrong.toml: profile 'tiny-cpu': block_size = 0: expected a whole number",
        ),
        ("fitted_range =", "range =", r"wrong.toml: profile 'tiny-cpu': provenance.fitted_range = None"),
        ("tp = 1", "tp = ", r"wrong.toml: expected TOML"),
    ):
        assert old in text
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load_profile(path)


def test_a_table_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    top, _, _ = profile_to_toml(PROFILES["tiny-cpu"]).partition("[provenance]")
    path.write_text(f"provenance = 'wat'\n{top}", encoding="utf-8")
    expected = r"wrong.toml: provenance = 'wat': expected a table \[provenance\] of cost, fitted_range"
    with pytest.raises(ValueError, match=expected):
        load_profile(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a = " + 100_000 * b"[", b"a = " + 5_000 * b"9"])
def test_what_is_no_toml_is_refused_by_its_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"wrong\.toml: expected TOML"):
        load_profile(path)


def test_an_unknown_profile_names_those_that_are_close() -> None:
    with pytest.raises(ValueError, match=r"profile 'h100-llama-8b': expected a built-in profile \(h100-llama-"):
        load_profile("h100-llama-8b")


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"iteration_s\(-1, 0.0, 0, 0\): expected counts >= 0"):
        PROFILES["tiny-cpu"].iteration_s(-1, 0.0, 0, 0)
    with pytest.raises(ValueError, match=r"expected counts >= 0"):
        PROFILES["tiny-cpu"].decode_s(-1, 10)
    with pytest.raises(ValueError, match=r"prefill_s\(-5\): expected"):
        PROFILES["tiny-cpu"].prefill_s(-5)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_table_of_the_profiles() -> None:
    rows = profile_rows()
    assert [row["profile"] for row in rows] == list(list_profiles())
    page = DOCS.read_text(encoding="utf-8")
    assert "| " + " | ".join(rows[0]) + " |" in page
    for row in rows:
        assert "| " + " | ".join(row.values()) + " |" in page


# --- SLO classes ------------------------------------------------------------------------------------------------------


def test_the_presets_are_their_sources_targets() -> None:
    assert (TIGHT.ttft_target_s(10_000), TIGHT.tpot_s) == (0.175, 0.0397)
    assert (LOOSE.ttft_target_s(0), LOOSE.tpot_s) == pytest.approx((0.525, 0.1191))
    assert LENGTH_SCALED.ttft_target_s(0) == 1.0
    assert LENGTH_SCALED.ttft_target_s(8_000) == pytest.approx(1.5)
    assert LENGTH_SCALED.tpot_s == 0.020
    assert (CHAT.ttft_target_s(500), CHAT.tpot_s) == (2.0, 0.1)
    assert {name: slo.name for name, slo in SLO_CLASSES.items()} == {name: name for name in SLO_CLASSES}


def test_impossible_targets_are_refused() -> None:
    assert SLOClass("batch", ttft_s=math.inf, tpot_s=math.inf).ttft_target_s(100) == math.inf
    with pytest.raises(ValueError, match=r"SLO class 'x': ttft_s = 0: expected a time > 0"):
        SLOClass("x", ttft_s=0, tpot_s=1)
    with pytest.raises(ValueError, match=r"SLO class 'x': tpot_s = nan: expected a time > 0"):
        SLOClass("x", ttft_s=1, tpot_s=math.nan)
    with pytest.raises(ValueError, match=r"ttft_s_per_prompt_token = -1: expected a finite time >= 0"):
        SLOClass("x", ttft_s=1, tpot_s=1, ttft_s_per_prompt_token=-1)
