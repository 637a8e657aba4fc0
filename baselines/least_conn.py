"""min(requests in flight); ties are broken round robin over the slots.

Source: NGINX, `ngx_http_upstream_least_conn_module`, all weights equal.
Reads: instance.in_flight, fleet.decisions
Notes: NGINX's smooth round robin among tied peers keeps a weight per peer; here the tied slot next in turn is taken.
    Both go through an idle fleet slot by slot; among a few tied peers their orders may differ.
"""

from __future__ import annotations

from typing import Any

from fleetpilot.fleet.policy import CompiledPolicy
from fleetpilot.fleet.view import NONE


def choose(instances: Any, requests: Any, fleets: Any) -> int:
    """See the module."""
    best = NONE
    for turn in range(len(instances)):
        slot = (fleets[0].decisions + turn) % len(instances)
        if instances[slot].candidate != 0 and (best == NONE or instances[slot].in_flight < instances[best].in_flight):
            best = slot
    return best


POLICY = CompiledPolicy("least-conn", choose)
