"""The network of a learned policy: one scorer, shared by all instances and all kinds of decision.

Each instance is scored from its own features, those of the request, the fleet and the kind of decision, and a summary
of all instances (mean and maximum of their embeddings). There are no identities and no weights that belong to a slot,
so permuting the instances permutes their scores, and the fleet may have any size.

Whether to choose an instance at all is one number, the *gate*: the log odds of none, apart from the scores. The
probability of none so does not depend on how many instances there are, and begins where an untrained policy does no
harm: it dispatches, and neither moves nor scales.

======================  ============================================================================
``embedding`` (B,N,H)   ``relu(instances W + [request, fleet, kind] W' + b)``
``context`` (B,H)       ``relu([mean(embedding), max(embedding), request, fleet, kind] W + b)``
``score`` (B,N)         ``relu(embedding W + context W' + b) w``
``gate`` (B,)           ``relu(context W + b) w + bias(kind)``
``logits`` (B,N+1)      the scores, then ``gate + logsumexp(scores)`` of the legal instances
======================  ============================================================================

Mean and maximum are over slots that hold an instance. Illegal choices have a logit of -1e8: not -inf, whose entropy
would be NaN. `fleetpilot.agents.inference` is the same in compiled loops.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetpilot.agents.schema import ILLEGAL, PRESENT, Sizes
from fleetpilot.fleet.features import KINDS

HIDDEN = 32
GATE_BIAS = {"dispatch": -5.0, "prefill": -5.0, "decode": -5.0, "source": 3.0, "destination": -3.0, "scale": 3.0}
"""Log odds of none before training."""


class Scored(NamedTuple):
    """What the network says of a batch."""

    logits: Tensor  # (B, N + 1) of the instances, last of none
    context: Tensor  # (B, H) the fleet as a whole, for a critic


class SetScorer(nn.Module):
    """See the module.

    Args:
        sizes: of the features.
        hidden: H.
    """

    def __init__(self, sizes: Sizes, hidden: int = HIDDEN):
        super().__init__()
        self.sizes = sizes
        self.hidden = hidden
        self.instance = nn.Linear(sizes.instance, hidden, bias=False)
        self.common = nn.Linear(sizes.common, hidden)
        self.context = nn.Linear(2 * hidden + sizes.common, hidden)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.query = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.gate_hidden = nn.Linear(hidden, hidden)
        self.gate = nn.Linear(hidden, 1, bias=False)
        self.gate_bias = nn.Parameter(torch.tensor([GATE_BIAS[kind] for kind in KINDS]))
        for layer in (self.score, self.gate):  # begin near uniform
            nn.init.normal_(layer.weight, std=0.01)
        for name, size in zip(("instances", "request", "fleet"), sizes, strict=False):
            self.register_buffer(f"low_{name}", torch.full((size,), torch.inf))
            self.register_buffer(f"high_{name}", torch.full((size,), -torch.inf))

    def widen_ranges(self, *features: NDArray[np.float32]) -> None:
        """Take into the trained ranges what was seen: (n, F) of instances, (n, R) of requests, (n, G) of fleets."""
        for name, seen in zip(("instances", "request", "fleet"), features, strict=True):
            low, high = getattr(self, f"low_{name}"), getattr(self, f"high_{name}")
            torch.minimum(low, torch.as_tensor(seen.min(axis=0)), out=low)
            torch.maximum(high, torch.as_tensor(seen.max(axis=0)), out=high)

    def forward(self, instances: Tensor, request: Tensor, fleet: Tensor, kind: Tensor, action_mask: Tensor) -> Scored:
        """Score a batch of observations: (B, N, F), (B, R), (B, G), (B, K), (B, N + 1)."""
        common = torch.cat([request, fleet, kind], dim=1)
        embedding = torch.relu(self.instance(instances) + self.common(common).unsqueeze(1))
        present = (instances[:, :, PRESENT] > 0).to(embedding.dtype).unsqueeze(2)
        embedding = embedding * present  # of relu, so an empty slot never is the maximum
        mean = embedding.sum(dim=1) / present.sum(dim=1).clamp(min=1.0)
        context = torch.relu(self.context(torch.cat([mean, embedding.amax(dim=1), common], dim=1)))
        scores = self.score(torch.relu(self.key(embedding) + self.query(context).unsqueeze(1))).squeeze(2)
        legal = action_mask > 0
        scores = scores.masked_fill(~legal[:, :-1], ILLEGAL)
        gate = self.gate(torch.relu(self.gate_hidden(context))).squeeze(1) + (kind * self.gate_bias).sum(dim=1)
        any_instance = legal[:, :-1].any(dim=1)
        none = torch.where(any_instance, gate + torch.logsumexp(scores, dim=1), 0.0)
        none = none.masked_fill(~legal[:, -1], ILLEGAL)
        return Scored(torch.cat([scores, none.unsqueeze(1)], dim=1), context)


def log_odds_of_none(logits: Tensor) -> Tensor:
    """(B,) the gate, from (B, N + 1) logits; very low or high where only one side is legal."""
    return logits[:, -1] - torch.logsumexp(logits[:, :-1], dim=1)


def likeliest(logits: Tensor) -> Tensor:
    """(B,) none where it is more likely than all instances together, else the best instance."""
    instance = logits[:, :-1].argmax(dim=1)
    return torch.where(log_odds_of_none(logits) > 0, logits.shape[1] - 1, instance)
