"""The iteration-time form: how long one iteration of an engine takes, and the end of the j-th of a row of decodes.

    t = a + max(w, b (P + B)) + w_e (1 - (1 - k/E)^(P + B)) + c Q + d B + e K + host_step + host_per_seq B

P prefill tokens, Q = sum of chunk * (context + chunk / 2), B decodes, K the KV tokens that they read. The hinge
(reading the weights against computing on them) and the saturating expert term follow the fits in the profiles'
sources.
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
    ],
    align=True,
)


@inlined
def base_time_s(cost: Any, prefill_tokens: int, attention_tokens2: float, decodes: int) -> float:
    """The terms of an iteration's time that do not depend on the decodes' KV tokens."""
    tokens = prefill_tokens + decodes
    time_s = cost.a_s + max(cost.w_s, cost.b_s * tokens) + cost.c_s * attention_tokens2
    time_s += cost.d_s * decodes + cost.host_step_s + cost.host_per_seq_s * decodes
    if cost.w_e_s > 0.0:
        time_s += cost.w_e_s * (1.0 - (1.0 - cost.expert_share) ** tokens)
    return time_s


@inlined
def leap_end_s(anchor_s: float, base_s: float, e_s: float, kv_tokens: float, decodes: int, steps: int) -> float:
    """The end of the `steps`-th iteration of an unchanged batch that read `kv_tokens` in its first one."""
    j = np.float64(steps)
    return anchor_s + j * base_s + e_s * (j * kv_tokens + decodes * (j * (j - 1.0) * 0.5))
