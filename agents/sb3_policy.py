"""`SetScorer` as a policy of Stable-Baselines3: `SetPolicy` for PPO, `MaskableSetPolicy` for MaskablePPO.

Both mask illegal choices inside the forward pass, from the observation's `action_mask`, so plain PPO never takes one,
and evaluation callbacks and `predict` work as they are. A policy works for any number of instances: load it with
``custom_objects={"observation_space": ..., "action_space": ...}`` of another fleet.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import MaskableCategoricalDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.distributions import CategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from fleetpilot.agents.schema import ARRAYS, PRESENT, Sizes
from fleetpilot.agents.scorer import HIDDEN, SetScorer, likeliest

_CRITIC = 64
"""Width of the critic."""


def sizes_of(observation_space: spaces.Space[Any]) -> Sizes:
    """Sizes of the features in the observations of `fleetpilot.envs`.

    Raises:
        ValueError: it is another space.
    """
    if not isinstance(observation_space, spaces.Dict) or set(observation_space.spaces) != set(ARRAYS):
        raise ValueError(f"observation_space = {observation_space}: expected that of fleetpilot's environments")
    shapes = [cast("tuple[int, ...]", observation_space.spaces[key].shape) for key in ARRAYS[:-1]]
    return Sizes(*(shape[-1] for shape in shapes))


class ScorerExtractor(BaseFeaturesExtractor):
    """The whole network; its output is the logits, then a summary of the observation for the critic.

    The summary is the context, and mean and maximum of the instances' features beside the others. No gradient of the
    critic's goes into the scorer: where returns are large, it would be most of what the scorer learns from.
    """

    def __init__(self, observation_space: spaces.Dict, hidden: int = HIDDEN):
        sizes = sizes_of(observation_space)
        choices = cast("tuple[int, ...]", observation_space.spaces["action_mask"].shape)[0]
        self.summary_size = hidden + 2 * sizes.instance + sizes.common
        super().__init__(observation_space, choices + self.summary_size)
        self.scorer = SetScorer(sizes, hidden)

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """(B, N + 1 + `summary_size`)."""
        logits, context = self.scorer(*(observations[key] for key in ARRAYS))
        instances, *common, _ = (observations[key] for key in ARRAYS)
        count = (instances[:, :, PRESENT] > 0).sum(dim=1, keepdim=True).clamp(min=1)
        mean = instances.sum(dim=1) / count  # slots without an instance are rows of 0
        return torch.cat([logits, context.detach(), mean, instances.amax(dim=1), *common], dim=1)


class _Split(nn.Module):
    """Stands in for the two towers of Stable-Baselines3: the actor gets the logits, the critic the summary."""

    def __init__(self, summary_size: int):
        super().__init__()
        self.latent_dim_vf = summary_size
        self.latent_dim_pi = 1  # of the layer that `SetPolicy` replaces

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: Tensor) -> Tensor:
        return features[:, : -self.latent_dim_vf]

    def forward_critic(self, features: Tensor) -> Tensor:
        return features[:, -self.latent_dim_vf :]


class _ByGate(CategoricalDistribution):
    """Its likeliest choice is none only where that is more likely than all instances together."""

    def mode(self) -> Tensor:
        return likeliest(self.distribution.logits)


class _MaskableByGate(MaskableCategoricalDistribution):
    """The same for MaskablePPO."""

    def mode(self) -> Tensor:
        assert self.distribution is not None
        return likeliest(self.distribution.logits)


class _SetPolicyMixin:
    """What both policies have in common."""

    _distribution: Any

    def __init__(self, *args: Any, hidden: int = HIDDEN, **kwargs: Any):
        self.hidden = hidden
        own: dict[str, Any] = {
            "features_extractor_class": ScorerExtractor,
            "features_extractor_kwargs": {"hidden": hidden},
            "ortho_init": False,
        }
        super().__init__(*args, **{**kwargs, **own})

    def _get_constructor_parameters(self) -> dict[str, Any]:
        """For the policy's own `save`."""
        return {**super()._get_constructor_parameters(), "hidden": self.hidden}  # type: ignore[misc]

    @property
    def scorer(self) -> SetScorer:
        """The network that an export holds."""
        return self.features_extractor.scorer  # type: ignore[attr-defined, no-any-return]

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor: Any = _Split(self.features_extractor.summary_size)  # type: ignore[attr-defined]

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)  # type: ignore[misc]
        policy: Any = self
        policy.action_dist = self._distribution(policy.action_space.n)
        policy.action_net = nn.Identity()
        size = policy.mlp_extractor.latent_dim_vf
        policy.value_net = nn.Sequential(
            nn.Linear(size, _CRITIC), nn.ReLU(), nn.Linear(_CRITIC, _CRITIC), nn.ReLU(), nn.Linear(_CRITIC, 1)
        )
        policy.optimizer = policy.optimizer_class(
            policy.parameters(), lr=lr_schedule(1), foreach=True, **policy.optimizer_kwargs
        )

    def evaluate_actions(self, obs: Any, actions: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the algorithm asks for it, with the entropy over the logarithm of the number of legal choices.

        A coefficient of the entropy so means the same for every size of fleet and kind of decision.
        """
        values, log_prob, entropy = super().evaluate_actions(obs, actions, *args, **kwargs)  # type: ignore[misc]
        legal = obs["action_mask"].sum(dim=1).clamp(min=2.0)
        return values, log_prob, entropy / torch.log(legal)


class SetPolicy(_SetPolicyMixin, ActorCriticPolicy):
    """For ``PPO(SetPolicy, envs)``."""

    _distribution = _ByGate


class MaskableSetPolicy(_SetPolicyMixin, MaskableActorCriticPolicy):
    """For ``MaskablePPO(MaskableSetPolicy, envs)``."""

    _distribution = _MaskableByGate
