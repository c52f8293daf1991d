"""Whole engines over MoRI-IO, run by the environment's own Python: a scheduler and its ranks as
processes, claims, loads, releases; every byte of every decode rank compared."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Set before numpy is imported by the processes: they only move bytes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from interop.caches import ODD, PADDED, PLAIN, Model, Style
from interop.harness import Engine, EngineStartError, tokens

MORI = {"transport": "mori"}
GQA = Model(kv_heads=4)
MLA = Model(kv_heads=0, parts=1, token_bytes=72)
PAIRS = {
    "gqa 2 to 1": (GQA, 2, 1, PADDED, ODD),
    "gqa 1 to 2": (GQA, 1, 2, PLAIN, PADDED),
    "mla 2 to 1": (MLA, 2, 1, ODD, PLAIN),
}


def engine(name: str, model: Model, tp: int, style: Style, **options: object) -> Engine:
    settings = {**MORI, **options.pop("settings", {})}
    made = Engine(name, model, style, tp, settings=settings, **options)
    return made.wait_started()


def exact(name: str) -> dict[str, object]:
    """Loads of several lengths; bytes, sources and what is left."""
    model, tp_p, tp_d, style_p, style_d = PAIRS[name]
    p = engine("p", model, tp_p, style_p, producer=True, seed=100)
    d = engine("d", model, tp_d, style_d, producer=False, seed=200)
    moved, transports = 0, set()
    for salt, count in enumerate((2, 5, 33)):
        request = d.decode(p.prefill(tokens(count, salt)))
        load = d.loaded(request)
        assert load.ok, load.text
        moved += load.bytes_read
        for report in load.reports:
            transports |= {source["transport"] for source in report["sources"]}
        d.wait_event("finished", request.request_id)
    d.check_bytes()
    p.assert_clean()
    d.assert_clean()
    p.stop()
    d.stop()
    return {"moved": moved, "transports": sorted(transports)}


def killed() -> dict[str, object]:
    """A prefill rank that dies; the load fails by name, the next engine serves."""
    p = engine("p", GQA, 1, PLAIN, producer=True, seed=100)
    d = engine("d", GQA, 1, PADDED, producer=False, seed=200)
    first = d.loaded(d.decode(p.prefill(tokens(9))))
    prefill = p.prefill(tokens(9, 1))
    p.ranks[0].kill()
    p.ranks[0].join()
    lost = d.loaded(d.decode(prefill))
    p.kill()
    again = engine("p2", GQA, 1, PLAIN, producer=True, seed=300)
    next_load = d.loaded(d.decode(again.prefill(tokens(9, 2))))
    d.check_bytes()
    again.kill()
    d.kill()
    return {
        "first": first.ok,
        "lost": sorted(lost.reasons),
        "text": lost.text,
        "next": next_load.ok,
    }


def mixed() -> dict[str, object]:
    """Only one side has set the transport."""
    p = Engine("p", GQA, PLAIN, 1, producer=True, seed=100, settings={"transport": "tcp"})
    p.wait_started()
    d = engine("d", GQA, 1, PADDED, producer=False, seed=200)
    load = d.loaded(d.decode(p.prefill(tokens(9))))
    p.kill()
    d.kill()
    return {"ok": load.ok, "text": load.text}


def address(host: str) -> str:
    """An address that MoRI-IO does not take."""
    try:
        started = Engine(
            "p", GQA, PLAIN, 1, producer=True, seed=100, settings={**MORI, "host": host}
        )
        started.wait_started()
    except EngineStartError as error:
        return str(error)
    started.kill()
    return "started"


if __name__ == "__main__":
    print("\nANSWER " + json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
