"""Does a load that is stalled slow the other requests of its decode engine?

Streams decode while the load of one more request hangs: its prefill engine is stopped (SIGSTOP)
after it has granted the lease, so that the data connection stands and no byte comes. Each round
has three windows in random order: two undisturbed ones and one with the stalled load. The prefill
engine is stopped in all three, so that it takes no processor time in any. The step time is the gap
between a stream's chunks at the client.

The two undisturbed windows compared with each other show what the measurement can resolve. On a
busy host look at the processor time per step too: it counts the decode engine's own work.

Exit status 0 when the ratio stays under the bar, 1 when not, 2 when the host cannot measure it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from support import kernel
from support.requests import Background, BenchError, Stream, completion, prefill, wait_until
from support.statistics import median, shown

from hetero_kv.demo import run as demo
from hetero_kv.demo.engines import Engine, EngineSpec, connector_config, running

BAR_RATIO = 1.02
STALL_S = 5.0
STREAMS = 3
STREAM_PROMPT_TOKENS = 40
# More than a window can use; the streams are left when it ends.
STREAM_TOKENS = 1900
MODEL_LEN_MAX = 2048
WARM_TOKENS = 24
STALLED_PROMPT_TOKENS = 700
BYTES_READ = "hetero_kv_bytes_read_total"
LEASES_GRANTED = "hetero_kv_leases_granted_total"
STALLED, CALM_A, CALM_B = "stalled", "calm-a", "calm-b"


def specs(model: Path) -> list[EngineSpec]:
    # Only tcp needs the prefill worker's own help for a read; and the lease must outlast the stall.
    settings = {"transport": "tcp", "lease_s": 60, "load_timeout_s": 60}
    return [
        EngineSpec(
            role,
            model,
            role,
            kv_transfer_config=connector_config(role, settings),
            model_len_max=MODEL_LEN_MAX,
        )
        for role in ("prefill", "decode")
    ]


@dataclasses.dataclass(frozen=True)
class Window:
    """Figures of one window. `mean_ms` is its length over the steps in it."""

    kind: str
    median_ms: float
    mean_ms: float
    steps: float
    processor_ms_per_step: float


class Bench:
    """The pair, and the processes of it that are stopped."""

    def __init__(self, prefill_engine: Engine, decode_engine: Engine) -> None:
        self.prefill = prefill_engine
        self.decode = decode_engine
        self._prefill_pids = kernel.tree(prefill_engine.process.pid)
        self._workers = [pid for pid in self._prefill_pids if kernel.part(pid) == "Worker"]
        if not self._workers:
            raise BenchError("the prefill engine has no worker process by its title")
        self._count = 0

    def window(self, kind: str) -> Window:
        """Starts streams, brings the load into its state, and counts for `STALL_S`."""
        self._count += 1
        streams = [self._stream(index) for index in range(STREAMS)]
        try:
            wait_until(
                lambda: all(stream.tokens >= WARM_TOKENS for stream in streams),
                60.0,
                f"{WARM_TOKENS} tokens on each stream",
            )
            if kind == STALLED:
                return self._with_stalled_load(streams)
            with kernel.stopped(self._prefill_pids):
                # As long as a stalled load needs to be claimed and ordered.
                time.sleep(0.5)
                return self._count_steps(kind, streams)
        finally:
            for stream in streams:
                stream.leave()

    def _stream(self, index: int) -> Stream:
        """A request whose own KV came from the prefill engine."""
        prompt = [20 + index] * STREAM_PROMPT_TOKENS
        body = completion(prompt, STREAM_TOKENS, cache_salt=f"stream-{self._count}-{index}")
        return Stream(self.decode, {**body, "kv_transfer_params": prefill(self.prefill, body)})

    def _with_stalled_load(self, streams: Sequence[Stream]) -> Window:
        prompt = [300 + self._count % 100] * STALLED_PROMPT_TOKENS
        body = completion(prompt, 1, cache_salt=f"stalled-{self._count}")
        params = prefill(self.prefill, body)
        bytes_before = self.decode.metric(BYTES_READ)
        with kernel.stopped(self._workers):
            load = Background(self.decode, {**body, "kv_transfer_params": params})
            # The scheduler process of the prefill engine answers the claim, then stops as well.
            time.sleep(0.5)
            others = [pid for pid in self._prefill_pids if pid not in self._workers]
            with kernel.stopped(others):
                result = self._count_steps(STALLED, streams)
                if load.done:
                    raise BenchError(f"the load was not stalled: {load.error or load.answer}")
            resumed_at_s = time.monotonic()
        load.wait()
        wait_until(
            lambda: self.decode.metric(BYTES_READ) > bytes_before,
            10.0,
            "the stalled load's bytes are counted, so it was a load and no recompute",
        )
        if load.finished_at_s < resumed_at_s:
            raise BenchError("the load ended while its source was stopped")
        return result

    def _count_steps(self, kind: str, streams: Sequence[Stream]) -> Window:
        pids = kernel.tree(self.decode.process.pid)
        processor_before = kernel.processor_ns(pids)
        tokens_before = [stream.tokens for stream in streams]
        begun_s = time.monotonic()
        time.sleep(STALL_S)
        end_s = time.monotonic()
        tokens_after = [stream.tokens for stream in streams]
        used = kernel.used_s(processor_before, kernel.processor_ns(pids))
        if any(stream.done for stream in streams):
            raise BenchError("a stream ended within its window")
        gaps = [
            1e3 * (at - before) / (tokens - tokens_then)
            for stream in streams
            for (before, tokens_then), (at, tokens) in zip(
                list(stream.stamps), list(stream.stamps)[1:], strict=False
            )
            if begun_s <= before and at <= end_s and tokens > tokens_then
        ]
        # Every stream takes part in every step.
        steps = sum(b - a for a, b in zip(tokens_before, tokens_after, strict=True)) / len(streams)
        if not gaps or steps < 1:
            raise BenchError(f"no steps within {STALL_S:g} s")
        return Window(
            kind,
            median(gaps),
            1e3 * (end_s - begun_s) / steps,
            steps,
            1e3 * sum(used.values()) / steps,
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the windows")
    parser.add_argument("--logs", type=Path, help="folder of the engines' logs")
    arguments = parser.parse_args(argv)
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="hetero-kv-bench-"))
    try:
        kernel.processor_ns([os.getpid()])
    except kernel.UnsupportedError as reason:
        print(f"stalled_load: skipped: {reason}")
        return 2
    demo.prepare_model("gqa")
    with running(specs(demo.model_folder("gqa")), logs) as (prefill_engine, decode_engine):
        bench = Bench(prefill_engine, decode_engine)
        for kind in (CALM_A, STALLED):
            bench.window(kind)
        return report(measure(bench, arguments.rounds, random.Random(arguments.seed)))


def measure(bench: Bench, rounds: int, draw: random.Random) -> list[dict[str, Window]]:
    found = []
    for index in range(rounds):
        kinds = [STALLED, CALM_A, CALM_B]
        draw.shuffle(kinds)
        windows = {kind: bench.window(kind) for kind in kinds}
        found.append(windows)
        figures = "  ".join(
            f"{kind} {windows[kind].median_ms:.2f} ms ({windows[kind].steps:.0f} steps, "
            f"{windows[kind].processor_ms_per_step:.2f} ms processor)"
            for kind in (CALM_A, CALM_B, STALLED)
        )
        print(f"round {index}: {figures}  (load {kernel.load_average():.1f})", flush=True)
    return found


def report(rounds: Sequence[dict[str, Window]]) -> int:
    def of(kind: str, name: str) -> list[float]:
        return [float(getattr(windows[kind], name)) for windows in rounds]

    def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
        return [a / b for a, b in zip(above, below, strict=True)]

    print(f"\n{len(rounds)} rounds of three windows of {STALL_S:g} s, {STREAMS} streams")
    verdict = 0.0
    for name, what in (
        ("median_ms", "step time, median of the gaps"),
        ("mean_ms", "step time, window / steps"),
        ("processor_ms_per_step", "decode engine's processor time per step"),
    ):
        calm_a, calm_b, stalled = (of(kind, name) for kind in (CALM_A, CALM_B, STALLED))
        calm = [(a + b) / 2 for a, b in zip(calm_a, calm_b, strict=True)]
        print(f"{what}:")
        print(
            f"  undisturbed {median([*calm_a, *calm_b]):.3f} ms, stalled {median(stalled):.3f} ms"
        )
        print(f"  undisturbed a / b, within rounds      {shown(ratios(calm_a, calm_b))}")
        print(f"  stalled / undisturbed, within rounds  {shown(ratios(stalled, calm))}")
        print(f"  stalled / undisturbed, of the medians {median(stalled) / undisturbed:.4f}")
        if name == "median_ms":
            verdict = median(ratios(stalled, calm))
    print(f"ratio of step times {verdict:.4f}; bar {BAR_RATIO}")
    return 0 if verdict <= BAR_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
