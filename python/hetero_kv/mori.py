"""MoRI-IO for the ``mori`` transport: finds AMD's package, and holds its engines.

The extension module calls the objects of this module, from its own threads, for one batch at a
time. ``amd-mori``'s compiled module is used as it is (``mori.cpp``): its Python layer ``mori.io``
adds names and the import of torch, and makes sessions by a call that keeps the interpreter lock
while a peer does not answer. ``BatchRead`` of the engine makes the same sessions with the lock
released.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_kv import _core

PACKAGE = "amd-mori"

# How long MoRI-IO waits for a peer's handshake; its own default outlasts a connect of ours.
HANDSHAKE_TIMEOUT_MS = 1500

# Work requests of an engine's send queue and completions of its queue: three batches in flight,
# and their reads of the lease page, with room.
SEND_REQUESTS = 8192

# Statuses that are kept between two looks at which of them are done.
STATUSES_KEPT = 64

# Peers' failures that nobody has asked for yet.
FAILURES_MAX = 256

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROCM_SMI = ("librocm_smi64.so.1", "/opt/rocm/lib/librocm_smi64.so.1", "librocm_smi64.so")


class MoriError(RuntimeError):
    """What is missing or refused, and the way out."""


class Library:
    """The package, found and checked; starts engines for host memory."""

    def __init__(self) -> None:
        """Raises :class:`MoriError` where the package or ROCm is missing."""
        self._cpp, self.version = load()

    def start(self, host: str, port: int, notify: bool = False) -> Engine:
        """An engine that listens at an IPv4 address; whether it sends notifications and takes
        them."""
        return Engine(self._cpp, self.version, host, port, notify)


def load() -> tuple[Any, str]:
    """The compiled module and the package's version."""
    lowest, below = _core.mori_versions()
    wanted = f"pip install '{PACKAGE}>={lowest},<{below}'"
    try:
        import mori
    except ModuleNotFoundError:
        raise MoriError(
            f"the package {PACKAGE} is not installed: {wanted} (CPython 3.10 or 3.12, ROCm 7), or "
            "set another transport"
        ) from None
    version = str(getattr(mori, "__version__", "unknown"))
    if not _numbers(lowest) <= _numbers(version) < _numbers(below):
        raise MoriError(
            f"{PACKAGE} is version {version}, and this transport is for {lowest} to below {below}: "
            f"{wanted}, or set another transport"
        )
    try:
        from mori import cpp
    except (ImportError, OSError) as error:
        raise MoriError(
            f"{PACKAGE} {version} cannot be loaded, most likely because ROCm 7 is missing or not "
            f"on the library path: {error}"
        ) from None
    return cpp, version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_machine() -> None:
    """Raises :class:`MoriError` for what would end or hang the process inside the package."""
    # The package ends the process where ROCm's management library is missing or sees no GPU.
    named = os.environ.get("MORI_ROCM_SMI_PATH")
    tried = (named,) if named else _ROCM_SMI
    smi = None
    for name in tried:
        with suppress(OSError):
            smi = ctypes.CDLL(name)
            break
    if smi is None:
        raise MoriError(
            f"ROCm's system management library is missing (tried {', '.join(tried)}): install "
            "rocm-smi-lib, or name the library by MORI_ROCM_SMI_PATH"
        )
    count = ctypes.c_uint32(0)
    if smi.rsmi_init(ctypes.c_uint64(0)) or smi.rsmi_num_monitor_devices(ctypes.byref(count)):
        raise MoriError("ROCm's system management library does not start: is the driver loaded?")
    smi.rsmi_shut_down()
    if count.value == 0:
        raise MoriError("ROCm sees no GPU, and MoRI-IO does not start without one")
    # The package walks up a device's path to its PCI address, and never ends where there is none.
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        if not _PCI_ADDRESS.search(str(device.resolve())):
            raise MoriError(
                f"RDMA device {device.name} is not on a PCI bus ({device.resolve()}), and MoRI-IO "
                "does not come back from looking it up: remove the device, or set another "
                "transport"
            )


def check_locked_memory(size: int) -> None:
    """Raises :class:`MoriError` where this process may not lock so much host memory: the package
    would end it when it is first used."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    # CAP_IPC_LOCK is 14, see capabilities(7).
    unlimited = effective is not None and int(effective[1], 16) >> 14 & 1
    if not unlimited and limit != resource.RLIM_INFINITY and size > limit:
        raise MoriError(
            f"MoRI-IO has to lock {size} bytes of memory, and the limit is {limit} (ulimit -l): "
            "ulimit -l unlimited, LimitMEMLOCK=infinity for systemd, or docker run --ulimit "
            "memlock=-1"
        )


class Engine:
    """One MoRI-IO engine with its RDMA backend."""

    def __init__(self, cpp: Any, version: str, host: str, port: int, notify: bool) -> None:
        check_machine()
        # Copies between GPUs of one host would not end with the registration of their memory, and
        # that is what a read that is given up relies on.
        os.environ["MORI_DISABLE_AUTO_XGMI"] = "1"
        os.environ.setdefault("MORI_IO_CP_TIMEOUT_MS", str(HANDSHAKE_TIMEOUT_MS))
        # It would decide for the engine, and a peer would not know.
        os.environ.pop("MORI_IO_ENABLE_NOTIFICATION", None)
        self._cpp = cpp
        self._version = version
        # Another engine's descriptors of a former start never fit this one.
        key = f"hetero_kv-{secrets.token_hex(16)}"
        self._engine = cpp.IOEngine(key, cpp.IOEngineConfig(host, port))
        backend = cpp.RdmaBackendConfig(
            poll_cq_mode=cpp.PollCqMode.EVENT, enable_notification=notify
        )
        backend.max_send_wr = SEND_REQUESTS
        backend.max_cqe_num = SEND_REQUESTS
        try:
            self._engine.CreateBackend(cpp.BackendType.RDMA, backend)
        except RuntimeError as error:
            # Behind the reason the package may advise a variable that is overruled above.
            reason = str(error).partition(";")[0]
            raise MoriError(
                f"MoRI-IO's RDMA backend does not start: {reason}: bring a port of an RDMA device "
                "up (`rdma link` lists them; MORI_RDMA_DEVICES, where it is set, has to name it), "
                "or set another transport"
            ) from None
        self._locked_bytes = 0
        self._memories: list[Any] = []
        self._statuses: list[Any] = []
        self._failures: dict[str, str] = {}

    def address(self) -> tuple[bytes, str, int, str]:
        """Packed descriptor, host, port, version of the package."""
        described = self._engine.GetEngineDesc()
        return bytes(described.pack()), described.host, described.port, self._version

    def register(self, base: int, size: int) -> tuple[int, bytes]:
        """Registers host memory; its number and packed descriptor."""
        self._locked_bytes += size
        check_locked_memory(self._locked_bytes)
        # On no device.
        described = self._engine.RegisterMemory(
            _capsule(base), size, -1, self._cpp.MemoryLocationType.CPU
        )
        self._memories.append(described)
        return len(self._memories) - 1, bytes(described.pack())

    def deregister_all(self) -> None:
        """Takes back every registration."""
        for memory in self._memories:
            self._engine.DeregisterMemory(memory)

    def learn(self, descriptor: bytes, memories: Sequence[bytes]) -> Peer:
        """Another engine and its memories, from their packed descriptors."""
        try:
            engine = self._cpp.EngineDesc.unpack(descriptor)
            unpacked = [self._cpp.MemoryDesc.unpack(memory) for memory in memories]
        except Exception as error:
            raise MoriError(
                f"a descriptor of the peer cannot be read by {PACKAGE} {self._version}: {error}"
            ) from None
        self._engine.RegisterRemoteEngine(engine)
        return Peer(self, engine, unpacked)

    def begin(self, write: bool, columns: tuple[Any, ...], remotes: list[Any]) -> list[Any]:
        """Begins to read or to write; one status for each part."""
        uids, locals_, local_offsets, remote_offsets, sizes = columns
        statuses = [self._cpp.TransferStatus() for _ in sizes]
        # The engine writes to a status until its transfer has ended, whoever still asks for it.
        # One that failed may be written to again by what is left of its transfer.
        if len(self._statuses) >= STATUSES_KEPT:
            self._statuses = [s for s in self._statuses if not s.Succeeded()]
        self._statuses += statuses
        batch = self._engine.BatchWrite if write else self._engine.BatchRead
        batch(
            [self._memories[local] for local in locals_],
            local_offsets,
            remotes,
            remote_offsets,
            sizes,
            statuses,
            uids,
        )
        return statuses

    def arrived(self, key: str, uid: int) -> bool:
        """Whether the write of this number by the engine of this key has arrived. The engine
        keeps the answer: it is the same each time."""
        return bool(self._engine.PopInboundTransferStatus(key, uid, self._cpp.TransferStatus()))

    def failure_of(self, key: str) -> str | None:
        """What the engine has seen of a peer's end since the last call."""
        while (event := self._engine.PopPeerFailure()) is not None:
            if len(self._failures) < FAILURES_MAX or event.remote_engine_key in self._failures:
                reason = getattr(event.reason, "name", event.reason)
                self._failures[event.remote_engine_key] = f"{reason}: {event.detail}"
        return self._failures.pop(key, None)

    def forget(self, engine: Any) -> None:
        """The peer is not read any more."""
        self._failures.pop(engine.key, None)
        self._engine.DeregisterRemoteEngine(engine)

    def close(self) -> None:
        """Ends the backend, its threads and its connections."""
        self._engine.RemoveBackend(self._cpp.BackendType.RDMA)
        self._statuses.clear()


class Peer:
    """Another engine, as one of this process knows it."""

    def __init__(self, owner: Engine, engine: Any, memories: list[Any]) -> None:
        self._owner = owner
        self._engine = engine
        self._memories = memories

    def read(self, *columns: Any) -> Transfer:
        """Begins to read, part by part: entries of the same index belong together. Columns are the
        parts' numbers, own memories, offsets in them, the peer's memories, offsets in those,
        sizes."""
        return self._begin(False, *columns)

    def write(self, *columns: Any) -> Transfer:
        """Begins to write; columns as of :meth:`read`."""
        return self._begin(True, *columns)

    def _begin(
        self,
        write: bool,
        uids: list[int],
        locals_: list[int],
        local_offsets: list[list[int]],
        remotes: list[int],
        remote_offsets: list[list[int]],
        sizes: list[list[int]],
    ) -> Transfer:
        columns = (uids, locals_, local_offsets, remote_offsets, sizes)
        remote_memories = [self._memories[remote] for remote in remotes]
        return Transfer(self._owner.begin(write, columns, remote_memories))

    def arrived(self, uid: int) -> bool:
        """Whether the peer's write of this number has arrived."""
        return self._owner.arrived(self._engine.key, uid)

    def failure(self) -> str | None:
        """What the engine has seen of this peer's end, once."""
        return self._owner.failure_of(self._engine.key)

    def close(self) -> None:
        """Forgets the peer."""
        self._owner.forget(self._engine)


class Transfer:
    """A transfer under way: one status for each part."""

    def __init__(self, statuses: list[Any]) -> None:
        self._waiting = statuses

    def wait(self, timeout_ms: int) -> tuple[bool, str | None]:
        """Waits for all parts; whether they have arrived, and what failed."""
        until = time.monotonic() + timeout_ms / 1e3
        while self._waiting:
            status = self._waiting[-1]
            status.WaitFor(max(0, round((until - time.monotonic()) * 1e3)))
            if status.Failed():
                return False, f"{status.Code().name}: {status.Message()}"
            if not status.Succeeded():
                return False, None
            self._waiting.pop()
        return True, None


def _capsule(address: int) -> Any:
    """An address as the compiled module takes it."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, None, None)
