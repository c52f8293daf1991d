"""What the demo prints: a row for each prompt, and a verdict on each thing that must hold."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from hetero_kv.demo.client import Answer
from hetero_kv.demo.prompts import Prompt
from hetero_kv.demo.witness import LOADED, Counters, Held, Load, Planner, Trace, trace_of

# Two of the prompts that move bytes may give the same tokens from flipped KV: a random model may
# be certain of its next tokens whatever it has read.
CONTROL_EQUAL_MAX = 2

# With this many loads for each holder, a fair choice leaves one out once in a thousand runs or
# less; with fewer a holder that was never read says nothing.
SPREAD_LOADS_MIN = 7


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt of one pass. Milliseconds; bytes; tokens."""

    request_id: str
    prompt_tokens: int
    stream: bool
    equal: bool
    moved_bytes: int
    planned_bytes: int
    external_tokens: int
    computed_tokens: int
    decode_dp: int | None
    # ``dpD.tpT`` of each prefill rank read from, with its bytes.
    sources: Mapping[str, int]
    ttft_ms: float | None
    prefill_ms: float | None
    wait_ms: float | None
    load_ms: float | None
    first_step_ms: float | None
    total_ms: float
    token_ids: tuple[int, ...]
    error: str

    @property
    def moves(self) -> bool:
        return self.external_tokens > 0

    def to_json(self, topology: str, model: str, pass_name: str) -> str:
        record = {"topology": topology, "model": model, "pass": pass_name}
        return json.dumps(record | dataclasses.asdict(self))


def make_row(
    prompt: Prompt,
    answer: Answer,
    expected: Sequence[int],
    trace: Trace,
    planner: Planner,
    decode: tuple[int, int],
) -> Row:
    """Brings together what the client, the trace and the planner say of one request. `decode`: tp
    and pp of the decode engines."""
    own = trace_of(trace, answer.request_id)
    loads = own.loads
    # The last prompt token is computed on the decode side, so a prompt of one token moves nothing.
    external = len(prompt) - 1
    planned = 0
    problem = answer.error
    if loads:
        owner_dps = {dp for load in loads for dp, _, _ in load.sources}
        decode_dps = {load.dp_rank for load in loads}
        if len(owner_dps) == 1 and len(decode_dps) == 1:
            planned = planner.bytes_planned(min(owner_dps), min(decode_dps), external)
        else:
            problem = problem or (
                f"read from prefill DP ranks {sorted(owner_dps)} "
                f"by decode DP ranks {sorted(decode_dps)}"
            )
        ranks = sorted((load.pp_rank, load.tp_rank) for load in loads)
        tp, pp = decode
        if ranks != [(stage, place) for stage in range(pp) for place in range(tp)]:
            problem = problem or (
                f"loads by decode ranks (pp, tp) {ranks}, not by each of pp={pp}, tp={tp} once"
            )
        bad = [load for load in loads if load.outcome != LOADED]
        if bad:
            # Beside what the client saw: vLLM answers every failed load with the same 500.
            said = f"rank {bad[0].tp_rank} reports {bad[0].outcome!r}"
            problem = f"{said}; {problem}" if problem else said
        problem = problem or _not_planned(loads, planner)
    elif external:
        planned = planner.bytes_planned(0, 0, external)
        problem = problem or "no load in the trace"
    sources: Counter[str] = Counter()
    for load in loads:
        for dp, tp, moved in load.sources:
            sources[f"dp{dp}.tp{tp}"] += moved
    # vLLM's answer repeats what prefill had cached, so its usage cannot tell what decode computed.
    taken = sum(event.external_tokens for event in own.allocations)
    return Row(
        request_id=answer.request_id,
        prompt_tokens=len(prompt),
        stream=prompt.stream,
        equal=not answer.error and tuple(answer.token_ids) == tuple(expected),
        moved_bytes=sum(load.moved_bytes for load in loads),
        planned_bytes=planned,
        external_tokens=external,
        computed_tokens=len(prompt) - taken,
        decode_dp=loads[0].dp_rank if loads else None,
        sources=dict(sorted(sources.items())),
        load_ms=max((load.load_ms for load in loads), default=None),
        **_split(answer),
        total_ms=answer.total_ms,
        token_ids=answer.token_ids,
        error=problem,
    )


def _not_planned(loads: Sequence[Load], planner: Planner) -> str:
    """What a load did that the planner of the other process would not; empty when all is well."""
    for load in loads:
        if not load.sources:
            continue
        owner = load.sources[0][0]
        allowed = planner.holders(owner, load.dp_rank).get(load.tp_rank, set())
        read = {(dp, tp) for dp, tp, _ in load.sources}
        if not read <= allowed:
            return (
                f"rank {load.tp_rank} read from {sorted(read - allowed)}, which hold no head of it"
            )
        moved = sum(source_bytes for _, _, source_bytes in load.sources)
        if moved != load.moved_bytes:
            return f"rank {load.tp_rank}: its sources gave {moved} of {load.moved_bytes} bytes"
    return ""


def _split(answer: Answer) -> dict[str, float | None]:
    """Time to first token in its parts: prefill with the proxy, waiting for KV, the first step.

    The decode engine tells how long the request waited (its queue, and there the load) and how
    long its first step took; what is left of the client's time was spent before.
    """
    parts: dict[str, float | None] = dict.fromkeys(
        ("ttft_ms", "prefill_ms", "wait_ms", "first_step_ms")
    )
    waited, first_step = answer.engine_queue_ms, answer.engine_first_ms
    ttft = answer.first_ms
    if ttft is None and answer.engine_generation_ms is not None:
        # Not streamed: the whole time without the time between the first and the last token.
        ttft = answer.total_ms - answer.engine_generation_ms
    parts["ttft_ms"] = ttft
    if ttft is not None and waited is not None and first_step is not None:
        parts["wait_ms"] = waited
        parts["first_step_ms"] = first_step
        parts["prefill_ms"] = max(0.0, ttft - waited - first_step)
    return parts


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that must hold, whether it does, and the numbers."""

    name: str
    ok: bool
    detail: str

    def line(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'} {self.name}: {self.detail}"


def check_pass(rows: Sequence[Row], counters: Counters) -> list[Check]:
    """The checks on an honest pass: equal tokens and both witnesses."""
    failed = [row for row in rows if row.error]
    equal = sum(row.equal for row in rows)
    return [
        Check(
            "requests",
            not failed,
            f"{len(rows) - len(failed)} of {len(rows)} without a fault"
            + "".join(f"; {row.request_id}: {row.error}" for row in failed[:3]),
        ),
        Check("tokens", equal == len(rows), f"{equal} of {len(rows)} equal to the plain engine's"),
        *_check_bytes(rows, counters),
        *_check_tokens(rows, counters),
    ]


def _check_bytes(rows: Sequence[Row], counters: Counters) -> list[Check]:
    moved = sum(row.moved_bytes for row in rows)
    planned = sum(row.planned_bytes for row in rows)
    alike = all(row.moved_bytes == row.planned_bytes for row in rows)
    still = [row for row in rows if row.moves and row.moved_bytes == 0]
    return [
        Check("bytes moved", alike and moved > 0, f"{moved} moved, {planned} planned"),
        Check("bytes counted", counters.bytes_read == moved, f"{counters.bytes_read:.0f} counted"),
        Check("prompts that move", not still, f"{len(still)} of 2 tokens or more moved nothing"),
    ]


def _check_tokens(rows: Sequence[Row], counters: Counters) -> list[Check]:
    external = sum(row.external_tokens for row in rows)
    one_each = all(row.computed_tokens == 1 for row in rows)
    return [
        Check(
            "tokens from KV",
            counters.external_tokens == external,
            f"vLLM counts {counters.external_tokens:.0f} from transfer, {external} expected",
        ),
        Check(
            "tokens computed on decode",
            counters.computed_tokens == len(rows) and counters.cached_tokens == 0 and one_each,
            f"vLLM counts {counters.computed_tokens:.0f} computed and "
            f"{counters.cached_tokens:.0f} cached, {len(rows)} and 0 expected",
        ),
    ]


def check_spread(rows: Sequence[Row], planner: Planner) -> list[Check]:
    """Where several prefill ranks hold the same heads, reads must not all go to one of them."""
    wanted: set[tuple[int, int]] = set()
    for owner, decode in {(_owner(row), row.decode_dp) for row in rows if row.sources}:
        for holders in planner.holders(owner, decode or 0).values():
            wanted |= holders
    used = {source for row in rows for source in row.sources}
    missing = sorted({f"dp{dp}.tp{tp}" for dp, tp in wanted} - used)
    enough = sum(row.moves for row in rows) >= SPREAD_LOADS_MIN * max(1, len(wanted))
    detail = f"read from {', '.join(sorted(used)) or 'none'}"
    if missing:
        detail += f"; never from {', '.join(missing)}"
    return [Check("source ranks", bool(used) and not (missing and enough), detail)]


def _owner(row: Row) -> int:
    name = next(iter(row.sources))
    return int(name.removeprefix("dp").split(".")[0])


def check_control(honest: Sequence[Row], flipped: Sequence[Row]) -> list[Check]:
    """The control: KV flipped at its source moves the same bytes and gives other tokens."""
    pairs = [(a, b) for a, b in zip(honest, flipped, strict=True) if a.moves]
    failed = [b for _, b in pairs if b.error]
    same_bytes = sum(a.moved_bytes == b.moved_bytes for a, b in pairs)
    same_tokens = sum(b.equal for _, b in pairs)
    unmoved = [b for a, b in zip(honest, flipped, strict=True) if not a.moves]
    return [
        Check(
            "control: requests",
            not failed,
            f"{len(pairs) - len(failed)} of {len(pairs)} without a fault"
            + "".join(f"; {row.request_id}: {row.error}" for row in failed[:3]),
        ),
        Check(
            "control: bytes moved",
            same_bytes == len(pairs),
            f"equal for {same_bytes} of {len(pairs)} prompts that move bytes",
        ),
        Check(
            "control: tokens",
            bool(pairs) and same_tokens <= CONTROL_EQUAL_MAX and all(b.equal for b in unmoved),
            f"changed for {len(pairs) - same_tokens} of {len(pairs)} prompts that move bytes, "
            f"for {sum(not b.equal for b in unmoved)} of {len(unmoved)} that move none",
        ),
    ]


def check_held(now: Held) -> Check:
    silent = f", {now.silent} engines export no gauge" if now.silent else ""
    return Check(
        "held",
        now.nothing,
        f"{now.leases} leases alive, {now.blocks} blocks not free, "
        f"cache usage {now.usage:.3f}{silent}",
    )


HEADINGS = (
    ("prompt", 7), ("tokens", 6), ("mode", 6), ("equal", 5), ("bytes moved", 11),
    ("planned", 11), ("computed", 8), ("from", 17), ("ttft ms", 8), ("prefill", 8),
    ("wait", 7), ("(load)", 7), ("step", 7), ("control", 8),
)  # fmt: skip


def table(rows: Sequence[Row], flipped: Sequence[Row] | None) -> list[str]:
    """One line for each prompt, with headings."""
    lines = ["  ".join(f"{name:>{width}}" for name, width in HEADINGS)]
    for index, row in enumerate(rows):
        control = "-"
        if flipped is not None and row.moves:
            control = "equal" if flipped[index].equal else "changed"
        times = (row.ttft_ms, row.prefill_ms, row.wait_ms, row.load_ms, row.first_step_ms)
        cells = (
            str(index),
            str(row.prompt_tokens),
            "stream" if row.stream else "whole",
            "yes" if row.equal else "NO",
            str(row.moved_bytes),
            str(row.planned_bytes),
            str(row.computed_tokens),
            " ".join(row.sources) or "-",
            *("-" if value is None else f"{value:.1f}" for value in times),
            control,
        )
        lines.append(
            "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, HEADINGS, strict=True))
        )
    return lines
