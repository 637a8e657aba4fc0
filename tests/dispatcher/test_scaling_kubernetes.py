"""Scaling by Kubernetes: what the API server tells is followed, whatever it keeps back, refuses or tells too late."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster_api import COST, ClusterApi
from scripted import WAIT_S, ask, expected_text, run, text_of, until
from told import PROMPT, QUICK, TOKENS, Told, become, on, states

from fleetpilot.dispatcher.config import ServeConfig, load_config
from fleetpilot.dispatcher.http.client import HttpClient
from fleetpilot.dispatcher.scaling import kubernetes
from fleetpilot.dispatcher.scaling.actuator import ActuatorError
from fleetpilot.dispatcher.scaling.kubernetes import KubernetesActuator
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.view import STATE_ABSENT, STATE_DRAINING, STATE_READY, STATE_STARTING

RELIST_S = 0.3
NEVER_S = 1e4


def actuator_of(api: ClusterApi, **settings: Any) -> KubernetesActuator:
    kind = api.kind.removesuffix("s")
    quick = {"stop_deadline_s": 2.0, "relist_s": RELIST_S, "timeout_s": 0.3}
    return KubernetesActuator(f"{kind}/vllm", "vllm", "serving", api.url, **quick | settings)


@asynccontextmanager
async def a_cluster(
    policy: Told, api: ClusterApi | None = None, actuator: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[tuple[ClusterApi, Dispatcher, HttpClient]]:
    """A cluster of one workload, and a dispatcher that scales it, all pods that are to be ready."""
    api = api or ClusterApi()
    await api.start()
    settings: dict[str, Any] = (
        QUICK
        | {
            "scaler": "kubernetes",
            "kubernetes_workload": "deployment/vllm",
            "kubernetes_service": "vllm",
            "max_instances": 3,
        }
        | config
    )
    dispatcher = Dispatcher(ServeConfig(**settings), policy, actuator_of(api, **actuator or {}))
    await dispatcher.start()
    try:
        await dispatcher.ready(api.replicas, WAIT_S)
        yield api, dispatcher, HttpClient(f"http://127.0.0.1:{dispatcher.port}")
    finally:
        await dispatcher.stop()
        await api.stop()


def test_a_pod_is_ordered_counts_as_pending_serves_and_is_the_one_that_goes() -> None:
    async def test() -> None:
        policy = Told()
        async with a_cluster(policy) as (api, dispatcher, client):
            api.ready_pods = False
            await become(dispatcher, policy, STATE_ABSENT, STATE_READY, STATE_STARTING, STATE_ABSENT)
            await until(lambda: len(api.pods) == 2)
            assert states(dispatcher) == [STATE_READY, STATE_STARTING, STATE_ABSENT]
            assert not dispatcher.fleet.engines[1].has_address
            api.make_ready()
            await dispatcher.ready(2, WAIT_S)
            url = dispatcher.fleet.engines[1].url
            task = asyncio.create_task(ask(client, prompt=PROMPT, max_tokens=TOKENS))
            await on(dispatcher, 1)
            name = api.pod_of(url).name
            await become(dispatcher, policy, STATE_READY, STATE_READY, STATE_ABSENT, STATE_ABSENT)
            await until(lambda: api.gone == [url])
            assert api.count("PATCH", name) == 1
            assert api.replicas == 1
            assert text_of(await task) == expected_text(PROMPT, TOKENS)
            counts = dispatcher.counts
            assert (counts["scale_outs"], counts["migrations completed"], counts["failovers"]) == (1, 1, 0)
            assert counts["engines_lost"] == counts["scale_refusals"] == 0
            assert dispatcher.outcomes == {"finished": 1}

    run(test)


def test_the_pod_that_drained_goes_and_not_the_one_that_would_have() -> None:
    async def test() -> None:
        policy = Told()
        async with a_cluster(policy, ClusterApi(replicas=2)) as (api, dispatcher, _):
            url = dispatcher.fleet.engines[1].url
            policy.next = STATE_READY
            await until(lambda: api.gone == [url])
            await until(lambda: states(dispatcher) == [STATE_READY, STATE_ABSENT, STATE_ABSENT])

    run(test)


@pytest.mark.parametrize("fault", ["missed", "expired", "expired on arrival", "cut", "nonsense"])
def test_pods_are_found_however_their_watch_fails(fault: str) -> None:
    async def test() -> None:
        relist_s = RELIST_S if fault == "missed" else NEVER_S
        async with a_cluster(Told(), actuator={"relist_s": relist_s}) as (api, dispatcher, _):
            await until(lambda: api.count("GET", "watch=1") == 1)
            api.events = False
            api.replicas = 3
            await until(lambda: len(api.pods) == 3)
            if fault == "expired":
                api.compact()
            elif fault == "expired on arrival":
                api.fail("GET", "watch=1", 410, times=2)
                api.cut()
            elif fault == "cut":
                api.cut()
            elif fault == "nonsense":
                api._write({"type": "MODIFIED", "object": {}})
            await dispatcher.ready(3, WAIT_S)
            api.events = True
            api.replicas = 2
            await until(lambda: states(dispatcher).count(STATE_READY) == 2)

    run(test)


@pytest.mark.parametrize("status", [0, 403, 410, 500])
def test_while_the_server_does_not_tell_the_engines_stay(status: int) -> None:
    async def test() -> None:
        async with a_cluster(Told(), ClusterApi(replicas=2)) as (api, dispatcher, client):
            api.fail("GET", "", status, times=3)
            api.cut()
            await until(lambda: not api.faults[-1].times)
            assert states(dispatcher) == [STATE_READY, STATE_READY, STATE_ABSENT]
            assert (await ask(client)).status == 200
            api.replicas = 3
            await dispatcher.ready(3, WAIT_S)

    run(test)


@pytest.mark.parametrize(
    ("status", "does"), [(0, False), (0, True), (409, False), (429, False), (500, False), (500, True)]
)
def test_a_change_that_fails_for_now_is_made_once(status: int, does: bool) -> None:
    async def test() -> None:
        policy = Told()
        async with a_cluster(policy) as (api, dispatcher, _):
            api.fail("PUT", "scale", status, does=does)
            policy.next = STATE_ABSENT
            await dispatcher.ready(2, WAIT_S)
            assert api.count("PUT", "scale") == (1 if does else 2)
            assert api.replicas == len(api.pods) == 2
            api.fail("PUT", "scale", status, does=does)
            policy.next = STATE_READY
            await until(lambda: len(api.gone) == 1)
            await until(lambda: dispatcher.scaler is not None and len(dispatcher.scaler.instances) == 1)
            assert api.replicas == len(api.pods) == 1
            assert dispatcher.counts["starts_given_up"] == dispatcher.counts["scale_refusals"] == 0

    run(test)


def test_a_refused_change_is_counted_and_what_was_to_go_serves_on() -> None:
    async def test() -> None:
        policy = Told()
        async with a_cluster(policy, ClusterApi(replicas=2)) as (api, dispatcher, client):
            api.fail("PUT", "scale", 403)
            policy.next = STATE_ABSENT
            await until(lambda: dispatcher.counts["starts_given_up"] == 1)
            assert api.replicas == 2
            assert states(dispatcher) == [STATE_READY, STATE_READY, STATE_ABSENT]
            for part, method in (("pods", "PATCH"), ("scale", "PUT")):
                refusals = dispatcher.counts["scale_refusals"]
                api.fail(method, part, 403)
                policy.next = STATE_READY
                await until(lambda: dispatcher.counts["scale_refusals"] == refusals + 1)  # noqa: B023
                await dispatcher.ready(2, WAIT_S)
            assert api.replicas == 2
            assert not any(COST in pod.annotations for pod in api.pods.values())
            answers = [asyncio.create_task(ask(HttpClient(client.origin))) for _ in range(4)]
            assert {answer.status for answer in await asyncio.gather(*answers)} == {200}

    run(test)


def test_what_somebody_else_sets_is_followed_and_not_fought() -> None:
    async def test() -> None:
        policy = Told()
        async with a_cluster(policy) as (api, dispatcher, client):
            api.replicas = 4  # beyond the dispatcher's maximum
            await dispatcher.ready(4, WAIT_S)
            policy.next, policy.every = STATE_ABSENT, True
            task = asyncio.create_task(ask(client, max_tokens=TOKENS))
            await until(lambda: sum(len(at) for at in dispatcher.at) == 1)
            assert api.count("PUT", "scale") == 0
            api.replicas = 3
            await until(lambda: states(dispatcher).count(STATE_READY) == 3)
            assert text_of(await task) == expected_text(PROMPT, TOKENS)
            assert api.count("PUT", "scale") == 0

    run(test)


def test_the_maximum_holds_for_what_is_there_by_now() -> None:
    async def test() -> None:
        api = ClusterApi()
        await api.start()
        actuator = actuator_of(api, relist_s=NEVER_S)
        await actuator.open(lambda: None)
        api.events = False
        api.replicas = 3
        with pytest.raises(ActuatorError, match="vllm has 3 replicas"):
            await actuator.start(3)
        assert api.replicas == 3
        await actuator.close()
        await api.stop()

    run(test)


def test_where_another_pod_went_instead_the_drained_one_serves_again() -> None:
    async def test() -> None:
        policy = Told()
        async with a_cluster(policy, ClusterApi(replicas=2), {"stop_deadline_s": 0.3}) as (api, dispatcher, client):
            api.heeds_cost = False
            policy.first = False
            url = dispatcher.fleet.engines[1].url
            policy.next = STATE_READY
            await until(lambda: dispatcher.counts["scale_refusals"] == 1)
            assert api.gone != [url]
            await dispatcher.ready(1, WAIT_S)
            assert list(api.pods) == [api.pod_of(url).name]
            assert COST not in api.pod_of(url).annotations
            assert (await ask(client)).status == 200

    run(test)


def test_a_pod_that_stays_pending_is_given_up() -> None:
    async def test() -> None:
        policy = Told()
        async with a_cluster(policy, start_deadline_s=0.5) as (api, dispatcher, _):
            api.ready_pods = False
            policy.next = STATE_ABSENT
            await until(lambda: dispatcher.counts["starts_given_up"] == 1)
            await until(lambda: api.replicas == len(api.pods) == 1)
            await until(lambda: states(dispatcher) == [STATE_READY, STATE_ABSENT, STATE_ABSENT])

    run(test)


def test_of_a_statefulset_only_the_last_pod_may_go() -> None:
    async def test() -> None:
        policy = Told()
        policy.first = True
        api = ClusterApi("statefulsets", replicas=3)
        async with a_cluster(policy, api, kubernetes_workload="statefulset/vllm") as (api, dispatcher, _):
            last = api.pods["vllm-2"].engine.url
            policy.next = STATE_READY
            await until(lambda: api.gone == [last])
            assert api.count("PATCH", "pods") == 0
            assert states(dispatcher)[:2] == [STATE_READY, STATE_READY]

    run(test)


def test_pods_that_are_not_ready_or_terminate_take_no_requests() -> None:
    async def test() -> None:
        async with a_cluster(Told(moves=False), ClusterApi(replicas=2)) as (api, dispatcher, client):
            pod = api.pod_of(dispatcher.fleet.engines[1].url)
            task = asyncio.create_task(ask(client, prompt=PROMPT, max_tokens=TOKENS))
            await on(dispatcher, 1)
            pod.terminating = True
            api._tell("MODIFIED", pod)
            await until(lambda: states(dispatcher)[1] == STATE_DRAINING)
            assert text_of(await task) == expected_text(PROMPT, TOKENS)
            await until(lambda: states(dispatcher)[1] == STATE_ABSENT)

    run(test)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_to_tell_is_an_error_at_once(status: int) -> None:
    async def test() -> None:
        api = ClusterApi()
        await api.start()
        api.fail("GET", "scale", status)
        with pytest.raises(ValueError, match=f"'kubernetes': GET .*/scale was answered {status}: fault {status}"):
            await actuator_of(api).open(lambda: None)
        await api.stop()

    run(test)


def test_a_server_that_is_not_up_yet_is_waited_for() -> None:
    async def test() -> None:
        api = ClusterApi(replicas=2)
        await api.start()
        api.fail("GET", "", times=2)
        actuator = actuator_of(api)
        await actuator.open(lambda: None)
        assert not actuator.instances
        with pytest.raises(ActuatorError, match="not known yet"):
            await actuator.start(3)
        await until(lambda: len(actuator.instances) == 2)
        await actuator.close()
        await api.stop()

    run(test)


def test_the_token_of_the_service_account_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        api = ClusterApi()
        await api.start()
        (tmp_path / "token").write_text("one\n")
        monkeypatch.setattr(kubernetes, "_access", lambda _: (HttpClient(api.url), tmp_path / "token"))
        actuator = actuator_of(api)
        await actuator.open(lambda: None)
        (tmp_path / "token").write_text("two\n")
        await until(lambda: api.tokens == {b"Bearer one", b"Bearer two"})
        await actuator.close()
        await api.stop()

    run(test)


def test_in_a_pod_the_service_account_is_used_and_elsewhere_a_url_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="kubernetes_api = '': expected a URL"):
        KubernetesActuator("deployment/vllm", "vllm")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setattr(kubernetes, "_ACCOUNT", tmp_path)
    with pytest.raises(ValueError, match="expected this pod's service account"):
        KubernetesActuator("deployment/vllm", "vllm")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    monkeypatch.setattr(ssl, "create_default_context", lambda *, cafile: context)
    (tmp_path / "namespace").write_text("serving")
    assert "/namespaces/serving/" in KubernetesActuator("deployment/vllm", "vllm")._scale_path


def test_a_pod_of_two_families_is_one_engine() -> None:
    reference = {"kind": "Pod", "name": "vllm-0"}

    def a_slice(family: str, address: str, ports: Any) -> dict[str, Any]:
        endpoint = {"addresses": [address], "targetRef": reference, "conditions": {}}
        return {"addressType": family, "metadata": {"name": family}, "endpoints": [endpoint], "ports": ports}

    actuator = KubernetesActuator("deployment/vllm", "vllm", "serving", "http://127.0.0.1:1")
    six = a_slice("IPv6", "fd00::7", [{"port": 8000}])
    actuator._slices = {"six": six, "four": a_slice("IPv4", "10.0.0.7", [{"port": 8000}])}
    actuator._read_slices()
    assert list(actuator.instances) == ["http://10.0.0.7:8000"]
    actuator._slices = {"six": six}
    actuator._read_slices()
    assert list(actuator.instances) == ["http://[fd00::7]:8000"]
    actuator._slices = {"four": a_slice("IPv4", "10.0.0.7", None)}
    actuator._read_slices()
    assert not actuator.instances


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kubernetes_service": "vllm"}, "kubernetes_workload = '': expected with scaler = 'kubernetes'"),
        ({"kubernetes_workload": "pod/vllm"}, "kubernetes_workload = 'pod/vllm': expected deployment/NAME"),
        ({"kubernetes_workload": "deployment/a/b"}, "kubernetes_workload = 'deployment/a/b': expected deployment/NAME"),
        ({"scaler": "process", "scale_command": "x {port}"}, "kubernetes_workload = .*: expected with scaler"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    base = {"policy": "llumnix", "scaler": "kubernetes", "max_instances": 2, "kubernetes_api": "http://127.0.0.1:1"}
    if "kubernetes_service" not in settings:
        base |= {"kubernetes_service": "vllm", "kubernetes_workload": "deployment/vllm"}
    with pytest.raises(ValueError, match=words):
        Dispatcher(load_config(base | settings, None, {}))
