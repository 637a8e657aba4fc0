"""Carries out the policy's SCALE decisions within limits: pending counted, load predicted, cooldowns, drains."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetpilot.dispatcher.engine import Engine, EngineState
from fleetpilot.dispatcher.scaling.actuator import Actuator, ActuatorError
from fleetpilot.fleet.view import NONE

if TYPE_CHECKING:
    from fleetpilot.dispatcher.service import Dispatcher

_LOG = logging.getLogger("fleetpilot.dispatcher")
_STEP_S = 0.1
_LONGEST_BACK_OFF_S = 300.0
_LEAST_BACK_OFF_S = 1.0


class Scaler:
    """Starts and drains engines of a dispatcher.

    Args:
        dispatcher: whose fleet it is.
        actuator: that starts and stops them.
    """

    def __init__(self, dispatcher: Dispatcher, actuator: Actuator):
        self._dispatcher = dispatcher
        self._config = dispatcher.config
        self._fleet = dispatcher.fleet
        self._actuator = actuator
        self._ordering = 0  # orders on their way
        self._stopping: set[str] = set()  # URLs of instances that are drained and being ended
        self._start_from_s = 0.0  # as the policy says
        self._retry_from_s = 0.0  # any start, after one that came to nothing
        self._drain_from_s = 0.0
        self._failures = 0  # starts that came to nothing, in a row
        self._failed_s = 0.0
        self._closing = False

    @property
    def instances(self) -> Collection[str]:
        """URLs of the engines that the actuator has, those included that are being ended."""
        return self._actuator.instances

    async def open(self) -> None:
        """Bring up the least number of instances.

        Raises:
            ValueError: the actuator's settings do not fit what is there.
        """
        self._fleet.reserve(self._config.max_instances)
        await self._actuator.open(self.follow)
        self.follow()

    async def run(self) -> None:
        """Ask the policy, and see to it."""
        self._drain_from_s = time.monotonic() + self._config.scale_in_cooldown_s
        decision_s = time.monotonic()
        while not self._closing:
            now_s = time.monotonic()
            self._end_drains(now_s)
            self._give_up(now_s)
            self._keep_minimum(now_s)
            if now_s >= decision_s:
                self.decide(now_s)
                decision_s = now_s + self._config.scale_interval_s
            await asyncio.sleep(min(_STEP_S, self._config.scale_interval_s))

    def pause(self) -> None:
        """Start and drain nothing more."""
        self._closing = True

    async def close(self) -> None:
        """End what the dispatcher started."""
        self._closing = True
        await self._actuator.close()

    # what is there

    def follow(self) -> None:
        """Bring the fleet in line with what the actuator says."""
        if self._closing:
            return
        present = [url for url in self._actuator.instances if url not in self._stopping]
        urls = [*self._config.fixed_engines, *present]
        for engine in self._fleet.engines:
            if engine.state == EngineState.STARTING and engine.has_address and engine.url not in urls:
                self._came_to_nothing(f"engine {engine.slot} ({engine.url}) ended while it started")
                self._dispatcher.engine_left(engine)
        self._dispatcher.set_engines(urls)
        self._fleet.expect(self._actuator.pending + self._ordering)

    @property
    def _present(self) -> int:
        """Instances that take up room, now or soon: all but those of the configuration, which are always there."""
        return len(self._actuator.instances) + self._actuator.pending + self._ordering

    @property
    def _most(self) -> int:
        return self._config.max_instances - len(self._config.fixed_engines)

    def _is_scaled(self, engine: Engine) -> bool:
        """Whether it is there by the actuator and not about to leave."""
        return engine.url in self._actuator.instances and not engine.leaving

    # starting

    def _order(self, now_s: float) -> None:
        self._ordering += 1
        self._fleet.expect(self._actuator.pending + self._ordering)
        self._dispatcher.counts["scale_outs"] += 1
        self._start_from_s = now_s + self._config.scale_out_cooldown_s
        self._drain_from_s = now_s + self._config.scale_in_cooldown_s
        self._dispatcher._run(self._start())

    async def _start(self) -> None:
        try:
            await self._actuator.start(self._most)
        except ActuatorError as error:
            self._came_to_nothing(str(error))
        finally:
            self._ordering -= 1
            self.follow()

    def _came_to_nothing(self, reason: str) -> None:
        """A start failed: the next ones wait, longer each time."""
        self._dispatcher.counts["starts_given_up"] += 1
        wait_s = max(_LEAST_BACK_OFF_S, self._config.scale_out_cooldown_s) * 2**self._failures
        wait_s = min(wait_s, max(_LONGEST_BACK_OFF_S, self._config.scale_out_cooldown_s))
        _LOG.warning("a start came to nothing, the next in %g s at the earliest: %s", wait_s, reason)
        self._failures = min(self._failures + 1, 30)
        self._failed_s = time.monotonic()
        self._retry_from_s = self._failed_s + wait_s

    def _give_up(self, now_s: float) -> None:
        """Engines that do not come up, or not again, are replaced."""
        latest_s = now_s - self._config.start_deadline_s
        for engine in self._fleet.engines:
            is_up = engine.state in (EngineState.READY, EngineState.DRAINING)
            if is_up and self._is_scaled(engine) and engine.state_since_s > self._failed_s:
                self._failures = 0
            if engine.state not in (EngineState.STARTING, EngineState.FAILED) or engine.state_since_s > latest_s:
                continue
            reason = f"engine {engine.slot} ({engine.url}) was not up within {self._config.start_deadline_s:g} s"
            if self._is_scaled(engine) and self._actuator.may_stop(engine.url):
                self._came_to_nothing(reason)
                self._stop(engine)
            elif not engine.has_address and self._actuator.pending:
                self._came_to_nothing(reason)
                engine.state_since_s = now_s
                self._dispatcher._run(self._cancel_pending())

    async def _cancel_pending(self) -> None:
        try:
            await self._actuator.cancel_pending()
        except ActuatorError as error:
            self._refused(error)
        self.follow()

    def _keep_minimum(self, now_s: float) -> None:
        least = self._config.min_instances - len(self._config.fixed_engines)
        while self._present < least and now_s >= self._retry_from_s:
            self._order(now_s)

    # deciding

    def decide(self, now_s: float) -> None:
        """Ask the policy until it has no more; each instance is chosen once."""
        chosen: set[int] = set()
        may_start = now_s >= max(self._start_from_s, self._retry_from_s)
        may_drain = now_s >= self._drain_from_s
        while True:
            slot = self._fleet.choose_scale(
                lambda engine: engine.slot not in chosen and self._may_change(engine, may_start, may_drain)
            )
            if slot == NONE:
                return
            chosen.add(slot)
            engine = self._fleet.engines[slot]
            if self._fleet.host.dry_run:
                self._dispatcher.counts["scalings not made in a dry run"] += 1
            elif engine.state == EngineState.ABSENT:
                self._order(now_s)
            elif engine.state == EngineState.READY:
                self._drain(engine, now_s)
            else:
                self._keep(engine)

    def _may_change(self, engine: Engine, may_start: bool, may_drain: bool) -> bool:
        if engine.state == EngineState.ABSENT:
            lowest = next(e for e in self._fleet.engines if e.state == EngineState.ABSENT)
            return may_start and engine is lowest and self._present < self._most
        if engine.state == EngineState.DRAINING:
            return self._is_scaled(engine)
        return may_drain and engine.state == EngineState.READY and self._is_scaled(engine) and self._may_drain(engine)

    def _may_drain(self, engine: Engine) -> bool:
        ready = sum(e.state == EngineState.READY for e in self._fleet.engines)
        if ready <= self._config.min_instances or not self._actuator.may_stop(engine.url) or self._fleet.held:
            return False
        return load_without(self._fleet.view.instances[0], engine.slot) <= self._config.scale_in_load

    def _drain(self, engine: Engine, now_s: float) -> None:
        _LOG.info("engine %d (%s) drains", engine.slot, engine.url)
        self._dispatcher.counts["scale_ins"] += 1
        self._fleet.set_state(engine, EngineState.DRAINING)
        self._drain_from_s = now_s + self._config.scale_in_cooldown_s

    def _keep(self, engine: Engine) -> None:
        _LOG.info("engine %d (%s) drains no more", engine.slot, engine.url)
        self._dispatcher.counts["drains_cancelled"] += 1
        self._fleet.set_state(engine, EngineState.READY)
        self._dispatcher.place_held()

    # draining

    def _end_drains(self, now_s: float) -> None:
        for engine in self._fleet.engines:
            if engine.state != EngineState.DRAINING or not self._is_scaled(engine):
                continue
            if not self._fleet.in_flight(engine.slot) and not self._fleet.is_migrating(engine.slot):
                self._stop(engine)
            elif now_s - engine.state_since_s > self._config.drain_deadline_s:
                self._dispatcher.send_elsewhere(engine)

    def _stop(self, engine: Engine) -> None:
        """End an instance that has no requests."""
        self._stopping.add(engine.url)
        self._dispatcher.engine_left(engine)
        self._dispatcher._run(self._stopped(engine.url))

    async def _stopped(self, url: str) -> None:
        try:
            await self._actuator.stop(url)
        except ActuatorError as error:
            self._refused(error)
        finally:
            self._stopping.discard(url)
            self.follow()

    def _refused(self, error: ActuatorError) -> None:
        self._dispatcher.counts["scale_refusals"] += 1
        _LOG.warning("an instance stays: %s", error)


def load_without(instances: Any, leaving: int) -> float:
    """What the fleet holds, as a share of the room of its ready instances but one; inf if that leaves none.

    The larger share counts, that of the KV blocks or that of the places in batches. Blocks in use are the last poll's,
    or the ledger's where that has more: a poll may be old, or never have come.

    Args:
        instances: (N,) records of `INSTANCE_VIEW`.
        leaving: slot of the one.
    """
    kept = (instances["state"] == EngineState.READY) & (instances["slot"] != leaving)
    if not kept.any():
        return float("inf")
    serving = instances[(instances["state"] == EngineState.READY) | (instances["state"] == EngineState.DRAINING)]
    capacity = serving["kv_capacity_blocks"]
    polled = np.where(np.isfinite(serving["poll_age_s"]), capacity - serving["free_blocks"], 0.0)
    ledger = (serving["started_prompt_tokens"] + serving["streamed_tokens"]) / serving["block_size"]
    blocks = float((np.maximum(polled, ledger) + serving["queued_demand_blocks"]).sum())
    blocks_share = blocks / float(instances["kv_capacity_blocks"][kept].sum())
    return max(blocks_share, float(serving["in_flight"].sum()) / float(instances["max_num_seqs"][kept].sum()))
