"""A pair of engines within one process, for tests of forks."""

from __future__ import annotations

import json
import time
from typing import Any

from hetero_kv import _core
from hetero_kv.config import Settings

from .caches import PADDED, PLAIN, Model, Place, RankMemory
from .harness import FAST, FIELDS, tokens

MODEL = Model(kv_heads=4)


class Pair:
    """One prefill and one decode engine of one rank each."""

    def __init__(
        self, p_settings: dict[str, Any] | None = None, d_settings: dict[str, Any] | None = None
    ) -> None:
        self.p_memory = RankMemory.allocate(MODEL, PLAIN, Place())
        self.d_memory = RankMemory.allocate(MODEL, PADDED, Place())
        self.p_memory.fill_all(1)
        self.d_memory.fill_all(2)
        self.p_worker, self.p = _start("p", self.p_memory, p_settings, producer=True)
        self.d_worker, self.d = _start("d", self.d_memory, d_settings, producer=False)
        self._count = 0

    def prefill_with(self, request_id: str) -> tuple[str | None, str | None]:
        prompt = tokens(9, self._count)
        return self.p.prefilled(
            request_id, '{"do_remote_decode": true}', prompt, [], [[5, 6, 7]], len(prompt)
        )

    def order_load(self) -> bytes:
        """Prefills, claims and allocates; returns the orders that start the read."""
        self._count += 1
        request_id = f"d{self._count}"
        self.p_memory.fill_blocks(1, self._count, [5, 6, 7])
        self.p_worker.step(self.p.take_orders(), 0.0)
        answer, refused = self.prefill_with(f"p{self._count}")
        assert answer is not None, refused
        self.d.new_request(request_id, answer, tokens(9, self._count), [], 9)
        assert self.d.matched_tokens(request_id, 0) == 8
        # Once it is claimed the allocation is answered by an order to load.
        time.sleep(0.5)
        self.d.allocated(request_id, [3, 2], 8)
        return self.d.take_orders()

    def finish_load(self, orders: bytes) -> None:
        """Carries the orders out, compares, releases."""
        request_id = f"d{self._count}"
        self.d_worker.step(orders, 0.0)
        (report,) = self._results(self.d_worker, 1)
        assert report["reason"] is None, report
        for layer in range(MODEL.layers):
            for part in range(MODEL.parts):
                got = self.d_memory.view(layer, part)[[3, 2]]
                assert (got == self.p_memory.view(layer, part)[[5, 6]]).all()
        self.d.received(request_id, False)
        self.d.finished(request_id)
        deadline = time.monotonic() + 10
        while json.loads(self.p.figures())["gauges"]["leases_alive"]:
            self.p.wait_for_orders(50.0)
            self.p_worker.step(self.p.take_orders(), 0.0)
            sent, _ = self.p_worker.take_results()
            for one in sent:
                self.p.sent(one)
            assert time.monotonic() < deadline

    def load(self) -> None:
        self.finish_load(self.order_load())

    def _results(self, worker: _core.Worker, count: int) -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = []
        deadline = time.monotonic() + 10
        while len(reports) < count:
            worker.wait(50.0)
            reports += [json.loads(text) for text in worker.take_results()[1]]
            assert time.monotonic() < deadline
        return reports


def one_load() -> None:
    """Starts a pair, moves a prompt, ends."""
    Pair().load()


def _start(
    name: str, memory: RankMemory, given: dict[str, Any] | None, *, producer: bool
) -> tuple[_core.Worker, _core.Scheduler]:
    settings = Settings({**FAST, **(given or {})}).for_core("127.0.0.1")
    engine = {
        "engine_id": name,
        "dp_rank": 0,
        "dp_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "block_size": MODEL.block_size,
        "kv_heads": MODEL.kv_heads,
        "producer": producer,
        "consumer": not producer,
    }
    options = {"settings": settings, "engine": engine}
    worker = _core.Worker(
        json.dumps({**options, "tp_rank": 0, "pp_rank": 0}), json.dumps(memory.describe())
    )
    scheduler = _core.Scheduler(json.dumps({**options, "fields": FIELDS}), [worker.card()])
    return worker, scheduler
