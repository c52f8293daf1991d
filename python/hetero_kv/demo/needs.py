"""What a topology costs on this host, said before anything is started."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hetero_kv.demo.engines import EngineSpec

# Proportional set sizes of vLLM 0.32 serving a tiny model, measured and rounded up: the API
# server; each engine core; each worker; the coordinator where there is more than one engine.
SERVER_BYTES = 500_000_000
CORE_BYTES = 700_000_000
WORKER_BYTES = 750_000_000
COORDINATOR_BYTES = 400_000_000
# The proxy, this program, and some air for the rest of the host.
MARGIN_BYTES = 500_000_000

# Weights as stored are bf16 as a rule; engines hold them in fp32.
WEIGHTS_IN_MEMORY = 2

# A model of 5 MB and logs of a few; a user's own model is there already.
DISK_BYTES = 200_000_000

# Processor seconds that one vLLM process takes to start, nearly all of them spent in imports.
START_CPU_S = 11.0
REQUESTS_S = 30.0


class RefusedError(Exception):
    """The run cannot be done on this host or with this pair; the text says why."""


def memory_bytes(spec: EngineSpec) -> int:
    """What one launched vLLM server takes with its weights and its KV cache."""
    workers = spec.dp * spec.tp * spec.pp
    coordinator = COORDINATOR_BYTES if spec.dp > 1 else 0
    weights = spec.dp * WEIGHTS_IN_MEMORY * stored_weights_bytes(spec.model)
    cache = workers * spec.kv_cache_bytes
    processes = SERVER_BYTES + spec.dp * CORE_BYTES + workers * WORKER_BYTES + coordinator
    return processes + weights + cache


def stored_weights_bytes(model: Path) -> int:
    """0 for a model that is not written yet: a tiny one."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def process_count(spec: EngineSpec) -> int:
    return 1 + (1 if spec.dp > 1 else 0) + spec.dp + spec.dp * spec.tp * spec.pp


def memory_available_bytes() -> int:
    """MemAvailable of /proc/meminfo: what can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RefusedError("/proc/meminfo does not tell the available memory")


@dataclasses.dataclass(frozen=True)
class Needs:
    """Needs of one run, and what the host has."""

    # One or two groups of engines that run at the same time, the second after the first.
    phases: tuple[tuple[EngineSpec, ...], ...]
    memory_needed_bytes: int
    memory_available_bytes: int
    disk_free_bytes: int
    minutes: float

    def lines(self) -> list[str]:
        engines = [spec for phase in self.phases for spec in phase]
        order = "all at the same time" if len(self.phases) == 1 else "the plain one first"
        return [
            "engines: "
            + "; ".join(f"{spec.name} ({spec.shape})" for spec in engines)
            + f"; {order}",
            f"memory: about {self.memory_needed_bytes / 1e9:.1f} GB, "
            f"{self.memory_available_bytes / 1e9:.1f} GB available",
            f"disk: {DISK_BYTES / 1e9:.1f} GB, {self.disk_free_bytes / 1e9:.0f} GB free",
            f"time: about {self.minutes:.0f} minutes on {os.cpu_count()} cores",
            "system packages: none beyond the vLLM environment",
        ]


def assess(plain: EngineSpec, pair: Sequence[EngineSpec], work: Path) -> Needs:
    """Decides whether the plain engine runs beside the others or before them.

    Raises `RefusedError` when the host cannot hold the larger phase, or the disk is full.
    """
    available = memory_available_bytes()
    pair_bytes = sum(memory_bytes(spec) for spec in pair)
    together = pair_bytes + memory_bytes(plain) + MARGIN_BYTES
    if together <= available:
        phases: tuple[tuple[EngineSpec, ...], ...] = ((plain, *pair),)
        needed = together
    else:
        phases = ((plain,), tuple(pair))
        needed = pair_bytes + MARGIN_BYTES
    processes = sum(process_count(spec) for phase in phases for spec in phase)
    start_s = processes * START_CPU_S / (os.cpu_count() or 1) + 15.0 * len(phases)
    free = shutil.disk_usage(work).free
    needs = Needs(phases, needed, available, free, max(1.0, (start_s + REQUESTS_S) / 60))
    if needed > available:
        raise RefusedError(
            f"not enough memory: about {needed / 1e9:.1f} GB needed, {available / 1e9:.1f} GB "
            "available. Take a smaller topology, for example dp=1,tp=1:dp=1,tp=1."
        )
    if free < DISK_BYTES:
        raise RefusedError(
            f"not enough disk at {work}: {DISK_BYTES / 1e9:.1f} GB needed, {free / 1e9:.2f} free"
        )
    return needs
