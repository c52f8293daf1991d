"""What does a request cost our proxy, beside nginx and vllm-router?

Mock workers answer; `hetero-kv-proxy bench` sends and reads the processor time of each proxy's own
processes. All proxies run at once, and each round measures every case on every proxy in an order
of its own. Proxies share one processor, workers and load the others. nginx passes one leg on;
nginx with a script in Lua, vllm-router and ours send both. So does `floor`
(`rust/hetero-kv-proxy/benches/floor.rs`), which passes messages on and does nothing else: what it
takes is nearly all the kernel's, and what two legs cost at the least. It can hand nothing over, so
both its legs go to workers that do not ask for it, with the client's body as it is and answers
without params. A ratio is of two windows of one round, and the figure is the median over rounds.
Proxies that this host cannot have are left out, with the reason. A proxy with many streams holds
two descriptors for each: the limit of open files is raised as far as this host lets it be, and a
case that needs more is made smaller and says so.

Exit status 0 when every bar that could be judged holds, 1 when one does not, 2 when nothing could
be measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import kernel, proxies
from support.proxies import MissingError, Proxy, Workers
from support.statistics import median, median_interval

from hetero_kv.demo.witness import executable

PACE_MS = 20
SLOW_PACE_MS = 1000
MANY_STREAMS = 10_000
# Descriptors that a proxy has besides one for each client and one for each leg: connections kept
# to engines, listeners, logs.
SPARE_FILES = 400
# One token, so that it ends soon at any pace.
WARM_UP = ("--concurrency", "32", "--no-stream", "--max-tokens", "1")
# It admits 4,096 requests unless told otherwise; kept connections take descriptors.
MANY_FLAGS = ("--requests-max", "16384", "--pool-idle-max", "64")
# How long memory is given to go back to the system, and how much of a peak may stay.
REST_S = 12.0
OURS, NGINX, LUA, ROUTER, DIRECT = "ours", "nginx one leg", "nginx+Lua", "vllm-router", "direct"
FLOOR = "floor"
BY_HAND = ("smg", "sglang-router")
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
    with_floor: bool = False
    # Ours less that proxy's, in the figure's unit: at most this.
    added: dict[str, float] = dataclasses.field(default_factory=dict)
    # Largest resident memory of our own process, in MiB.
    memory_mib: float | None = None
    # Which proxies are measured; none stands for all.
    only: frozenset[str] | None = None


def raise_open_files() -> int:
    """Raises the limit of open files, for children too; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * MANY_STREAMS + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, needed))
            hard = needed
    if hard == resource.RLIM_INFINITY:
        hard = needed
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def cases(window_s: float, open_files: int) -> list[Case]:
    lasting = ["--duration", f"{window_s:g}"]
    small = ["--no-stream", *lasting]
    bars = {ROUTER: 0.33, LUA: 1.0}
    many = min(MANY_STREAMS, (open_files - SPARE_FILES) // 2)
    return [
        *(
            Case(
                f"small, {count} at once",
                0,
                ["--concurrency", f"{count}", *small],
                "request",
                "µs/req",
                bars,
                with_floor=True,
            )
            for count in (32, 128)
        ),
        Case(
            "36 KB body, 32 at once",
            0,
            ["--concurrency", "32", "--prompt-bytes", "36000", *small],
            "request",
            "µs/req",
            {ROUTER: 0.3, LUA: 1.0},
            with_floor=True,
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
            "first byte, 32 streams",
            PACE_MS,
            ["--concurrency", "32", "--max-tokens", "16", *lasting],
            "first byte",
            "ms",
            {},
            with_direct=True,
            added={DIRECT: 2.0},
        ),
        Case(
            "2,048 small at once",
            0,
            ["--concurrency", "2048", "--per-concurrency", "1", "--no-stream"],
            "completed",
            "answered",
            {},
            memory_mib=120.0,
        ),
        Case(
            "2,048 streams at once",
            PACE_MS,
            ["--concurrency", "2048", "--per-concurrency", "1", "--max-tokens", "64"],
            "completed",
            "answered",
            {},
            memory_mib=120.0,
        ),
        Case(
            f"{many:,} streams at 1 token/s",
            SLOW_PACE_MS,
            ["--concurrency", str(many), "--per-concurrency", "1", "--max-tokens", "15"],
            "completed",
            "answered",
            {},
            memory_mib=400.0,
            only=frozenset({OURS}),
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
    if case.figure == "first byte":
        return float(result["first_byte_ms"]["p50"])
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
    wanted: set[str],
    flags: Sequence[str],
) -> dict[str, Proxy]:
    """Every proxy of `wanted` that this host can have, before these workers; ours with `flags`."""
    binary = executable("hetero-kv-proxy", "HETERO_KV_PROXY")
    makers = {
        OURS: lambda: proxies.ours(binary, behind, folder, cpus, flags),
        NGINX: lambda: proxies.nginx_one_leg(behind, folder, cpus),
        LUA: lambda: proxies.nginx_lua(behind, folder, cpus, arguments.lua_root),
        ROUTER: lambda: proxies.vllm_router(behind, folder, cpus),
        FLOOR: lambda: proxies.floor(behind, folder, cpus),
    }
    if arguments.no_vllm_router:
        del makers[ROUTER]
    for name in arguments.peer:
        makers[name] = functools.partial(proxies.by_hand, name, behind, folder, cpus)
    found = {}
    for name, make in makers.items():
        if name not in wanted and name not in arguments.peer:
            continue
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
        result = window(binary, proxy, WARM_UP, None)
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
            if proxy.name == FLOOR and not case.with_floor:
                continue
            if case.only and proxy.name not in case.only:
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
    names = [OURS, FLOOR, NGINX, LUA, ROUTER, *BY_HAND, DIRECT]
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
        for name in (FLOOR, NGINX, LUA, ROUTER, *BY_HAND, DIRECT):
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
    report_floor(chosen, results)
    holds &= report_added(chosen, results)
    holds &= report_memory(chosen, results)
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


def report_floor(chosen: Sequence[Case], results: Results) -> None:
    """Prints the floor as a part of the others: what a bar cannot be below."""
    for case in chosen:
        floor = results.get((case.name, FLOOR), [])
        for name in (LUA, ROUTER):
            others = results.get((case.name, name), [])
            pairs = [
                (figure(case, a), figure(case, b)) for a, b in zip(floor, others, strict=False)
            ]
            ratios = [a / b for a, b in pairs if a is not None and b]
            if ratios:
                print(f"| {case.name} | floor / {name} | {shown(ratios, '.2f')} | - | shown |")


def report_added(chosen: Sequence[Case], results: Results) -> bool:
    """Prints what ours adds to another; whether it stays within the bars."""
    holds = True
    for case in chosen:
        for name, bar in case.added.items():
            ours, theirs = results.get((case.name, OURS), []), results.get((case.name, name), [])
            pairs = [(figure(case, a), figure(case, b)) for a, b in zip(ours, theirs, strict=False)]
            added = [a - b for a, b in pairs if a is not None and b is not None]
            if added:
                fine = median(added) <= bar
                holds = holds and fine
                print(
                    f"| {case.name} | more than {name} | {shown(added, '.2f')} {case.unit} | "
                    f"{bar} {case.unit} | {'holds' if fine else 'missed'} |"
                )
    return holds


def report_memory(chosen: Sequence[Case], results: Results) -> bool:
    """Prints our largest resident memory by the end of a case; whether it stays within the bars."""
    holds = True
    for case in chosen:
        ours = [result["cpu"] for result in results.get((case.name, OURS), []) if result["cpu"]]
        if case.memory_mib is None or not ours:
            continue
        peak = max(cpu["rss_peak_mib"] for cpu in ours)
        fine = peak <= case.memory_mib
        holds = holds and fine
        print(
            f"| {case.name} | - | {peak:.0f} MiB at most | {case.memory_mib:.0f} MiB | "
            f"{'holds' if fine else 'missed'} |"
        )
    return holds


def report_rest(by_pace: dict[int, dict[str, Proxy]]) -> None:
    """Prints what each proxy of ours still holds when it has had nothing to do for a while."""
    time.sleep(REST_S)
    for pace, found in by_pace.items():
        process = found[OURS].process
        assert process is not None, "invariant: only `direct` has no process"
        resident_mib = kernel.resident_mib(process.pid)
        print(
            f"ours, behind workers at a pace of {pace} ms: {resident_mib:.0f} MiB resident "
            f"{REST_S:g} s after the last answer"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--case", action="append", help="only cases whose name holds this text")
    parser.add_argument("--lua-root", type=Path, help="where nginx's Lua packages are unpacked")
    parser.add_argument("--no-vllm-router", action="store_true", help="do without; nothing is got")
    parser.add_argument(
        "--peer", action="append", default=[], choices=BY_HAND, help="beside them too, by hand"
    )
    parser.add_argument("--no-pin", action="store_true", help="let all use every processor")
    parser.add_argument("--json", type=Path, help="every window's result, to this file")
    arguments = parser.parse_args(argv)
    open_files = raise_open_files()
    chosen = [
        case
        for case in cases(arguments.window_s, open_files)
        if not arguments.case or any(part in case.name for part in arguments.case)
    ]
    if not chosen:
        parser.error(f"no such case; they are {[case.name for case in cases(1.0, open_files)]}")
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
            names = {OURS, NGINX, LUA, ROUTER}
            if any(case.with_floor and case.pace_ms == pace for case in chosen):
                names.add(FLOOR)
            wanted: set[str] = set()
            for case in chosen:
                if case.pace_ms == pace:
                    wanted |= case.only or names
            flags = MANY_FLAGS if pace == SLOW_PACE_MS else ()
            found = proxies_before(behind, own, arguments, proxy_cpus, stack, said, wanted, flags)
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
        report_rest(by_pace)
        if arguments.json:
            flat = [
                {"case": case, "proxy": proxy, "windows": windows}
                for (case, proxy), windows in results.items()
            ]
            arguments.json.write_text(json.dumps(flat, indent=1), encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
