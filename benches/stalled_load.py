"""Does a load that is stalled slow the other requests of its decode engine?

Streams decode while the load of one more request hangs: its prefill engine is stopped (SIGSTOP)
after it has granted the lease, so that the data connection stands and no byte comes. Each round
has three windows in random order: two undisturbed ones and one with the stalled load. The prefill
engine is stopped in all three, so that it takes no processor time in any.

A step time is what one stream takes for a slice of tokens, over the tokens: chunks come in bursts
when the API server is short of processor time, so single gaps between them are no step times. Of a
window the median of its slices counts, and beside it the window over its steps.

The two undisturbed windows compared with each other show what the measurement can resolve. The
processor time of our own threads tells apart from any noise whether a stalled load keeps one busy.

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
from typing import Any

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
SLICE_TOKENS = 20
STALLED_PROMPT_TOKENS = 700
BYTES_READ = "hetero_kv_bytes_read_total"
OUR_THREADS = "hkv-"
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
    """Figures of one window. `slice_ms` is the median step time of its slices, `mean_ms` its
    length over the steps in it, `ours_percent` what our threads took of a core."""

    slice_ms: float
    mean_ms: float
    steps: float
    processor_ms_per_step: float
    ours_percent: float


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
        # All prompts are prefilled before the first stream begins: they run side by side.
        bodies = [self._prefilled(index) for index in range(STREAMS)]
        streams = [Stream(self.decode, body) for body in bodies]
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
                return self._count_steps(streams)
        finally:
            for stream in streams:
                stream.leave()

    def _prefilled(self, index: int) -> dict[str, Any]:
        """The decode leg of a request whose own KV comes from the prefill engine."""
        prompt = [20 + index] * STREAM_PROMPT_TOKENS
        body = completion(prompt, STREAM_TOKENS, cache_salt=f"stream-{self._count}-{index}")
        return {**body, "kv_transfer_params": prefill(self.prefill, body)}

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
                result = self._count_steps(streams)
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

    def _count_steps(self, streams: Sequence[Stream]) -> Window:
        pids = kernel.tree(self.decode.process.pid)
        processor_before = kernel.processor_ns(pids)
        tokens_before = [stream.tokens for stream in streams]
        begun_s = time.monotonic()
        time.sleep(STALL_S)
        end_s = time.monotonic()
        tokens_after = [stream.tokens for stream in streams]
        used = kernel.used_s(processor_before, kernel.processor_ns(pids))
        for stream in streams:
            if stream.done:
                raise BenchError(f"a stream ended after {stream.tokens} tokens: {stream.error}")
        step_times = [
            step_ms
            for stream in streams
            for step_ms in slices(
                [stamp for stamp in list(stream.stamps) if begun_s <= stamp[0] <= end_s]
            )
        ]
        # Every stream takes part in every step.
        steps = sum(b - a for a, b in zip(tokens_before, tokens_after, strict=True)) / len(streams)
        if not step_times:
            raise BenchError(f"fewer than {SLICE_TOKENS} steps within {STALL_S:g} s")
        elapsed_s = end_s - begun_s
        ours_s = sum(s for thread, s in used.items() if thread.name.startswith(OUR_THREADS))
        return Window(
            slice_ms=median(step_times),
            mean_ms=1e3 * elapsed_s / steps,
            steps=steps,
            processor_ms_per_step=1e3 * sum(used.values()) / steps,
            ours_percent=100 * ours_s / elapsed_s,
        )


def slices(stamps: Sequence[tuple[float, int]]) -> list[float]:
    """Milliseconds per token of each run of at least `SLICE_TOKENS` tokens."""
    found = []
    begun = stamps[0] if stamps else None
    for at_s, tokens in stamps:
        if begun is not None and tokens - begun[1] >= SLICE_TOKENS:
            found.append(1e3 * (at_s - begun[0]) / (tokens - begun[1]))
            begun = (at_s, tokens)
    return found


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
            f"{kind} {windows[kind].slice_ms:.2f} ms ({windows[kind].steps:.0f} steps)"
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
        ("slice_ms", f"step time, median of slices of {SLICE_TOKENS} tokens"),
        ("mean_ms", "step time, window over steps"),
        ("processor_ms_per_step", "processor time of the decode engine per step"),
    ):
        calm_a, calm_b, stalled = (of(kind, name) for kind in (CALM_A, CALM_B, STALLED))
        calm = [*calm_a, *calm_b]
        both = [(a + b) / 2 for a, b in zip(calm_a, calm_b, strict=True)]
        of_medians = median(stalled) / median(calm)
        print(f"{what}:")
        print(f"  undisturbed {median(calm):.3f} ms, stalled {median(stalled):.3f} ms")
        print(f"  undisturbed a / b, within rounds      {shown(ratios(calm_a, calm_b))}")
        print(f"  stalled / undisturbed, within rounds  {shown(ratios(stalled, both))}")
        print(f"  stalled / undisturbed, of the medians {of_medians:.4f}")
        if name == "slice_ms":
            verdict = of_medians
    ours_calm = [*of(CALM_A, "ours_percent"), *of(CALM_B, "ours_percent")]
    print(
        f"our threads on the decode side: undisturbed {median(ours_calm):.4f}, "
        f"stalled {median(of(STALLED, 'ours_percent')):.4f} % of a core"
    )
    print(f"ratio of the medians of step times {verdict:.4f}; bar {BAR_RATIO}")
    return 0 if verdict <= BAR_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
