"""The commands of the README's "Use it in your own cluster", as they stand there, on real engines.

What a reader fills in is filled in: hosts, ports, the model. Engines get a small cache beside it,
since this host is small.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_kv.demo.engines import (
    BASE_ENV,
    HOST,
    READY_DEADLINE_S,
    free_port,
    http_get,
    vllm_python,
)
from hetero_kv.demo.models import write_model
from hetero_kv.demo.processes import GuardedProcess
from hetero_kv.demo.witness import executable

pytestmark = [pytest.mark.engines, pytest.mark.vllm, pytest.mark.timeout(900)]

README = Path(__file__).resolve().parents[2] / "README.md"
SMALL = [
    "--host", HOST, "--uvicorn-log-level", "warning", "--dtype", "float32", "--enforce-eager",
    "--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(32 << 20),
    # One page of metrics, whatever the number of engines behind the server.
    "--api-server-count", "1",
]  # fmt: skip


def commands() -> list[str]:
    """Those of the section, in order, each on one line."""
    text = README.read_text(encoding="utf-8")
    section = text.partition("## Use it in your own cluster")[2].partition("\n## ")[0]
    blocks = re.findall(r"^ *```\n(.*?)^ *```", section, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def chosen(begin: str) -> list[str]:
    found = [line for line in commands() if line.startswith(begin)]
    assert found, f"the README has no command that begins with `{begin}`"
    return found


@contextlib.contextmanager
def running(
    name: str, command: list[str], logs: Path, env: dict[str, str]
) -> Iterator[GuardedProcess]:
    process = GuardedProcess(name, command, logs / f"{name}.log", env)
    try:
        yield process
    finally:
        process.stop(5.0)


def wait_until_answers(process: GuardedProcess, port: int, path: str) -> None:
    end = time.monotonic() + READY_DEADLINE_S
    while True:
        with contextlib.suppress(OSError):
            if http_get(port, path, 2.0)[0] == 200:
                return
        assert process.poll() is None, process.log_tail()
        assert time.monotonic() < end, process.log_tail()
        time.sleep(0.2)


def test_the_readmes_commands_serve_and_prove_that_kv_moved(
    tmp_path: Path, engine_logs: Path
) -> None:
    logs = engine_logs / "readme"
    model = str(write_model("gqa", tmp_path / "model"))
    ports = {"8100": free_port(), "8200": free_port(), "8000": free_port()}
    proxy = executable("hetero-kv-proxy", "HETERO_KV_PROXY")
    proofs = executable("hetero-kv", "HETERO_KV_CLI")

    def filled(command: str) -> list[str]:
        command = command.replace("PREFILL:", f"{HOST}:").replace("DECODE:", f"{HOST}:")
        command = command.replace("localhost:", f"{HOST}:").replace("0.0.0.0:", f"{HOST}:")
        for written, port in ports.items():
            command = re.sub(rf"\b{written}\b", str(port), command)
        words = shlex.split(re.sub(r"\bMODEL\b", model, command))
        names = {"python": vllm_python(), "hetero-kv-proxy": proxy, "hetero-kv": proofs}
        return [names.get(words[0], words[0]), *words[1:]]

    engines = chosen("python -m vllm.entrypoints.openai.api_server")
    assert [re.search(r"kv_\w+er\b", line)[0] for line in engines] == ["kv_producer", "kv_consumer"]
    (serve,) = chosen("hetero-kv-proxy serve")
    (curl,) = chosen("curl http://localhost:8000/v1/completions")
    (verify,) = chosen("hetero-kv verify")
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(running(role, [*filled(line), *SMALL], logs, dict(BASE_ENV)))
            for role, line in zip(("prefill", "decode"), engines, strict=True)
        ]
        for process, port in zip(started, (ports["8100"], ports["8200"]), strict=True):
            wait_until_answers(process, port, "/health")
        front = stack.enter_context(running("proxy", filled(serve), logs, {}))
        wait_until_answers(front, ports["8000"], "/ready")
        assert shutil.which("curl"), "the README's request is sent by curl"
        sent = subprocess.run(
            [*filled(curl), "-sS"], capture_output=True, text=True, timeout=300, check=True
        )
        answer = json.loads(sent.stdout)
        assert answer["usage"]["completion_tokens"] == 16, answer
        proof = subprocess.run(
            filled(verify), capture_output=True, text=True, timeout=300, check=False, env=os.environ
        )
        assert proof.returncode == 0, proof.stdout + proof.stderr
