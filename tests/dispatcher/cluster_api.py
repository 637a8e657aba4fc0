"""A Kubernetes API server over HTTP, with the controllers that matter, whose pods are engines of this process.

It does on cue what real ones do: events that never come, answers that come too late or not at all, refusals, conflicts,
versions that are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import orjson
from scripted import ScriptedEngine

from fleetpilot.dispatcher.http.server import Exchange, HttpServer, serve

COST = "controller.kubernetes.io/pod-deletion-cost"
APPS = "/apis/apps/v1/namespaces/serving"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
PODS = "/api/v1/namespaces/serving/pods"


@dataclass
class Pod:
    """A pod, its engine and the slice that names it."""

    name: str
    engine: ScriptedEngine
    number: int
    annotations: dict[str, str] = field(default_factory=dict)
    ready: bool = True
    terminating: bool = False


@dataclass
class Fault:
    """What happens to the next so many requests that it fits; `does` says whether they are carried out all the same."""

    fits: Callable[[str, str], bool]
    status: int = 0  # 0: no answer
    times: int = 1
    does: bool = False


class ClusterApi:
    """One workload with a service.

    Attributes:
        pods: by name.
        replicas: as asked for.
        faults: those to come.
        events: while False, watches are told nothing.
        ready_pods: pods come up; else they stay pending.
        heeds_cost: the controller regards deletion costs.
        requests: (method, path) of all that came.
        tokens: of all that came.
    """

    def __init__(self, kind: str = "deployments", replicas: int = 1):
        self.kind = kind
        self.replicas = replicas
        self.pods: dict[str, Pod] = {}
        self.version = 100
        self.oldest = 0  # versions before are gone
        self.faults: list[Fault] = []
        self.events = True
        self.ready_pods = True
        self.heeds_cost = True
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[bytes | None] = set()
        self.gone: list[str] = []
        self._numbers = 0
        self._watches: list[Exchange] = []
        self._server: HttpServer
        self._controller: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    async def start(self) -> None:
        await self.settle()
        self._server = await serve(self._handle)
        self._controller = asyncio.get_running_loop().create_task(self._control())

    async def stop(self) -> None:
        self._controller.cancel()
        await self._server.close()
        for pod in self.pods.values():
            await pod.engine.kill()

    def fail(self, method: str, part: str, status: int = 0, times: int = 1, *, does: bool = False) -> None:
        self.faults.append(Fault(lambda m, p: m == method and part in p, status, times, does))

    def count(self, method: str, part: str) -> int:
        return sum(m == method and part in path for m, path in self.requests)

    def pod_of(self, url: str) -> Pod:
        return next(pod for pod in self.pods.values() if pod.engine.url == url)

    # controllers

    async def _control(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            await self.settle()

    async def settle(self) -> None:
        """Have as many pods as replicas."""
        while len(self.pods) < self.replicas:
            number = len(self.pods) if self.kind == "statefulsets" else self._numbers
            pod = Pod(f"vllm-{number}", ScriptedEngine(), self._numbers, ready=self.ready_pods)
            self._numbers += 1
            pod.engine.token_s = 0.005
            await pod.engine.start()
            self.pods[pod.name] = pod
            self._tell("ADDED", pod)
        while len(self.pods) > self.replicas:
            pod = min(self.pods.values(), key=self._order)
            del self.pods[pod.name]
            self.gone.append(pod.engine.url)
            self._tell("DELETED", pod)
            await pod.engine.kill()

    def _order(self, pod: Pod) -> tuple[float, ...]:
        if self.kind == "statefulsets":
            return (-pod.number,)
        cost = int(pod.annotations.get(COST, "0")) if self.heeds_cost else 0
        return (float(pod.ready), float(cost), float(pod.number))

    def make_ready(self) -> None:
        self.ready_pods = True
        for pod in self.pods.values():
            if not pod.ready:
                pod.ready = True
                self._tell("MODIFIED", pod)

    def compact(self) -> None:
        """Forget old versions, and tell those that watch from one."""
        self.version += 1
        self.oldest = self.version
        self._write({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}})

    def cut(self) -> None:
        """Break all watches."""
        for exchange in self._watches:
            exchange.abort()

    def _tell(self, kind: str, pod: Pod) -> None:
        self.version += 1
        if self.events:
            self._write({"type": kind, "object": self._slice(pod)})

    def _write(self, event: dict[str, Any]) -> None:
        self._watches = [exchange for exchange in self._watches if not exchange.closed]
        line = orjson.dumps(event) + b"\n"
        for exchange in self._watches:
            exchange.write(line[:20])  # lines come in pieces
            exchange.write(line[20:])

    def _slice(self, pod: Pod) -> dict[str, Any]:
        conditions = {"ready": pod.ready, "serving": pod.ready, "terminating": pod.terminating}
        reference = {"kind": "Pod", "name": pod.name, "namespace": "serving"}
        return {
            "metadata": {"name": f"slice-{pod.number}", "resourceVersion": str(self.version)},
            "addressType": "IPv4",
            "endpoints": [{"addresses": ["127.0.0.1"], "conditions": conditions, "targetRef": reference}],
            "ports": [{"name": "metrics", "port": 1}, {"name": "http", "port": pod.engine.server.port}],
        }

    # requests

    def _handle(self, exchange: Exchange) -> None:
        self.requests.append((exchange.method, f"{exchange.path}?{exchange.query}"))
        self.tokens.add(exchange.header(b"authorization"))
        fault = next((f for f in self.faults if f.times and f.fits(*self.requests[-1])), None)
        if fault is None:
            self._answer(exchange, exchange.respond)
            return
        fault.times -= 1
        if fault.does:
            self._answer(exchange, lambda *_: None)
        if fault.status:
            exchange.respond(fault.status, orjson.dumps({"kind": "Status", "message": f"fault {fault.status}"}))

    def _answer(self, exchange: Exchange, respond: Callable[[int, bytes], None]) -> None:
        query = {name: values[0] for name, values in parse_qs(exchange.query).items()}
        if exchange.path == SLICES and query["labelSelector"] == "kubernetes.io/service-name=vllm":
            if "watch" in query:
                self._watch(exchange, int(query["resourceVersion"]))
            else:
                items = [self._slice(pod) for pod in self.pods.values()]
                respond(200, orjson.dumps({"metadata": {"resourceVersion": str(self.version)}, "items": items}))
        elif exchange.path == f"{APPS}/{self.kind}/vllm/scale":
            self._scale(exchange, respond)
        elif exchange.method == "PATCH" and exchange.path.startswith(PODS):
            assert exchange.header(b"content-type") == b"application/merge-patch+json"
            pod = self.pods[exchange.path.rpartition("/")[2]]
            for name, value in orjson.loads(exchange.body)["metadata"]["annotations"].items():
                pod.annotations.pop(name, None) if value is None else pod.annotations.update({name: value})
            respond(200, b"{}")
        else:
            respond(404, orjson.dumps({"kind": "Status", "message": f"{exchange.path} not found"}))

    def _scale(self, exchange: Exchange, respond: Callable[[int, bytes], None]) -> None:
        if exchange.method == "PUT":
            body = orjson.loads(exchange.body)
            if body["metadata"]["resourceVersion"] != str(self.version):
                respond(409, orjson.dumps({"kind": "Status", "message": "the object has been modified"}))
                return
            self.replicas = body["spec"]["replicas"]
            self.version += 1
        value = {
            "metadata": {"name": "vllm", "resourceVersion": str(self.version)},
            "spec": {"replicas": self.replicas},
        }
        respond(200, orjson.dumps(value))

    def _watch(self, exchange: Exchange, version: int) -> None:
        if version < self.oldest:
            exchange.respond(410, orjson.dumps({"kind": "Status", "message": "too old resource version"}))
            return
        exchange.start(200, [(b"content-type", b"application/json")])
        self._watches.append(exchange)
        self._write({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}})
