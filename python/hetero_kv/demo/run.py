"""The main job on this host: prefill and decode engines of unlike layouts, and the proof.

Real vLLM engines are started: one plain engine as the reference, the prefill and decode engines
of the topology behind the proxy, and a prefill engine that flips its KV before it is read, which
is the control. The same prompts go to each. Progress is on stderr, the table and the verdicts on
stdout; the last line of stdout says what is still held.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetero_kv.demo import models
from hetero_kv.demo.client import Answer, complete, complete_all
from hetero_kv.demo.engines import (
    HOST,
    MODEL_NAME,
    Engine,
    EngineError,
    EngineSpec,
    connector_config,
    free_port,
    http_get,
    running,
    vllm_python,
)
from hetero_kv.demo.needs import Needs, RefusedError, assess
from hetero_kv.demo.processes import GuardedProcess, ProcessError
from hetero_kv.demo.prompts import Prompt, make_prompts
from hetero_kv.demo.report import (
    Check,
    Row,
    check_control,
    check_held,
    check_pass,
    check_spread,
    make_row,
    table,
)
from hetero_kv.demo.topology import Shape, Topology, parse_topology
from hetero_kv.demo.witness import (
    Counters,
    Held,
    HeldBlocks,
    ModelShape,
    Planner,
    block_tokens,
    executable,
    read_trace,
    settle,
)

DEFAULT_TOPOLOGY = "dp=1,tp=2:dp=2,tp=1"
PROMPT_TOKENS_MAX = 300
COMPLETION_TOKENS = 16
REQUEST_TIMEOUT_S = 180.0
PROXY_READY_TIMEOUT_S = 20.0
MODEL_TIMEOUT_S = 180.0
PROMPT_SEED = 7
LOG_FOLDERS_KEPT = 8

# Room for all prompts at once, with their completions. The tiny models need less than the least.
KV_CACHE_BYTES_MIN = 32 << 20
KV_CACHE_TOKENS = 8192

# Read by the connector: where its worker side writes a line for each load, and a fault that its
# producer side commits on purpose.
TRACE_ENV = "HETERO_KV_TRACE"
FAULT_ENV = "HETERO_KV_FAULT"
FAULT_FLIP = "flip-source"

# Connector settings for engines that share a few cores. A rank that spins in lock-step keeps the
# processor from the one that it waits for; and a virtual machine may take it from all of them for
# longer than the ten seconds in which a claim has to be answered, or fifteen of silence.
SHARED_CORES: dict[str, object] = {
    "lock_step_wait_ms": 5,
    "claim_timeout_s": 60,
    "lease_s": 60,
    "peer_silence_s": 60,
}

# A Unix socket's address takes so many bytes of path. vLLM and multiprocessing put sockets with
# names of up to 37 bytes into the temporary folder.
SOCKET_PATH_BYTES_MAX = 107
SOCKET_NAME_BYTES = 40

# The decode engine then tells, with each answer, the tokens that it did not compute and its times.
ANSWER_FLAGS = ("--enable-prompt-tokens-details", "--enable-per-request-metrics")


def say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Says the seconds that a step took."""
    begun = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - begun:.1f} s")


def cache_root() -> Path:
    named = os.environ.get("HETERO_KV_CACHE", "")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "hetero_kv"


def model_folder(model: str) -> Path:
    """Where the model lies, or will: a tiny one has its place in the cache."""
    if model in models.KINDS:
        name = f"{model}-v{models.RECIPE_VERSION}-{models.DEFAULT_SEED}"
        return cache_root() / "models" / name
    return Path(model).expanduser().absolute()


def prepare_model(model: str) -> None:
    """Writes a tiny model that is not there yet.

    Raises `EngineError` when that fails.
    """
    folder = model_folder(model)
    if model not in models.KINDS or models.is_written(folder, model):
        return
    # By path, and in a process of its own: it needs torch, which this one does without.
    command = [vllm_python(), "-I", str(Path(models.__file__)), model, str(folder)]
    with timed(f"writing the model {model}"):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=MODEL_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"writing the model: {error}") from error
    if done.returncode != 0:
        raise EngineError(f"writing the model failed:\n{done.stderr.strip()[-2000:]}")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is launched. `flipping` is the prefill engine of the control."""

    plain: EngineSpec
    prefill: tuple[EngineSpec, ...]
    decode: tuple[EngineSpec, ...]
    flipping: EngineSpec

    @property
    def pair(self) -> list[EngineSpec]:
        return [*self.prefill, *self.decode, self.flipping]


def make_setup(
    topology: Topology,
    model: Path,
    cache_bytes: int,
    trace: Path,
    temporary: Path,
    extra: dict[str, object],
) -> Setup:
    """The engines of a run, with their temporary folder; only the decode side writes the trace."""
    everywhere = {"TMPDIR": str(temporary)}

    def instances(role: str, shape: Shape, env: dict[str, str]) -> tuple[EngineSpec, ...]:
        side = "prefill" if role.startswith("prefill") else "decode"
        return tuple(
            EngineSpec(
                name=role if count == 1 else f"{role}{index}",
                model=model,
                role="prefill" if side == "prefill" else "decode",
                dp=shape.dp,
                tp=shape.tp,
                pp=shape.pp,
                kv_transfer_config=connector_config(
                    "prefill" if side == "prefill" else "decode", {**SHARED_CORES, **extra}
                ),
                kv_cache_bytes=cache_bytes,
                flags=ANSWER_FLAGS,
                env={**everywhere, **env},
            )
            for count in [shape.instances]
            for index in range(count)
        )

    one_prefill = dataclasses.replace(topology.prefill, instances=1)
    return Setup(
        plain=EngineSpec(
            "plain", model, kv_cache_bytes=cache_bytes, flags=ANSWER_FLAGS, env=everywhere
        ),
        prefill=instances("prefill", topology.prefill, {}),
        decode=instances("decode", topology.decode, {TRACE_ENV: str(trace)}),
        flipping=instances("prefill-flipping", one_prefill, {FAULT_ENV: FAULT_FLIP})[0],
    )


@contextlib.contextmanager
def proxy(
    prefill: Sequence[Engine],
    decode: Sequence[Engine],
    name: str,
    logs: Path,
    connector: str = "hetero",
) -> Iterator[int]:
    """A proxy between these engines, ready; yields its port."""
    port = free_port()
    command = [executable("hetero-kv-proxy", "HETERO_KV_PROXY"), "serve"]
    command += ["--listen", f"{HOST}:{port}", "--connector", connector]
    for flag, engines in (("--prefill", prefill), ("--decode", decode)):
        for engine in engines:
            command += [flag, f"{engine.url},dp={engine.spec.dp}"]
    process = GuardedProcess(name, command, logs / f"{name}.log")
    try:
        end = time.monotonic() + PROXY_READY_TIMEOUT_S
        while True:
            if process.poll() is not None:
                raise EngineError(f"{name} ended at once:\n{process.log_tail()}")
            with contextlib.suppress(OSError):
                if http_get(port, "/ready", 2.0)[0] == 200:
                    break
            if time.monotonic() > end:
                raise EngineError(f"{name} is not ready:\n{process.log_tail()}")
            time.sleep(0.1)
        yield port
    finally:
        process.stop(5.0)


class Progress:
    """Says each stage of each engine's start once."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def __call__(self, engine: Engine) -> None:
        stage = engine.stage()
        if self._said.get(engine.name) != stage:
            self._said[engine.name] = stage
            say(f"{engine.process.age_s:4.0f} s  {engine.name}: {stage}")


def warm_up(engines: Sequence[Engine]) -> None:
    """One step on each DP rank, with no transfer, so that every engine exports its metrics."""
    for engine in engines:
        for rank in range(engine.spec.dp):
            answer = complete(
                engine.port,
                Prompt(0, (17,), stream=False),
                1,
                f"warm-up-{rank}",
                "warm-up",
                REQUEST_TIMEOUT_S,
                dp_rank=rank if engine.spec.dp > 1 else None,
            )
            if answer.error:
                raise EngineError(f"{engine.name}, DP rank {rank}: {answer.error}")


def reference(engine: Engine, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """The plain engine's tokens for each prompt."""
    answers = complete_all(engine.port, prompts, COMPLETION_TOKENS, "plain", REQUEST_TIMEOUT_S)
    for answer in answers:
        if answer.error or len(answer.token_ids) != COMPLETION_TOKENS:
            raise EngineError(
                f"the plain engine gave {len(answer.token_ids)} tokens for {answer.request_id}: "
                f"{answer.error or 'no error'}"
            )
    return [answer.token_ids for answer in answers]


@dataclasses.dataclass
class Judge:
    """Sends a pass of prompts and reads both witnesses."""

    decode: Sequence[Engine]
    prompts: Sequence[Prompt]
    expected: Sequence[tuple[int, ...]]
    planner: Planner
    trace: Path

    def send(self, port: int, pass_name: str) -> tuple[list[Row], Counters]:
        before = Counters.read(self.decode)
        answers: list[Answer] = complete_all(
            port, self.prompts, COMPLETION_TOKENS, pass_name, REQUEST_TIMEOUT_S
        )
        computed = len(self.prompts)
        counters = settle(
            lambda: Counters.read(self.decode) - before,
            lambda now: now.computed_tokens >= computed and now.bytes_read > 0,
        )
        trace = read_trace(self.trace)
        spec = self.decode[0].spec
        rows = [
            make_row(prompt, answer, tokens, trace, self.planner, (spec.tp, spec.pp))
            for prompt, answer, tokens in zip(self.prompts, answers, self.expected, strict=True)
        ]
        return rows, counters


@dataclasses.dataclass(frozen=True)
class Options:
    topology: Topology
    model: str
    prompts: int
    prompt_tokens_max: int
    keep: bool
    json_path: Path | None
    extra_config: dict[str, object]


def run(options: Options, logs: Path, temporary: Path) -> bool:
    """The whole job. True when everything holds; raises when it could not be carried out."""
    model = model_folder(options.model)
    trace = logs / "trace.jsonl"
    cache_bytes = KV_CACHE_BYTES_MIN
    if options.model not in models.KINDS:
        cache_bytes = max(cache_bytes, KV_CACHE_TOKENS * ModelShape.read(model).token_bytes)
    setup = make_setup(options.topology, model, cache_bytes, trace, temporary, options.extra_config)
    needs = assess(setup.plain, setup.pair, logs)
    for line in needs.lines():
        say(line)
    prepare_model(options.model)
    shape = ModelShape.read(model)
    # What would fail after minutes is found out before engines are started.
    executable("hetero-kv-proxy", "HETERO_KV_PROXY")
    try:
        Planner(options.topology.prefill, options.topology.decode, shape, 16).rows(0)
    except EngineError as refusal:
        raise RefusedError(str(refusal)) from refusal
    with contextlib.ExitStack() as stack:
        prompts, expected, engines = _start(options, needs, shape, logs, stack)
        count = len(setup.prefill)
        prefill, decode = engines[:count], engines[count:-1]
        flipping = engines[-1]
        warm_up(engines)
        blocks = HeldBlocks([*prefill, flipping])
        planner = Planner(
            options.topology.prefill, options.topology.decode, shape, block_tokens(decode[0])
        )
        judge = Judge(decode, prompts, expected, planner, trace)
        port = stack.enter_context(proxy(prefill, decode, "proxy", logs))
        with timed(f"{len(prompts)} prompts at once"):
            rows, counters = judge.send(port, "pass")
        with (
            timed("the control, with flipped KV"),
            proxy([flipping], decode, "proxy-flipping", logs) as control_port,
        ):
            flipped, _ = judge.send(control_port, "control")
        held = blocks.settle()
        flipping.stop()
        checks = [
            *check_pass(rows, counters),
            *check_spread(rows, planner),
            *check_control(rows, flipped),
            check_held(held),
        ]
        _print(options, rows, flipped, checks)
        if options.json_path is not None:
            _write_json(options, rows, flipped)
        if options.keep:
            _print_curl(port, engines[:-1])
        print(held_line(held), flush=True)
        if options.keep:
            _wait_until_interrupted()
    return all(check.ok for check in checks)


def _start(
    options: Options, needs: Needs, shape: ModelShape, logs: Path, stack: contextlib.ExitStack
) -> tuple[list[Prompt], list[tuple[int, ...]], list[Engine]]:
    """Starts the engines, and has the plain one answer; the others are left running."""
    progress = Progress()

    def ask(plain: Engine) -> tuple[list[Prompt], list[tuple[int, ...]]]:
        prompts = make_prompts(
            options.prompts,
            block_tokens(plain),
            options.prompt_tokens_max,
            shape.vocab_size,
            PROMPT_SEED,
        )
        with timed("the plain engine's answers"):
            return prompts, reference(plain, prompts)

    if len(needs.phases) == 1:
        with timed("engines ready"):
            plain, *engines = stack.enter_context(running(needs.phases[0], logs, progress=progress))
        prompts, expected = ask(plain)
        plain.stop()
        return prompts, expected, engines
    with running(needs.phases[0], logs, progress=progress) as (plain,):
        prompts, expected = ask(plain)
    with timed("engines ready"):
        engines = stack.enter_context(running(needs.phases[1], logs, progress=progress))
    return prompts, expected, engines


def _print(
    options: Options, rows: Sequence[Row], flipped: Sequence[Row], checks: Sequence[Check]
) -> None:
    print(f"prefill {options.topology.prefill} -> decode {options.topology.decode}, ", end="")
    print(f"model {options.model}: {len(rows)} prompts, {COMPLETION_TOKENS} tokens each")
    for line in [*table(rows, flipped), *(check.line() for check in checks)]:
        print(line)


def _write_json(options: Options, rows: Sequence[Row], flipped: Sequence[Row]) -> None:
    """One line for each request of both passes. Raises `OSError` when it cannot be written."""
    assert options.json_path is not None, "invariant: the caller has looked"
    lines = [row.to_json(str(options.topology), options.model, "pass") for row in rows]
    lines += [row.to_json(str(options.topology), options.model, "control") for row in flipped]
    options.json_path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def held_line(held: Held) -> str:
    """The last line of stdout. A lease without a block, or cache in use, counts as one, too."""
    if held.silent:
        return "blocks still held: unknown"
    return f"blocks still held: {max(held.blocks, held.leases, 1 if held.usage else 0)}"


def _print_curl(port: int, engines: Sequence[Engine]) -> None:
    for engine in engines:
        print(f"{engine.name}: {engine.url}")
    print(
        f"curl http://{HOST}:{port}/v1/completions -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{MODEL_NAME}", "prompt": "The quick brown fox", "max_tokens": 16}}\''
    )


def _wait_until_interrupted() -> None:
    say("left running; Ctrl-C ends it")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)


def parse_options(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="hetero-kv demo",
        description="Runs prefill and decode on real vLLM engines of unlike layouts on this host "
        "and proves that KV moved.",
        epilog="Exit status: 0 when every check holds, 1 when one does not or an engine fails, "
        "2 for wrong usage or a host that is too small.",
    )
    parser.add_argument(
        "--topology",
        default=DEFAULT_TOPOLOGY,
        metavar="[Nx]dp=D,tp=T[,pp=P]:[Nx]dp=D,tp=T[,pp=P]",
        help=f"prefill and decode side (default {DEFAULT_TOPOLOGY})",
    )
    parser.add_argument(
        "--model",
        default="gqa",
        help="gqa, mla or mla-dense: a tiny random one; or the folder of your own (default gqa)",
    )
    parser.add_argument("--prompts", type=int, default=16, help="how many at once (default 16)")
    parser.add_argument(
        "--prompt-tokens-max",
        type=int,
        default=PROMPT_TOKENS_MAX,
        help=f"the longest prompt (default {PROMPT_TOKENS_MAX})",
    )
    parser.add_argument("--keep", action="store_true", help="leave it running until Ctrl-C")
    parser.add_argument("--json", type=Path, metavar="FILE", help="one JSON line for each request")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a connector setting (kv_connector_extra_config) for both sides; repeatable",
    )
    arguments = parser.parse_args(argv)
    try:
        topology = parse_topology(arguments.topology)
    except ValueError as error:
        parser.error(str(error))
    if not 1 <= arguments.prompts <= 256:
        parser.error("--prompts must be between 1 and 256")
    if not 1 <= arguments.prompt_tokens_max <= 1000:
        parser.error("--prompt-tokens-max must be between 1 and 1000")
    extra: dict[str, object] = {}
    for pair in arguments.set:
        key, mark, value = pair.partition("=")
        if not mark or not key:
            parser.error(f"--set {pair}: write KEY=VALUE")
        extra[key] = value
    return Options(
        topology,
        arguments.model,
        arguments.prompts,
        arguments.prompt_tokens_max,
        arguments.keep,
        arguments.json,
        extra,
    )


def make_log_folder(parent: Path) -> Path:
    """A new folder for this run's logs; of older runs that failed the newest few are kept."""
    parent.mkdir(parents=True, exist_ok=True)
    older = sorted(parent.glob("demo-*"), key=lambda path: path.stat().st_mtime)
    for path in older[: -LOG_FOLDERS_KEPT or None]:
        shutil.rmtree(path, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix="demo-", dir=parent))


@contextlib.contextmanager
def temporary_folder(logs: Path) -> Iterator[Path]:
    """The engines' `TMPDIR`, gone when the block is left: engines that are killed leave sockets.

    Beside the logs where the path of a socket in it has room, else in the system's own.
    """
    longest = len(os.fsencode(logs)) + len("/tmp-12345678/") + SOCKET_NAME_BYTES
    parent = logs if longest <= SOCKET_PATH_BYTES_MAX else None
    folder = Path(tempfile.mkdtemp(prefix="tmp-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    try:
        logs = make_log_folder(cache_root() / "logs")
    except OSError as error:
        say(f"failed: {error}")
        return 1
    try:
        with timed("all"), temporary_folder(logs) as temporary:
            good = run(options, logs, temporary)
    except RefusedError as error:
        say(str(error))
        shutil.rmtree(logs, ignore_errors=True)
        return 2
    except (EngineError, ProcessError, OSError, ValueError) as error:
        say(f"failed: {error}")
        with contextlib.suppress(OSError):
            # A failure before anything was started leaves no log.
            logs.rmdir()
        if logs.exists():
            say(f"logs: {logs}")
        return 1
    except KeyboardInterrupt:
        say("stopped")
        shutil.rmtree(logs, ignore_errors=True)
        return 130
    if good:
        shutil.rmtree(logs, ignore_errors=True)
        return 0
    say(f"a check failed; logs: {logs}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
