"""Where the requests of an episode come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetpilot.envs.parameters import Parameter, Range
from fleetpilot.fleet.jit import inlined, kernel
from fleetpilot.fleet.slo import CHAT, SLOClass
from fleetpilot.workloads.arrivals import ArrivalProcess, Gamma, PiecewiseRate
from fleetpilot.workloads.lengths import LogNormal
from fleetpilot.workloads.library import workload
from fleetpilot.workloads.llumnix import llumnix_workload
from fleetpilot.workloads.selection import select, superpose, within_length
from fleetpilot.workloads.sessions import Sessions
from fleetpilot.workloads.table import MAX_TOKENS, NO_NODE, NO_PARENT, NO_SESSION, RequestTable

CV = Parameter("", 0.1, 10.0, "coefficient of variation of the gaps between arrivals; 1 is Poisson, above is burstier")

_GUIDE_PARTS = 1024  # a power of 2, so that a draw's part is exact


class RequestSource(Protocol):
    """Draws the requests of an episode at a mean rate of one per second; the episode sets their load."""

    @property
    def slo_classes(self) -> tuple[SLOClass, ...]:
        """What the requests' `slo_class` refers to."""

    @property
    def parameters(self) -> Mapping[str, tuple[Parameter, Range]]:
        """What may differ between episodes, with the default range of each."""

    def draw(self, n: int, values: Mapping[str, float], rng: np.random.Generator) -> RequestTable:
        """`n` requests.

        Args:
            n: >= 1.
            values: of the parameters.
            rng: all draws are from it.
        """

    def most_nodes(self, n: int) -> int:
        """Nodes of the prefix tree of `n` requests, at most."""

    def closed_loop(self) -> bool:
        """Whether answers release further requests."""


@dataclass(frozen=True)
class RequestKind:
    """Requests that have something in common.

    Attributes:
        prompt: tokens of the prompt, without a shared prefix.
        output: tokens of the answer.
        slo: what they are promised.
        priority: lower is earlier.
    """

    prompt: LogNormal
    output: LogNormal
    slo: SLOClass = CHAT
    priority: int = 0


@dataclass(frozen=True)
class SharedPrefixes:
    """Beginnings that prompts share: system prompts, examples, documents.

    Attributes:
        count: how many there are.
        low_tokens: length of the shortest.
        high_tokens: length of the longest; uniform in between, drawn for each episode.
        popularity: Zipf exponent of how often each is used.
        share: range of the share of requests that begin with one.
    """

    count: int
    low_tokens: int
    high_tokens: int
    popularity: float = 1.0
    share: Range = 0.5


@dataclass(frozen=True)
class RequestMix:
    """Independent requests of one or two kinds.

    Attributes:
        kinds: one or two; the parameter `mix` is the share of the second.
        prefixes: what prompts share.
        cv: range of the burstiness.
        mix: range of the share of the second kind.
        scale: range of the factors that an episode's prompts and outputs are longer than the kinds say.
        course: the arrival rate in equal parts of the episode, relative to each other.
    """

    kinds: tuple[RequestKind, ...]
    prefixes: SharedPrefixes
    cv: Range = 1.0
    mix: Range = 0.5
    scale: Range = 1.0
    course: tuple[float, ...] = (1.0,)

    @property
    def slo_classes(self) -> tuple[SLOClass, ...]:
        """One per kind."""
        return tuple(kind.slo for kind in self.kinds)

    @property
    def parameters(self) -> Mapping[str, tuple[Parameter, Range]]:
        """See `RequestSource`."""
        parameters: dict[str, tuple[Parameter, Range]] = {
            "cv": (CV, self.cv),
            "prompt_scale": (Parameter("", 0.1, 4.0, "factor on the length of prompts"), self.scale),
            "output_scale": (Parameter("", 0.1, 4.0, "factor on the length of answers"), self.scale),
            "prefix_share": (Parameter("share", 0, 1, "requests that begin with a shared prefix"), self.prefixes.share),
        }
        if len(self.kinds) > 1:
            parameters["mix"] = (Parameter("share", 0, 1, "requests of the second kind"), self.mix)
        return parameters

    def draw(self, n: int, values: Mapping[str, float], rng: np.random.Generator) -> RequestTable:
        """See `RequestSource`. A request is predicted the mean output of its kind."""
        base: ArrivalProcess = Gamma(1.0, values["cv"])
        if len(self.course) > 1:
            part_s = n / len(self.course)
            base = PiecewiseRate(self.course, (part_s,) * len(self.course), base)
        arrival_s = base.draw_in(n, float(n), rng)
        kind = (rng.random(n, np.float32) < values.get("mix", 0.0)).astype(np.int32)
        prompt = self._lengths("prompt", kind, values["prompt_scale"], rng)
        output = self._lengths("output", kind, values["output_scale"], rng)
        p = self.prefixes
        prefix_tokens = rng.integers(p.low_tokens, p.high_tokens, p.count, np.int64, endpoint=True)
        popularity = np.arange(1, p.count + 1) ** -p.popularity
        edges = np.cumsum(popularity) * (values["prefix_share"] / popularity.sum())
        columns = _mixed(
            kind,
            prompt,
            output,
            np.array([[k.prompt.high, k.output.high] for k in self.kinds], np.float32),
            np.array([k.priority for k in self.kinds], np.int32),
            rng.random(n),
            edges,
            np.append(prefix_tokens, 0),
        )
        return _open_loop_table(arrival_s, *columns, slo_class=kind, node_end_tokens=prefix_tokens)

    def _lengths(
        self, side: str, kind: NDArray[np.int32], scale: float, rng: np.random.Generator
    ) -> NDArray[np.float32]:
        """Log-normal lengths, neither clipped nor rounded; single precision will do for tokens."""
        of_kind: list[LogNormal] = [getattr(k, side) for k in self.kinds]
        tokens = rng.standard_normal(len(kind), np.float32)
        _scale(tokens, kind, np.array([d.sigma for d in of_kind], np.float32))
        np.exp(tokens, out=tokens)
        _scale(tokens, kind, np.array([d.median * scale for d in of_kind], np.float32))
        return tokens

    def most_nodes(self, n: int) -> int:
        """One per shared prefix."""
        return self.prefixes.count

    def closed_loop(self) -> bool:
        """Requests come whatever becomes of others."""
        return False


@dataclass(frozen=True)
class LlumnixRequests:
    """A workload of the Llumnix paper (OSDI'24), drawn from its distributions of lengths.

    Attributes:
        name: ``M-M``, ``ShareGPT``, ... (`fleetpilot.workloads.llumnix_workload`).
        cv: range of the burstiness; the paper has Poisson arrivals, and Gamma gaps with a CV up to 8.
        slo_classes: all requests are of the first.
    """

    name: str
    cv: Range = 1.0
    slo_classes: tuple[SLOClass, ...] = (CHAT,)

    @property
    def parameters(self) -> Mapping[str, tuple[Parameter, Range]]:
        """See `RequestSource`."""
        return {"cv": (CV, self.cv)}

    def draw(self, n: int, values: Mapping[str, float], rng: np.random.Generator) -> RequestTable:
        """See `RequestSource`. Every request is predicted the mean output."""
        mode = "quantile" if self.name in ("ShareGPT", "BurstGPT") else "zipf"
        source = llumnix_workload(self.name, 1.0, values["cv"], mode)
        return source.table(n, int(rng.integers(2**63)), f"llumnix/{self.name}")

    def most_nodes(self, n: int) -> int:
        """Nothing is shared."""
        return 0

    def closed_loop(self) -> bool:
        """Requests come whatever becomes of others."""
        return False


@dataclass(frozen=True)
class SessionRequests:
    """Sessions whose next turn comes when the last one is answered.

    The load holds on average over the time in which sessions start: it rises until the first sessions end, which the
    warm-up should outlast, and falls after the last session has started.

    Attributes:
        sessions: closed loop; its arrivals are replaced.
        cv: range of the burstiness of the sessions' starts.
        slo_classes: all requests are of the first.
    """

    sessions: Sessions
    cv: Range = 1.0
    slo_classes: tuple[SLOClass, ...] = (CHAT,)

    @property
    def parameters(self) -> Mapping[str, tuple[Parameter, Range]]:
        """See `RequestSource`."""
        return {"cv": (CV, self.cv)}

    def draw(self, n: int, values: Mapping[str, float], rng: np.random.Generator) -> RequestTable:
        """See `RequestSource`. Every request is predicted the mean output."""
        table = replace(self.sessions, arrivals=Gamma(1.0, values["cv"])).table(n, int(rng.integers(2**63)))
        starts = np.flatnonzero(~np.isnan(table.arrival_s))
        return replace(table, arrival_s=table.arrival_s * (n / len(starts)))

    def most_nodes(self, n: int) -> int:
        """One per turn that another follows, and the system prompts."""
        return n + self.sessions.system_prompts

    def closed_loop(self) -> bool:
        """Whether a turn waits for the one before."""
        return self.sessions.closed_loop


@dataclass(frozen=True, eq=False)
class TraceRequests:
    """Consecutive requests of a trace, from a place that is drawn; their rate is the episode's.

    Attributes:
        table: an open loop, longer than the longest episode.
        slo_classes: what the table's `slo_class` refers to.
    """

    table: RequestTable
    slo_classes: tuple[SLOClass, ...] = (CHAT,)

    def __post_init__(self) -> None:
        if np.isnan(self.table.arrival_s).any():
            raise ValueError(
                f"{self.table.name}: requests that wait for the answers of others; expected arrivals for all of them"
            )

    @property
    def parameters(self) -> Mapping[str, tuple[Parameter, Range]]:
        """None of its own."""
        return {}

    def draw(self, n: int, values: Mapping[str, float], rng: np.random.Generator) -> RequestTable:
        """See `RequestSource`.

        Raises:
            ValueError: the trace is too short, or all requests of a part come at once.
        """
        table = self.table
        first = int(rng.integers(self._starts(n)))
        begin_s, end_s = table.arrival_s[first], table.arrival_s[first + n - 1]
        if begin_s == end_s and n > 1:
            raise ValueError(f"{table.name}: rows {first} to {first + n - 1} arrive at once; expected different times")
        part = select(table, np.arange(first, first + n), start_s=begin_s)
        return replace(part, arrival_s=part.arrival_s * ((n - 1) / (end_s - begin_s) if n > 1 else 1.0))

    def most_nodes(self, n: int) -> int:
        """No more than the tree has, nor than lie on the paths of `n` consecutive requests."""
        self._starts(n)
        depth = np.zeros(len(self.table.node_parent) + 1, np.int64)  # the last is no node
        for node, parent in enumerate(self.table.node_parent.tolist()):  # a parent is a smaller index
            depth[node] = depth[parent] + 1
        passed = np.append(0, np.cumsum(depth[self.table.prefix_node] + depth[self.table.own_node]))
        return int(min(len(depth) - 1, (passed[n:] - passed[:-n]).max()))

    def closed_loop(self) -> bool:
        """Requests come whatever becomes of others."""
        return False

    def _starts(self, n: int) -> int:
        if n > len(self.table):
            raise ValueError(
                f"{self.table.name}: {len(self.table)} requests for episodes of up to {n}; expected a longer trace, or "
                "less of fleet_size, warmup_requests or scored_requests"
            )
        return len(self.table) - n + 1


@dataclass(frozen=True)
class TwinRequests:
    """Consecutive requests of a trace's statistical twin, which is generated when it is first asked for.

    Attributes:
        spec: a workload (`fleetpilot.workloads.workload`), longer than the longest episode.
        parts: of it that are laid over each other: a fleet that is so much larger than the trace's.
        max_tokens: of a request, prompt and answer; longer ones are left out.
    """

    spec: str
    parts: int = 1
    max_tokens: int = MAX_TOKENS

    @cached_property
    def _trace(self) -> TraceRequests:
        table = within_length(workload(self.spec), self.max_tokens)
        return TraceRequests(superpose(table, self.parts) if self.parts > 1 else table)

    @property
    def slo_classes(self) -> tuple[SLOClass, ...]:
        """See `RequestSource`."""
        return self._trace.slo_classes

    @property
    def parameters(self) -> Mapping[str, tuple[Parameter, Range]]:
        """None of its own."""
        return {}

    def draw(self, n: int, values: Mapping[str, float], rng: np.random.Generator) -> RequestTable:
        """See `RequestSource`."""
        return self._trace.draw(n, values, rng)

    def most_nodes(self, n: int) -> int:
        """See `RequestSource`."""
        return self._trace.most_nodes(n)

    def closed_loop(self) -> bool:
        """See `RequestSource`."""
        return self._trace.closed_loop()


@kernel
def _scale(values: Any, kind: Any, factors: Any) -> None:
    for i in range(len(values)):
        values[i] *= factors[kind[i]]


@kernel
def _mixed(
    kind: Any, prompt: Any, output: Any, most: Any, priority: Any, draws: Any, edges: Any, prefix_tokens: Any
) -> tuple[Any, ...]:
    """Columns of a mix: prompt and output tokens, predicted output, priority, prefix node.

    Args:
        kind: (n,) kind of each request.
        prompt: (n,) length of its own prompt, not rounded.
        output: (n,) length of its answer, not rounded.
        most: (kinds, 2) the most tokens of both.
        priority: (kinds,).
        draws: (n,) from [0, 1).
        edges: (m,) prefix k is that of draws from edges[k - 1] to before edges[k].
        prefix_tokens: (m + 1,) length of each prefix, and of none.
    """
    n = len(kind)
    prompt_tokens, output_tokens = np.empty(n, np.int32), np.empty(n, np.int32)
    predicted, priorities, nodes = np.empty(n, np.float32), np.empty(n, np.int32), np.empty(n, np.int32)
    guide = _first_edges(edges)
    total, count = np.zeros(len(most), np.int64), np.zeros(len(most), np.int64)
    one = np.float32(1.0)
    for i in range(n):
        k = kind[i]
        node = guide[int(draws[i] * len(guide))]
        while node < len(edges) and edges[node] <= draws[i]:
            node += 1
        nodes[i] = node if node < len(edges) else NO_NODE
        prompt_tokens[i] = int(min(max(prompt[i], one), most[k, 0])) + prefix_tokens[node]
        output_tokens[i] = int(min(max(output[i], one), most[k, 1]))
        priorities[i] = priority[k]
        total[k] += output_tokens[i]
        count[k] += 1
    means = np.ones(len(most), np.float32)
    for k in range(len(most)):
        if count[k] > 0:
            means[k] = total[k] / count[k]
    for i in range(n):
        predicted[i] = means[kind[i]]
    return prompt_tokens, output_tokens, predicted, priorities, nodes


@inlined
def _first_edges(edges: Any) -> Any:
    """Where to begin the search for a draw in [0, 1): the first edge that may be above, in equal parts of it."""
    guide = np.empty(_GUIDE_PARTS, np.int32)
    node = 0
    for part in range(_GUIDE_PARTS):
        while node < len(edges) and edges[node] <= part / _GUIDE_PARTS:
            node += 1
        guide[part] = node
    return guide


def _open_loop_table(
    arrival_s: NDArray[np.float64],
    prompt: NDArray[np.int32],
    output: NDArray[np.int32],
    predicted: NDArray[np.float32],
    priority: NDArray[np.int32],
    prefix_node: NDArray[np.int32],
    *,
    slo_class: NDArray[np.int32],
    node_end_tokens: NDArray[np.int64],
) -> RequestTable:
    """A table of what is known to be right; checking it again would take longer than drawing it."""
    n = len(arrival_s)
    return RequestTable(
        name="episode",
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=output,
        predicted_output_tokens=predicted,
        priority=priority,
        slo_class=slo_class,
        session=np.broadcast_to(np.int64(NO_SESSION), n),
        turn=np.broadcast_to(np.int32(0), n),
        parent=np.broadcast_to(np.int64(NO_PARENT), n),
        think_s=np.broadcast_to(np.float64(np.nan), n),
        prefix_node=prefix_node,
        own_node=np.broadcast_to(np.int32(NO_NODE), n),
        source_row=np.arange(n),
        node_parent=np.full(len(node_end_tokens), NO_NODE, np.int32),
        node_end_tokens=node_end_tokens,
    )
