"""Settings that cannot be used end the start of a real engine, with every fault in one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_kv.demo import run as demo
from hetero_kv.demo.engines import Engine, EngineError, EngineSpec, connector_config

pytestmark = [
    pytest.mark.engines,
    pytest.mark.vllm,
    pytest.mark.matrix,
    pytest.mark.timeout(600),
]

FAULTS = {
    "lease_s": "soon",
    "transport": "pigeon",
    "port_range": "9-1",
    "leese_s": 3,
    "require_kv": "perhaps",
    "heartbeat_s": 99_999,
}


def test_bad_settings_end_the_start_with_one_error_that_lists_all(engine_logs: Path) -> None:
    demo.prepare_model("gqa")
    engine = Engine(
        EngineSpec(
            "bad-settings",
            demo.model_folder("gqa"),
            role="prefill",
            kv_transfer_config=connector_config("prefill", FAULTS),
        ),
        engine_logs / "start-faults",
    )
    try:
        with pytest.raises(EngineError):
            engine.wait_ready(300.0)
    finally:
        engine.kill()
    log = engine.process.log_path.read_text(errors="replace")
    start = log.index(f"kv_connector_extra_config has {len(FAULTS)} fault(s)")
    error = log[start : start + 4000]
    for name in FAULTS:
        assert f"- {name}:" in error, f"{name} is not named in: {error}"
    assert "valid keys:" in error
    assert "lease_slots" in error.partition("valid keys:")[2]
