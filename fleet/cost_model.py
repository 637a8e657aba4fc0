"""The iteration-time form: how long one iteration of an engine takes, and the end of the j-th of a row of decodes.

    t = a + max(w, b T) + w_e (1 - (1 - k/E)^T) + c Q + d B + e K + host_step + host_per_seq B,  T = P + B

P prefill tokens, Q = sum of chunk * (context + chunk / 2), B decodes, K the KV tokens that they read. The hinge
(reading the weights against computing on them) and the saturating expert term follow the fits in the profiles'
sources. With speculative decoding each decode computes its draft tokens too, T = P + B (1 + draft_tokens), and to draft
them takes draft + draft_per_seq B more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleetpilot.fleet.jit import inlined

COST = np.dtype(
    [
        ("a_s", "f8"),  # constant
        ("w_s", "f8"),  # reading the weights once
        ("b_s", "f8"),  # per token computed
        ("w_e_s", "f8"),  # reading all experts (MoE), 0 for dense models
        ("expert_share", "f8"),  # k/E: experts per token over experts
        ("c_s", "f8"),  # per token of Q
        ("d_s", "f8"),  # per decode
        ("e_s", "f8"),  # per KV token read
        ("host_step_s", "f8"),
        ("host_per_seq_s", "f8"),
        ("jitter_sigma", "f8"),  # of the log-normal factor, 0 for none
        ("draft_tokens", "i8"),  # of each decode in an iteration, 0 without speculative decoding
        ("acceptance", "f8"),  # probability that a draft token is right, those before it being right
        ("draft_s", "f8"),  # to draft, in an iteration with decodes
        ("draft_per_seq_s", "f8"),  # to draft, per decode
    ],
    align=True,
)


@inlined
def base_time_s(cost: Any, prefill_tokens: int, attention_tokens2: float, decodes: int) -> float:
    """The terms of an iteration's time that do not depend on the decodes' KV tokens."""
    tokens = prefill_tokens + decodes * (1 + cost.draft_tokens)
    time_s = cost.a_s + max(cost.w_s, cost.b_s * tokens) + cost.c_s * attention_tokens2
    time_s += cost.d_s * decodes + cost.host_step_s + cost.host_per_seq_s * decodes
    if cost.w_e_s > 0.0:
        time_s += cost.w_e_s * (1.0 - (1.0 - cost.expert_share) ** tokens)
    if cost.draft_tokens > 0 and decodes > 0:
        time_s += cost.draft_s + cost.draft_per_seq_s * decodes
    return time_s


@inlined
def tokens_per_step(cost: Any) -> float:
    """Tokens that a decode generates in an iteration on average: 1 + a + a^2 + ... + a^draft_tokens."""
    tokens = 1.0
    for _ in range(cost.draft_tokens):
        tokens = 1.0 + cost.acceptance * tokens
    return tokens


@inlined
def leap_end_s(anchor_s: float, base_s: float, e_s: float, kv_tokens: float, decodes: int, steps: int) -> float:
    """The end of the `steps`-th iteration of an unchanged batch that read `kv_tokens` in its first one."""
    j = np.float64(steps)
    return anchor_s + j * base_s + e_s * (j * kv_tokens + decodes * (j * (j - 1.0) * 0.5))
