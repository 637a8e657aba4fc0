"""The reward: named components, each a weight times the growth of a cost between two decisions.

All costs are counted by the cluster itself for every request that has arrived (`cluster.kernel.costs`), whoever
dispatched it and whenever:

======================  ===========================================================================  ==========
component               cost, since the previous decision                                            default weight
======================  ===========================================================================  ==========
``waiting``             seconds that requests spent without a first token, held ones included        0.1 per s
``slo_miss``            requests that missed a target, each once, charged when the target passes     1
``preemption``          seconds that preempted requests lost to recomputation                        0.1 per s
``instance_cost``       seconds that instances were billed: starting, ready or draining              0 per s
``migration``           migrations that ended, completed or aborted                                  0
======================  ===========================================================================  ==========

A target for the first token passes at its time, one for the time per token is missed at the last token.
``instance_cost`` weighs nothing by default because the fleet is fixed where only dispatch is decided; a request that
fails, because all instances are gone, misses its target. What a migration costs is in the other components already, as
far as it is felt; a weight of its own keeps a policy from moves that gain nothing.

Example: 16 instances, 20 ms since the previous decision. In that time three requests were waiting throughout and a
fourth got its first token after 5 ms, and the target of one of the three passed. Waiting grew by 3 x 0.020 + 0.005 =
0.065 s and misses by one, so

>>> import numpy as np
>>> before = np.zeros(COSTS)
>>> after = np.array([0.065, 1.0, 0.0, 0.0, 0.0, 0.0, 0.020, 16 * 0.020, 0.0])
>>> components = np.empty(len(COMPONENTS))
>>> total = write_components(before, after, RewardWeights().array(), components)
>>> dict(zip(COMPONENTS, (-components).round(4).tolist(), strict=True))
{'waiting': 0.0065, 'slo_miss': 1.0, 'preemption': 0.0, 'instance_cost': 0.0, 'migration': 0.0}
>>> round(total, 4)
-1.0065

Why it cannot be gamed. A request costs from its arrival on until it has its first token, whether or not it is doomed
already, so dumping doomed requests on one instance does not make them free. Nothing can be put off past the end: the
horizon is random, held requests go on costing, and after the last arrival the episode's last step lasts until every
request is answered. Requests that are in the system when the first observation is made are scored like all others from
then on; what they cost during the warm-up is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster import kernel as cluster
from fleetpilot.cluster.memory import env_at, instance_at
from fleetpilot.fleet.jit import inlined, kernel

BILLED_S, MIGRATIONS = cluster.COSTS, cluster.COSTS + 1
COSTS = cluster.COSTS + 2
"""What accrues in an episode: `cluster.kernel.costs`, seconds that instances were billed, migrations that ended."""

_WAITING_S, _MISSES, _PREEMPTION_S = 0, 1, 2  # in `cluster.kernel.costs`


@dataclass(frozen=True)
class RewardWeights:
    """What each component weighs; all are costs, so a weight is >= 0.

    Attributes:
        waiting: per request and second without a first token.
        slo_miss: per request that misses a target.
        preemption: per second lost to preemption.
        instance_cost: per instance and second that it is billed.
        migration: per migration that ends, completed or aborted.
    """

    waiting: float = 0.1
    slo_miss: float = 1.0
    preemption: float = 0.1
    instance_cost: float = 0.0
    migration: float = 0.0

    def __post_init__(self) -> None:
        for name, weight in vars(self).items():
            if not (isinstance(weight, int | float | np.number) and 0 <= weight < math.inf):
                raise ValueError(f"reward weight {name} = {weight!r}: expected a finite number >= 0")

    def array(self) -> NDArray[np.float64]:
        """(5,) the weights in the order of `COMPONENTS`."""
        return np.array([getattr(self, name) for name in COMPONENTS])


COMPONENTS = tuple(field.name for field in fields(RewardWeights))


@kernel
def billed_s(s: Any, e: int, time_s: float) -> float:
    """Seconds until `time_s` that instances have been billed."""
    env = env_at(s, e)
    billed = 0.0
    for g in range(env.instance0, env.instance0 + env.instances):
        inst = instance_at(s, g)
        billed += inst.alive_s
        if not np.isnan(inst.billed_from_s):
            billed += time_s - inst.billed_from_s
    return billed


@inlined
def write_components(before: Any, after: Any, weights: Any, components: Any) -> float:
    """The reward of one step.

    Args:
        before: (COSTS,) costs at the previous decision.
        after: (COSTS,) costs now.
        weights: (5,) `RewardWeights.array`.
        components: (5,) written.

    Returns:
        The sum of the components.
    """
    components[0] = -weights[0] * (after[_WAITING_S] - before[_WAITING_S])
    components[1] = -weights[1] * (after[_MISSES] - before[_MISSES])
    components[2] = -weights[2] * (after[_PREEMPTION_S] - before[_PREEMPTION_S])
    components[3] = -weights[3] * (after[BILLED_S] - before[BILLED_S])
    components[4] = -weights[4] * (after[MIGRATIONS] - before[MIGRATIONS])
    return components[0] + components[1] + components[2] + components[3] + components[4]
