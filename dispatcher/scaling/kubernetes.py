"""Engines as pods: their number by the scale subresource of a workload, their addresses by a service's EndpointSlices.

Addresses are listed and then watched, and listed again every half minute, or when a watch ends in whatever way: what
was listed is the truth, whatever events were missed. While the API server does not answer, the last truth stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import ssl
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from fleetpilot.dispatcher.http.client import CallError, HttpClient
from fleetpilot.dispatcher.http.server import Headers
from fleetpilot.dispatcher.scaling.actuator import ActuatorError

_LOG = logging.getLogger("fleetpilot.dispatcher")
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_COST = "controller.kubernetes.io/pod-deletion-cost"
_LEAST_COST = "-2147483647"
_RETRY_S = (0.1, 0.4, 1.6)
"""Before the second, third and last try of a change."""
_SHORTEST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
KINDS = {"deployment": "deployments", "statefulset": "statefulsets"}


class _Refused(Exception):
    """The API server answered, and not with success."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class _Pod:
    """An endpoint that takes requests."""

    url: str
    name: str


class KubernetesActuator:
    """See `Actuator`. Of a Deployment any pod may be stopped, of a StatefulSet the one of the highest ordinal.

    Args:
        workload: ``deployment/NAME`` or ``statefulset/NAME``.
        service: whose EndpointSlices name the engines' addresses.
        namespace: of both; empty: that of this pod's service account, or ``default``.
        api: base URL of the API server, as of ``kubectl proxy``; empty: this pod's, with its service account.
        stop_deadline_s: a pod that is still an endpoint so long after it should have gone serves again.
        relist_s: between two lists.
        timeout_s: of a call.

    Raises:
        ValueError: one of these is malformed, or there is no service account.
    """

    def __init__(
        self,
        workload: str,
        service: str,
        namespace: str = "",
        api: str = "",
        *,
        stop_deadline_s: float = 60.0,
        relist_s: float = 30.0,
        timeout_s: float = 10.0,
    ):
        kind, self._name = workload_parts(workload)
        if not service:
            raise ValueError("kubernetes_service = '': expected the name of a service")
        self._has_ordinals = kind == "statefulset"
        self._client, self._token = _access(api)
        namespace = namespace or _own_namespace()
        self._scale_path = f"/apis/apps/v1/namespaces/{namespace}/{KINDS[kind]}/{self._name}/scale"
        self._slices_path = (
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            f"?labelSelector=kubernetes.io%2Fservice-name%3D{service}"
        )
        self._pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self._stop_deadline_s = stop_deadline_s
        self._relist_s = relist_s
        self._timeout_s = timeout_s
        self._slices: dict[str, dict[str, Any]] = {}
        self._pods: dict[str, _Pod] = {}  # by URL
        self._replicas: int | None = None
        self._changes = asyncio.Lock()
        self._moved = asyncio.Event()  # set, and made anew, whenever the pods were read
        self._changed: Callable[[], None] = lambda: None
        self._follower: asyncio.Task[None] | None = None

    @property
    def instances(self) -> Collection[str]:
        """Of the endpoints that are ready, as Kubernetes has it."""
        return self._pods.keys()

    @property
    def pending(self) -> int:
        """Replicas that are no ready endpoints yet."""
        return max(0, (self._replicas or 0) - len(self._pods))

    async def open(self, changed: Callable[[], None]) -> None:
        """List, and go on in the background.

        Raises:
            ValueError: the API server refuses to tell.
        """
        self._changed = changed
        try:
            version = await self._list()
        except _Refused as refused:
            raise ValueError(f"scaler = 'kubernetes': {refused}") from None
        except (CallError, TimeoutError, ValueError) as error:
            _LOG.warning("kubernetes: no list of engines yet: %s", _reason(error))
            version = ""
        self._follower = asyncio.get_running_loop().create_task(self._follow(version))

    async def start(self, most: int) -> None:
        """One replica more."""
        if self._replicas is None:
            raise ActuatorError(f"{self._name}: it is not known yet how many replicas there are")
        await self._scale_by(1, most)

    def may_stop(self, url: str) -> bool:
        """Whether Kubernetes could be told to stop this pod of all."""
        if url not in self._pods:
            return False
        if not self._has_ordinals:
            return True
        return not self.pending and _ordinal(self._pods[url].name) == max(_ordinal(p.name) for p in self._pods.values())

    async def stop(self, url: str) -> None:
        """One replica less, and that this pod."""
        pod = self._pods.get(url)
        if pod is None:
            return
        await self._mark(pod, _LEAST_COST)
        try:
            await self._scale_by(-1, self._replicas or 0)
            async with asyncio.timeout(self._stop_deadline_s):
                while url in self._pods:
                    await self._moved.wait()
        except (ActuatorError, TimeoutError) as error:
            with contextlib.suppress(ActuatorError):
                await self._mark(pod, None)
            if isinstance(error, TimeoutError):
                raise ActuatorError(f"pod {pod.name} still serves after {self._stop_deadline_s:g} s") from None
            raise

    async def cancel_pending(self) -> None:
        """One replica less: Kubernetes stops pods that are not ready before those that are."""
        if self.pending:
            await self._scale_by(-1, self._replicas or 0)

    async def close(self) -> None:
        """The pods stay: they are not the dispatcher's."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        self._client.close()

    # changes

    async def _scale_by(self, step: int, most: int) -> None:
        """Change the number that is there now, whoever set it, by one.

        A try that got no answer may have been carried out: then it is not made again.
        """
        async with self._changes:
            tried: int | None = None  # replicas of a try whose outcome is not known
            for pause_s in (*_RETRY_S, None):
                wanted = tried
                try:
                    scale = await self._call("GET", self._scale_path)
                    replicas = int(scale["spec"].get("replicas", 0))
                    if tried is not None and (replicas - tried) * step >= 0:
                        self._replicas = replicas
                        return
                    wanted = replicas + step
                    if not 0 <= wanted <= most:
                        raise ActuatorError(f"{self._name} has {replicas} replicas, expected room for {step:+d}")
                    await self._call("PUT", self._scale_path, scale | {"spec": scale["spec"] | {"replicas": wanted}})
                    self._replicas = wanted
                    return
                except _Refused as refused:
                    if refused.status not in (409, 429) and refused.status < 500:
                        raise ActuatorError(str(refused)) from None
                    tried = wanted if refused.status >= 500 else tried
                    reason = str(refused)
                except (CallError, TimeoutError, ValueError, KeyError) as error:
                    tried = wanted
                    reason = _reason(error)
                if pause_s is None:
                    raise ActuatorError(f"{self._name} could not be scaled: {reason}")
                await asyncio.sleep(pause_s)

    async def _mark(self, pod: _Pod, cost: str | None) -> None:
        """Have a Deployment stop this pod before all others, or no more."""
        if self._has_ordinals:
            return
        try:
            change = {"metadata": {"annotations": {_COST: cost}}}
            await self._call("PATCH", f"{self._pods_path}/{pod.name}", change, b"application/merge-patch+json")
        except (_Refused, CallError, TimeoutError, ValueError) as error:
            raise ActuatorError(f"pod {pod.name} could not be marked as the one to stop: {_reason(error)}") from None

    # what is there

    async def _follow(self, version: str) -> None:
        failures = 0
        while True:
            try:
                if not version:
                    version = await self._list()
                async with asyncio.timeout(self._relist_s):
                    await self._watch(version)
                failures = 0
            except TimeoutError:
                failures = 0 if version else failures + 1
            except (_Refused, CallError, ValueError, KeyError) as error:
                failures += 1
                log = _LOG.warning if failures == 1 else _LOG.debug
                log("kubernetes: the list of engines stays as it is for now: %s", _reason(error))
            version = ""
            pause_s = min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S * 2**failures)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _list(self) -> str:
        """Read everything; returns the version to watch from."""
        listing = await self._call("GET", self._slices_path)
        scale = await self._call("GET", self._scale_path)
        self._slices = {item["metadata"]["name"]: item for item in listing.get("items") or ()}
        self._replicas = int(scale["spec"].get("replicas", 0))
        self._read_slices()
        return str(listing["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> None:
        """Follow changes until the server ends that.

        Raises:
            _Refused: the version is too old, or it is refused.
        """
        target = f"{self._slices_path}&watch=1&allowWatchBookmarks=true&resourceVersion={version}"
        async for line in self._lines(f"{target}&timeoutSeconds={max(1, round(self._relist_s))}"):
            event = orjson.loads(line)
            kind, item = event["type"], event["object"]
            if kind == "ERROR":
                raise _Refused(int(item.get("code", 0)), f"watch: {item.get('message')}")
            if kind == "DELETED":
                self._slices.pop(item["metadata"]["name"], None)
            elif kind in ("ADDED", "MODIFIED"):
                self._slices[item["metadata"]["name"]] = item
            self._read_slices()

    def _read_slices(self) -> None:
        pods: dict[str, _Pod] = {}
        for each in sorted(
            self._slices.values(), key=lambda item: (item.get("addressType", ""), item["metadata"]["name"])
        ):
            for pod in _pods_of(each):
                pods.setdefault(pod.name, pod)  # a pod with addresses of both families is one engine
        self._pods = {pod.url: pod for pod in sorted(pods.values(), key=lambda pod: pod.name)}
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        self._changed()

    # calls

    def _headers(self) -> list[tuple[bytes, bytes]]:
        """With the token, read anew: it is replaced every hour."""
        if self._token is None:
            return []
        return [(b"authorization", b"Bearer " + self._token.read_bytes().strip())]

    async def _call(
        self, method: str, target: str, body: Any = None, content_type: bytes = b"application/json"
    ) -> dict[str, Any]:
        headers = self._headers()
        if body is not None:
            headers.append((b"content-type", content_type))
        data = b"" if body is None else orjson.dumps(body)
        answer = await self._client.fetch(method, target, data, headers, timeout_s=self._timeout_s)
        _expect_success(method, target, answer.status, answer.body)
        value: dict[str, Any] = orjson.loads(answer.body)
        return value

    async def _lines(self, target: str) -> AsyncIterator[bytes]:
        """The lines of a streamed answer as they come."""
        lines = _Lines()
        call = self._client.call("GET", target, self._headers(), b"", lines)
        try:
            while (line := await lines.queue.get()) is not None:
                yield line
            if lines.error is not None:
                raise lines.error
            _expect_success("GET", target, lines.status, lines.rest)
        finally:
            call.cancel()


class _Lines:
    """A receiver that cuts an answer into lines; None ends them. Of a refusal there are none, it is `rest`."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.status = 0
        self.rest = b""
        self.error: CallError | None = None

    def on_start(self, status: int, headers: Headers) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        self.rest += data
        if self.status == 200:
            *lines, self.rest = self.rest.split(b"\n")
            for line in lines:
                if line.strip():
                    self.queue.put_nowait(line)

    def on_end(self) -> None:
        self.queue.put_nowait(None)

    def on_error(self, error: CallError) -> None:
        self.error = error
        self.queue.put_nowait(None)


def workload_parts(workload: str) -> tuple[str, str]:
    """Kind and name of ``KIND/NAME``.

    Raises:
        ValueError: it is not of this form, or of no known kind.
    """
    kind, _, name = workload.partition("/")
    if kind not in KINDS or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name):
        raise ValueError(f"kubernetes_workload = {workload!r}: expected deployment/NAME or statefulset/NAME")
    return kind, name


def _access(api: str) -> tuple[HttpClient, Path | None]:
    """A client of the API server, and the file of the token that it wants."""
    if api:
        return HttpClient(api), None
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ValueError("kubernetes_api = '': expected a URL (of `kubectl proxy`), as this is no pod of a cluster")
    try:
        tls = ssl.create_default_context(cafile=_ACCOUNT / "ca.crt")
    except OSError as error:
        raise ValueError(f"kubernetes_api = '': expected this pod's service account in {_ACCOUNT}: {error}") from None
    return HttpClient(f"https://{_in_url(host)}:{port}", tls=tls), _ACCOUNT / "token"


def _own_namespace() -> str:
    try:
        return (_ACCOUNT / "namespace").read_text().strip()
    except OSError:
        return "default"


def _pods_of(endpoint_slice: dict[str, Any]) -> list[_Pod]:
    """Of an EndpointSlice, those that take requests. The port called ``http`` counts, or the first."""
    ports = endpoint_slice.get("ports") or ()
    port = next((each for each in ports if each.get("name") == "http"), ports[0] if ports else {}).get("port")
    found = []
    for endpoint in endpoint_slice.get("endpoints") or ():
        conditions, reference = endpoint.get("conditions") or {}, endpoint.get("targetRef") or {}
        is_ready = conditions.get("ready") is not False and not conditions.get("terminating")
        if port and is_ready and reference.get("kind") == "Pod" and endpoint.get("addresses"):
            found.append(_Pod(f"http://{_in_url(endpoint['addresses'][0])}:{port}", reference["name"]))
    return found


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _ordinal(pod: str) -> int:
    """Of a StatefulSet's pod, behind the last hyphen; -1 for none."""
    number = pod.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _expect_success(method: str, target: str, status: int, body: bytes) -> None:
    if status in (200, 201):
        return
    try:
        message = orjson.loads(body).get("message")
    except (orjson.JSONDecodeError, AttributeError):
        message = None
    raise _Refused(status, f"{method} {target.partition('?')[0]} was answered {status}: {message or '(no reason)'}")


def _reason(error: Exception) -> str:
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
