"""Writes docs/features.md from the tables in fleet/features.py.

python tools/build_feature_docs.py
"""

from __future__ import annotations

from pathlib import Path

from fleetpilot.fleet.features import (
    FLEET_FEATURES,
    INSTANCE_FEATURES,
    KINDS,
    MORE_FLEET_FEATURES,
    MORE_INSTANCE_FEATURES,
    MORE_REQUEST_FEATURES,
    QUANTITIES,
    REQUEST_FEATURES,
    Feature,
    sources,
)

DOCS = Path(__file__).parent.parent / "docs" / "features.md"

HEAD = """\
# What a learned policy reads

Written by `python tools/build_feature_docs.py` from the tables in `fleet/features.py`; do not edit.

Every number is a ratio, a share of the candidates, or a time or size brought to [0, 1] by a fixed constant, computed by
one function (`fleetpilot.fleet.features.write_features`) from a `FleetView`, in the simulator and in a dispatcher
alike. Nothing is an identity, an index or a rank, nothing is normalised by past observations, and the order of the
instances does not matter. float32.

Formulas are Python over the fields of the view (`fleet/view.py`): `i` an instance, `r` the request, `f` the fleet.
`share(x, h)` is x / (x + h). `mean`, `least`, `most` are over the candidates, `candidates` their number; `lower(x)` is
the share of the candidates with a strictly lower x; `part(x)` the share of all instances for which x holds;
`ratio(x, y)` is x / y, 0 where y is 0. Results are clipped to the range. Slots without an instance are rows of 0.

Who only dispatches (`fleetpilot/Dispatch-v0`) reads the first features of each array; who answers other kinds of
decision reads all of them.

Age: "now" is what the dispatcher knows as of the decision, "poll" is as old as the last visible poll (`poll_age`). In
the papers' engine-reported mode the loads are exact.
"""

ORDER = """\
## kind

One-hot: {kinds}.

## action_mask

One number per slot and one, last, for none: 1 where it may be chosen.
"""


def table(title: str, features: tuple[Feature, ...], more: tuple[Feature, ...]) -> str:
    """A section with one row per feature, in the order of the array; `more` is for who does more than dispatch."""
    lines = [
        f"## {title}",
        "",
        "| # | name | meaning | unit | range | from | age | formula |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for place, feature in enumerate(features + more):
        if place == len(features):
            lines.append("| | **where not only dispatch is decided** | | | | | | |")
        cells = [
            str(place),
            f"`{feature.name}`",
            feature.meaning,
            feature.unit or "-",
            f"{feature.low:g} to {feature.high:g}",
            ", ".join(sources(feature.formula)),
            feature.age,
            f"`{feature.formula}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def page() -> str:
    """The whole of docs/features.md."""
    quantities = ["## Quantities in formulas", "", "| name | formula |", "|---|---|"]
    quantities += [f"| `{name}` | `{formula}` |" for name, formula in QUANTITIES.items()]
    return "\n".join(
        [
            HEAD,
            table("instances", INSTANCE_FEATURES, MORE_INSTANCE_FEATURES),
            table("request", REQUEST_FEATURES, MORE_REQUEST_FEATURES),
            table("fleet", FLEET_FEATURES, MORE_FLEET_FEATURES),
            ORDER.format(kinds=", ".join(KINDS)),
            *quantities,
            "",
        ]
    )


if __name__ == "__main__":
    DOCS.write_text(page(), encoding="utf-8")
