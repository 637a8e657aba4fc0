"""What starts and stops engines: the seam between the scaler and processes, Kubernetes, ..."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from fleetpilot.dispatcher.config import ServeConfig


class ActuatorError(Exception):
    """What was asked for was refused, or could not be done. The message says why."""


class Actuator(Protocol):
    """Starts and stops engines somewhere, and says which are there.

    What it says is followed, whatever was asked of it: an engine that ends by itself, or that somebody else started, is
    as good as any.
    """

    @property
    def instances(self) -> Collection[str]:
        """Base URLs of the engines that are there, up or coming up."""

    @property
    def pending(self) -> int:
        """Further ones that were ordered and have no address yet."""

    async def open(self, changed: Callable[[], None]) -> None:
        """Begin to watch.

        Args:
            changed: called when `instances` or `pending` have changed by themselves.

        Raises:
            ValueError: the settings do not fit what is there.
        """

    async def start(self, most: int) -> None:
        """Order one more instance, if there are fewer than `most` of them by then.

        Raises:
            ActuatorError: there will be none.
        """

    def may_stop(self, url: str) -> bool:
        """Whether this instance could be the next to be stopped."""

    async def stop(self, url: str) -> None:
        """End an instance that has no requests; returns when it is gone.

        Raises:
            ActuatorError: it stays.
        """

    async def cancel_pending(self) -> None:
        """Take back one order of an instance that has no address yet.

        Raises:
            ActuatorError: it stands.
        """

    async def close(self) -> None:
        """Watch no more, and end what would not outlive the dispatcher. May be called again."""


def make_actuator(config: ServeConfig) -> Actuator:
    """The actuator that `config.scaler` names.

    Raises:
        ValueError: its settings are malformed.
    """
    if config.scaler == "kubernetes":
        from fleetpilot.dispatcher.scaling.kubernetes import KubernetesActuator

        return KubernetesActuator(
            config.kubernetes_workload, config.kubernetes_service, config.kubernetes_namespace, config.kubernetes_api
        )
    if config.scaler == "sleep":
        from fleetpilot.dispatcher.scaling.sleep import SleepActuator

        return SleepActuator(config.engines, config.engine_key_headers)
    from fleetpilot.dispatcher.scaling.process import ProcessActuator

    return ProcessActuator(config.scale_command, config.stop_grace_s)
