"""What will not work with these engines, and why: ``fleetpilot serve --check``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fleetpilot.agents import load_policy
from fleetpilot.dispatcher.config import ServeConfig
from fleetpilot.dispatcher.engine import Capabilities, Engine, ask_capabilities
from fleetpilot.dispatcher.http.client import CallError
from fleetpilot.dispatcher.scaling.sleep import CannotSleep, expect_sleep_mode, is_asleep
from fleetpilot.dispatcher.service import Dispatcher
from fleetpilot.fleet.policy import kinds_of
from fleetpilot.fleet.view import KIND_SOURCE


@dataclass(frozen=True)
class Finding:
    """Something that was seen.

    Attributes:
        engine: its URL; empty for the fleet or the configuration.
        works: whether everything that concerns it will work.
        text: what was seen, and what follows.
    """

    engine: str
    works: bool
    text: str


async def check(config: ServeConfig, timeout_s: float = 60.0) -> list[Finding]:
    """Ask every engine, and judge.

    Raises:
        ValueError: the configuration itself cannot be.
    """
    headers = Dispatcher(config).engine_headers([])
    engines = [Engine(slot, url) for slot, url in enumerate(config.engines)]
    findings, awake = await _ask_who_sleeps(engines, headers) if config.scaler == "sleep" else ([], engines)
    asked = await asyncio.gather(*(_ask(engine, headers, timeout_s) for engine in awake))
    findings += [finding for engine, answer in zip(awake, asked, strict=True) for finding in _judge(engine, answer)]
    capabilities = [answer for answer in asked if isinstance(answer, Capabilities)]
    findings += _judge_fleet(config, capabilities)
    for engine in engines:
        engine.client.close()
    return findings


async def _ask_who_sleeps(
    engines: list[Engine], headers: list[tuple[bytes, bytes]]
) -> tuple[list[Finding], list[Engine]]:
    """What there is to say of engines as ones that sleep, and those that can be asked more."""
    findings, awake = [], []
    for engine in engines:
        try:
            await expect_sleep_mode(engine.client, headers)
            asleep = await is_asleep(engine.client, headers)
        except CannotSleep as error:
            findings.append(Finding(engine.url, False, f"cannot be put to sleep: {error}"))
        except (CallError, TimeoutError):
            pass  # so it will be said
        else:
            if asleep:
                findings.append(Finding(engine.url, True, "sleeps: what else it can do is not known"))
                continue
        awake.append(engine)
    return findings, awake


async def _ask(engine: Engine, headers: list[tuple[bytes, bytes]], timeout_s: float) -> Capabilities | str:
    try:
        return await ask_capabilities(engine, headers, timeout_s)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except (CallError, ValueError) as error:
        return str(error)


def _judge(engine: Engine, answer: Capabilities | str) -> list[Finding]:
    if isinstance(answer, str):
        return [Finding(engine.url, False, f"serves nothing: {answer}")]
    found = [
        Finding(
            engine.url,
            True,
            f"vLLM {answer.version or '(unknown version)'}, models {', '.join(answer.models)}, "
            f"at most {answer.max_model_len or 'an unknown number of'} tokens",
        )
    ]
    if not answer.kv_transfer:
        found.append(
            Finding(
                engine.url,
                False,
                "no live migration from or to it: it exports no KV blocks. Start it with --kv-transfer-config "
                '\'{"kv_connector":"NixlConnector","kv_role":"kv_both"}\' and prefix caching',
            )
        )
    if answer.priority is None:
        found.append(
            Finding(
                engine.url,
                True,
                "whether it schedules by priority cannot be seen from outside; without --scheduling-policy priority a "
                "migration from a full engine queues behind its line",
            )
        )
    elif not answer.priority:
        found.append(
            Finding(
                engine.url,
                False,
                "priorities are ignored, and a migration from a full engine queues behind its line: it does not "
                "schedule by priority. Start it with --scheduling-policy priority",
            )
        )
    if not answer.tokenize:
        found.append(Finding(engine.url, False, "lengths of text prompts are estimated: it has no /tokenize"))
    return found


def _judge_fleet(config: ServeConfig, capabilities: list[Capabilities]) -> list[Finding]:
    found = []
    versions = {c.version for c in capabilities}
    if len(versions) > 1:
        found.append(
            Finding(
                "", False, f"versions differ ({', '.join(sorted(versions))}): NIXL moves KV only between equal versions"
            )
        )
    if len({c.models for c in capabilities}) > 1:
        found.append(
            Finding("", False, "models differ: every request may go to any engine, so all must serve the same")
        )
    moves = KIND_SOURCE in kinds_of(load_policy(config.policy))
    if config.migration and not moves:
        found.append(Finding("", True, f"policy {config.policy!r} moves no running request"))
    return found
