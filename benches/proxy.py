"""What does a request cost our proxy, beside nginx and vllm-router?

Mock workers answer; `hetero-kv-proxy bench` sends and reads the processor time of each proxy's own
processes. All proxies run at once, and each round measures every case on every proxy in an order
of its own. Proxies share one processor, workers and load the others. nginx passes one leg on;
nginx with a script in Lua, vllm-router and ours send both. A ratio is of two windows of one round,
and the figure is the median over rounds. Proxies that this host cannot have are left out, with the
reason.

Exit status 0 when every bar that could be judged holds, 1 when one does not, 2 when nothing could
be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import kernel, proxies
from support.proxies import MissingError, Proxy, Workers
from support.statistics import median, median_interval

from hetero_kv.demo.witness import executable

PACE_MS = 20
OURS, NGINX, LUA, ROUTER, DIRECT = "ours", "nginx one leg", "nginx+Lua", "vllm-router", "direct"
WINDOW_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 30


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of load: which workers, the flags of `bench`, and the figure that counts."""

    name: str
    pace_ms: int
    flags: Sequence[str]
    figure: str
    unit: str
    # Ours divided by that proxy's: at most (at least, where direct is compared) this.
    bars: dict[str, float]
    with_direct: bool = False


def cases(window_s: float) -> list[Case]:
    lasting = ["--duration", f"{window_s:g}"]
    small = ["--no-stream", *lasting]
    bars = {ROUTER: 0.33, LUA: 1.0}
    return [
        Case("small, 32 at once", 0, ["--concurrency", "32", *small], "request", "µs/req", bars),
        Case("small, 128 at once", 0, ["--concurrency", "128", *small], "request", "µs/req", bars),
        Case(
            "36 KB body, 32 at once",
            0,
            ["--concurrency", "32", "--prompt-bytes", "36000", *small],
            "request",
            "µs/req",
            {ROUTER: 0.3, LUA: 1.0},
        ),
        Case(
            "chunk, no delay, 32 streams",
            0,
            ["--concurrency", "32", "--max-tokens", "128", *lasting],
            "chunk",
            "µs/chunk",
            {NGINX: 1.5},
        ),
        Case(
            "chunk, 20 ms pace, 32 streams",
            PACE_MS,
            ["--concurrency", "32", "--max-tokens", "64", "--per-concurrency", "4"],
            "chunk",
            "µs/chunk",
            {NGINX: 1.5},
        ),
        Case(
            "512 streams at 50 tokens/s",
            PACE_MS,
            ["--concurrency", "512", "--max-tokens", "64", "--per-concurrency", "1"],
            "rate",
            "tok/s",
            {DIRECT: 0.95},
            with_direct=True,
        ),
        Case(
            "2,048 small at once",
            0,
            ["--concurrency", "2048", "--per-concurrency", "1", "--no-stream"],
            "completed",
            "answered",
            {},
        ),
        Case(
            "2,048 streams at once",
            PACE_MS,
            ["--concurrency", "2048", "--per-concurrency", "1", "--max-tokens", "64"],
            "completed",
            "answered",
            {},
        ),
    ]


def figure(case: Case, result: dict[str, Any]) -> float | None:
    """What counts in this case; none where a window has no complete answer."""
    if case.figure == "completed":
        return float(result["completed"])
    if not result["completed"]:
        return None
    if case.figure == "rate":
        return float(result["generated_tokens_per_s"])
    cpu = result["cpu"]
    return float(cpu["us_per_request" if case.figure == "request" else "us_per_chunk"])


def window(
    binary: str, proxy: Proxy, flags: Sequence[str], cpus: set[int] | None
) -> dict[str, Any]:
    command = [binary, "bench", "--quiet", "--json", "-", "--model", "mock-model", "--no-usage"]
    command += ["--url", proxy.url, "--request-timeout-s", str(REQUEST_TIMEOUT_S), *flags]
    if proxy.process is not None:
        command += ["--pid", str(proxy.process.pid)]
    done = subprocess.run(
        proxies.pinned(cpus, command),
        check=False,
        capture_output=True,
        text=True,
        timeout=WINDOW_TIMEOUT_S,
    )
    if not done.stdout:
        raise RuntimeError(f"{proxy.name}: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)["rounds"][0]
    return result


def proxies_before(
    behind: Workers,
    folder: Path,
    arguments: argparse.Namespace,
    cpus: set[int] | None,
    stack: contextlib.ExitStack,
    said: set[str],
) -> dict[str, Proxy]:
    """Every proxy that this host can have, before these workers."""
    binary = executable("hetero-kv-proxy", "HETERO_KV_PROXY")
    makers = {
        OURS: lambda: proxies.ours(binary, behind, folder, cpus),
        NGINX: lambda: proxies.nginx_one_leg(behind, folder, cpus),
        LUA: lambda: proxies.nginx_lua(behind, folder, cpus, arguments.lua_root),
        ROUTER: lambda: proxies.vllm_router(behind, folder, cpus),
    }
    if arguments.no_vllm_router:
        del makers[ROUTER]
    found = {}
    for name, make in makers.items():
        try:
            proxy = make()
        except MissingError as reason:
            if name not in said:
                print(f"left out: {name}: {reason}", file=sys.stderr)
            said.add(name)
            continue
        assert proxy.process is not None, "invariant: only `direct` has no process"
        stack.callback(proxy.process.stop, 5.0)
        # Connections, caches and, with vllm-router, the first look at the workers.
        result = window(binary, proxy, ["--concurrency", "32", "--no-stream"], None)
        if not result["completed"]:
            print(f"left out: {name}: {result['failures']}", file=sys.stderr)
            said.add(name)
            continue
        found[name] = proxy
    return found


Results = dict[tuple[str, str], list[dict[str, Any]]]


def measure(
    chosen: Sequence[Case],
    by_pace: dict[int, dict[str, Proxy]],
    rounds: int,
    cpus: set[int] | None,
) -> Results:
    binary = executable("hetero-kv-proxy", "HETERO_KV_PROXY")
    order = random.Random(1)
    results: Results = {}
    for number in range(rounds):
        turns = [(case, proxy) for case in chosen for proxy in by_pace[case.pace_ms].values()]
        order.shuffle(turns)
        for case, proxy in turns:
            if proxy.name == DIRECT and not case.with_direct:
                continue
            result = window(binary, proxy, case.flags, cpus)
            results.setdefault((case.name, proxy.name), []).append(result)
        load = kernel.load_average()
        print(f"round {number + 1} of {rounds} done, load average {load:.1f}", file=sys.stderr)
    return results


def shown(values: Sequence[float | None], form: str) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    low, high = median_interval(numbers)
    return f"{median(numbers):{form}} [{low:{form}}, {high:{form}}]"


def report(chosen: Sequence[Case], results: Results) -> bool:
    """Prints the tables; whether each bar holds that could be judged."""
    holds = True
    names = [OURS, NGINX, LUA, ROUTER, DIRECT]
    present = [name for name in names if any(key[1] == name for key in results)]
    print("| case | " + " | ".join(present) + " |")
    print("|---|" + "---|" * len(present))
    for case in chosen:
        cells = []
        for name in present:
            of = results.get((case.name, name), [])
            cell = shown([figure(case, result) for result in of], ".1f")
            lost = sum(result["failed"] for result in of)
            if lost:
                sent = sum(result["sent"] for result in of)
                kinds = sorted({kind for result in of for kind in result["failures"]})
                cell += f"; {lost} of {sent} failed: {', '.join(kinds)}"
            cells.append(cell)
        print(f"| {case.name}, {case.unit} | " + " | ".join(cells) + " |")
    print()
    print("| case | ours / | ratio | bar | |")
    print("|---|---|---|---|---|")
    for case in chosen:
        ours = results.get((case.name, OURS), [])
        for name in (NGINX, LUA, ROUTER, DIRECT):
            theirs = results.get((case.name, name), [])
            pairs = [(figure(case, a), figure(case, b)) for a, b in zip(ours, theirs, strict=False)]
            ratios = [a / b for a, b in pairs if a is not None and b]
            if not ratios or case.figure == "completed":
                continue
            bar = case.bars.get(name)
            verdict = "shown"
            if bar is not None:
                fine = median(ratios) >= bar if name == DIRECT else median(ratios) <= bar
                verdict = "holds" if fine else "missed"
                low, high = median_interval(ratios)
                if low <= bar <= high:
                    verdict += "; the bar is within the interval"
                holds = holds and fine
            print(
                f"| {case.name} | {name} | {shown(ratios, '.2f')} | "
                f"{'-' if bar is None else bar} | {verdict} |"
            )
    print()
    for case in chosen:
        ours = results.get((case.name, OURS), [])
        if any(result["failed"] for result in ours):
            holds = False
            print(f"{case.name}: ours failed requests")
    for name in present:
        peaks = [
            result["cpu"]["rss_peak_mib"]
            for key, of in results.items()
            for result in of
            if key[1] == name and result["cpu"]
        ]
        if peaks:
            print(f"{name}: largest resident memory {max(peaks):.0f} MiB")
    return holds


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--case", action="append", help="only cases whose name holds this text")
    parser.add_argument("--lua-root", type=Path, help="where nginx's Lua packages are unpacked")
    parser.add_argument("--no-vllm-router", action="store_true", help="do without; nothing is got")
    parser.add_argument("--no-pin", action="store_true", help="let all use every processor")
    parser.add_argument("--json", type=Path, help="every window's result, to this file")
    arguments = parser.parse_args(argv)
    chosen = [
        case
        for case in cases(arguments.window_s)
        if not arguments.case or any(part in case.name for part in arguments.case)
    ]
    if not chosen:
        parser.error(f"no such case; they are {[case.name for case in cases(1.0)]}")
    all_cpus = sorted(os.sched_getaffinity(0))
    pinned = len(all_cpus) > 1 and not arguments.no_pin
    proxy_cpus = {all_cpus[0]} if pinned else None
    other_cpus = set(all_cpus[1:]) if pinned else None
    binary = executable("hetero-kv-proxy", "HETERO_KV_PROXY")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hetero-kv-bench-")))
        by_pace: dict[int, dict[str, Proxy]] = {}
        said: set[str] = set()
        for pace in sorted({case.pace_ms for case in chosen}):
            behind = stack.enter_context(proxies.workers(binary, pace, other_cpus))
            own = folder / str(pace)
            own.mkdir()
            found = proxies_before(behind, own, arguments, proxy_cpus, stack, said)
            found[DIRECT] = Proxy(DIRECT, behind.plain[0], None)
            by_pace[pace] = found
        if any(OURS not in found for found in by_pace.values()):
            print("proxy: nothing measured: our own proxy does not serve")
            return 2
        before = kernel.load_average()
        results = measure(chosen, by_pace, arguments.rounds, other_cpus)
        print(
            f"{arguments.rounds} rounds, windows of {arguments.window_s:g} s, "
            f"{len(all_cpus)} processors, proxies {'on one of them' if pinned else 'on all'}; "
            f"load average {before:.1f} at the start, {kernel.load_average():.1f} at the end\n"
        )
        holds = report(chosen, results)
        if arguments.json:
            flat = [
                {"case": case, "proxy": proxy, "windows": windows}
                for (case, proxy), windows in results.items()
            ]
            arguments.json.write_text(json.dumps(flat, indent=1), encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
