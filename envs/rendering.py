"""Pictures of one fleet for people: a table in text, and an image drawn with NumPy alone.

What is drawn is the true state at this moment, which no dispatcher could see; policies get a `FleetView` instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetpilot.cluster.batch import ClusterBatch
from fleetpilot.cluster.kv_cache import blocks_for
from fleetpilot.cluster.memory import (
    batch_at,
    engine_at,
    env_at,
    instance_at,
    migration_at,
    node_at,
    residency_at,
    slot_at,
    transfer_at,
)
from fleetpilot.cluster.prefix_cache import leaf
from fleetpilot.cluster.state import DECODE, HANDING_OVER, NEVER, NIL, State
from fleetpilot.cluster.telemetry import steps_before, used_blocks
from fleetpilot.fleet.jit import kernel
from fleetpilot.fleet.view import STATE_ABSENT, STATE_DRAINING, STATE_FAILED, STATE_READY, STATE_STARTING

Picture = NDArray[np.uint8]
Colour = tuple[int, int, int]


class RequestSnapshot(NamedTuple):
    """One request.

    Attributes:
        held_blocks: KV blocks in use for it alone.
        slo_class: index of its SLO class.
        priority: lower is earlier.
    """

    held_blocks: int
    slo_class: int
    priority: int


@dataclass(frozen=True)
class InstanceSnapshot:
    """One instance.

    Attributes:
        kv_capacity_blocks: usable KV blocks.
        kv_used_blocks: blocks in use; those of a prefix that several requests share count once.
        kv_cached_blocks: free blocks that still hold what ended requests left, for prefix hits.
        running: the batch.
        waiting: the queue, its head first.
        state: of its life, as in `fleetpilot.fleet.view`.
        due_s: when it will be ready, repaired or drained by force; inf for never.
        moving_blocks: of those in use, blocks for requests that move and are in no batch, or not in this one: reserved
            for one that is copied here, held by one that has come, or by one that has stopped and is not gone.
    """

    kv_capacity_blocks: int
    kv_used_blocks: int
    kv_cached_blocks: int
    running: tuple[RequestSnapshot, ...]
    waiting: tuple[RequestSnapshot, ...]
    state: int = STATE_READY
    due_s: float = math.inf
    moving_blocks: int = 0

    @property
    def shared_blocks(self) -> int:
        """Blocks in use for more than one request: prefixes that they share."""
        return self.kv_used_blocks - self.moving_blocks - sum(request.held_blocks for request in self.running)


class MigrationSnapshot(NamedTuple):
    """One migration in progress.

    Attributes:
        source: slot.
        destination: slot.
        copied_blocks: that are there.
        stopped: the request has stopped and the last of it is copied.
    """

    source: int
    destination: int
    copied_blocks: int
    stopped: bool


@dataclass(frozen=True)
class Snapshot:
    """A fleet at one moment.

    Attributes:
        time_s: now.
        instances: by slot.
        held: requests held at the dispatcher, the head first.
        chosen: slot that the last decision chose; None for none.
        finished: requests since the start.
        missed: requests that missed a target, since the start.
        slo_classes: how many there are.
        migrations: in progress, by source.
    """

    time_s: float
    instances: tuple[InstanceSnapshot, ...]
    held: tuple[RequestSnapshot, ...]
    chosen: int | None
    finished: int
    missed: int
    slo_classes: int
    migrations: tuple[MigrationSnapshot, ...] = ()


RENDER_MODES = ["ansi", "rgb_array"]


def render_row(batch: ClusterBatch, e: int, mode: str, *, chosen: int | None = None) -> str | Picture:
    """Environment `e` in one of the `RENDER_MODES`; see `snapshot`."""
    fleet = snapshot(batch, e, chosen=chosen)
    return ansi(fleet) if mode == "ansi" else rgb(fleet)


# --- from the arrays ------------------------------------------------------------------------------------------------


def snapshot(batch: ClusterBatch, e: int, *, chosen: int | None = None) -> Snapshot:
    """Environment `e` as it is at its last decision or end.

    Args:
        batch: the clusters.
        e: index of the environment.
        chosen: slot that the last decision chose, which the arrays do not keep; None for none.
    """
    state = batch.state
    env = state.env[e]
    these = slice(env["instance0"], env["instance0"] + env["instances"])
    held = _queue(state, env["held_head"]) if env["held"] else ()
    return Snapshot(
        time_s=float(env["time_s"]),
        instances=tuple(_instance(batch, g, env["time_s"]) for g in range(these.start, these.stop)),
        held=held,
        chosen=chosen,
        finished=int(env["finished"]),
        missed=int(env["misses"]),
        slo_classes=int(env["classes"]),
        migrations=tuple(_migrations(state, these)),
    )


def _migrations(state: State, these: slice) -> Iterator[MigrationSnapshot]:
    for g in range(these.start, these.stop):
        if state.instance["migration"][g] == g:
            migration = state.migration[g]
            yield MigrationSnapshot(
                source=g - these.start,
                destination=int(migration["destination"]) - these.start,
                copied_blocks=int(migration["copied_blocks"]),
                stopped=bool(migration["phase"] == HANDING_OVER),
            )


@kernel
def _held_blocks(s: Any, g: int, time_s: float, held: Any) -> int:
    """Blocks in use on an instance; writes how many of them each request of its batch alone holds."""
    inst = instance_at(s, g)
    engine = engine_at(s, g)
    decoded = inst.steps_done  # decode steps before the one in progress
    if inst.doing == DECODE:
        decoded += min(steps_before(inst, engine, time_s) + 1, inst.planned) - inst.steps - 1
    for position in range(inst.in_batch):
        entry = batch_at(s, inst.batch0 + position)
        slot = slot_at(s, entry.slot)
        blocks = slot.held_blocks
        if entry.finish_step != NEVER:
            # the step in progress takes room for its token, but for those that sit it out
            tokens = slot.prompt_tokens + slot.generated + decoded - (1 if position >= inst.sitting_out else 0)
            blocks = blocks_for(tokens, engine.block_size)
        held[position] = blocks - _blocks_of_others(s, inst, slot)
    return used_blocks(s, inst, engine, time_s)


@kernel
def _moving_blocks(s: Any, g: int) -> int:
    """See `InstanceSnapshot.moving_blocks`."""
    inst = instance_at(s, g)
    blocks = inst.reserved_blocks
    index = inst.incoming
    while index != NIL:
        blocks += _blocks_alone(s, inst, engine_at(s, g), slot_at(s, index))
        index = slot_at(s, index).next
    if inst.migration == g and migration_at(s, g).phase == HANDING_OVER:
        blocks += _blocks_alone(s, inst, engine_at(s, g), slot_at(s, migration_at(s, g).slot))
    if env_at(s, inst.env).pools != 0:
        blocks += _handed_over_blocks(s, env_at(s, inst.env), inst, g)
    return blocks  # type: ignore[no-any-return]


@kernel
def _handed_over_blocks(s: Any, env: Any, inst: Any, g: int) -> int:
    """Blocks of requests that another instance pulls from here, and of those that are pulled, or were, to join."""
    blocks = 0
    for index in range(env.slot0, env.slot0 + env.used_slots):
        if slot_at(s, index).row != NIL and transfer_at(s, index).source == g:
            blocks += transfer_at(s, index).held_blocks - transfer_at(s, index).node_blocks
    index = inst.transfers
    while index != NIL:
        if index >= env.slot0:
            blocks += slot_at(s, index).held_blocks - slot_at(s, index).node_blocks
        index = transfer_at(s, index).next
    index = inst.pulled
    while index != NIL:
        blocks += slot_at(s, index).held_blocks - slot_at(s, index).node_blocks
        index = slot_at(s, index).next
    return blocks


@kernel
def _blocks_alone(s: Any, inst: Any, engine: Any, slot: Any) -> int:
    """Blocks in use for a decoding request alone that is in no batch."""
    return blocks_for(slot.prompt_tokens + slot.generated - 1, engine.block_size) - _blocks_of_others(s, inst, slot)


@kernel
def _blocks_of_others(s: Any, inst: Any, slot: Any) -> int:
    """Of the nodes' blocks that a request has pinned, those that others have pinned too."""
    blocks = slot.node_blocks
    node = leaf(slot)
    while node >= 0:
        here = residency_at(s, inst.residency0 + node)
        if here.pins == 1:
            blocks -= here.blocks
        node = node_at(s, inst.node0 + node).parent
    return blocks  # type: ignore[no-any-return]


def _instance(batch: ClusterBatch, g: int, time_s: float) -> InstanceSnapshot:
    state = batch.state
    inst = state.instance[g]
    capacity = int(state.engine["kv_blocks"][g])
    entries = state.batch[inst["batch0"] : inst["batch0"] + inst["in_batch"]]
    slots = state.slot[entries["slot"]]
    held = np.empty(len(entries), np.int64)
    used = _held_blocks(batch.handle, g, time_s, held)
    return InstanceSnapshot(
        kv_capacity_blocks=capacity,
        kv_used_blocks=used,
        kv_cached_blocks=_cached_blocks(state, g, used),
        running=tuple(map(RequestSnapshot, held.tolist(), slots["slo_class"].tolist(), slots["priority"].tolist())),
        waiting=_queue(state, inst["head"]),
        state=int(inst["life"]),
        due_s=float(inst["due_s"]),
        moving_blocks=_moving_blocks(batch.handle, g),
    )


def _cached_blocks(state: State, g: int, used: int) -> int:
    """Blocks that hold a prefix and are free to be taken.

    A leap takes blocks off the front of the free list when it is accounted for; those taken by now are left out here.
    """
    inst = state.instance[g]
    committed = state.engine["kv_blocks"][g] - inst["free_blocks"] - inst["lru_blocks"]
    to_take = used - int(committed) - int(inst["free_blocks"])
    cached = 0
    extent = int(inst["lru_head"])
    while extent != NIL:
        if extent >= 0:
            node = state.residency[inst["residency0"] + extent]
            resident, dead, extent = int(node["blocks"]), int(node["dead_blocks"]), int(node["next"])
        else:
            slot = state.slot[-2 - extent]
            resident, dead, extent = int(slot["resident_blocks"]), int(slot["dead_blocks"]), int(slot["lru_next"])
        cached += max(0, resident - max(0, to_take))
        to_take -= resident + dead if resident <= to_take else resident
    return cached


def _queue(state: State, head: int) -> tuple[RequestSnapshot, ...]:
    """A linked list of requests that hold no blocks."""

    def requests() -> Iterator[RequestSnapshot]:
        index = head
        while index != NIL:
            slot = state.slot[index]
            yield RequestSnapshot(0, int(slot["slo_class"]), int(slot["priority"]))
            index = slot["next"]

    return tuple(requests())


# --- text -----------------------------------------------------------------------------------------------------------

_TEXT_BAR = 20


def ansi(fleet: Snapshot) -> str:
    """A table, one line per instance; ``>`` marks the last decision's choice.

    An instance that is not ready has its state in the last column, with the seconds that it lasts; a migration is an
    arrow to its destination or from its source, ``=>`` when the request has stopped.
    """
    lines = [
        f"time {fleet.time_s:.2f} s   held {len(fleet.held)}   finished {fleet.finished}   missed {fleet.missed}",
        "  instance  KV blocks used / capacity                             running  waiting",
    ]
    moves: dict[int, str] = {}
    for migration in fleet.migrations:
        arrow = "=>" if migration.stopped else "->"
        moves[migration.source] = f"  {arrow} {migration.destination}  {migration.copied_blocks:,d} copied"
        moves[migration.destination] = f"  {arrow} from {migration.source}"
    for i, instance in enumerate(fleet.instances):
        share = instance.kv_used_blocks / instance.kv_capacity_blocks
        bar = "#" * round(share * _TEXT_BAR)
        lines.append(
            f"{'>' if i == fleet.chosen else ' '} {i:8d}  {instance.kv_used_blocks:11,d} / "
            f"{instance.kv_capacity_blocks:<11,d} {share:6.1%} [{bar:<{_TEXT_BAR}}]"
            f" {len(instance.running):8d} {len(instance.waiting):8d}{_state_text(fleet, instance)}{moves.get(i, '')}"
        )
    return "\n".join(lines)


STATE_NAMES = {STATE_ABSENT: "absent", STATE_STARTING: "starting", STATE_DRAINING: "draining", STATE_FAILED: "failed"}
"""Of the states that pictures name."""


def _state_text(fleet: Snapshot, instance: InstanceSnapshot) -> str:
    if instance.state == STATE_READY:
        return ""
    left_s = instance.due_s - fleet.time_s
    return f"  {STATE_NAMES[instance.state]}" + (f" {left_s:.1f} s" if math.isfinite(left_s) else "")


# --- picture --------------------------------------------------------------------------------------------------------

PALETTE: tuple[Colour, ...] = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
    (240, 228, 66),
)
"""By SLO class, repeated after the last: colours that colour-blind people can tell apart (Okabe and Ito)."""

_PAPER: Colour = (252, 252, 250)
_INK: Colour = (34, 34, 34)
_FAINT_INK: Colour = (120, 120, 116)
_FREE: Colour = (229, 229, 224)
_CACHED: Colour = (196, 196, 190)
_SHARED: Colour = (132, 132, 128)
_MOVING: Colour = (60, 60, 200)
_STOPPED: Colour = (200, 30, 30)
_STATE_INKS: dict[str, Colour] = {
    "absent": (170, 170, 165),
    "starting": (0, 120, 60),
    "draining": (150, 90, 0),
    "failed": (180, 20, 20),
}
_TINTS = (0.0, 0.4, 0.65)  # of priority 0 or less, 1, and 2 or more, towards the paper

_MARGIN = 16
_HEADER = 80  # height
_FOOTER = 34
_ROW = 14  # height below which a second column of instances is begun
_LEAST_ROW = 4
_LEAST_COLUMN = 280
_COLUMN_GAP = 20
_LABEL = 22  # width, three digits
_GUTTER = 26  # between label and bar: the mark of the choice, and room for migrations
_TICK = 4  # width, its gap included
_LINE = 7  # height of a letter
_LETTER = 6  # width, its gap included
_WIDEST_COUNT = 15  # letters


def rgb(fleet: Snapshot, width: int = 960, height: int = 540) -> Picture:
    """Memory of each instance as a bar of its requests, coloured by SLO class and paler for lower priority, and queues.

    Args:
        fleet: what to draw.
        width: in pixels, even, as video encoders want it.
        height: in pixels, even.

    Returns:
        (height, width, 3) array.

    Raises:
        ValueError: for an odd size, or one too small for so many instances.
    """
    columns, rows, row_height = _grid(len(fleet.instances), width, height)
    picture = np.full((height, width, 3), _PAPER, np.uint8)
    _draw_header(picture, fleet)
    column_width = (width - 2 * _MARGIN + _COLUMN_GAP) // columns
    thickness = _thickness(row_height)
    places = [
        (_MARGIN + i // rows * column_width, _HEADER + i % rows * row_height) for i in range(len(fleet.instances))
    ]
    for i, instance in enumerate(fleet.instances):
        x, y = places[i]
        if i % rows == 0:
            _draw_headings(picture, x, column_width - _COLUMN_GAP)
        _draw_instance(picture, x, y, column_width - _COLUMN_GAP, row_height, i, instance, i == fleet.chosen)
    for migration in fleet.migrations:
        source, destination = (
            (places[slot][0] + _LABEL + _GUTTER - 8, places[slot][1] + thickness // 2)
            for slot in (migration.source, migration.destination)
        )
        _draw_arc(picture, source, destination, _STOPPED if migration.stopped else _MOVING)
    _draw_legend(picture, fleet)
    return picture


def _grid(instances: int, width: int, height: int) -> tuple[int, int, int]:
    """Columns, instances in each, and pixels for each."""
    for name, value in {"width": width, "height": height}.items():
        if value % 2:
            raise ValueError(f"{name} = {value}: expected an even number of pixels")
    room = height - _HEADER - _FOOTER
    most_columns = (width - 2 * _MARGIN) // _LEAST_COLUMN
    if most_columns < 1:
        raise ValueError(f"width = {width}: expected at least {_LEAST_COLUMN + 2 * _MARGIN}")
    columns = min(most_columns, -(-instances // max(1, room // _ROW)))
    rows = -(-instances // columns)
    if room < rows * _LEAST_ROW:
        raise ValueError(
            f"height = {height}: expected at least {rows * _LEAST_ROW + _HEADER + _FOOTER} for {instances} instances"
        )
    return columns, rows, min(room // rows, 3 * _ROW)


def _draw_header(picture: Picture, fleet: Snapshot) -> None:
    counts = {
        "TIME": f"{fleet.time_s:.1f} S",
        "RUNNING": sum(len(instance.running) for instance in fleet.instances),
        "WAITING": sum(len(instance.waiting) for instance in fleet.instances),
        "FINISHED": fleet.finished,
        "MISSED": fleet.missed,
    }
    step = (picture.shape[1] - 2 * _MARGIN) // len(counts)
    scale = 2 if step >= _WIDEST_COUNT * 2 * _LETTER else 1
    for place, (name, value) in enumerate(counts.items()):
        x = _text(picture, _MARGIN + place * step, _MARGIN - 4, name, _FAINT_INK, scale)
        _text(picture, x, _MARGIN - 4, str(value), _INK, scale)
    x = _text(picture, _MARGIN, _MARGIN + 22, "HELD", _FAINT_INK)
    _draw_queue(picture, x, _MARGIN + 20, picture.shape[1] - _MARGIN - x, _LINE + 4, fleet.held)


def _bar_width(width: int) -> int:
    return (width - _LABEL - _GUTTER) * 2 // 3


def _draw_headings(picture: Picture, x: int, width: int) -> None:
    y = _HEADER - _LINE - 6
    _text(picture, x + _LABEL + _GUTTER, y, "KV MEMORY", _FAINT_INK)
    _text(picture, x + _LABEL + _GUTTER + _bar_width(width) + 10, y, "WAITING", _FAINT_INK)


def _draw_instance(
    picture: Picture, x: int, y: int, width: int, height: int, slot: int, instance: InstanceSnapshot, chosen: bool
) -> None:
    thickness = _thickness(height)
    text_y = y + (thickness - _LINE) // 2
    if thickness >= _LINE:
        _text(picture, x, text_y, f"{slot:3d}", _INK if chosen else _FAINT_INK)
    bar = x + _LABEL + _GUTTER
    bar_width = _bar_width(width)
    if chosen:
        _draw_mark(picture, bar - 3, y, thickness)
    _draw_memory(picture, bar, y, bar_width, thickness, instance)
    if instance.state in STATE_NAMES:
        _draw_state(picture, bar, y, bar_width, thickness, STATE_NAMES[instance.state])
    queue = bar + bar_width + 10
    _draw_queue(picture, queue, y, x + width - queue, thickness, instance.waiting)


def _thickness(height: int) -> int:
    """Of a bar in a row of this height."""
    return max(height - max(2, height // 5), 2)


def _draw_state(picture: Picture, x: int, y: int, width: int, height: int, state: str) -> None:
    """A frame around the bar, hollow but for an instance that drains, and the state's name at its end."""
    if state != "draining":
        _fill(picture, x + 1, y + 1, x + width - 1, y + height - 1, _PAPER)
    for left, top, right, bottom in (
        (x, y, x + width, y + 1),
        (x, y + height - 1, x + width, y + height),
        (x, y, x + 1, y + height),
        (x + width - 1, y, x + width, y + height),
    ):
        _fill(picture, left, top, right, bottom, _STATE_INKS[state])
    if height >= _LINE + 2:
        size = _LETTER * len(state)
        _fill(picture, x + width - size - 6, y + 1, x + width - 1, y + height - 1, _PAPER)
        _text(picture, x + width - size - 3, y + (height - _LINE) // 2, state.upper(), _STATE_INKS[state])


def _draw_arc(picture: Picture, source: tuple[int, int], destination: tuple[int, int], colour: Colour) -> None:
    """A curve from one row's gutter to another's, bent to the left, with a dot where it comes from and a head."""
    (x0, y0), (x1, y1) = source, destination
    points = 2 * (abs(y1 - y0) + abs(x1 - x0)) + 2
    along = np.linspace(0.0, 1.0, points)
    bend = min(14.0, 3.0 + abs(y1 - y0) / 8)
    xs = (x0 + (x1 - x0) * along - bend * 4 * along * (1 - along)).round().astype(int)
    ys = (y0 + (y1 - y0) * along).round().astype(int)
    picture[ys, xs] = colour
    picture[ys, xs + 1] = colour
    _fill(picture, x0 - 1, y0 - 1, x0 + 3, y0 + 2, colour)
    for step in range(4):
        _fill(picture, x1 + 3 - step, y1 - step, x1 + 4 - step, y1 + step + 1, colour)


def _draw_memory(picture: Picture, x: int, y: int, width: int, height: int, instance: InstanceSnapshot) -> None:
    """Shared prefixes, the requests in the order of the batch, free memory, and at the end what is cached in it."""
    blocks = [instance.shared_blocks, *(request.held_blocks for request in instance.running)]
    colours = [_SHARED, *(_colour(request) for request in instance.running)]
    scale = width / instance.kv_capacity_blocks
    edges = (np.cumsum([0, *blocks]) * scale).round().astype(int) + x
    _fill(picture, x, y, x + width, y + height, _FREE)
    cached = x + width - round(instance.kv_cached_blocks * scale)
    _hatch(picture, cached, y, x + width, y + height)
    for left, right, colour in zip(edges[:-1], edges[1:], colours, strict=True):
        _fill(picture, left, y, right - 1 if right - left > 3 else right, y + height, colour)


def _draw_queue(picture: Picture, x: int, y: int, width: int, height: int, requests: Sequence[RequestSnapshot]) -> None:
    """The number of requests and a tick for each, as far as they go."""
    ticks = x
    text_y = y + (height - _LINE) // 2
    if height >= _LINE:
        ticks = _text(picture, x, text_y, f"{len(requests):3d}", _INK if requests else _FAINT_INK)
    room = (x + width - ticks) // _TICK
    shown = len(requests) if len(requests) <= room else max(0, room - 3)
    for place, request in enumerate(requests[:shown]):
        left = ticks + place * _TICK
        _fill(picture, left, y, left + _TICK - 1, y + height, _colour(request))
    if shown < len(requests) and height >= _LINE:
        _text(picture, ticks + shown * _TICK, text_y, "..", _FAINT_INK)


def _draw_mark(picture: Picture, x: int, y: int, height: int) -> None:
    """A triangle that points from the left at `x`."""
    half = min(5, (height - 1) // 2)
    middle = y + height // 2
    for row in range(-half, half + 1):
        _fill(picture, x - half - 1, middle + row, x - abs(row), middle + row + 1, _INK)


def _draw_legend(picture: Picture, fleet: Snapshot) -> None:
    x, y = _MARGIN, picture.shape[0] - _MARGIN - _LINE
    swatches = {f"CLASS {k}": PALETTE[k % len(PALETTE)] for k in range(fleet.slo_classes)}
    swatches |= {"SHARED PREFIX": _SHARED, "CACHED": _CACHED, "FREE": _FREE}
    if fleet.migrations:
        swatches |= {"MIGRATION": _MOVING, "STOPPED": _STOPPED}
    for name, colour in swatches.items():
        if name == "CACHED":
            _fill(picture, x, y, x + 11, y + _LINE, _FREE)
            _hatch(picture, x, y, x + 11, y + _LINE)
        else:
            _fill(picture, x, y, x + 11, y + _LINE, colour)
        x = _text(picture, x + 15, y, name, _FAINT_INK) + 8
    _text(picture, x, y, "PALER: LOWER PRIORITY", _FAINT_INK)


def _colour(request: RequestSnapshot) -> Colour:
    tint = _TINTS[min(max(request.priority, 0), len(_TINTS) - 1)]
    pure = PALETTE[request.slo_class % len(PALETTE)]
    red, green, blue = (round(c + tint * (paper - c)) for c, paper in zip(pure, _PAPER, strict=True))
    return red, green, blue


def _fill(picture: Picture, left: int, top: int, right: int, bottom: int, colour: Colour) -> None:
    picture[top:bottom, left:right] = colour


def _hatch(picture: Picture, left: int, top: int, right: int, bottom: int) -> None:
    """Diagonal stripes over what is there."""
    rows, columns = np.ogrid[top:bottom, left:right]
    picture[top:bottom, left:right][(rows + columns) % 4 == 0] = _CACHED


def _text(picture: Picture, x: int, y: int, text: str, colour: Colour, scale: int = 1) -> int:
    """Write in capitals; returns where the next word begins. What lies beyond the edge is cut off."""
    for character in text:
        glyph = _GLYPHS[character].repeat(scale, axis=0).repeat(scale, axis=1)
        place = picture[y : y + len(glyph), x : x + glyph.shape[1]]
        place[glyph[: place.shape[0], : place.shape[1]]] = colour
        x += _LETTER * scale
    return x + _LETTER * scale


_FONT = """
0 3E5149453E 1 00427F4000 2 4261514946 3 2241494936 4 1814127F10 5 2745454539 6 3C4A494930 7 0171090503 8 3649494936
9 064949291E A 7E1111117E B 7F49494936 C 3E41414122 D 7F4141221C E 7F49494941 F 7F09090901 G 3E4149497A H 7F0808087F
I 00417F4100 K 7F08142241 L 7F40404040 M 7F020C027F N 7F0408107F O 3E4141413E P 7F09090906 R 7F09192946 S 4649494931
T 01017F0101 U 3F4040403F V 1F2040201F W 3F4038403F X 6314081463 Y 0708700807 . 0060600000
: 0036360000
"""
"""Characters and their five columns, the lowest bit on top."""


def _glyph(columns: str) -> NDArray[np.bool_]:
    return (np.frombuffer(bytes.fromhex(columns), np.uint8) >> np.arange(_LINE)[:, None]) & 1 == 1


_GLYPHS = {" ": _glyph("0000000000")} | {
    character: _glyph(columns) for character, columns in zip(_FONT.split()[::2], _FONT.split()[1::2], strict=True)
}
