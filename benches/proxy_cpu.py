"""What does one small P/D request cost our proxy, beside nginx passing one leg on?

A scripted engine answers at once with fixed bytes; the same clients send the same body through
nginx (one request, one leg) and through our proxy (one request, a prefill and a decode leg), in
interleaved windows. Only the processor time of the proxy's own processes counts, so neither the
clients nor the engine nor other load is in the figure.

Exit status 0 when measured, 2 when the host has no nginx or counts no processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from support import kernel
from support.requests import wait_until
from support.statistics import median, shown

from hetero_kv.demo.engines import HOST, free_port, http_get
from hetero_kv.demo.processes import GuardedProcess
from hetero_kv.demo.witness import executable

CONNECTIONS = 16
BODY = json.dumps(
    {"model": "model", "prompt": list(range(16, 266)), "max_tokens": 16, "temperature": 0}
).encode()
ANSWER_BYTES_MAX = 64 << 10

NGINX_CONF = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 100000000;
  upstream engine {{
    server 127.0.0.1:{engine_port};
    keepalive 64;
    keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@contextlib.contextmanager
def scripted_engine() -> Iterator[int]:
    """Its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.scripted_engine"],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None, "invariant: Popen was given stdout=PIPE"
    try:
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(10.0)


def listens(port: int) -> bool:
    try:
        return http_get(port, "/health", 2.0)[0] == 200
    except OSError:
        return False


async def client(port: int, end_s: float) -> int:
    """Requests on one kept connection until the time is up; how many were answered by 200."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=ANSWER_BYTES_MAX)
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(BODY)}\r\n\r\n"
    ).encode() + BODY
    count = 0
    try:
        while time.monotonic() < end_s:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"port {port}: {head[:200]!r}")
            lower = head.lower()
            if b"content-length:" in lower:
                size = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
            else:
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    await reader.readexactly(size + 2)
                await reader.readexactly(2)
            count += 1
    finally:
        writer.close()
    return count


async def clients(port: int, seconds: float) -> int:
    end_s = time.monotonic() + seconds
    return sum(await asyncio.gather(*(client(port, end_s) for _ in range(CONNECTIONS))))


def window(pid: int, port: int, seconds: float) -> tuple[float, int]:
    """Processor microseconds per request, and the requests."""
    pids = kernel.tree(pid)
    before = kernel.processor_ns(pids)
    count = asyncio.run(clients(port, seconds))
    used = kernel.used_s(before, kernel.processor_ns(pids))
    return 1e6 * sum(used.values()) / count, count


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--window-s", type=float, default=3.0)
    arguments = parser.parse_args(argv)
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        print("proxy_cpu: skipped: no nginx on this host (Debian: apt-get install nginx-light)")
        return 2
    try:
        kernel.processor_ns([os.getpid()])
    except kernel.UnsupportedError as reason:
        print(f"proxy_cpu: skipped: {reason}")
        return 2
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hetero-kv-bench-")))
        engine_port = stack.enter_context(scripted_engine())
        nginx_port, proxy_port = free_port(), free_port()
        conf = folder / "nginx.conf"
        conf.write_text(NGINX_CONF.format(folder=folder, engine_port=engine_port, port=nginx_port))
        command = [executable("hetero-kv-proxy", "HETERO_KV_PROXY"), "serve"]
        command += ["--listen", f"{HOST}:{proxy_port}", "--connector", "hetero"]
        command += ["--prefill", f"http://{HOST}:{engine_port}"]
        command += ["--decode", f"http://{HOST}:{engine_port}"]
        ports = {"nginx, one leg": nginx_port, "hetero-kv-proxy, two legs": proxy_port}
        processes = {}
        for name, line in zip(ports, ([nginx, "-c", str(conf)], command), strict=True):
            process = GuardedProcess(name, line, folder / f"{name.split(',')[0]}.log")
            stack.callback(process.stop, 5.0)
            processes[name] = process
            wait_until(lambda port=ports[name]: listens(port), 20.0, f"{name} serves")
        return measure(processes, ports, arguments.rounds, arguments.window_s)


def measure(
    processes: dict[str, GuardedProcess], ports: dict[str, int], rounds: int, window_s: float
) -> int:
    for name, process in processes.items():
        window(process.pid, ports[name], 1.0)
    cost: dict[str, list[float]] = {name: [] for name in ports}
    counts = dict.fromkeys(ports, 0)
    for _ in range(rounds):
        for name, process in processes.items():
            microseconds, count = window(process.pid, ports[name], window_s)
            cost[name].append(microseconds)
            counts[name] += count
    nginx, ours = cost.values()
    print(
        f"{rounds} rounds of {window_s:g} s each, {CONNECTIONS} connections, {len(BODY)} B bodies"
    )
    for name, values in cost.items():
        print(f"{name:26} {shown(values, '.1f')} µs of processor per request ({counts[name]} sent)")
    ratios = [a / b for a, b in zip(ours, nginx, strict=True)]
    print(f"ratio                      {shown(ratios, '.2f')}; per leg {median(ratios) / 2:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
