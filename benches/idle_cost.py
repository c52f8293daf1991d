"""What does an idle pair cost more than two plain vLLM engines?

A prefill and a decode engine that have moved KV and then have nothing to do, beside two plain
engines of the same shape that have answered the same prompts. All four are counted over the same
windows, so that whatever else the host does meets both pairs alike. The two plain engines
compared with each other show what the measurement can resolve.

Exit status 0 when the pair stays under the bar, 1 when not, 2 when the host cannot measure it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from support import kernel
from support.requests import completion, post, prefill
from support.statistics import median, shown

from hetero_kv.demo import run as demo
from hetero_kv.demo.engines import Engine, EngineSpec, connector_config, running

BAR_PERCENT = 0.5
# vLLM's readers spin for a second after their last message, and delayed work settles.
SETTLE_S = 10.0
PROMPT_TOKENS = (40, 130, 300)
COMPLETION_TOKENS = 16
BYTES_READ = "hetero_kv_bytes_read_total"
OUR_THREADS = "hkv-"


def specs(model: Path) -> list[EngineSpec]:
    return [
        EngineSpec("prefill", model, "prefill", kv_transfer_config=connector_config("prefill")),
        EngineSpec("decode", model, "decode", kv_transfer_config=connector_config("decode")),
        EngineSpec("plain0", model),
        EngineSpec("plain1", model),
    ]


def work(engines: list[Engine]) -> float:
    """The same prompts through the pair and through each plain engine; bytes that moved."""
    prefill_engine, decode_engine, *plain = engines
    before = decode_engine.metric(BYTES_READ)
    for index, size in enumerate(PROMPT_TOKENS):
        body = completion([17 + index] * size, COMPLETION_TOKENS, cache_salt=f"bench-{index}")
        params = prefill(prefill_engine, body)
        post(decode_engine, {**body, "kv_transfer_params": params})
        for engine in plain:
            post(engine, body)
    return decode_engine.metric(BYTES_READ) - before


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window-s", type=float, default=15.0)
    parser.add_argument("--logs", type=Path, help="folder of the engines' logs")
    arguments = parser.parse_args(argv)
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="hetero-kv-bench-"))
    try:
        kernel.processor_ns([os.getpid()])
    except (kernel.UnsupportedError, OSError) as reason:
        print(f"idle_cost: skipped: {reason}")
        return 2
    demo.prepare_model("gqa")
    with running(specs(demo.model_folder("gqa")), logs) as engines:
        moved = work(engines)
        if not moved:
            print("idle_cost: the pair moved no bytes; an idle pair that never paired says nothing")
            return 1
        time.sleep(SETTLE_S)
        return measure(engines, moved, arguments.windows, arguments.window_s)


def measure(engines: list[Engine], moved: float, windows: int, window_s: float) -> int:
    pids = {engine.name: kernel.tree(engine.process.pid) for engine in engines}
    percent: dict[str, list[float]] = defaultdict(list)
    by_part: dict[tuple[str, str], float] = defaultdict(float)
    ours_s = 0.0
    measured_s = 0.0
    for index in range(windows):
        before = {name: kernel.processor_ns(group) for name, group in pids.items()}
        begun = time.monotonic()
        time.sleep(window_s)
        after = {name: kernel.processor_ns(group) for name, group in pids.items()}
        elapsed_s = time.monotonic() - begun
        measured_s += elapsed_s
        for name in pids:
            used = kernel.used_s(before[name], after[name])
            percent[name].append(100 * sum(used.values()) / elapsed_s)
            for thread, seconds in used.items():
                by_part[name, thread.part] += seconds
                if thread.name.startswith(OUR_THREADS):
                    ours_s += seconds
        figures = "  ".join(f"{name} {percent[name][-1]:6.3f}" for name in pids)
        print(f"window {index}: % of a core: {figures}  (load {kernel.load_average():.1f})")

    pair = [sum(both) for both in zip(percent["prefill"], percent["decode"], strict=True)]
    plain = [sum(both) for both in zip(percent["plain0"], percent["plain1"], strict=True)]
    more = [ours - theirs for ours, theirs in zip(pair, plain, strict=True)]
    noise = [a - b for a, b in zip(percent["plain0"], percent["plain1"], strict=True)]
    print(
        f"\n{windows} windows of {window_s:g} s, all four engines in each; {moved:.0f} bytes moved"
    )
    for name in pids:
        parts = ", ".join(
            f"{part} {100 * seconds / measured_s:.3f}"
            for (engine, part), seconds in sorted(by_part.items())
            if engine == name
        )
        print(f"{name:8} {shown(percent[name], '.3f')} % of a core ({parts})")
    print(f"pair                 {shown(pair, '.3f')} % of a core")
    print(f"two plain engines    {shown(plain, '.3f')} % of a core")
    print(f"plain0 - plain1      {shown(noise, '.3f')} (what the measurement can resolve)")
    print(f"our threads alone    {100 * ours_s / measured_s:.4f} % of a core")
    print(f"pair - plain         {shown(more, '.3f')} % of a core; bar {BAR_PERCENT}")
    return 0 if median(more) <= BAR_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
