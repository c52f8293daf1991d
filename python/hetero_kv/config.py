"""The settings of ``kv_connector_extra_config``: one table, checked once, at engine start.

``docs/configuration.md`` is generated from the table, so each entry says what it means, in which
unit, and what happens at its bounds.
"""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "bool", "int", "seconds", "ms", "text", "name", "choice", "ports", "addresses", "url", "path"
]

# As many as the core keeps connected (``STANDING_MAX``).
ADDRESSES_MAX = 256


@dataclass(frozen=True)
class Setting:
    """One key: its kind, its default, its bounds (inclusive, in the key's unit), its meaning."""

    name: str
    kind: Kind
    default: Any
    meaning: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "host",
        "text",
        "",
        "Host name or address that the other engines reach this one by. IPv6 without brackets. "
        "Empty: vLLM's own (`VLLM_HOST_IP`, else the first network address). The listeners bind "
        "it and nothing else, unless `bind_host` is set; no wildcard such as `0.0.0.0`.",
    ),
    Setting(
        "bind_host",
        "text",
        "",
        "Address to bind instead of `host`, for networks where peers dial a translated address. "
        "Only here `0.0.0.0` and `::` are taken.",
    ),
    Setting(
        "port_range",
        "ports",
        "",
        "`FIRST-LAST`: the control listener (one per engine) and the data listeners (one per "
        "rank) take the first free port of it. Empty: the system assigns ports.",
    ),
    Setting(
        "transport",
        "choice",
        "auto",
        "How KV is read. `auto` takes the best that both sides offer and that passes a probe: "
        "`process` (same host, `process_vm_readv`), else `verbs` (RDMA, where both sides have a "
        "device), else `tcp`. `verbs` set by name is an error at start without a device. `mori` "
        "reads by AMD's MoRI-IO over RDMA (docs/mori.md); both sides have to set it, and `auto` "
        "never takes it.",
        choices=("auto", "process", "verbs", "tcp", "mori"),
    ),
    Setting(
        "verbs_device",
        "name",
        "",
        "RDMA device to use, as `rdma link` names it. Empty: the first with an active port and a "
        "usable address. A name that does not exist is an error that lists those that do.",
    ),
    Setting(
        "verbs_port",
        "int",
        0,
        "Port of the RDMA device. 0: the first that is active.",
        0,
        255,
    ),
    Setting(
        "verbs_gid_index",
        "int",
        -1,
        "Which entry of the port's GID table packets are sent from. -1: the one of `host`, else "
        "one of the peer's address family; on Ethernet of RoCE v2.",
        -1,
        255,
    ),
    Setting(
        "verbs_queue_pairs",
        "int",
        2,
        "Decode: queue pairs to each prefill rank; reads take turns on them.",
        1,
        16,
    ),
    Setting(
        "verbs_busy_poll_us",
        "int",
        0,
        "Decode: microseconds that a reading thread looks for completions before it sleeps. "
        "Saves the wake-up on cores that are idle anyway; 0: never.",
        0,
        10_000,
    ),
    Setting(
        "source_policy",
        "choice",
        "hash",
        "Decode: which of several prefill ranks with the same heads is read. `hash` spreads "
        "transfers evenly over them, for any pair of layouts. `round_robin` is RFC #46107's: in "
        "turn where decode has one worker, the model is MLA, prefill has one DP and several TP "
        "ranks; elsewhere always the same one.",
        choices=("hash", "round_robin"),
    ),
    Setting(
        "stripe_bytes_min",
        "int",
        33_554_432,
        "Decode: a rank's read of at least so many bytes is split over the prefill ranks that have "
        "the same heads, so that one request uses all their links. 0: never.",
        0,
        1 << 50,
    ),
    Setting(
        "stripe_sources_max",
        "int",
        8,
        "Decode: most prefill ranks that one read is split over.",
        1,
        64,
    ),
    Setting(
        "allow_ptracer",
        "bool",
        False,
        "Lets processes of the same user read this one's memory where the Yama security module "
        "would forbid it (`prctl(PR_SET_PTRACER)`); the `process` transport needs it there.",
    ),
    Setting(
        "require_kv",
        "bool",
        False,
        "Decode: fail a request whose prompt is not the one that was prefilled, instead of "
        "computing its prompt here.",
    ),
    Setting(
        "lease_s",
        "seconds",
        30.0,
        "Prefill: how long blocks are held for a decode engine that has not claimed them, and "
        "what each claim and renewal grants. Covers the way through the router and decode's "
        "queue.",
        0.5,
        3600,
    ),
    Setting(
        "grace_ms",
        "ms",
        500.0,
        "Prefill: time between the end of a lease and the release of its blocks, for reads that "
        "were under way.",
        0,
        60_000,
    ),
    Setting(
        "margin_ms",
        "ms",
        250.0,
        "Decode: taken off each granted time, so that reads stop before the holder's clock does. "
        "Below half of `lease_s`.",
        0,
        60_000,
    ),
    Setting(
        "connect",
        "addresses",
        (),
        "Decode: prefill engines to pair with at start, before any request names them: a list of "
        "`HOST:PORT` (IPv6 in brackets) or one text of them with commas between, each the control "
        "listener of one DP rank, with `HOST` as that engine's own `host` writes it. An engine "
        "that does not answer is tried again until it does; requests do not wait for it.",
    ),
    Setting(
        "claim_timeout_s",
        "seconds",
        10.0,
        "Decode: from a request's arrival to the holder's answer, dialling and handshake included.",
        0.1,
        600,
    ),
    Setting(
        "load_timeout_s",
        "seconds",
        30.0,
        "Decode: from the first read of a request to its last byte.",
        0.1,
        3600,
    ),
    Setting(
        "sibling_linger_ms",
        "ms",
        100.0,
        "Decode: how long a transfer waits for another request of the same prompt (`n > 1`) "
        "after its last one is done, before the holder is told to free its blocks.",
        0,
        10_000,
    ),
    Setting(
        "heartbeat_s",
        "seconds",
        5.0,
        "Decode: between heartbeats on a quiet control connection.",
        0.1,
        300,
    ),
    Setting(
        "peer_silence_s",
        "seconds",
        15.0,
        "Decode: silence after which a prefill engine counts as lost although its connection "
        "stands; at least three heartbeats.",
        0.3,
        3600,
    ),
    Setting(
        "quiesce_timeout_s",
        "seconds",
        30.0,
        "Decode: how long a stopped read may take until nothing can write its blocks. Beyond it "
        "the blocks stay held and an error says so.",
        0.1,
        3600,
    ),
    Setting(
        "empty_step_wait_ms",
        "ms",
        5.0,
        "How long a step of the engine without any tokens waits for a read or a release, instead "
        "of spinning. 0: never. With lock-step data parallelism see `lock_step_wait_ms`.",
        0,
        100,
    ),
    Setting(
        "lock_step_wait_ms",
        "ms",
        0.0,
        "The same with lock-step data parallelism (MoE), where each step is a collective over the "
        "DP ranks: a rank that waits holds up the others' steps by as much, one that spins takes "
        "a core per worker. 0 is right where every worker has a core of its own.",
        0,
        100,
    ),
    Setting(
        "lease_slots",
        "int",
        16_384,
        "Prefill: most prompts held at once; must be equal on all ranks of an engine.",
        1,
        1_048_576,
    ),
    Setting(
        "readers_max",
        "int",
        256,
        "Prefill: most decode ranks that read one rank over `tcp` at once, a thread and a "
        "connection each; one more is refused by name.",
        1,
        65_536,
    ),
    Setting(
        "sources_max",
        "int",
        256,
        "Decode: most prefill ranks that one rank reads at once, a thread and a connection each. A "
        "load that finds no room is read from fewer sources, or waits.",
        1,
        65_536,
    ),
    Setting(
        "control_key_file",
        "path",
        "",
        "File of keys that engines share: one a line, of 16 to 512 visible characters, lines that "
        "begin with `#` left out. Prefill and decode then prove to each other that they have one "
        "before anything is claimed or read (not by `mori`), and refuse a peer without. The first "
        "key proves, each is taken (docs/session-protocol.md, Keys). It encrypts nothing. "
        "Empty: nobody is asked, and a peer that asks is refused.",
    ),
    Setting(
        "register_url",
        "url",
        "",
        "`http://HOST:PORT` of the admin listener (`--admin-listen`) of `hetero-kv-proxy`: there "
        "the engine registers at start, is heard of every `register_interval_s`, and says goodbye "
        "at its end. A proxy that is away is tried again and costs nothing. Empty: it does not "
        "register.",
    ),
    Setting(
        "register_public_url",
        "url",
        "",
        "`http://HOST:PORT` of this vLLM server's API as the proxy reaches it; needed with "
        "`register_url`.",
    ),
    Setting(
        "register_role",
        "choice",
        "auto",
        "What the engine registers as. `auto`: by `kv_role`; `kv_both` has to say which.",
        choices=("auto", "prefill", "decode"),
    ),
    Setting(
        "register_dp",
        "int",
        0,
        "DP ranks behind `register_public_url`, each of which the proxy then addresses. 0: what "
        "vLLM tells, which is 1 for a dense model whatever its `--data-parallel-size`; vLLM then "
        "chooses the rank.",
        0,
        1024,
    ),
    Setting(
        "register_key_file",
        "path",
        "",
        "File whose first key signs what is sent to `register_url`, for a proxy with "
        "`--admin-key-file` (docs/proxy.md). Empty: nothing is signed.",
    ),
    Setting(
        "register_interval_s",
        "seconds",
        2.0,
        "Between two heartbeats at the proxy, which forgets an engine after three are missing.",
        0.1,
        600,
    ),
)

KEPT_BY_PYTHON = frozenset(
    setting.name
    for setting in SETTINGS
    if setting.name.startswith("register_") or setting.name.endswith("_step_wait_ms")
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


class SettingsError(ValueError):
    """Every fault of ``kv_connector_extra_config`` at once, and the keys that exist."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        lines = "".join(f"\n  - {fault}" for fault in faults)
        keys = ", ".join(setting.name for setting in SETTINGS)
        super().__init__(
            f"hetero_kv: kv_connector_extra_config has {len(faults)} fault(s):{lines}\n"
            f"  valid keys: {keys}"
        )


class Settings:
    """Checked settings; ``settings["lease_s"]`` is always of its kind and within its bounds."""

    def __init__(self, extra_config: Mapping[str, Any] | None) -> None:
        """Checks every key; raises one :class:`SettingsError` that lists all faults."""
        given = dict(extra_config or {})
        faults: list[str] = []
        self._values: dict[str, Any] = {}
        for name in given:
            if name not in _BY_NAME:
                faults.append(f"{name}: no such key")
        for setting in SETTINGS:
            value = given.get(setting.name, setting.default)
            try:
                self._values[setting.name] = _parse(setting, value)
            except ValueError as error:
                faults.append(f"{setting.name}: {error}, not {_shown(value)}")
        faults += self._cross_faults()
        if faults:
            raise SettingsError(faults)

    def _cross_faults(self) -> list[str]:
        faults = []
        known = self._values.keys()
        if (
            known >= {"peer_silence_s", "heartbeat_s"}
            and self["peer_silence_s"] + 1e-9 < 3 * self["heartbeat_s"]
        ):
            faults.append("peer_silence_s: must be at least three times heartbeat_s")
        if known >= {"margin_ms", "lease_s"} and self["margin_ms"] / 1e3 >= self["lease_s"] / 2:
            faults.append("margin_ms: must be below half of lease_s")
        url, public = (self._values.get(f"register_{name}url") for name in ("", "public_"))
        if url and public == "":
            faults.append("register_public_url: needed with register_url")
        if public and url == "":
            faults.append("register_public_url: has no use without register_url")
        if public and (fault := _engine_url_fault(public)):
            faults.append(f"register_public_url: {fault}")
        return faults

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def for_core(self, default_host: str) -> dict[str, Any]:
        """The settings that the Rust side takes, with ``host`` filled in."""
        values = {k: v for k, v in self._values.items() if k not in KEPT_BY_PYTHON}
        values["host"] = values["host"] or default_host
        values["bind_host"] = values["bind_host"] or None
        return values


def _parse(setting: Setting, value: Any) -> Any:
    if setting.kind == "bool":
        return _parse_bool(value)
    if setting.kind == "text":
        return _parse_host(value, wildcard=setting.name == "bind_host")
    if setting.kind == "name":
        return _parse_name(value)
    if setting.kind == "url":
        return _parse_url(value)
    if setting.kind == "path":
        return _parse_path(value)
    if setting.kind == "ports":
        return _parse_ports(value)
    if setting.kind == "addresses":
        return _parse_addresses(value)
    if setting.kind == "choice":
        if value not in setting.choices:
            raise ValueError(f"must be one of {', '.join(setting.choices)}")
        return value
    return _parse_number(setting, value)


def _parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("must be true or false")


def _parse_number(setting: Setting, value: Any) -> float | int:
    unit = {"seconds": " seconds", "ms": " milliseconds"}.get(setting.kind, "")
    number_kind = "whole number" if setting.kind == "int" else "number"
    wanted = f"must be a {number_kind} of {_bound(setting.low)} to {_bound(setting.high)}{unit}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(wanted)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(wanted) from None
    if not setting.low <= number <= setting.high:
        raise ValueError(wanted)
    if setting.kind == "int":
        if number != int(number):
            raise ValueError(wanted)
        return int(number)
    return number


def _bound(value: float) -> str:
    """A bound as people would type it; `:g` alone writes 2**50 as 1.1259e+15."""
    return str(int(value)) if value == int(value) else f"{value:g}"


def _parse_name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{0,63}", value.strip()):
        raise ValueError("must be a device name of at most 63 letters, digits, '_', '.' or '-'")
    return value.strip()


def _parse_url(value: Any) -> str:
    """A base URL without a slash at its end, or an empty text."""
    wanted = "must be http://HOST:PORT, without user, query or fragment"
    if not isinstance(value, str) or len(value) > 1024:
        raise ValueError(wanted)
    text = value.strip()
    if not text:
        return ""
    plain = text.isascii() and text.isprintable() and not any(c in text for c in " ,@?#")
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(wanted) from None
    if not plain or parts.scheme != "http" or not parts.hostname or port == 0:
        raise ValueError(wanted)
    return text.rstrip("/")


def _engine_url_fault(url: str) -> str | None:
    """Why the proxy cannot send requests to an engine at ``url``, which is a base URL."""
    if url.endswith("/v1"):
        return f"{url}: leave /v1 out: the paths of requests begin with it"
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return None
    if wildcard:
        return f"{url}: means every interface and nobody can dial it; name the engine's own address"
    return None


def _parse_path(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 4096 or "\0" in value:
        raise ValueError("must be the path of a file")
    return value


def _parse_host(value: Any, wildcard: bool) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a host name or address")
    text = value.strip()
    wanted = "must be a host name or address without port or brackets"
    if len(text) > 253 or any(not c.isprintable() or c.isspace() or c in "[]/" for c in text):
        raise ValueError(wanted)
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        if ":" in text:
            raise ValueError(wanted) from None
        return text
    if address.is_unspecified and not wildcard:
        raise ValueError("must be an address that peers can dial (bind_host may be a wildcard)")
    return text


def _parse_ports(value: Any) -> tuple[int, int] | None:
    if value in ("", None):
        return None
    wanted = "must be FIRST-LAST with 1 <= FIRST <= LAST <= 65535"
    found = (
        re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", value, re.ASCII)
        if (isinstance(value, str))
        else None
    )
    if found is None:
        raise ValueError(wanted)
    ports = int(found[1]), int(found[2])
    if not 1 <= ports[0] <= ports[1] <= 65_535:
        raise ValueError(wanted)
    return ports


def _parse_addresses(value: Any) -> tuple[tuple[str, int], ...]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of HOST:PORT")
    if len(value) > ADDRESSES_MAX:
        raise ValueError(f"must be at most {ADDRESSES_MAX} addresses")
    found: dict[tuple[str, int], None] = {}
    for text in value:
        wanted = f"must be a list of HOST:PORT, IPv6 in brackets ({_shown(text)} is none)"
        if not isinstance(text, str):
            raise ValueError(wanted)
        match = re.fullmatch(r"\s*(?:\[([^\]]+)\]|([^:\s]+)):(\d{1,5})\s*", text, re.ASCII)
        if match is None or not 1 <= int(match[3]) <= 65_535:
            raise ValueError(wanted)
        try:
            host = _parse_host(match[1] or match[2], wildcard=False)
        except ValueError:
            raise ValueError(wanted) from None
        found[host, int(match[3])] = None
    return tuple(found)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
