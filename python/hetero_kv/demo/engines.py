"""Launches, watches and stops real vLLM engines on this host's CPU.

Used by the demo and by the tests on real engines. Needs neither torch nor vLLM in the process
that calls it: engines run by the interpreter that `vllm_python` finds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import importlib.util
import json
import os
import random
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hetero_kv.demo.processes import GuardedProcess, ProcessError, stop_all
from hetero_kv.demo.topology import Shape

Role = Literal["prefill", "decode", "plain"]
Progress = Callable[["Engine"], None]

HOST = "127.0.0.1"
MODEL_NAME = "model"
CONNECTOR_NAME = "HeteroKVConnector"
KV_ROLES: Mapping[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}

# Below the range from which Linux takes ports for outgoing connections (32768 and up), so that a
# port found free is not taken by a client socket before the engine binds it.
PORTS = range(15_000, 32_000)
HEALTH_TIMEOUT_S = 2.0
POLL_INTERVAL_S = 0.5
# Two loaded cores were seen to take 210 s for engines that are ready after 75 s on two quiet ones.
READY_DEADLINE_S = 600.0

# vLLM gives up on it after 120 s.
COORDINATOR_WAIT_S = 150.0

FIRST_STAGE = "starting"
# Stages of a start in order, each by a line of the log. Engine cores start after the coordinator.
STAGES = (
    ("Initializing a V1 LLM engine", "engine core starting"),
    ("world_size=", "ranks joining"),
    ("Starting to load model", "loading weights"),
    ("KV cache size", "cache allocated"),
    ("init engine", "warming up"),
    ("Started server process", "server starting"),
    ("Application startup complete", "serving"),
)

BASE_ENV: Mapping[str, str] = {
    # No look-ups over the network: models are folders.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Without it engines bind and advertise the first network address of the host.
    "VLLM_HOST_IP": HOST,
    # vLLM's default pins the worker of every engine to the same core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # torch's ordinary build has no "+cpu" in its version, by which vLLM would know its platform.
    "VLLM_TARGET_DEVICE": "cpu",
}


class EngineError(Exception):
    """An engine that did not come up; the text holds the lines of its log that tell."""


def vllm_python() -> str:
    """The interpreter that has vLLM: `HETERO_KV_VLLM_PYTHON`, else this one.

    Raises `EngineError` when neither has it.
    """
    named = os.environ.get("HETERO_KV_VLLM_PYTHON")
    if named:
        if not os.access(named, os.X_OK):
            raise EngineError(f"HETERO_KV_VLLM_PYTHON={named} is no executable file")
        return named
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise EngineError(
        f"{sys.executable} has no vLLM. Run this by the interpreter of an environment with vLLM "
        "(`make env` makes one), or name such an interpreter by HETERO_KV_VLLM_PYTHON."
    )


def free_port(taken: set[int] | None = None) -> int:
    """A TCP port of `PORTS` that is free on loopback and not in `taken`, to which it is added."""
    for port in random.sample(PORTS, 200):
        if taken is not None and port in taken:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        if taken is not None:
            taken.add(port)
        return port
    raise EngineError(f"no free TCP port in {PORTS.start}-{PORTS.stop - 1} on {HOST}")


def uses_mla(model: Path) -> bool:
    """Whether the model's attention is MLA, by its config.json."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{model} is no model folder: {error}") from error
    return bool(config.get("kv_lora_rank"))


def connector_config(
    role: Role,
    extra_config: Mapping[str, Any] | None = None,
    load_failure_policy: str | None = None,
) -> dict[str, Any] | None:
    """vLLM's `--kv-transfer-config` with our connector; None for a plain engine."""
    if role == "plain":
        return None
    config: dict[str, Any] = {
        "kv_connector": CONNECTOR_NAME,
        "kv_role": KV_ROLES[role],
        "kv_connector_extra_config": dict(extra_config or {}),
    }
    if load_failure_policy is not None:
        config["kv_load_failure_policy"] = load_failure_policy
    return config


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """What to launch: one vLLM server of `dp` engines with `pp` stages of `tp` ranks each.

    `kv_transfer_config` None with role "prefill" or "decode" means our connector with default
    settings; role "plain" runs without a connector. `port` 0 means a free one.
    """

    name: str
    model: Path
    role: Role = "plain"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    port: int = 0
    kv_transfer_config: Mapping[str, Any] | None = None
    kv_cache_bytes: int = 32 << 20
    model_len_max: int = 1024
    seqs_max: int = 32
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> str:
        """As the demo's grammar writes it."""
        return Shape(1, self.dp, self.tp, self.pp).engine

    def command(self, python: str, port: int) -> list[str]:
        """The engine's command line."""
        # Not the `vllm` script: it asks for a distribution of that name, and the CPU build of
        # vLLM has another one.
        command = [python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", MODEL_NAME]
        command += ["--host", HOST, "--port", str(port), "--uvicorn-log-level", "warning"]
        # fp32 without compilation: equal input gives equal tokens on every layout.
        command += ["--dtype", "float32"]
        compilation: dict[str, Any] = {}
        if self.pp > 1:
            command += ["--pipeline-parallel-size", str(self.pp)]
            # vLLM 0.32's CPU runner makes the buffer for what a stage gets from the one before in
            # a profiling run that it leaves out of eager engines, and then fails on the first
            # request. Compiled "by" torch's eager backend, the same operators run, and that run is
            # done.
            compilation |= {"mode": 1, "backend": "eager"}
        else:
            command += ["--enforce-eager"]
        command += ["--max-model-len", str(self.model_len_max)]
        command += ["--max-num-seqs", str(self.seqs_max)]
        command += ["--kv-cache-memory-bytes", str(self.kv_cache_bytes)]
        if self.tp > 1:
            command += ["--tensor-parallel-size", str(self.tp)]
        if self.dp > 1:
            # One API server also with several engines: one /metrics page for all of them.
            command += ["--data-parallel-size", str(self.dp), "--api-server-count", "1"]
        if uses_mla(self.model):
            # vLLM 0.32's CPU rotary kernel rotates a 3-D query wrongly when a rank has more than
            # one head; the Python implementation is right.
            compilation["custom_ops"] = ["all", "-rotary_embedding"]
        if compilation:
            command += ["--compilation-config", json.dumps(compilation)]
        transfer = self.kv_transfer_config
        if transfer is None:
            transfer = connector_config(self.role)
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        return [*command, *self.flags]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One value of a Prometheus page."""

    name: str
    labels: Mapping[str, str]
    value: float


class Engine:
    """A launched engine: its process tree, its port and its log."""

    def __init__(self, spec: EngineSpec, logs: Path, taken_ports: set[int] | None = None) -> None:
        """Starts it; `wait_ready` waits until it serves."""
        self.spec = spec
        self.port = spec.port or free_port(taken_ports)
        self._log_offset = 0
        self._stage = FIRST_STAGE
        self.process = GuardedProcess(
            spec.name,
            spec.command(vllm_python(), self.port),
            logs / f"{spec.name}.log",
            {**BASE_ENV, **spec.env},
        )

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def healthy(self) -> bool:
        """Whether /health answers 200 at this moment."""
        try:
            status, _ = http_get(self.port, "/health", HEALTH_TIMEOUT_S)
        except OSError:
            return False
        return status == 200

    def stage(self) -> str:
        """How far the start has come, by the log."""
        try:
            with self.process.log_path.open("rb") as log:
                log.seek(self._log_offset)
                new = log.read(1 << 20)
        except OSError:
            return self._stage
        self._log_offset += len(new)
        text = new.decode(errors="replace")
        for mark, stage in STAGES:
            if mark in text:
                self._stage = stage
        return self._stage

    def require_alive(self) -> None:
        """Raises `EngineError` with the telling part of the log when the engine has ended."""
        status = self.process.poll()
        if status is not None:
            raise EngineError(
                f"engine {self.name} ended with status {status} after "
                f"{self.process.age_s:.0f} s:\n{self.process.log_tail()}"
            )

    def wait_ready(
        self, deadline_s: float = READY_DEADLINE_S, progress: Progress | None = None
    ) -> None:
        """Returns when the engine serves; `progress` is called about twice a second.

        Raises `EngineError` when it ends first or the deadline passes.
        """
        wait_all_ready([self], deadline_s, progress)

    def metrics(self) -> list[Sample]:
        """The engine's /metrics page."""
        status, body = http_get(self.port, "/metrics", 10.0)
        if status != 200:
            raise EngineError(f"{self.url}/metrics answered {status}")
        return parse_metrics(body.decode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all its samples that have these labels; 0 with none."""
        return sum_metric(self.metrics(), name, **labels)

    def stop(self, grace_s: float = 15.0) -> int:
        return self.process.stop(grace_s)

    def kill(self) -> int:
        """SIGKILL to every process of the engine."""
        return self.process.kill()


def wait_all_ready(
    engines: Sequence[Engine],
    deadline_s: float = READY_DEADLINE_S,
    progress: Progress | None = None,
) -> None:
    """Returns when all serve; fails as soon as one has ended, or at the deadline."""
    waiting = list(engines)
    end = time.monotonic() + deadline_s
    while waiting:
        for engine in list(waiting):
            engine.require_alive()
            if engine.healthy():
                waiting.remove(engine)
            if progress is not None:
                progress(engine)
        if waiting and time.monotonic() > end:
            tails = "\n".join(f"{late.name}:\n{late.process.log_tail()}" for late in waiting)
            raise EngineError(f"not ready after {deadline_s:.0f} s: {tails}")
        if waiting:
            time.sleep(POLL_INTERVAL_S)


def _wait_for_coordinator(engine: Engine, progress: Progress | None) -> None:
    """Returns when the coordinator of a data parallel server is up, or has had its time."""
    end = time.monotonic() + COORDINATOR_WAIT_S
    while engine.stage() == FIRST_STAGE and time.monotonic() < end:
        engine.require_alive()
        if progress is not None:
            progress(engine)
        time.sleep(POLL_INTERVAL_S)


@contextlib.contextmanager
def running(
    specs: Sequence[EngineSpec],
    logs: Path,
    deadline_s: float = READY_DEADLINE_S,
    progress: Progress | None = None,
) -> Iterator[list[Engine]]:
    """Engines started side by side and ready; all gone when the block is left, however."""
    engines: list[Engine] = []
    taken = {spec.port for spec in specs if spec.port}
    # An engine that is still starting hears no SIGINT for many seconds and has nothing to lose.
    grace_s = 1.0
    try:
        # Those with several engines first: vLLM gives their coordinator 120 s to come up, which is
        # not enough while everything else starts beside it on few cores.
        for spec in sorted(specs, key=lambda spec: -spec.dp):
            engine = Engine(spec, logs, taken)
            engines.append(engine)
            if spec.dp > 1 and len(engines) < len(specs):
                _wait_for_coordinator(engine, progress)
        engines.sort(key=lambda engine: specs.index(engine.spec))
        wait_all_ready(engines, deadline_s, progress)
        grace_s = 15.0
        yield engines
    finally:
        stop_all([engine.process for engine in engines], grace_s)


def http_get(port: int, path: str, timeout_s: float, host: str = HOST) -> tuple[int, bytes]:
    """Status and body of one GET, with no proxy between. Raises `OSError` on any failure."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(64 << 20)
    except http.client.HTTPException as error:
        raise ConnectionError(f"GET {path} on port {port}: {error!r}") from error
    finally:
        connection.close()


# The Prometheus text format, version 0.0.4: name, optional labels in braces, value.
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


def parse_metrics(text: str) -> list[Sample]:
    """The samples of a Prometheus page; comments and lines of another form are left out."""
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        pairs = {
            key: re.sub(r"\\.", lambda escape: _ESCAPES.get(escape[0], escape[0]), raw)
            for key, raw in _LABEL.findall(labels or "")
        }
        samples.append(Sample(name, pairs, number))
    return samples


def sum_metric(samples: Sequence[Sample], name: str, **labels: str) -> float:
    """The sum over the samples of this name that carry these labels; 0 with none."""
    return sum(
        sample.value
        for sample in samples
        if sample.name == name
        and all(sample.labels.get(key) == value for key, value in labels.items())
    )


__all__ = [
    "CONNECTOR_NAME",
    "Engine",
    "EngineError",
    "EngineSpec",
    "ProcessError",
    "Sample",
    "connector_config",
    "free_port",
    "parse_metrics",
    "running",
    "sum_metric",
    "vllm_python",
    "wait_all_ready",
]
