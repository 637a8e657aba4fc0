"""Engines that are put to sleep and woken up: vLLM's sleep mode, a standby whose weights lie in main memory.

vLLM's routes for it are those of its development mode (``VLLM_SERVER_DEV_MODE=1``), and they answer as if all were well
on engines that cannot sleep: the CPU build pauses, says that it sleeps, and frees nothing. So an engine counts only if
its configuration says ``enable_sleep_mode``, with which engines that cannot do not start.

Not yet tried on a GPU.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import orjson

from fleetpilot.dispatcher.http.client import Answer, CallError, HttpClient
from fleetpilot.dispatcher.http.server import Headers
from fleetpilot.dispatcher.scaling.actuator import ActuatorError

_LOG = logging.getLogger("fleetpilot.dispatcher")
_ASK_S = 5.0
"""Between two questions who sleeps."""
_ANSWER_S = 5.0
_INFO_S = 20.0
_CHANGE_S = 120.0
"""For weights to be copied to main memory or back."""


class CannotSleep(ValueError):
    """An engine has no sleep mode. The message says what it would take."""


async def expect_sleep_mode(client: HttpClient, headers: Headers = ()) -> None:
    """Nothing, if an engine can sleep.

    Raises:
        CannotSleep: it has no sleep mode.
        CallError, TimeoutError: it does not answer.
    """
    info = await client.fetch("GET", "/server_info?config_format=json", headers=headers, timeout_s=_INFO_S)
    if info.status != 200:
        raise CannotSleep(
            f"engine {client.origin}: GET /server_info was answered {info.status}, expected 200: it must be started "
            "with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
        )
    if _inside(info, "vllm_config", "model_config", "enable_sleep_mode") is not True:
        raise CannotSleep(
            f"engine {client.origin}: it has no sleep mode: it must be started with --enable-sleep-mode, which vLLM "
            "refuses on a CPU"
        )


async def is_asleep(client: HttpClient, headers: Headers = ()) -> bool:
    """Whether an engine that can sleep does.

    Raises:
        CallError, TimeoutError: it does not answer.
    """
    return (
        _inside(await client.fetch("GET", "/is_sleeping", headers=headers, timeout_s=_ANSWER_S), "is_sleeping") is True
    )


class SleepActuator:
    """See `Actuator`. What `start` wakes up and `stop` puts to sleep are the engines of the configuration.

    Args:
        urls: of the engines.
        headers: for them.
        ask_s: between two questions who sleeps.
    """

    def __init__(self, urls: Sequence[str], headers: Headers = (), *, ask_s: float = _ASK_S):
        self._clients = {url.rstrip("/"): HttpClient(url) for url in urls}
        self._headers = headers
        self._ask_s = ask_s
        self._awake: dict[str, None] = {}  # in the order in which they woke up
        self._asleep: dict[str, None] = {}
        self._able: set[str] = set()  # can sleep, as they were asked since they last did not answer
        self._restless: set[str] = set()  # answered, and cannot sleep
        self._changes = asyncio.Lock()
        self._changed: Callable[[], None] = lambda: None
        self._follower: asyncio.Task[None] | None = None

    @property
    def instances(self) -> Collection[str]:
        """Of engines that are awake."""
        return self._awake.keys()

    @property
    def pending(self) -> int:
        """None: an engine that wakes up has its address."""
        return 0

    async def open(self, changed: Callable[[], None]) -> None:
        """Ask who sleeps, and go on asking.

        Raises:
            CannotSleep: an engine that answers has no sleep mode.
        """
        self._changed = changed
        await asyncio.gather(*(self._ask(url) for url in self._clients))
        self._follower = asyncio.get_running_loop().create_task(self._follow())

    async def start(self, most: int) -> None:
        """Wake one up."""
        async with self._changes:
            if len(self._awake) >= most:
                raise ActuatorError(f"{len(self._awake)} engines are awake, expected fewer than {most}")
            reasons = ["no engine sleeps"]
            for url in list(self._asleep):
                try:
                    answer = await self._call(url, "/wake_up")
                except ActuatorError as error:
                    reasons.append(str(error))
                    continue
                if _inside(answer, "status") == "awake":
                    self._note(url, asleep=False)
                    return
                reasons.append(f"engine {url} was woken up and says it is not awake")
            raise ActuatorError(reasons[-1])

    def may_stop(self, url: str) -> bool:
        """Whether it is awake and can sleep."""
        return url in self._awake and url not in self._restless

    async def stop(self, url: str) -> None:
        """Put one to sleep, its weights in main memory; its KV cache is lost."""
        async with self._changes:
            if not self.may_stop(url):
                raise ActuatorError(f"engine {url} cannot be put to sleep")
            await self._call(url, "/sleep?level=1&mode=wait")
            try:
                asleep = await is_asleep(self._clients[url], self._headers)
            except (CallError, TimeoutError) as error:
                raise ActuatorError(f"engine {url} was put to sleep and does not say so: {error}") from None
            if not asleep:
                raise ActuatorError(f"engine {url} was put to sleep and says it is awake")
            self._note(url, asleep=True)

    async def cancel_pending(self) -> None:
        """There are none."""

    async def close(self) -> None:
        """The engines stay as they are."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        for client in self._clients.values():
            client.close()

    def _note(self, url: str, *, asleep: bool) -> None:
        self._awake.pop(url, None)
        self._asleep.pop(url, None)
        (self._asleep if asleep else self._awake)[url] = None

    async def _call(self, url: str, target: str) -> Answer:
        try:
            answer = await self._clients[url].fetch("POST", target, headers=self._headers, timeout_s=_CHANGE_S)
        except (CallError, TimeoutError) as error:
            raise ActuatorError(f"POST {target} of {url}: {error or 'no answer in time'}") from None
        if answer.status != 200:
            raise ActuatorError(f"POST {target} of {url} was answered {answer.status}")
        return answer

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._ask_s)
            async with self._changes:
                before = list(self._awake)
                await asyncio.gather(*(self._ask_again(url) for url in self._clients))
                if list(self._awake) != before:
                    self._changed()

    async def _ask(self, url: str) -> None:
        """One that does not answer stays what it was; not known, it is not there yet."""
        try:
            if url not in self._able:
                await expect_sleep_mode(self._clients[url], self._headers)
            asleep = await is_asleep(self._clients[url], self._headers)
        except (CallError, TimeoutError) as error:
            _LOG.debug("whether engine %s sleeps: %s", url, error)
            self._able.discard(url)
            return
        self._able.add(url)
        self._restless.discard(url)
        if asleep != (url in self._asleep) or url not in {**self._awake, **self._asleep}:
            self._note(url, asleep=asleep)

    async def _ask_again(self, url: str) -> None:
        """One that came later, and cannot sleep, serves and stays awake."""
        try:
            await self._ask(url)
        except CannotSleep as error:
            if url not in self._restless:
                _LOG.warning("%s; it stays awake", error)
                self._restless.add(url)
                self._note(url, asleep=False)


def _inside(answer: Answer, *names: str) -> Any:
    """A value of the JSON of an answer; None if it is not there."""
    try:
        value = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value
