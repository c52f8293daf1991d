"""The process of one engine's scheduler: plays vLLM's part in front of our scheduler side.

It keeps vLLM's order: waiting requests get blocks (``get_num_new_matched_tokens``,
``update_state_after_alloc``), the step's orders go to every rank, what the ranks report is counted
per request as ``KVOutputAggregator`` does, loaded requests are scheduled with a second
``update_state_after_alloc``, and blocks are freed only after every rank's report. An engine with
requests or delayed frees keeps stepping; an idle one sleeps.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from hetero_kv import _core

from .caches import Model
from .rank import process_figures

EMPTY_STEP_WAIT_MS = 5.0


@dataclass
class Request:
    request_id: str
    params: str
    token_ids: list[int]
    computed: int = 0
    hold: bool = False
    """Stays in the waiting queue until the test lets it go."""
    state: str = "waiting"
    blocks: list[int] = field(default_factory=list)
    external: int = 0
    aborted: bool = False


class EngineCore:
    def __init__(
        self,
        test: Connection,
        ranks: list[Connection],
        options: dict[str, Any],
        model: Model,
        num_blocks: int,
        seed: int,
    ) -> None:
        self._test = test
        self._ranks = ranks
        self._model = model
        self._seed = seed
        self._producer = options["engine"]["producer"]
        cards = []
        for rank in ranks:
            kind, card = rank.recv()
            if kind == "failed":
                raise RuntimeError(card)
            cards.append(card)
        self._core: _core.Scheduler | None = _core.Scheduler(json.dumps(options), cards)
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._requests: dict[str, Request] = {}
        self._delayed: dict[str, list[int]] = {}
        """Blocks of finished prefills that wait for `finished_sending`."""
        self._generation = 0
        self._sending: Counter[str] = Counter()
        self._receiving: dict[str, list[dict[str, Any]]] = {}
        self._violations: list[str] = []
        self._paused = False

    def run(self) -> None:
        """Until told to stop, or until the test or a rank is gone."""
        assert self._core is not None
        self._test.send(("started", self._core.port))
        while True:
            busy = (self._requests or self._delayed) and not self._paused
            while not busy or self._test.poll():
                command, *arguments = self._test.recv()
                if command == "stop":
                    self._core.revoke_leases()
                    self._core = None
                    self._test.send(("reply", None))
                    return
                self._test.send(("reply", getattr(self, f"_do_{command}")(*arguments)))
                busy = (self._requests or self._delayed) and not self._paused
            self._step()

    # === commands of the test ===

    def _do_prefill(self, request_id: str, token_ids: list[int], params: dict[str, Any]) -> None:
        self._requests[request_id] = Request(request_id, json.dumps(params), token_ids)

    def _do_decode(
        self, request_id: str, token_ids: list[int], params: Any, computed: int, hold: bool
    ) -> None:
        text = params if isinstance(params, str) else json.dumps(params)
        self._core_().new_request(request_id, text, token_ids, [], len(token_ids))
        self._requests[request_id] = Request(request_id, text, token_ids, computed, hold)

    def _do_let_go(self, request_id: str) -> None:
        self._requests[request_id].hold = False

    def _do_abort(self, request_id: str) -> str:
        """vLLM's `finish_requests`: blocks of a load stay until every rank has reported it."""
        request = self._requests.get(request_id)
        if request is None:
            return "unknown"
        state = request.state
        if not self._producer:
            self._core_().finished(request_id)
        if state == "loading":
            request.aborted = True
        else:
            self._drop(request)
        return state

    def _do_rejected(self, params: dict[str, Any]) -> None:
        self._core_().rejected(json.dumps(params))

    def _do_connect(self, host: str, port: int, engine_id: str, incarnation: str) -> None:
        self._core_().connect(host, port, engine_id, incarnation)

    def _do_pause(self, paused: bool) -> None:
        """A long forward pass."""
        self._paused = paused

    def _do_figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads(self._core_().figures())
        figures["free_blocks"] = len(self._free)
        figures["violations"] = self._violations
        figures["process"] = process_figures()
        return figures

    def _do_state(self, request_id: str) -> str:
        request = self._requests.get(request_id)
        return request.state if request else "gone"

    def _do_revoke(self) -> None:
        self._core_().revoke_leases()

    # === one step ===

    def _step(self) -> None:
        fills, prefilled = self._schedule_prefills()
        running, loading = self._schedule_decodes()
        orders = self._core_().take_orders()
        empty = not fills and not running
        for rank in self._ranks:
            rank.send(("step", orders, fills, EMPTY_STEP_WAIT_MS if empty else 0.0))
        for request in loading:
            self._event("ordered", request.request_id)
        results = [rank.recv() for rank in self._ranks]
        for request in prefilled:
            self._finish_prefill(request)
        for request in running:
            self._core_().finished(request.request_id)
            self._event("finished", request.request_id)
            self._drop(request)
        for rank, (sent, reports) in enumerate(results):
            self._count(sent, [{**report, "rank": rank} for report in reports])
        self._deliver()

    def _schedule_prefills(self) -> tuple[list[tuple[int, list[int]]], list[Request]]:
        fills, done = [], []
        if self._producer:
            for request in list(self._requests.values()):
                need = self._model.blocks_for(len(request.token_ids))
                if request.state != "waiting" or need > len(self._free):
                    continue
                request.blocks = self._take(need)
                request.state = "running"
                self._generation += 1
                fills.append((self._generation, request.blocks))
                request.external = self._generation
                done.append(request)
        return fills, done

    def _schedule_decodes(self) -> tuple[list[Request], list[Request]]:
        """Those that run in this step, and those that wait for their load from now on."""
        running: list[Request] = []
        loading: list[Request] = []
        if self._producer:
            return running, loading
        for request in self._requests.values():
            if request.state == "loaded":
                # The load is done: scheduled like a request with a local hit.
                self._core_().allocated(request.request_id, request.blocks, 0)
                request.state = "running"
                running.append(request)
            if request.state != "waiting" or request.hold:
                continue
            external = self._core_().matched_tokens(request.request_id, request.computed)
            need = self._model.blocks_for(
                request.computed + external if external else len(request.token_ids)
            )
            if need > len(self._free):
                continue
            request.blocks = self._take(need)
            request.external = external
            self._core_().allocated(request.request_id, request.blocks, external)
            if external:
                request.state = "loading"
                loading.append(request)
            else:
                request.state = "running"
                self._event("local", request.request_id)
                running.append(request)
        return running, loading

    def _finish_prefill(self, request: Request) -> None:
        answer, refused = self._core_().prefilled(
            request.request_id,
            request.params,
            request.token_ids,
            [],
            [request.blocks],
            len(request.token_ids),
        )
        self._event(
            "prefilled",
            request.request_id,
            json.loads(answer) if answer else None,
            refused,
            request.blocks,
            request.external,
        )
        if answer is None:
            self._drop(request)
        else:
            self._delayed[request.request_id] = request.blocks
            del self._requests[request.request_id]

    def _count(self, sent: list[str], reports: list[dict[str, Any]]) -> None:
        for request_id in sent:
            if request_id not in self._delayed:
                self._violations.append(f"{request_id}: sent, but no blocks wait for that")
            self._sending[request_id] += 1
        for report in reports:
            request = self._requests.get(report["request_id"])
            if request is None or request.state != "loading":
                self._violations.append(f"{report['request_id']}: received, but loads nothing")
            self._receiving.setdefault(report["request_id"], []).append(report)

    def _deliver(self) -> None:
        world = len(self._ranks)
        for request_id, reports in list(self._receiving.items()):
            if len(reports) < world:
                continue
            del self._receiving[request_id]
            reports.sort(key=lambda report: int(report["rank"]))
            failed = any(report["reason"] for report in reports)
            for report in reports:
                if report["lost_tp_rank"] is not None:
                    self._core_().source_lost(request_id, report["lost_tp_rank"])
            self._core_().received(request_id, failed)
            request = self._requests.get(request_id)
            if request is None:
                continue
            dest = request.blocks[request.computed // self._model.block_size :]
            self._event("loaded", request_id, not failed, reports, dest, request.aborted)
            if request.aborted:
                self._drop(request)
            elif failed:
                # `kv_load_failure_policy` "fail".
                self._core_().finished(request_id)
                self._drop(request)
            else:
                request.state = "loaded"
        for request_id, count in list(self._sending.items()):
            if count < world:
                continue
            del self._sending[request_id]
            self._core_().sent(request_id)
            self._free.extend(self._delayed.pop(request_id, []))
            self._event("released", request_id)

    def _take(self, count: int) -> list[int]:
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def _drop(self, request: Request) -> None:
        self._free.extend(request.blocks)
        request.blocks = []
        self._requests.pop(request.request_id, None)

    def _event(self, kind: str, request_id: str, *rest: Any) -> None:
        self._test.send(("event", kind, request_id, time.monotonic(), rest))

    def _core_(self) -> _core.Scheduler:
        assert self._core is not None
        return self._core


def main(
    test: Connection,
    ranks: list[Connection],
    options: dict[str, Any],
    model: Model,
    num_blocks: int,
    seed: int,
) -> None:
    _core.init_logging(os.environ.get("HETERO_KV_LOG", "off"))
    try:
        core = EngineCore(test, ranks, options, model, num_blocks, seed)
    except Exception as error:
        test.send(("failed", str(error)))
        return
    try:
        core.run()
    except (EOFError, ConnectionResetError, BrokenPipeError):
        # The test or a rank is gone; vLLM's engine ends when one of its workers does.
        return
