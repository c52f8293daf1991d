"""What does a byte cost by our transports, beside the bare calls under them and beside NIXL?

Two processes per side on this host; all sides and cases of a round run one after another in random
order, and each figure is the median over rounds of the ratio within a round. Before anything is
timed, every side moves every case once with every byte compared.

`process` is held against `process_vm_readv` with the lists ready, `tcp` against a socket that
streams the same pieces, both against NIXL 1.5 with UCX (its own choice of transport, and tcp), and
by hand (`--peer mooncake`) against Mooncake over tcp. Two reading threads are held against one, and
reads under Python while a thread keeps the interpreter lock against those while none does.
Figures are per processor second of all threads of both processes, and per second.

Exit status 0 when every bar holds, 1 when one does not, 2 when the host cannot measure it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support import kernel, picture
from support.statistics import median, shown
from support.transfer_pairs import (
    Measured,
    Pair,
    PairError,
    build,
    cases,
    locked,
    mooncake,
    nixl,
    ours,
)

SCATTERED = ("16k", "64k", "mla", "tp8", "split")
LARGE = (*SCATTERED, "whole")
MIB = 320
# So many in a row for what one reading of a clock cannot resolve.
TINY_TIMES = {"bare": 2000, "process-by-hand": 2000, "process": 1000, "tcp": 300, "": 300}
CONNECT_TIMES = 50
IDLE_S = 10.0

# A side: which pair, and the way it is told to go. NIXL has one way.
Side = tuple[str, str]
BARE, SOCKET, MEMCPY = ("ours", "bare"), ("ours", "socket"), ("ours", "memcpy")
PROCESS, TCP = ("ours", "process"), ("ours", "tcp")
PROCESS_BY_HAND, TCP_BY_HAND = ("ours", "process-by-hand"), ("ours", "tcp-by-hand")
PROCESS_TWO, BARE_TWO = ("ours", "process-two"), ("ours", "bare-two")
NIXL, NIXL_TCP, MOONCAKE = ("nixl", ""), ("nixl tcp", ""), ("mooncake", "")
FREE, HELD = ("locked", "free"), ("locked", "held")
NAMES = {
    BARE: "bare process_vm_readv",
    SOCKET: "bare socket",
    MEMCPY: "memcpy",
    PROCESS: "process",
    TCP: "tcp",
    PROCESS_BY_HAND: "process, caller's thread",
    TCP_BY_HAND: "tcp, caller's thread",
    NIXL: "NIXL",
    PROCESS_TWO: "process, two threads",
    BARE_TWO: "bare process_vm_readv, two threads",
    NIXL_TCP: "NIXL, tcp",
    MOONCAKE: "Mooncake, tcp",
}
# Cases of two threads, and the one of the interpreter lock: a fifth of a second of reads or more,
# all of them submitted before the lock is kept.
BY_TWO = ("16k", "mla")
LOCKED_CASE, LOCKED_TIMES = "16k", 16

Figure = Callable[[Measured], float]


def per_cpu(measured: Measured) -> float:
    return 1.0 / measured.cpu_s


def per_wall(measured: Measured) -> float:
    return 1.0 / measured.wall_s


# Case, side, the side it is held against, by which figure, and the least ratio.
BARS: list[tuple[str, Side, Side, str, float]] = [
    *[(case, PROCESS, BARE, "cpu", 0.9) for case in SCATTERED],
    ("whole", PROCESS, BARE, "cpu", 0.95),
    ("16k", PROCESS, NIXL, "cpu", 5.0),
    ("mla", PROCESS, NIXL, "cpu", 5.0),
    ("64k", PROCESS, NIXL, "cpu", 3.5),
    ("whole", PROCESS, NIXL, "cpu", 3.0),
    ("16k", PROCESS, NIXL, "wall", 1.4),
    ("mla", PROCESS, NIXL, "wall", 1.4),
    ("16k", TCP, SOCKET, "cpu", 0.8),
    ("16k", TCP, SOCKET, "wall", 0.8),
    ("16k", TCP, NIXL_TCP, "cpu", 4.0),
    ("16k", TCP, NIXL_TCP, "wall", 4.0),
    *[(case, PROCESS_TWO, PROCESS, "wall", 1.6) for case in BY_TWO],
]
# How much of the bare call's figure is asked for where that itself does not reach a bar.
LIMIT_SHARE = {PROCESS: 0.9, TCP: 0.8, PROCESS_TWO: 0.9}
FIGURES: dict[str, Figure] = {"cpu": per_cpu, "wall": per_wall}

Rounds = dict[tuple[str, Side], list[Measured]]


def sides_of(pairs: dict[str, Pair]) -> list[Side]:
    return [side for side in NAMES if side[0] in pairs]


def measured_of(pairs: dict[str, Pair], names: Sequence[str]) -> list[tuple[str, Side]]:
    """Cases and sides, but for two threads where no bar is of them."""
    return [
        (name, side)
        for name in names
        for side in sides_of(pairs)
        if name in BY_TWO or side not in (PROCESS_TWO, BARE_TWO)
    ]


def measure(
    pairs: dict[str, Pair], known: dict[str, dict[str, Any]], names: Sequence[str], rounds: int
) -> Rounds:
    """Every side and case once per round, in random order, after one pass that compares bytes."""
    found: Rounds = {key: [] for key in measured_of(pairs, names)}
    for name, side in found:
        pairs[side[0]].measure(side[1], known[name], check=True)
    print(f"{len(found)} cases and sides exact", flush=True)
    for number in range(rounds):
        order = list(found)
        random.shuffle(order)
        for name, side in order:
            pair = pairs[side[0]]
            with pair.alone(pairs.values()):
                found[name, side].append(pair.measure(side[1], known[name]))
        print(f"round {number + 1} of {rounds}, load {kernel.load_average():.1f}", flush=True)
    return found


def ratios(found: Rounds, name: str, side: Side, beside: Side, figure: str) -> list[float]:
    of = FIGURES[figure]
    pairs = zip(found[name, side], found[name, beside], strict=True)
    return [of(one) / of(other) for one, other in pairs]


def table(found: Rounds, known: dict[str, dict[str, Any]]) -> list[str]:
    """GB per processor second and GB/s of each case and side, as Markdown."""
    lines = ["| case | side | GB per CPU second | GB/s |", "|---|---|---|---|"]
    for (name, side), measured in found.items():
        bytes_ = known[name]["bytes"]
        cpu = shown([bytes_ * per_cpu(each) / 1e9 for each in measured], ".2f")
        wall = shown([bytes_ * per_wall(each) / 1e9 for each in measured], ".2f")
        lines.append(f"| {known[name]['text']} | {NAMES[side]} | {cpu} | {wall} |")
    return lines


def judge(found: Rounds, known: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    lines = ["| case | ratio | by | measured | bar | limit | |", "|---|---|---|---|---|---|---|"]
    all_hold = True
    for name, side, beside, figure, bar in BARS:
        if (name, side) not in found or (name, beside) not in found:
            continue
        values = ratios(found, name, side, beside, figure)
        # Nothing is quicker than the bare call under it: what that reaches here is the limit.
        floor = {PROCESS: BARE, TCP: SOCKET, PROCESS_TWO: BARE_TWO}[side]
        under = BARE if side == PROCESS_TWO else beside
        least, limit = bar, ""
        if beside != floor:
            reached = median(ratios(found, name, floor, under, figure))
            least, limit = min(bar, LIMIT_SHARE[side] * reached), f"{reached:.2f}"
        holds = median(values) >= least
        all_hold &= holds
        lines.append(
            f"| {known[name]['text']} | {NAMES[side]} / {NAMES[beside]} | {figure} | "
            f"{shown(values, '.2f')} | {bar:g} | {limit} | "
            f"{'holds' if holds else 'MISSED'} |"
        )
    return lines, all_hold


def posting(found: Rounds, known: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    """Microseconds a run that posting takes, in the case of most runs."""
    lines, all_hold = [], True
    runs = known["tp8"]["runs"]
    for side in (PROCESS_BY_HAND, TCP_BY_HAND):
        values = [1e6 * each.post_s / runs for each in found["tp8", side]]
        holds = median(values) <= 0.3
        all_hold &= holds
        lines.append(
            f"posting {runs} runs, {NAMES[side]}: {shown(values, '.3f')} µs a run "
            f"(bar 0.3): {'holds' if holds else 'MISSED'}"
        )
    return lines, all_hold


def small(
    pairs: dict[str, Pair], known: dict[str, dict[str, Any]], rounds: int
) -> tuple[list[str], bool]:
    """8 bytes, and the way to the first byte."""
    tiny = known["tiny"]
    found: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}
    for _ in range(rounds):
        for side in (BARE, PROCESS_BY_HAND, PROCESS, TCP, NIXL):
            if side[0] not in pairs:
                continue
            times = TINY_TIMES[side[1]]
            with pairs[side[0]].alone(pairs.values()):
                measured = pairs[side[0]].measure(side[1], tiny, times)
            found.setdefault(NAMES[side], []).append(1e6 * measured.wall_s / times)
            processor.setdefault(NAMES[side], []).append(1e6 * measured.cpu_s / times)
        for way in ("process-connect", "tcp-connect"):
            with pairs["ours"].alone(pairs.values()):
                measured = pairs["ours"].measure(way, tiny, CONNECT_TIMES)
            found.setdefault(way, []).append(1e6 * measured.wall_s / CONNECT_TIMES)
    lines = [f"8 bytes or one connect, {name}: {shown(us, '.2f')} µs" for name, us in found.items()]
    pair = zip(processor[NAMES[PROCESS_BY_HAND]], processor[NAMES[BARE]], strict=True)
    by_hand = [one / other for one, other in pair]
    verdicts = [
        (f"8 bytes on the caller's thread / bare, CPU: {shown(by_hand, '.2f')} (bar 1.5)",
         median(by_hand) <= 1.5),
        (f"8 bytes through the driver thread: {median(found[NAMES[PROCESS]]):.1f} µs (bar 15)",
         median(found[NAMES[PROCESS]]) <= 15.0),
        (f"process connect and probe: {median(found['process-connect']) / 1e3:.3f} ms (bar 5)",
         median(found["process-connect"]) <= 5000.0),
    ]  # fmt: skip
    lines += [f"{text}: {'holds' if holds else 'MISSED'}" for text, holds in verdicts]
    return lines, all(holds for _, holds in verdicts)


def locked_reads(
    pairs: dict[str, Pair], known: dict[str, dict[str, Any]], rounds: int
) -> tuple[list[str], bool]:
    """Reads while a thread keeps the interpreter lock for a second, and while none does."""
    case, pair = known[LOCKED_CASE], pairs["locked"]
    found: dict[str, list[Measured]] = {FREE[1]: [], HELD[1]: []}
    for way in found:
        pair.measure(way, case, check=True)
    for _ in range(rounds):
        for way in random.sample(sorted(found), 2):
            with pair.alone(pairs.values()):
                found[way].append(pair.measure(way, case, LOCKED_TIMES))
    walls = zip(found[FREE[1]], found[HELD[1]], strict=True)
    values = [free.wall_s / held.wall_s for free, held in walls]
    bytes_ = LOCKED_TIMES * case["bytes"]
    speed = shown([bytes_ / each.wall_s / 1e9 for each in found[HELD[1]]], ".2f")
    holds = median(values) >= 0.9
    verdict = "holds" if holds else "MISSED"
    line = f"process while the interpreter lock is kept / while it is free: {shown(values, '.2f')}"
    return [f"{line} ({speed} GB/s; bar 0.9): {verdict}"], holds


def idle(pair: Pair) -> tuple[list[str], bool]:
    """Processor time of both processes while nothing is asked of them; connections stand."""
    before = kernel.processor_ns(pair.pids)
    time.sleep(IDLE_S)
    used = sum(kernel.used_s(before, kernel.processor_ns(pair.pids)).values())
    share = 100.0 * used / IDLE_S
    holds = share < 0.1
    verdict = "holds" if holds else "MISSED"
    return [f"idle for {IDLE_S:g} s: {share:.4f} % of a core (bar 0.1): {verdict}"], holds


def written(
    found: Rounds, known: dict[str, dict[str, Any]], load: Sequence[float]
) -> dict[str, Any]:
    """The run as `--json` has it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    kernel = os.uname().release.partition("-")[0]
    return {
        "day": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {memory:.0f} GiB, Linux {kernel}",
        "load": [min(load), max(load)],
        "rounds": max(len(measured) for measured in found.values()),
        "found": [
            {
                "case": name,
                "text": known[name]["text"],
                "bytes": known[name]["bytes"],
                "side": NAMES[side],
                "rounds": [vars(each) for each in measured],
            }
            for (name, side), measured in found.items()
        ],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", default=",".join(LARGE), help="of " + ", ".join(LARGE))
    parser.add_argument("--no-nixl", action="store_true", help="the bare calls alone")
    parser.add_argument(
        "--peer", action="append", default=[], choices=["mooncake"], help="beside it too, by hand"
    )
    parser.add_argument("--json", type=Path, help="every measurement, for a later look")
    parser.add_argument("--png", type=Path, help="a picture of what was measured")
    parser.add_argument("--png-of", type=Path, help="measures nothing: the picture of a --json")
    arguments = parser.parse_args(argv)
    if arguments.png_of:
        if not arguments.png:
            parser.error("--png-of needs --png, the picture's file")
        picture.draw(json.loads(arguments.png_of.read_text()), arguments.png)
        return 0
    chosen = arguments.cases.split(",")
    if unknown := [name for name in chosen if name not in LARGE]:
        parser.error(f"no case {unknown[0]}; there are {', '.join(LARGE)}")
    try:
        executable = build()
        known = cases(executable)
        with contextlib.ExitStack() as stack:
            pairs = {"ours": stack.enter_context(ours(executable, MIB))}
            if not arguments.no_nixl:
                pairs["nixl"] = stack.enter_context(nixl(MIB))
                pairs["nixl tcp"] = stack.enter_context(nixl(MIB, "tcp"))
            if "mooncake" in arguments.peer:
                pairs["mooncake"] = stack.enter_context(mooncake(MIB))
            pairs["locked"] = stack.enter_context(locked(MIB))
            load = [kernel.load_average()]
            found = measure(pairs, known, chosen, arguments.rounds)
            load.append(kernel.load_average())
            parts = [
                judge(found, known),
                small(pairs, known, arguments.rounds),
                locked_reads(pairs, known, arguments.rounds),
                idle(pairs["ours"]),
            ]
            if "tp8" in chosen:
                parts.append(posting(found, known))
    except (PairError, kernel.UnsupportedError) as reason:
        print(f"transfer: skipped: {reason}")
        return 2
    print("\n".join(table(found, known)), end="\n\n")
    for lines, _ in parts:
        print("\n".join(lines), end="\n\n")
    run = written(found, known, load)
    if arguments.json:
        arguments.json.write_text(json.dumps(run, indent=1))
    if arguments.png:
        picture.draw(run, arguments.png)
    return 0 if all(holds for _, holds in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
