"""Two witnesses that KV moved, neither of which is the text that came back.

The first: bytes that the transport counted (one line a load in the connector's trace file, and a
counter on the decode engine's /metrics) against bytes that the planner computes in a process of
its own. The second: vLLM's own counters of where prompt tokens came from.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetero_kv.demo.engines import Engine, EngineError, Sample, sum_metric
from hetero_kv.demo.topology import Shape

BYTES_READ = "hetero_kv_bytes_read_total"
LEASES_ALIVE = "hetero_kv_leases_alive"
FREE_BLOCKS = "hetero_kv_free_blocks"
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
CACHE_USAGE = "vllm:kv_cache_usage_perc"
CACHE_INFO = "vllm:cache_config_info"

PLAN_TIMEOUT_S = 30.0
SETTLE_TIMEOUT_S = 20.0
LOADED = "ok"


def executable(name: str, env_name: str) -> str:
    """One of this package's executables: named by `env_name`, beside the interpreter, or on PATH.

    Raises `EngineError` when it is in none of these places.
    """
    named = os.environ.get(env_name)
    beside = Path(sys.executable).with_name(name)
    for candidate in (named, str(beside), shutil.which(name)):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise EngineError(
        f"no executable {name}: not beside {sys.executable}, not on PATH. It comes with "
        f"`pip install .`; {env_name} names one outright."
    )


@dataclasses.dataclass(frozen=True)
class Load:
    """One rank's load of one request, as the connector's worker side wrote it."""

    request_id: str
    dp_rank: int
    tp_rank: int
    pp_rank: int
    moved_bytes: int
    planned_bytes: int
    load_ms: float
    outcome: str
    # (dp, tp) of each rank read from, with its bytes.
    sources: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Tokens that vLLM took from outside for one request, as the scheduler side wrote it."""

    request_id: str
    external_tokens: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a decode engine's processes wrote, in the order written."""

    loads: tuple[Load, ...] = ()
    allocations: tuple[Allocation, ...] = ()


def read_trace(path: Path) -> Trace:
    """The events in a trace file; none when the file is missing.

    Raises `EngineError` for a line of another form: a witness that cannot be read is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return Trace()
    loads = []
    allocations = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if record["event"] == "allocated":
                allocations.append(
                    Allocation(str(record["req_id"]), int(record["external_tokens"]))
                )
                continue
            if record["event"] != "load":
                continue
            sources = tuple(
                (int(source["dp"]), int(source["tp"]), int(source["bytes"]))
                for source in record["sources"]
            )
            loads.append(
                Load(
                    request_id=str(record["req_id"]),
                    dp_rank=int(record["dp_rank"]),
                    tp_rank=int(record["tp_rank"]),
                    pp_rank=int(record["pp_rank"]),
                    moved_bytes=int(record["bytes"]),
                    planned_bytes=int(record["planned_bytes"]),
                    load_ms=float(record["ms"]),
                    outcome=str(record["outcome"]),
                    sources=sources,
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{path}:{number}: not a trace event ({error!r})") from error
    return Trace(tuple(loads), tuple(allocations))


def trace_of(trace: Trace, request_id: str) -> Trace:
    """The events of a client's request. vLLM's own id of it is ``cmpl-ID-INDEX-RANDOM``."""
    pattern = re.compile(rf"cmpl-{re.escape(request_id)}-\d+(-|$)")
    return Trace(
        tuple(load for load in trace.loads if pattern.match(load.request_id)),
        tuple(event for event in trace.allocations if pattern.match(event.request_id)),
    )


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What the planner must know of a model, read from its config.json."""

    layers: int
    # The planner's KV grammar: ``gqa:HEADS:HEAD_DIM`` or ``mla:LATENT``.
    kv: str
    vocab_size: int

    @property
    def token_bytes(self) -> int:
        """fp32 bytes of one token's KV in all layers, were all its heads on one rank."""
        kind, *sizes = self.kv.split(":")
        elements = int(sizes[0]) if kind == "mla" else 2 * int(sizes[0]) * int(sizes[1])
        return self.layers * elements * 4

    @classmethod
    def read(cls, model: Path) -> ModelShape:
        """Raises `EngineError` for a folder that is no model or of an unknown form."""
        try:
            config = json.loads((model / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config", config)
            latent = config.get("kv_lora_rank")
            if latent:
                kv = f"mla:{int(latent) + int(config['qk_rope_head_dim'])}"
            else:
                heads = int(config["num_attention_heads"])
                head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
                kv = f"gqa:{int(config.get('num_key_value_heads') or heads)}:{int(head_dim)}"
            return cls(int(config["num_hidden_layers"]), kv, int(config["vocab_size"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"{model}/config.json: cannot be understood ({error!r})") from error


class Planner:
    """Asks `hetero-kv plan`, a process of its own, what a load ought to move."""

    def __init__(self, prefill: Shape, decode: Shape, model: ModelShape, block_tokens: int) -> None:
        self._model = model
        self._block_tokens = block_tokens
        # One instance of each side: instances of a shape are alike.
        self._command = [
            executable("hetero-kv", "HETERO_KV_CLI"),
            "plan",
            *("--prefill", prefill.engine),
            *("--decode", decode.engine),
            *("--kv", model.kv, "--layers", str(model.layers)),
            *("--block-size", str(block_tokens), "--dtype", "fp32", "--json"),
        ]
        self._rows: dict[int, list[dict[str, Any]]] = {}

    def rows(self, owner_dp: int) -> list[dict[str, Any]]:
        """The plan's rows when the prefill engine `owner_dp` owns the blocks."""
        if owner_dp not in self._rows:
            command = [*self._command, "--owner", str(owner_dp)]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=PLAN_TIMEOUT_S, check=False
                )
                if done.returncode != 0:
                    raise EngineError(f"{' '.join(command)}: {done.stderr.strip()}")
                self._rows[owner_dp] = json.loads(done.stdout)["ranks"]
            except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
                raise EngineError(f"{' '.join(command)}: {error!r}") from error
        return self._rows[owner_dp]

    def bytes_planned(self, owner_dp: int, decode_dp: int, tokens: int) -> int:
        """Bytes that all ranks of one decode engine read for `tokens` external tokens."""
        blocks = -(-tokens // self._block_tokens)
        every_layer = [0, self._model.layers]

        def layers(source: dict[str, Any]) -> int:
            first, past_last = source.get("layers", every_layer)
            return int(past_last - first)

        return sum(
            source["bytes_per_block_layer"] * layers(source) * blocks
            for row in self.rows(owner_dp)
            if row["dp"] == decode_dp
            for source in row["sources"]
        )

    def holders(self, owner_dp: int, decode_dp: int) -> dict[int, set[tuple[int, int]]]:
        """For each rank of a decode engine, the prefill ranks that have any of its heads."""
        return {
            row["tp"]: {(dp, tp) for dp, tp in row["holders"]}
            for row in self.rows(owner_dp)
            if row["dp"] == decode_dp
        }


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counters of the decode side, summed over its engines and ranks."""

    bytes_read: float
    external_tokens: float
    computed_tokens: float
    cached_tokens: float

    @classmethod
    def read(cls, engines: Sequence[Engine]) -> Counters:
        samples = [sample for engine in engines for sample in engine.metrics()]
        return cls(
            sum_metric(samples, BYTES_READ),
            sum_metric(samples, PROMPT_TOKENS, source="external_kv_transfer"),
            sum_metric(samples, PROMPT_TOKENS, source="local_compute"),
            sum_metric(samples, PROMPT_TOKENS, source="local_cache_hit"),
        )

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            *(
                getattr(self, field.name) - getattr(earlier, field.name)
                for field in dataclasses.fields(self)
            )
        )


def settle(
    read: Callable[[], Counters], wanted: Callable[[Counters], bool], timeout_s: float = 5.0
) -> Counters:
    """Reads until `wanted` holds or the time is up: metrics trail the last answer by a step."""
    end = time.monotonic() + timeout_s
    while True:
        counters = read()
        if wanted(counters) or time.monotonic() > end:
            return counters
        time.sleep(0.1)


def block_tokens(engine: Engine) -> int:
    """The block size that the engine chose, from its /metrics."""
    for sample in engine.metrics():
        if sample.name == CACHE_INFO:
            return int(sample.labels["block_size"])
    raise EngineError(f"{engine.name}: its /metrics has no {CACHE_INFO}")


@dataclasses.dataclass(frozen=True)
class Held:
    """What the prefill side has not given back."""

    leases: int
    # Blocks of the pools that were free at the start and are not.
    blocks: int
    # vLLM's own gauge: the share of the cache in use, the largest of any engine.
    usage: float
    # Engines that export no gauge of ours: nothing can be said of them.
    silent: int

    @property
    def nothing(self) -> bool:
        return (self.leases, self.blocks, self.usage, self.silent) == (0, 0, 0.0, 0)


class HeldBlocks:
    """Compares the free blocks of the prefill engines with those at the start.

    Made when each of their DP ranks has taken a step and before any transfer: vLLM exports a
    connector's metrics with the first step.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._free_at_start = [self._free(engine.metrics()) for engine in engines]

    def of_restarted(self, engines: Sequence[Engine]) -> HeldBlocks:
        """The same comparison for engines of the same specs that took the place of these, with the
        blocks that were free when the first ones started."""
        held = HeldBlocks(engines)
        held._free_at_start = self._free_at_start
        return held

    @staticmethod
    def _free(samples: Sequence[Sample]) -> dict[str, float]:
        """Free blocks by vLLM's label of the DP rank."""
        return {
            sample.labels.get("engine", ""): sample.value
            for sample in samples
            if sample.name == FREE_BLOCKS
        }

    def read(self) -> Held:
        """Leases, blocks and cache usage at this moment."""
        leases = blocks = silent = 0
        usage = 0.0
        for engine, at_start in zip(self._engines, self._free_at_start, strict=True):
            samples = engine.metrics()
            leases += int(sum_metric(samples, LEASES_ALIVE))
            usage = max([usage, *(s.value for s in samples if s.name == CACHE_USAGE)])
            free = self._free(samples)
            known = at_start.keys() & free.keys()
            silent += engine.spec.dp - len(known)
            blocks += sum(abs(int(at_start[rank] - free[rank])) for rank in known)
        return Held(leases, blocks, usage, silent)

    def settle(self, timeout_s: float = SETTLE_TIMEOUT_S) -> Held:
        """As `read`, until nothing is held or the time is up."""
        end = time.monotonic() + timeout_s
        while True:
            now = self.read()
            if now.nothing or time.monotonic() > end:
                return now
            time.sleep(0.2)
