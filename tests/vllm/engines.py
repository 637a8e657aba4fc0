"""Real vLLM engines as subprocesses of `.venv-vllm`: the tests talk to them over HTTP alone and never import vllm."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL_NAME = "tiny"
BLOCK_TOKENS = 32
START_LIMIT_S = 600.0
"""Up after 25 s on a quiet core; on a very busy machine after more than ten times that."""
STOP_LIMIT_S = 20.0
SHOWN_LOG_LINES = 30


class EngineError(Exception):
    """The engine did not come up; the message ends with the end of its log."""


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago (another process may still take one: a start is tried twice)."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _group(leader: int) -> list[int]:
    """The processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getpgid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except ProcessLookupError:
                pass
    return found


def build_tiny_model(folder: Path) -> Path:
    """The folder of the tiny model; vLLM's own environment has the libraries that write it."""
    subprocess.run([PYTHON, Path(__file__).with_name("tiny_model.py"), folder], check=True, capture_output=True)
    return folder


class Engine:
    """One vLLM engine on one core, with NIXL in both directions, priority scheduling and token-in-token-out routes.

    Args:
        model: the folder of the model.
        folder: where the engine runs and its log `engine-CORE.log` goes.
        core: which of the cores this process may use, counted from 0.
        blocks: KV blocks of 32 tokens, one of them reserved.
        max_num_seqs: requests that run at the same time.
        flags: further flags, after the others (the last one counts).
        environment: further environment variables.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        core: int = 0,
        blocks: int = 513,
        max_num_seqs: int = 32,
        flags: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.core = cores[core % len(cores)]
        self.log = folder / f"engine-{core}.log"
        self.model = model
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.flags = tuple(flags)
        self.environment = environment or {}
        self.starts = 0
        self.port, self._nixl_port = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the engine's process runs (not whether it is healthy)."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the engine and waits until it is healthy. After `kill` or `stop` it comes back at the same address.

        Raises:
            EngineError: it did not come up, twice.
        """
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Starts the processes and returns at once, so that several engines can come up together."""
        self.starts += 1
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(str(self.port)),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self._environment(str(self._nixl_port)),
                cwd=self.log.parent,  # `python -m` would import the folders of the checkout before installed packages
                start_new_session=True,  # a process group that `kill` can end as a whole
            )
        os.sched_setaffinity(self._process.pid, {self.core})

    def wait_ready(self) -> None:
        """Waits for a launched engine; one that does not come up is launched once more, on other ports.

        Raises:
            EngineError: it did not come up again.
        """
        try:
            self._wait_healthy()
        except EngineError:
            self.kill()
            self.port, self._nixl_port = free_ports(2)
            self.launch()
            self._wait_healthy()
        self._settle_threads()

    def _settle_threads(self) -> None:
        """Undo what two engines on two cores cannot bear.

        On the CPU, vLLM's NIXL connector moves the thread that computes to the last core of the node, whatever it was
        bound to: all engines would compute on that one. And NIXL's progress thread never sleeps (its delay is 0): on
        one core it would take half of the engine's time. (At 19 it takes 1 %, but then copies wait up to 0.5 s for it.)
        """
        for process in _group(self._process.pid if self._process else 0):
            for thread in Path(f"/proc/{process}/task").iterdir():
                with contextlib.suppress(OSError):  # a thread that has just ended
                    os.sched_setaffinity(int(thread.name), {self.core})
                    if (thread / "comm").read_text() == "VLLM::Worker\n" and int(thread.name) != process:
                        os.setpriority(os.PRIO_PROCESS, int(thread.name), 10)

    def move_server(self, core: int) -> None:
        """Its HTTP server on another core than the one that computes."""
        assert self._process is not None
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})

    def _wait_healthy(self) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s:
            if not self.alive:
                raise EngineError(f"vLLM ended before it was healthy; the end of its log:\n{self.log_end()}")
            if self.is_healthy():
                return
            time.sleep(0.25)
        raise EngineError(f"vLLM not healthy after {START_LIMIT_S:g} s; the end of its log:\n{self.log_end()}")

    def reset(self) -> None:
        """Aborts all requests and empties the prefix cache (but for blocks that a lease still holds)."""
        self._post("/abort_requests", {})
        self._post("/reset_prefix_cache", {})

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as response:
                return response.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def signal(self, number: int) -> None:
        """Sends a signal to all its processes."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM to the server, as an operator would, and does not wait."""
        assert self._process is not None
        self._process.terminate()

    def kill(self) -> None:
        """Ends all its processes with SIGKILL, as a crash would."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        """Ends it with SIGTERM, and what is left after `STOP_LIMIT_S` with SIGKILL."""
        if self._process is not None and self.alive:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
        self.kill()

    def log_end(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:])

    def _post(self, path: str, body: dict[str, object]) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30.0) as response:
            response.read()

    def template(self) -> str:
        """How ``fleetpilot serve --scaler process`` starts another one like it, on the same core."""
        environment = [f"{name}={value}" for name, value in self._environment("{side_port}").items()]
        return shlex.join(["env", "-C", str(self.log.parent), *environment, *self._command("{port}")])

    def _command(self, port: str) -> list[str]:
        # A load that fails must be seen: with "recompute" the engine would compute the whole context in silence.
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
        }
        options = {
            "--model": str(self.model),
            "--served-model-name": MODEL_NAME,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": "float32",
            "--max-num-seqs": str(self.max_num_seqs),
            "--block-size": str(BLOCK_TOKENS),
            "--num-gpu-blocks-override": str(self.blocks),
            "--scheduling-policy": "priority",
            "--kv-transfer-config": json.dumps(transfer),
            "--disable-access-log-for-endpoints": "/health,/metrics",
        }
        switches = ("--enforce-eager", "--enable-scale-out")
        # The `vllm` command looks for a distribution of that name, and the CPU build has another one.
        module = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
        return [*module, *(word for option in options.items() for word in option), *switches, *self.flags]

    def _environment(self, nixl_port: str) -> dict[str, str]:
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": str(self.core),
            "OMP_NUM_THREADS": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": nixl_port,
            "UCX_TLS": "tcp,self,sm",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for `reset`
            # Else the first request with logprobs compiles a kernel for a minute, and all others wait.
            "TORCHDYNAMO_DISABLE": "1",
        } | self.environment
