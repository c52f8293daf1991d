"""``docs/errors.md``: every error code and text, read from the Rust sources.

Codes, texts and meanings are the enums' own (variants, ``#[error]`` texts, doc comments). What to
do about them stands here, beside the code it is for: a code without advice, or advice without a
code, is an error, so neither can be forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CRATES = ("hetero-kv-core", "hetero-kv-transport", "hetero-kv-proxy")


class PageError(Exception):
    """The sources and this file do not fit."""


@dataclass(frozen=True)
class Variant:
    """One case of an enum."""

    name: str
    meaning: str
    text: str

    @property
    def code(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()


@dataclass(frozen=True)
class Enum:
    """One enum: where it is, what its doc comment says, its cases."""

    name: str
    path: Path
    meaning: str
    variants: tuple[Variant, ...]
    is_error: bool


# Enums whose cases are branched on and counted, with what to do about each case.
CODES: dict[str, tuple[str, dict[str, str]]] = {
    "FailureReason": (
        "Why one request's load failed on decode: label `reason` of the connector's counters, and "
        "the log line of the request.",
        {
            "bad_params": "The log names the key. The router must copy prefill's "
            "`kv_transfer_params` unchanged; both sides of one release.",
            "digest_mismatch": "The router sends decode another prompt than prefill got (template, "
            "LoRA, images, salt). Mend the router, or unset `require_kv` to compute it instead.",
            "unreachable": "`hetero-kv doctor check` from the decode host; set `host`, "
            "`port_range`, the firewall.",
            "pair_refused": "The log names the field and both values: start both engines with the "
            "same model, dtype and block size, and TP sizes of which one divides the other.",
            "lease_gone": "Prefill freed the blocks before decode asked: raise `lease_s` above the "
            "longest wait in the router and in decode's queue, or take load off.",
            "claim_timeout": "Prefill's scheduler or the network is too slow: "
            "`hetero-kv doctor check`; raise `claim_timeout_s`.",
            "lease_expired": "Renewals did not arrive in time: look for a stalled network or "
            "prefill host; raise `lease_s`.",
            "load_timeout": "The transfer is too slow: compare with the throughput that "
            "`hetero-kv doctor check` finds; raise `load_timeout_s`.",
            "peer_lost": "The prefill engine died or its connection was cut: see its log.",
            "fenced": "Prefill released blocks under a reader: nothing wrong was used. Raise "
            "`grace_ms` or `margin_ms` where it is frequent.",
            "plan": "The log names rank, layer or block. Run one release on both sides, or report "
            "it.",
            "transport": "The log names the call: see the table of read failures below.",
            "cancelled": "Nothing: the client left or the request was aborted.",
        },
    ),
    "ReadFailureKind": (
        "What ended one read of one source rank, as the worker's log names it. The request's "
        "reason is the one of the same name, or `transport`.",
        {
            "lease_gone": "As the reason of the same name.",
            "deadline": "As `load_timeout`, or the lease was near its end.",
            "cancelled": "Nothing.",
            "peer_lost": "As the reason of the same name; another holder is tried where there is "
            "one.",
            "unreachable": "`hetero-kv doctor check` from the decode host; for process memory "
            "`hetero-kv doctor --transport process` on the host.",
            "refused": "Another engine is at that address, or it serves as many readers as it may: "
            "restart decode if it holds old addresses, or spread load over more prefill ranks.",
            "out_of_bounds": "The two sides disagree on the cache's layout: report it with both "
            "logs.",
            "incarnation": "Prefill was restarted: requests that name its new start go well.",
            "not_quiesced": "A read hangs in the kernel; its blocks stay held. See the host's "
            "kernel log; the engine needs a restart if it stays.",
            "local": "Descriptors, threads or memory of the decode worker: `hetero-kv doctor`.",
        },
    ),
    "RejectCode": (
        "Why a handshake is refused: the control plane's `Reject`; decode counts `pair_refused`.",
        {
            "version": "Install versions of hetero_kv with a wire version in common on both sides.",
            "wrong_engine": "The params name another engine than lives at the address: stale "
            "params, or two engines behind one address.",
            "wrong_incarnation": "The engine was restarted after the params were made: send the "
            "request again.",
            "incompatible": "The log names each field with both values: make them equal.",
            "not_producer": "Start that engine with `kv_role` `kv_producer` or `kv_both`.",
            "too_many_peers": "More decode engines than the limit are connected to one prefill "
            "engine: spread them.",
            "already_connected": "Nothing to do: an address of decode's setting `connect` leads to "
            "an engine that is connected under another name of its host.",
            "unauthenticated": "Give every engine the same `control_key_file`, or none; the reason "
            "says which side has no key, or that the keys differ (docs/session-protocol.md, Keys).",
            "protocol": "Something else dials the control port, or versions are mixed: see the "
            "reason in the log.",
            "unknown": "The other side is newer and refuses for a reason of its own: see its log.",
        },
    ),
    "GoneReason": (
        "Why a lease is not alive: the control plane's `Gone`; decode counts `lease_gone`.",
        {
            "unknown": "Params of an engine long restarted, or invented ones.",
            "expired": "Raise `lease_s`.",
            "released": "The prompt was read already: a router sent one set of params twice, in "
            "turn.",
            "foreign": "Two prompts or two engines share one `transfer_id`: the router must not "
            "re-use it.",
        },
    ),
}

# Enums of texts, by the type that carries them; what to do about all of its cases.
ADVICE: dict[str, str] = {
    "CacheError": "The engine stops at start: the text names the tensor and the field. Use a "
    "layout that is supported, or report it.",
    "CompatError": "As `pair_refused`.",
    "CpuError": "`hetero-kv-proxy bench` ends: give the `--pid` of a process that runs.",
    "FrameError": "What came was no frame of ours; that connection is closed. Mixed versions, or a "
    "stranger on the port.",
    "GroupError": "The engine stops at start, or the pair is refused: the text names the KV cache "
    "group.",
    "LayoutError": "TP size and KV heads do not divide: choose a TP size that does.",
    "ListenError": "The engine stops at start: set `host`, `bind_host` or `port_range` as the text "
    "says; `hetero-kv doctor` finds it before.",
    "MemoryError": "The engine stops at start: report it with the model's name.",
    "MessageError": "As `FrameError`; the kind and the field are in the text.",
    "MoriHostError": "The engine stops at start: MoRI-IO takes one IPv4 address (docs/mori.md).",
    "OfferError": "The prompt is not held and decode computes it: raise `lease_slots` where slots "
    "are missing; do not re-use a `transfer_id`.",
    "PairError": "As `pair_refused`: of the two TP sizes one must divide the other.",
    "PlanError": "As `plan`.",
    "RegionError": "A region is asked for that the cache does not have: the text names the axis.",
    "RequestError": "The client's 400: the request names the field in `param`.",
    "SendError": "The proxy's 502 or 504: see `docs/proxy.md` and the engine's log.",
    "ServeError": "The engine stops at start: descriptors, threads or ports; `hetero-kv doctor`.",
    "StartError": "The engine stops at start: as `ListenError`, or threads are missing.",
    "StreamBroken": "The client's stream ends with an error event: see the decode engine's log.",
    "SubmitError": "The load fails as `transport`: limits are in the text; take load off.",
    "SyntaxError": "The client's 400: the body is not one JSON object.",
    "TrialError": "`hetero-kv doctor check` says it of the two hosts' RDMA, with the way out.",
    "VerbsError": "At start the other transports serve, or with `transport: verbs` the engine "
    "stops; in a connect the next transport is tried. The text says what is missing and the way "
    "out: `docs/rdma.md`.",
    "WorkerError": "The engine stops at start: the text names the part.",
}


def skip_balanced(text: str, start: int) -> int:
    """Index behind the bracket that closes the one at ``start``; strings are skipped."""
    depth = 0
    at = start
    while at < len(text):
        char = text[at]
        if char == '"':
            at += 1
            while text[at] != '"':
                at += 2 if text[at] == "\\" else 1
        elif text.startswith("//", at):
            at = text.index("\n", at)
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    raise PageError("brackets do not close")


def doc_of(lines: str) -> str:
    """The first paragraph of a doc comment, as Markdown."""
    words: list[str] = []
    for line in re.findall(r"^\s*///(.*)$", lines, re.MULTILINE):
        if not line.strip():
            break
        words.append(line.strip())
    # Links to items say nothing on a page without them.
    return re.sub(r"\[(`[^`]*`)\](?:\([^)]*\))?", r"\1", " ".join(words))


def error_text(attributes: str) -> str:
    """The text of an ``#[error]`` attribute."""
    if "#[error(transparent)]" in attributes:
        return "(that of the error within)"
    found = re.search(r'#\[error\(\s*"((?:[^"\\]|\\.)*)"', attributes, re.DOTALL)
    if found is None:
        return ""
    return re.sub(r"\\\n\s*", "", found[1]).replace('\\"', '"')


def constants_of(source: str) -> dict[str, str]:
    """Texts that a file names and its error texts take up."""
    found = re.findall(r'^(?:pub )?const (\w+): &str =\s*"((?:[^"\\]|\\.)*)"', source, re.M | re.S)
    return {name: re.sub(r"\\\n\s*", "", text).replace('\\"', '"') for name, text in found}


def variants_of(body: str, constants: dict[str, str]) -> Iterator[Variant]:
    """The cases of an enum's body."""
    at = 0
    head = ""
    while at < len(body):
        if body.startswith("///", at):
            end = body.index("\n", at)
            head += body[at : end + 1]
            at = end + 1
        elif body.startswith("//", at):
            at = body.index("\n", at)
        elif body[at] == "#":
            end = skip_balanced(body, at + 1)
            head += body[at:end] + "\n"
            at = end
        elif (name := re.compile(r"[A-Z]\w*").match(body, at)) is not None:
            text = error_text(head)
            for constant, value in constants.items():
                text = text.replace("{" + constant + "}", value)
            yield Variant(name[0], doc_of(head), text)
            head = ""
            at = name.end()
            while at < len(body) and body[at] != ",":
                at = skip_balanced(body, at) if body[at] in "({" else at + 1
        else:
            at += 1


def enums(root: Path) -> Iterator[Enum]:
    """Every public enum of the shipped crates that is an error, or one of :data:`CODES`."""
    opening = re.compile(r"^pub enum (\w+) \{", re.MULTILINE)
    for crate in CRATES:
        for path in sorted((root / "rust" / crate / "src").rglob("*.rs")):
            if path.name == "tests.rs" or "tests" in path.parts:
                continue
            text = path.read_text(encoding="utf-8")
            for found in opening.finditer(text):
                before = text[: found.start(1)].rsplit("\n\n", 1)[-1]
                is_error = "thiserror::Error" in before
                if not is_error and found[1] not in CODES:
                    continue
                brace = found.end() - 1
                body = text[brace + 1 : skip_balanced(text, brace) - 1]
                yield Enum(
                    found[1],
                    path.relative_to(root),
                    doc_of(before),
                    tuple(variants_of(body, constants_of(text))),
                    is_error,
                )


def cell(text: str) -> str:
    """Text that stays within its column."""
    return " ".join(text.replace("|", "\\|").split())


def coded(enum: Enum, root: Path) -> list[str]:
    """The table of an enum whose cases are counted."""
    intro, advice = CODES[enum.name]
    source = (root / enum.path).read_text(encoding="utf-8")
    codes = [variant.code for variant in enum.variants]
    if set(codes) != set(advice):
        missing = sorted(set(codes) ^ set(advice))
        raise PageError(f"tools/errors_page.py and {enum.name} differ in: {', '.join(missing)}")
    for code in codes:
        if f'"{code}"' not in source and 'rename_all = "snake_case"' not in source:
            raise PageError(f"{enum.path} does not spell {code!r}")
    rows = [
        f"| `{variant.code}` | {cell(variant.meaning)} | {cell(advice[variant.code])} |"
        for variant in enum.variants
    ]
    return [
        f"## {enum.name}",
        "",
        intro,
        "",
        "| code | meaning | what to do |",
        "|---|---|---|",
        *rows,
        "",
    ]


def texts(enum: Enum) -> list[str]:
    """The table of an enum of texts."""
    rows = [
        f"| `{variant.name}` | {cell(variant.text)} | {cell(variant.meaning)} |"
        for variant in enum.variants
    ]
    return [
        f"### {enum.name}",
        "",
        f"{enum.meaning} {ADVICE[enum.name]}",
        "",
        "| case | text | meaning |",
        "|---|---|---|",
        *rows,
        "",
    ]


def page(root: Path, made_by: str) -> str:
    """The whole page."""
    found = {enum.name: enum for enum in enums(root)}
    for name in CODES:
        if name not in found:
            raise PageError(f"there is no enum {name}")
    errors = {name for name, enum in found.items() if enum.is_error and name not in CODES}
    if errors != set(ADVICE):
        differ = ", ".join(sorted(errors ^ set(ADVICE)))
        raise PageError(f"tools/errors_page.py and the enums of errors differ in: {differ}")
    lines = [
        made_by,
        "# Errors",
        "",
        "Errors are of two kinds: a code that is branched on and counted, and a text for people "
        "that names the setting or field. What each side does about an event, and what the client "
        "sees, is in [failures.md](failures.md); `hetero-kv doctor` ([doctor.md](doctor.md)) finds "
        "most of what is wrong with a host or a network before an engine starts.",
        "",
    ]
    for name in CODES:
        lines += coded(found[name], root)
    lines += ["## Texts", "", "Words in braces stand for values.", ""]
    for name in sorted(errors):
        lines += texts(found[name])
    return "\n".join(lines)
