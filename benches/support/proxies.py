"""P/D proxies and what stands behind them, for `proxy.py`: mock workers, ours, nginx, vllm-router.

A proxy that this host cannot have is told with the reason, and left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from peer_wheels import SGLANG_ROUTER_PIN, SMG_PIN, VLLM_ROUTER_PIN, WheelError, unpacked

from hetero_kv.demo.engines import HOST, free_port, http_get
from hetero_kv.demo.processes import GuardedProcess

START_TIMEOUT_S = 60.0
WORKERS_EACH = 2
ROOT = Path(__file__).resolve().parents[2]
SYSTEM_MODULES = Path("/usr/lib/nginx/modules")
LUA_PACKAGES = (
    "libnginx-mod-http-lua libnginx-mod-http-ndk libluajit-5.1-2 libpcre3 lua-resty-core "
    "lua-resty-lrucache"
)

NGINX_HEAD = """{modules}
daemon off;
worker_processes 1;
worker_rlimit_nofile 16384;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 16384; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_body_buffer_size 1m;
  client_max_body_size 64m;
  keepalive_requests 100000000;
  proxy_http_version 1.1;
  proxy_set_header Connection "";
  proxy_read_timeout 600s;
"""

NGINX_UPSTREAM = """
  upstream {name} {{
    {servers}
    keepalive 1024;
    keepalive_requests 100000000;
  }}
"""

ONE_LEG = """
  server {{
    listen {host}:{port} backlog=4096;
    location / {{
      proxy_buffering off;
      proxy_pass http://plain;
    }}
  }}
}}
"""

# What a P/D proxy does at least: the prefill leg by a subrequest with three members changed, its
# params in front of the client's own members, the decode leg streamed. Finds members by plain
# search behind the prompt, as the requests of this bench have them: no parser, the least that can
# be asked of a script.
TWO_LEGS = """
  lua_package_path "{lua}/?.lua;;";
  init_by_lua_block {{
    local function set(body, key, value)
      local from, to = body:find(',"' .. key .. '":', 1, true)
      if not from then return body end
      local past = body:find('[,}}]', to + 1)
      return body:sub(1, to) .. value .. body:sub(past)
    end
    function prefill_body(body)
      body = set(set(body, "max_tokens", "1"), "stream", "false")
      return '{{"kv_transfer_params":{{"do_remote_decode":true,"do_remote_prefill":false}},'
        .. body:sub(2)
    end
  }}
  server {{
    listen {host}:{port} backlog=4096;
    location /prefill/ {{
      internal;
      proxy_pass http://prefill/;
    }}
    location / {{
      proxy_pass http://decode;
    }}
    location /v1/completions {{
      access_by_lua_block {{
        ngx.req.read_body()
        local body = ngx.req.get_body_data()
        local leg = ngx.location.capture("/prefill" .. ngx.var.uri,
          {{ method = ngx.HTTP_POST, body = prefill_body(body) }})
        if leg.status ~= 200 then
          ngx.status = leg.status
          ngx.print(leg.body)
          return ngx.exit(ngx.HTTP_OK)
        end
        local _, to = leg.body:find('"kv_transfer_params":', 1, true)
        local params = to and leg.body:match("^%b{{}}", to + 1)
        if not params then return ngx.exit(502) end
        ngx.req.set_body_data('{{"kv_transfer_params":' .. params .. ',' .. body:sub(2))
      }}
      proxy_buffering off;
      proxy_pass http://decode;
    }}
  }}
}}
"""


class MissingError(Exception):
    """This host cannot have the proxy; the text says why and how it could."""


@dataclasses.dataclass(frozen=True)
class Workers:
    """Base URLs of mock workers."""

    prefill: list[str]
    decode: list[str]
    plain: list[str]


@dataclasses.dataclass(frozen=True)
class Proxy:
    """One that serves."""

    name: str
    url: str
    process: GuardedProcess | None


def pinned(cpus: set[int] | None, command: Sequence[str]) -> list[str]:
    """`command` on these processors only."""
    if cpus is None:
        return list(command)
    return ["taskset", "-c", ",".join(map(str, sorted(cpus))), *command]


def start(name: str, command: Sequence[str], folder: Path, env: dict[str, str]) -> GuardedProcess:
    return GuardedProcess(name, command, folder / f"{name.replace(' ', '-')}.log", env)


def wait_served(process: GuardedProcess, port: int) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            if http_get(port, "/health", 2.0)[0] == 200:
                return
        time.sleep(0.1)
    raise MissingError(
        f"{process.name} does not serve after {START_TIMEOUT_S:g} s:\n{process.log_tail()}"
    )


@contextlib.contextmanager
def workers(executable: str, pace_ms: float, cpus: set[int] | None) -> Iterator[Workers]:
    """Two of each role, in one process. Decode refuses what was not prefilled."""
    command = [executable, "mock", "--require-kv", "--pace-ms", f"{pace_ms:g}"]
    for role in ("prefill", "decode", "any"):
        command += ["--listen", f"{HOST}:0,role={role},workers={WORKERS_EACH}"]
    process = subprocess.Popen(
        pinned(cpus, command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None, "invariant: Popen was given stdout=PIPE"
        lines = [process.stdout.readline().split() for _ in range(3 * WORKERS_EACH)]
        by_role: dict[str, list[str]] = {"prefill": [], "decode": [], "any": []}
        for url, role in lines:
            by_role[role].append(url)
        yield Workers(by_role["prefill"], by_role["decode"], by_role["any"])
    finally:
        process.terminate()
        process.wait(10.0)


def ours(
    executable: str,
    behind: Workers,
    folder: Path,
    cpus: set[int] | None,
    flags: Sequence[str],
) -> Proxy:
    port = free_port()
    command = [executable, "serve", "--listen", f"{HOST}:{port}", "--log-level", "warn"]
    command += flags
    for role, urls in (("--prefill", behind.prefill), ("--decode", behind.decode)):
        for url in urls:
            command += [role, url]
    return served("ours", pinned(cpus, command), port, folder, {})


def nginx() -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found is None:
        raise MissingError("no nginx on this host (Debian: apt-get install nginx)")
    return found


def upstream(name: str, urls: Sequence[str]) -> str:
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
    return NGINX_UPSTREAM.format(name=name, servers=servers)


def nginx_one_leg(behind: Workers, folder: Path, cpus: set[int] | None) -> Proxy:
    port = free_port()
    text = NGINX_HEAD.format(modules="", folder=folder) + upstream("plain", behind.plain)
    conf = folder / "one-leg.conf"
    conf.write_text(text + ONE_LEG.format(host=HOST, port=port))
    command = pinned(cpus, [nginx(), "-c", str(conf)])
    return served("nginx one leg", command, port, folder, {})


def nginx_lua(behind: Workers, folder: Path, cpus: set[int] | None, lua_root: Path | None) -> Proxy:
    """Both legs in Lua. `lua_root` is a folder with Debian's packages unpacked (`dpkg -x`)."""
    modules = lua_root / str(SYSTEM_MODULES).lstrip("/") if lua_root else SYSTEM_MODULES
    names = ("ndk_http_module.so", "ngx_http_lua_module.so")
    if not all((modules / name).is_file() for name in names):
        raise MissingError(
            f"no {' and '.join(names)} in {modules} (Debian: apt-get install {LUA_PACKAGES}; or "
            "apt-get download and dpkg -x them into a folder for --lua-root)"
        )
    root = lua_root or Path("/")
    # An nginx that loads its modules by itself (Debian's modules-enabled) is not asked to here.
    load = "\n".join(f"load_module {modules / name};" for name in names)
    port = free_port()
    text = NGINX_HEAD.format(modules=load, folder=folder)
    text += upstream("prefill", behind.prefill) + upstream("decode", behind.decode)
    text += TWO_LEGS.format(host=HOST, port=port, lua=root / "usr/share/lua/5.1")
    conf = folder / "two-legs.conf"
    conf.write_text(text)
    command = pinned(cpus, [nginx(), "-c", str(conf)])
    env = {}
    if lua_root:
        folders = [*lua_root.glob("usr/lib/*-linux-gnu"), *lua_root.glob("lib/*-linux-gnu")]
        env["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, folders))
    return served("nginx+Lua", command, port, folder, env)


def floor_executable() -> str:
    """Builds the forwarder of `rust/hetero-kv-proxy/benches/floor.rs`; returns where it lies."""
    command = ["cargo", "bench", "--locked", "--no-run", "--message-format=json"]
    command += ["-p", "hetero-kv-proxy", "--bench", "floor"]
    try:
        built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    except FileNotFoundError as error:
        raise MissingError("no cargo on the path: it builds the floor") from error
    except subprocess.CalledProcessError as error:
        raise MissingError(f"cargo bench ended with status {error.returncode}") from error
    # The proxy itself is built with it.
    found = [
        message["executable"]
        for message in map(json.loads, built.stdout.splitlines())
        if message.get("executable") and message["target"]["name"] == "floor"
    ]
    if len(found) != 1:
        raise MissingError(f"cargo bench built {found}, not one executable")
    return str(found[0])


def floor(behind: Workers, folder: Path, cpus: set[int] | None) -> Proxy:
    """Two legs and nothing else. It hands nothing over, so that both are to plain workers."""
    port = free_port()
    plain = ",".join(url.removeprefix("http://") for url in behind.plain)
    command = [floor_executable(), "--listen", f"{HOST}:{port}", "--leg", plain, "--leg", plain]
    return served("floor", pinned(cpus, command), port, folder, {})


def vllm_router(behind: Workers, folder: Path, cpus: set[int] | None) -> Proxy:
    """By its P/D mode for NIXL, which copies prefill's params to decode."""
    port, metrics_port = free_port(), free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
    command += ["--host", HOST, "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--policy", "round_robin", "--kv-connector", "nixl", "--log-level", "warning"]
    for url in behind.prefill:
        command += ["--prefill", url]
    for url in behind.decode:
        command += ["--decode", url]
    try:
        env = {"PYTHONPATH": str(unpacked(VLLM_ROUTER_PIN, dependencies=True))}
    except WheelError as error:
        raise MissingError(str(error)) from error
    return served("vllm-router", pinned(cpus, command), port, folder, env)


def by_hand(name: str, behind: Workers, folder: Path, cpus: set[int] | None) -> Proxy:
    """`smg` or `sglang-router`: two legs to workers given by flags, without a KV handle."""
    port, metrics_port = free_port(), free_port()
    pin, module = {
        "smg": (SMG_PIN, ["smg", "launch", "--backend", "vllm", "--log-level", "error"]),
        "sglang-router": (SGLANG_ROUTER_PIN, ["sglang_router.launch_router"]),
    }[name]
    command = [sys.executable, "-m", *module, "--pd-disaggregation", "--policy", "round_robin"]
    command += ["--host", HOST, "--port", str(port), "--prometheus-port", str(metrics_port)]
    for url in behind.prefill:
        command += ["--prefill", url]
    for url in behind.decode:
        command += ["--decode", url]
    try:
        env = {"PYTHONPATH": str(unpacked(pin, dependencies=True))}
    except WheelError as error:
        raise MissingError(str(error)) from error
    return served(name, pinned(cpus, command), port, folder, env)


def served(
    name: str, command: Sequence[str], port: int, folder: Path, env: dict[str, str]
) -> Proxy:
    process = start(name, command, folder, env)
    try:
        wait_served(process, port)
    except MissingError:
        process.kill()
        raise
    return Proxy(name, f"http://{HOST}:{port}", process)
