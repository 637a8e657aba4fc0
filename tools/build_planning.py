"""Writes docs/planning.md: worked answers of ``fleetpilot plan``, and sweeps of a scheduler's limit and of drafts.

    python tools/build_planning.py [--workers N]

The pictures go beside the page.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fleetpilot.evaluation.backends import map_over_workers
from fleetpilot.evaluation.planning import (
    Answer,
    Measured,
    Question,
    Size,
    Target,
    answer,
    configured,
    measure,
    plan_table,
)
from fleetpilot.evaluation.provenance import origin_text
from fleetpilot.evaluation.tables import markdown
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload

DOCS = Path(__file__).parent.parent / "docs"
LIMITS_PICTURE, DRAFTS_PICTURE = "planning-max-num-seqs.svg", "planning-draft-tokens.svg"

CHAT = (
    "sessions/chat?rate=1000&turns=1&user=lognormal:250:0.6:1000&output=lognormal:74:0.7:500"
    "&system_prompts=16&system_tokens=uniform:200:1000&loop=open&n=30000"
)
LONG = "sessions/chat?rate=1000&turns=1&system_prompts=16&system_tokens=uniform:200:1000&loop=open&n=30000"
LARGE = [
    *(f"h100-llama-3.1-70b-tp{tp}" for tp in (2, 4, 8)),
    *(f"b200-llama-3.1-70b-tp{tp}" for tp in (2, 4, 8)),
]
FIRST_TOKEN = Target(99, ttft_s=0.1)

SHORT = "poisson?rate=100&n=12000&prompt=lognormal:128:0.6:512&output=lognormal:74:0.7:500"
LONGER = "poisson?rate=100&n=12000&prompt=lognormal:250:0.6:1000&output=lognormal:74:0.7:500"
SMALL = "h100-llama-3.1-8b"
LIMITS = (16, 32, 64, 96, 128, 160, 256, 512)
STEADY = Target(99, ttft_s=0.05, tpot_s=0.05)

DRAFTS = range(8)
ACCEPTANCES = (0.6, 0.8)

POLICIES = ["round-robin", "join-shortest-queue", "lmetric"]

Settings = dict[str, bool | int | float]
CACHES: tuple[Settings, ...] = ({"prefix_cache": True}, {"prefix_cache": False})
OTHERS = ["h100-llama-3.1-70b-tp8", "b200-llama-3.1-70b-tp4"]
"""Profiles with which the other settings are tried."""
OTHER_TARGET = Target(99, ttft_s=0.1, tpot_s=0.03)


def drafting(profile: str, tokens: int, acceptance: float) -> Settings:
    """Drafts by a head that is one layer of the model: each takes that share of a step of one request."""
    step_ms = 1e3 * load_profile(profile).decode_s(1, 1024)
    layers = 80 if "70b" in profile else 32
    return {"draft_tokens": tokens, "acceptance": acceptance, "draft_ms": round(tokens * step_ms / layers, 2)}


def other_settings(profile: str) -> list[Settings]:
    """One after the other."""
    return [
        {},
        {"prefix_cache": False},
        {"shared_cache_gb": 1000.0},
        {"chunked_prefill": False},
        drafting(profile, 3, 0.7),
        {"pools": True},
        {"pools": True, **drafting(profile, 3, 0.7)},
    ]


COMMAND = """    fleetpilot plan --ttft-ms 100 --policies {policies} \\
      --profiles {profiles} \\
      --engine prefix_cache=true --engine prefix_cache=false \\
      --workload '{workload}'
"""

PAGE = """# Planning a fleet

`fleetpilot plan` says how many instances of a kind meet a latency target at a workload's rate, under each policy, and
what stands in the way of fewer. It bisects over simulated runs of the same requests: the count it gives meets the
target and one instance less does not. Before that every request is run alone, on an instance that keeps all prefixes:
what misses the target then is *infeasible at any count*. Latencies are those of a percentile of all requests offered
after a warm-up of a tenth; requests that did not finish count as infinitely late. `--engine` changes the engines
(`prefix_cache`, `chunked_prefill`, `max_num_seqs`, `max_num_batched_tokens`, speculation by `draft_tokens`,
`acceptance`, `draft_ms` and `draft_per_seq_ms`) and what the fleet has besides: `shared_cache_gb`, a second tier behind
the engines' prefix caches, and `pools`, of which neither can spare an instance then.

The search takes for granted that more instances do no harm. Where a policy spreads shared prefixes thinner over more
instances, that is not quite so, and near what is feasible at all the count hangs on a few requests of the sample.

The answers are as good as the profiles ([profiles](profiles.md)): those used here come from operator tables, not from a
measured engine. The fleet is dispatched by telemetry 0.1 s old. A sample of 30 s has 30,000 requests; bursts that it
does not hold are not planned for.

Written by `python tools/build_planning.py`; do not edit. {origin}

## 1,000 requests/s of a 70B model, P99 TTFT below 100 ms

Is it 50 requests/s per H100, and twice that per B200? It depends on the prompts more than on anything else. With short
ones (median 250 tokens, at most 1,000) behind 16 system prompts of 200 to 1,000 tokens, so that most of a prompt can be
found in the prefix cache:

- H100: {h100}; without the prefix cache {h100_without}.
- B200: {b200}; without the prefix cache {b200_without}.

50 on an H100 would be beyond its arithmetic: 350 tokens that must be computed per request, at 2 x 70e9 operations each,
are 2.5e15 operations/s, and it does 1e15 (dense, 16 bits). That a B200 does twice as much comes out.

{command}
{short}
What else an engine or a fleet can have, with TPOT below 30 ms as well. Drafts are assumed to come from a head that
costs as much as one of the model's layers, and to be right in 7 of 10 cases:

{others}
With ShareGPT's prompts, a hundredth of which have more than 3,000 tokens that no cache has seen, it is another
question:

{long}
## An 8B model on one H100, 100 requests/s, P99 below 50 ms

That depends on the lengths too. Prompts with a median of 128 tokens (at most 512) and answers with one of 74: TTFT and
TPOT at P99 over the most requests that a batch may have (`max_num_seqs`); the line is the target for both.

![P99 over max_num_seqs]({limits_picture})

{verdict}

The same over the tokens that are drafted per step (`draft_tokens`, with `max_num_seqs` 256), each by a head that costs
one of the model's 32 layers, and right with a probability of {acceptances} if those before it are:

![P99 over draft_tokens]({drafts_picture})

{drafts_verdict}

With prompts twice as long it takes more than one:

{longer}
"""


def asked(
    name: str, target: Target, profiles: list[str], policies: list[str], settings: Callable[[str], Iterable[Settings]]
) -> list[Question]:
    """One per profile, setting of it and policy."""
    table = workload(name)
    return [
        configured(table, load_profile(profile), policy, target, changes)
        for profile in profiles
        for changes in settings(profile)
        for policy in policies
    ]


def answers(questions: list[Question], workers: int | None) -> list[Answer]:
    """Answered side by side."""
    found: dict[int, Answer] = {}
    map_over_workers(answer, questions, found.__setitem__, workers=workers)
    return [found[place] for place in range(len(questions))]


def with_settings(settings: Settings) -> Measured:
    """One H100 with changes."""
    question = configured(workload(SHORT), load_profile(SMALL), "round-robin", STEADY, settings)
    return measure(question, Size(1))


def swept(settings: list[Settings], workers: int | None) -> list[Measured]:
    """One after the other."""
    found: dict[int, Measured] = {}
    map_over_workers(with_settings, settings, found.__setitem__, workers=workers)
    return [found[place] for place in range(len(settings))]


def picture(lines: dict[str, list[Measured]], places: Sequence[int], xlabel: str, xscale: str) -> str:
    """P99 of both latencies over a setting, as an SVG; each of `lines` has one of either."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5))
    axis = figure.subplots()
    for number, (name, line) in enumerate(lines.items()):
        for title, values, style in (
            ("TTFT P99", [of.ttft_s for of in line], "o-"),
            ("TPOT P99", [of.tpot_s for of in line], "s--"),
        ):
            axis.plot(places, [1e3 * value for value in values], style, label=f"{title}{name}", color=f"C{number}")
    axis.axhline(1e3 * STEADY.ttft_s, color="#777777", linewidth=0.8)
    axis.set(xscale=xscale, yscale="log", xlabel=xlabel, ylabel="ms")
    axis.set_xticks(places, map(str, places))
    axis.minorticks_off()
    axis.legend(frameon=False)
    figure.tight_layout()
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fleetpilot", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"[ \t]+$", "", buffer.getvalue(), flags=re.M)


def best(found: list[Answer], gpu: str, *, cache: bool = True) -> Answer | None:
    """The answer with the fewest GPUs of a kind."""
    known = [
        of
        for of in found
        if of.enough and of.question.profile.gpu.startswith(gpu) and of.question.profile.prefix_cache == cache
    ]
    return min(known, key=lambda of: of.gpus or 0, default=None)


def per_gpu(of: Answer | None) -> str:
    """Requests per second and GPU in words."""
    if of is None or of.enough is None or of.gpus is None:
        return "none that meets it"
    return (
        f"{of.rate_rps / of.gpus:.0f} requests/s per GPU ({of.gpus} GPUs: {of.enough.size} x "
        f"{of.question.profile.name}, {of.question.policy})"
    )


def main() -> None:
    """Ask, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, help="processes (default: the machine's cores)")
    workers = parser.parse_args().workers
    short = answers(asked(CHAT, FIRST_TOKEN, LARGE, POLICIES, lambda profile: CACHES), workers)
    others = answers(asked(CHAT, OTHER_TARGET, OTHERS, POLICIES[-1:], other_settings), workers)
    long = answers(asked(LONG, FIRST_TOKEN, LARGE, POLICIES[-1:], lambda profile: CACHES[:1]), workers)
    longer = answers(asked(LONGER, STEADY, [SMALL], POLICIES, lambda profile: ({},)), workers)
    limits = dict(zip(LIMITS, swept([{"max_num_seqs": limit} for limit in LIMITS], workers), strict=True))
    drafts = {
        acceptance: swept([{"max_num_seqs": 256, **drafting(SMALL, tokens, acceptance)} for tokens in DRAFTS], workers)
        for acceptance in ACCEPTANCES
    }
    shown = picture({"": [*limits.values()]}, LIMITS, "max_num_seqs", "log")
    (DOCS / LIMITS_PICTURE).write_text(shown, encoding="utf-8")
    lines = {f", {acceptance:g} right": line for acceptance, line in drafts.items()}
    (DOCS / DRAFTS_PICTURE).write_text(picture(lines, DRAFTS, "draft_tokens", "linear"), encoding="utf-8")
    h100, b200 = best(short, "H100"), best(short, "B200")
    without = best(short, "H100", cache=False), best(short, "B200", cache=False)
    page = PAGE.format(
        origin=origin_text(),
        command=COMMAND.format(workload=CHAT, profiles=",".join(LARGE), policies=",".join(POLICIES)),
        h100=per_gpu(h100),
        b200=per_gpu(b200),
        h100_without=per_gpu(without[0]),
        b200_without=per_gpu(without[1]),
        short=markdown(plan_table(short)),
        others=markdown(plan_table(others)),
        long=markdown(plan_table(long)),
        limits_picture=LIMITS_PICTURE,
        verdict=verdict(limits),
        acceptances=" or ".join(map(str, ACCEPTANCES)),
        drafts_picture=DRAFTS_PICTURE,
        drafts_verdict=drafts_verdict(drafts),
        longer=markdown(plan_table(longer)),
    )
    (DOCS / "planning.md").write_text(page, encoding="utf-8")
    print(DOCS / "planning.md")


def verdict(sweep: dict[int, Measured]) -> str:
    """Which limits meet both targets, and what the ends of the sweep do."""
    meets = [limit for limit, of in sweep.items() if not of.missed(STEADY)]
    quickest = min(sweep, key=lambda limit: sweep[limit].ttft_s)
    ends = [
        f"with {limit}, TTFT {1e3 * sweep[limit].ttft_s:.0f} ms and TPOT {1e3 * sweep[limit].tpot_s:.1f} ms"
        for limit in dict.fromkeys((LIMITS[0], quickest, LIMITS[-1]))
    ]
    met = f"Both are met with {', '.join(map(str, meets))}" if meets else "No limit meets both"
    return f"{met}: {'; '.join(ends)}. Batches have at most {sweep[LIMITS[-1]].running_max} requests there."


def drafts_verdict(drafts: dict[float, list[Measured]]) -> str:
    """The draft length with the lowest TPOT, and what drafts do to both latencies."""
    parts = []
    for acceptance, line in drafts.items():
        best = min(DRAFTS, key=lambda tokens: line[tokens].tpot_s)
        parts.append(
            f"With {acceptance:g} the lowest TPOT has {best} ({1e3 * line[best].tpot_s:.1f} ms, against "
            f"{1e3 * line[0].tpot_s:.1f} without; TTFT {1e3 * line[best].ttft_s:.0f} against "
            f"{1e3 * line[0].ttft_s:.0f} ms); with {DRAFTS[-1]} it is {1e3 * line[-1].tpot_s:.1f} ms."
        )
    return " ".join(parts)


if __name__ == "__main__":
    main()
