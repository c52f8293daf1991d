"""Does a load that is stalled slow the other requests of its decode engine?

Streams, whose own KV came from the prefill engine, decode while the load of one more request
hangs: the prefill engine is stopped (SIGSTOP) after it has granted the lease, so that the data
connection stands and no byte comes. Each round has three windows in random order: two undisturbed
ones and one with the stalled load. The prefill engine is stopped in all three, so that it takes no
processor time in any.

The decode engine notes each of its steps (`support/stepping_connector.py`); a window's step time
is the median over its steps that decode exactly the streams' tokens, and the quarter of quickest
steps is shown beside it, since a preempted step says nothing about us.

The two undisturbed windows compared with each other show what the measurement can resolve: where
that is coarser than the bar, the ratio is held to it instead, and both are printed. What does not
depend on the host's other load is held to the bar itself: the share of the time that vLLM's threads
spent inside our hooks, in the process where it was largest, and the processor time of our threads.

Exit status 0 when all three hold, 1 when not, 2 when the host cannot measure it.
"""

from __future__ import annotations

import argparse
import array
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
from hetero_kv.demo.processes import stopped

BAR_RATIO = 1.02
STALL_S = 5.0
STREAMS = 3
STREAM_PROMPT_TOKENS = 40
# Nearly all that the model's context takes. A fast engine is done with them within a window; the
# stream then begins anew, with its prompt computed by the decode engine.
STREAM_TOKENS = 1900
MODEL_LEN_MAX = 2048
# One chunk for so many tokens: API server and client otherwise work as much as the engine.
TOKENS_PER_CHUNK = 20
STEPS_MIN = 50
STALLED_PROMPT_TOKENS = 700
BYTES_READ = "hetero_kv_bytes_read_total"
# Of `support.stepping_connector`, which only an interpreter with vLLM can import.
STEPS_ENV = "HETERO_KV_BENCH_STEPS"
OUR_THREADS = "hkv-"
STALLED, CALM_A, CALM_B = "stalled", "calm-a", "calm-b"


def specs(model: Path, steps: Path) -> list[EngineSpec]:
    # Only tcp needs the prefill worker's own help for a read. The limits outlast the stall on a
    # host so busy that it lasts several times as long.
    settings = {
        "transport": "tcp",
        "lease_s": 120,
        "load_timeout_s": 120,
        "claim_timeout_s": 60,
        "peer_silence_s": 120,
    }
    stepping = {
        **(connector_config("decode", settings) or {}),
        "kv_connector": "SteppingConnector",
        "kv_connector_module_path": "support.stepping_connector",
    }
    return [
        EngineSpec(
            "prefill",
            model,
            "prefill",
            kv_transfer_config=connector_config("prefill", settings),
            model_len_max=MODEL_LEN_MAX,
        ),
        EngineSpec(
            "decode",
            model,
            "decode",
            kv_transfer_config=stepping,
            model_len_max=MODEL_LEN_MAX,
            flags=("--stream-interval", str(TOKENS_PER_CHUNK)),
            env={"PYTHONPATH": str(Path(__file__).parent), STEPS_ENV: str(steps)},
        ),
    ]


class Steps:
    """The records of the stepping connector, read as they are appended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def hooks_percent(self, begun_ns: int, end_ns: int) -> float:
        """The share of the window that vLLM spent in our hooks, in the process with the most."""
        shares = []
        for path in self._path.parent.glob(f"{self._path.name}.hooks-*"):
            stamps, totals = self._columns(path)
            inside = [
                (at, total)
                for at, total in zip(stamps, totals, strict=True)
                if begun_ns <= at <= end_ns
            ]
            if len(inside) > 1:
                (first, least), (last, most) = inside[0], inside[-1]
                shares.append(100 * (most - least) / (last - first))
        if not shares:
            raise BenchError("no process has noted its hooks within the window")
        return max(shares)

    @staticmethod
    def _columns(path: Path) -> tuple[array.array[int], array.array[int]]:
        records = array.array("q")
        raw = path.read_bytes()
        records.frombytes(raw[: len(raw) // 16 * 16])
        return records[0::2], records[1::2]

    def times_ms(self, begun_ns: int, end_ns: int, tokens: int) -> list[float]:
        """Each step within the window that computed `tokens`, up to the next step."""
        stamps, sizes = self._columns(self._path)
        return [
            (after - at) / 1e6
            for at, after, size, size_after in zip(
                stamps, stamps[1:], sizes, sizes[1:], strict=False
            )
            if begun_ns <= at and after <= end_ns and size == size_after == tokens
        ]


@dataclasses.dataclass(frozen=True)
class Window:
    """Figures of one window, in milliseconds per step. `ours_percent` is what our threads took of
    a core, `hooks_percent` the share of the window that vLLM spent in our hooks."""

    median_ms: float
    quick_ms: float
    steps: int
    ours_percent: float
    hooks_percent: float


class Bench:
    """The pair, and the processes of it that are stopped."""

    def __init__(self, prefill_engine: Engine, decode_engine: Engine, steps: Steps) -> None:
        self.prefill = prefill_engine
        self.decode = decode_engine
        self._steps = steps
        self._prefill_pids = kernel.tree(prefill_engine.process.pid)
        self._workers = [pid for pid in self._prefill_pids if kernel.part(pid) == "Worker"]
        if not self._workers:
            raise BenchError("the prefill engine has no worker process by its title")
        self._count = 0

    def window(self, kind: str) -> Window:
        """Starts streams, brings the load into its state, and counts for `STALL_S`."""
        self._count += 1
        # All prompts are prefilled before the first stream begins: they run side by side.
        bodies = [self._stream_body(index) for index in range(STREAMS)]
        params = [prefill(self.prefill, body) for body in bodies]
        streams = [
            Stream(self.decode, {**body, "kv_transfer_params": handed}, body)
            for body, handed in zip(bodies, params, strict=True)
        ]
        try:
            wait_until(
                lambda: all(stream.chunks > 1 for stream in streams),
                60.0,
                "two chunks on each stream",
            )
            if kind == STALLED:
                return self._with_stalled_load(streams)
            with stopped(self._prefill_pids):
                # As long as a stalled load needs to be claimed and ordered.
                time.sleep(0.5)
                return self._count_steps(streams)
        finally:
            for stream in streams:
                stream.leave()

    def _stream_body(self, index: int) -> dict[str, Any]:
        prompt = [20 + index] * STREAM_PROMPT_TOKENS
        return completion(prompt, STREAM_TOKENS, cache_salt=f"stream-{self._count}-{index}")

    def _with_stalled_load(self, streams: Sequence[Stream]) -> Window:
        prompt = [300 + self._count % 100] * STALLED_PROMPT_TOKENS
        body = completion(prompt, 1, cache_salt=f"stalled-{self._count}")
        params = prefill(self.prefill, body)
        bytes_before = self.decode.metric(BYTES_READ)
        with stopped(self._workers):
            load = Background(self.decode, {**body, "kv_transfer_params": params})
            # The scheduler process of the prefill engine answers the claim, then stops as well.
            time.sleep(0.5)
            others = [pid for pid in self._prefill_pids if pid not in self._workers]
            with stopped(others):
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
        begun_ns = time.monotonic_ns()
        time.sleep(STALL_S)
        end_ns = time.monotonic_ns()
        used = kernel.used_s(processor_before, kernel.processor_ns(pids))
        for stream in streams:
            if stream.done:
                raise BenchError(f"a stream broke: {stream.error}")
        # Every stream takes one token of every step; the last records are written by later steps.
        time.sleep(1.0)
        times = sorted(self._steps.times_ms(begun_ns, end_ns, len(streams)))
        if len(times) < STEPS_MIN:
            raise BenchError(f"{len(times)} steps of {len(streams)} tokens within {STALL_S:g} s")
        ours_s = sum(s for thread, s in used.items() if thread.name.startswith(OUR_THREADS))
        return Window(
            median_ms=median(times),
            quick_ms=times[len(times) // 4],
            steps=len(times),
            ours_percent=100 * ours_s / ((end_ns - begun_ns) / 1e9),
            hooks_percent=self._steps.hooks_percent(begun_ns, end_ns),
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
    # A file of its own for each run: the engine appends.
    steps = Path(tempfile.mkdtemp(prefix="hetero-kv-bench-steps-")) / "steps"
    engines = specs(demo.model_folder("gqa"), steps)
    with running(engines, logs) as (prefill_engine, decode_engine):
        bench = Bench(prefill_engine, decode_engine, Steps(steps))
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
            f"{kind} {windows[kind].median_ms:.3f} ms ({windows[kind].steps} steps, "
            f"hooks {windows[kind].hooks_percent:.2f} %, "
            f"threads {windows[kind].ours_percent:.3f} %)"
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
    ratio = resolution = 0.0
    for name, what in (
        ("median_ms", "step time, median of a window"),
        ("quick_ms", "step time, first quartile of a window"),
    ):
        calm_a, calm_b, stalled = (of(kind, name) for kind in (CALM_A, CALM_B, STALLED))
        both = [(a + b) / 2 for a, b in zip(calm_a, calm_b, strict=True)]
        disturbed = ratios(stalled, both)
        print(f"{what}:")
        print(
            f"  undisturbed {median([*calm_a, *calm_b]):.3f} ms, stalled {median(stalled):.3f} ms"
        )
        print(f"  undisturbed a / b, within rounds      {shown(ratios(calm_a, calm_b))}")
        print(f"  stalled / undisturbed, within rounds  {shown(disturbed)}")
        if name == "median_ms":
            ratio = median(disturbed)
            resolution = median([max(a / b, b / a) for a, b in zip(calm_a, calm_b, strict=True)])
    hooks, ours = (
        median(of(STALLED, name)) - median([*of(CALM_A, name), *of(CALM_B, name)])
        for name in ("hooks_percent", "ours_percent")
    )
    bar_percent = 100 * (BAR_RATIO - 1)
    print(
        f"in our hooks: stalled {median(of(STALLED, 'hooks_percent')):.3f} % of the time, "
        f"{hooks:+.3f} % against undisturbed; bar {bar_percent:.0f} %"
    )
    print(
        f"our threads on the decode side: stalled {median(of(STALLED, 'ours_percent')):.4f} % of a "
        f"core, {ours:+.4f} % against undisturbed; bar {bar_percent:.0f} %"
    )
    limit = max(BAR_RATIO, resolution)
    wins = "the bar" if limit == BAR_RATIO else "what two undisturbed windows differ by in this run"
    print(
        f"ratio of step times {ratio:.4f}; bar {BAR_RATIO}, resolution {resolution:.4f}: held to "
        f"{wins}"
    )
    return 0 if ratio <= limit and hooks <= bar_percent and ours <= bar_percent else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        print(f"stalled_load: no result: {error}")
        sys.exit(2)
