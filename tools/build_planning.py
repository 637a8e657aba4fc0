"""Writes docs/planning.md: worked answers of ``fleetpilot plan``, and a sweep of a scheduler's limit.

    python tools/build_planning.py [--workers N]

The picture goes beside the page.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from fleetpilot.evaluation.backends import map_over_workers
from fleetpilot.evaluation.planning import Answer, Measured, Question, Target, answer, measure, plan_table
from fleetpilot.evaluation.provenance import origin_text
from fleetpilot.evaluation.tables import markdown
from fleetpilot.fleet.profiles import load_profile
from fleetpilot.workloads import workload

DOCS = Path(__file__).parent.parent / "docs"
PICTURE = "planning-max-num-seqs.svg"

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
LIMITS = (16, 32, 64, 96, 128, 160, 256, 512)
STEADY = Target(99, ttft_s=0.05, tpot_s=0.05)

POLICIES = ["round-robin", "join-shortest-queue", "lmetric"]

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
(`prefix_cache`, `max_num_seqs`, `max_num_batched_tokens`).

The search takes for granted that more instances do no harm. Where a policy spreads shared prefixes thinner over more
instances, that is not quite so, and near what is feasible at all the count hangs on a few requests of the sample.

The answers are as good as the profiles ([profiles](profiles.md)): those used here come from operator tables, not from a
measured engine. The fleet is dispatched by telemetry 0.1 s old. A sample of 30 s has 30,000 requests; bursts that it
does not hold are not planned for. Pools, a second tier of KV memory and speculation are not among the engines' settings
yet, so nothing is said of draft lengths.

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
With ShareGPT's prompts, a hundredth of which have more than 3,000 tokens that no cache has seen, it is another
question:

{long}
## An 8B model on one H100, 100 requests/s, P99 below 50 ms

That depends on the lengths too. Prompts with a median of 128 tokens (at most 512) and answers with one of 74: TTFT and
TPOT at P99 over the most requests that a batch may have (`max_num_seqs`); the line is the target for both.

![P99 over max_num_seqs]({picture})

{verdict}

With prompts twice as long it takes more than one:

{longer}
"""


def questions(name: str, policies: list[str], caches: tuple[bool, ...]) -> list[Question]:
    """One per profile, policy and setting of the prefix cache."""
    table = workload(name)
    return [
        Question(
            table,
            load_profile(profile).replace(prefix_cache=cache),
            policy,
            FIRST_TOKEN,
            f"prefix_cache={cache}".lower(),
        )
        for profile in LARGE
        for cache in caches
        for policy in policies
    ]


def answers(asked: list[Question], workers: int | None) -> list[Answer]:
    """Answered side by side."""
    found: dict[int, Answer] = {}
    map_over_workers(answer, asked, found.__setitem__, workers=workers)
    return [found[place] for place in range(len(asked))]


def at_limit(limit: int) -> Measured:
    """One H100 with a batch of at most so many."""
    profile = load_profile("h100-llama-3.1-8b").replace(max_num_seqs=limit)
    return measure(Question(workload(SHORT), profile, "round-robin", STEADY), 1)


def swept(workers: int | None) -> dict[int, Measured]:
    """By limit."""
    found: dict[int, Measured] = {}
    map_over_workers(at_limit, LIMITS, lambda place, of: found.__setitem__(LIMITS[place], of), workers=workers)
    return {limit: found[limit] for limit in LIMITS}


def picture(found: dict[int, Measured]) -> str:
    """P99 of both latencies over the limit, as an SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5))
    axis = figure.subplots()
    for title, values, style in (
        ("TTFT P99", [of.ttft_s for of in found.values()], "o-"),
        ("TPOT P99", [of.tpot_s for of in found.values()], "s--"),
    ):
        axis.plot(list(found), [1e3 * value for value in values], style, label=title)
    axis.axhline(1e3 * STEADY.ttft_s, color="#777777", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="max_num_seqs", ylabel="ms")
    axis.set_xticks(LIMITS, map(str, LIMITS))
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
    return min(known, key=lambda of: of.enough.instances * of.question.profile.tp if of.enough else 0, default=None)


def per_gpu(of: Answer | None) -> str:
    """Requests per second and GPU in words."""
    if of is None or of.enough is None:
        return "none that meets it"
    gpus = of.enough.instances * of.question.profile.tp
    return (
        f"{of.rate_rps / gpus:.0f} requests/s per GPU ({gpus} GPUs: {of.enough.instances} x "
        f"{of.question.profile.name}, {of.question.policy})"
    )


def main() -> None:
    """Ask, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, help="processes (default: the machine's cores)")
    workers = parser.parse_args().workers
    short = answers(questions(CHAT, POLICIES, (True, False)), workers)
    long = answers(questions(LONG, POLICIES[-1:], (True,)), workers)
    small = load_profile("h100-llama-3.1-8b")
    longer = answers([Question(workload(LONGER), small, policy, STEADY) for policy in POLICIES], workers)
    sweep = swept(workers)
    (DOCS / PICTURE).write_text(picture(sweep), encoding="utf-8")
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
        long=markdown(plan_table(long)),
        picture=PICTURE,
        verdict=verdict(sweep),
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


if __name__ == "__main__":
    main()
