"""Prefill in one offline `LLM`, decode in another: no server and no proxy, only our connector.

    python examples/offline_pd.py
    python examples/offline_pd.py --model PATH --prefill-tp 4 --decode-tp 2 --prompt "Once upon"

Runs in an environment that has vLLM and hetero_kv, both engines on this host. Without `--model` a
tiny random model is written and used. What a router does between two servers is the loop in
`main`: the prefill side's answer carries `kv_transfer_params`, which go unchanged into the decode
request. `--check` compares the tokens with a third `LLM` that does the whole job alone.

Exit status 0: KV moved, nothing is held, and with `--check` all tokens are equal. 1: not so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

BYTES_READ = "hetero_kv_bytes_read_total"
LEASES_ALIVE = "hetero_kv_leases_alive"
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
# Longer than a start takes on two loaded cores.
ANSWER_TIMEOUT_S = 900.0
# Decode gives blocks back as soon as no other request of the same prompt is to be expected.
RELEASE_TIMEOUT_S = 15.0
# An engine ends its own processes before it does.
STOP_TIMEOUT_S = 60.0
PROMPTS = (
    "The KV cache of this prompt is computed by one engine and read by another.",
    "A second prompt, a little longer than the first, so that it takes another number of blocks.",
    "x",
)


@dataclasses.dataclass(frozen=True)
class EngineArgs:
    """One offline engine. `role`: "prefill", "decode", or "alone" for one without a connector."""

    role: str
    model: str
    tp: int
    extra: dict[str, Any]

    def for_llm(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": self.model,
            "tensor_parallel_size": self.tp,
            "enforce_eager": True,
            # Prometheus counters, ours among them, are kept only with statistics on.
            "disable_log_stats": False,
            **self.extra,
        }
        if self.role in KV_ROLES:
            arguments["kv_transfer_config"] = {
                "kv_connector": "HeteroKVConnector",
                "kv_role": KV_ROLES[self.role],
            }
        return arguments


def serve(arguments: EngineArgs, pipe: Connection) -> None:
    """An engine's process: answers `(prompts, max_tokens, params)` until None comes."""
    from vllm import LLM

    llm = LLM(**arguments.for_llm())
    try:
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            pipe.send(generate(llm, *asked))
    except EOFError:
        pass  # The parent is gone.
    finally:
        # A child of `multiprocessing` runs no exit handlers, by which vLLM would stop its engine.
        llm.llm_engine.engine_core.shutdown()


def generate(
    llm: LLM, prompts: list[str], max_tokens: int, params: list[dict[str, Any] | None]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The answers in the order of the prompts, and our counters after them."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": handed} if handed else None,
        )
        for handed in params
    ]
    answers = [
        {
            "text": output.outputs[0].text,
            "token_ids": list(output.outputs[0].token_ids),
            "prompt_tokens": len(output.prompt_token_ids or ()),
            "kv_transfer_params": output.kv_transfer_params,
        }
        for output in llm.generate(prompts, sampling, use_tqdm=False)
    ]
    return answers, {name: counted(name) for name in (BYTES_READ, LEASES_ALIVE)}


def counted(name: str) -> float:
    """One of our metrics, summed over its labels."""
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name
    )


class Engine:
    """An engine in a process of its own: vLLM keeps one per process."""

    def __init__(self, arguments: EngineArgs) -> None:
        context = multiprocessing.get_context("spawn")
        self._role = arguments.role
        self._pipe, theirs = context.Pipe()
        # Not a daemon: vLLM starts processes of its own below it.
        self._process = context.Process(target=serve, args=(arguments, theirs))
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        self._receive()

    def generate(
        self, prompts: list[str], max_tokens: int, params: list[dict[str, Any] | None] | None = None
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """The answers in the order of the prompts, and the engine's counters after them."""
        self._pipe.send((prompts, max_tokens, params or [None] * len(prompts)))
        answers, counters = self._receive()
        return answers, counters

    def _receive(self) -> Any:
        try:
            if self._pipe.poll(ANSWER_TIMEOUT_S):
                return self._pipe.recv()
        except EOFError:
            pass
        raise SystemExit(f"the {self._role} engine has ended or does not answer; see its log above")

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()


@contextlib.contextmanager
def running(*several: EngineArgs) -> Iterator[list[Engine]]:
    """Engines that start side by side."""
    engines = [Engine(arguments) for arguments in several]
    try:
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or name; without it a tiny random one")
    parser.add_argument("--prefill-tp", type=int, default=2, metavar="N")
    parser.add_argument("--decode-tp", type=int, default=1, metavar="N")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--check", action="store_true", help="compare with one engine alone")
    parser.add_argument(
        "--engine-args",
        type=json.loads,
        default={},
        metavar="JSON",
        help='more arguments of LLM() for every engine, e.g. {"max_model_len": 4096}',
    )
    options = parser.parse_args()
    prompts = options.prompt or list(PROMPTS)
    model, extra = options.model, options.engine_args
    # Both sides are on this host.
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    if model is None:
        model, tiny = tiny_model()
        extra = {**tiny, **extra}

    expected: list[dict[str, Any]] = []
    if options.check:
        with running(EngineArgs("alone", model, 1, extra)) as (alone,):
            expected, _ = alone.generate(prompts, options.max_tokens)

    with running(
        EngineArgs("prefill", model, options.prefill_tp, extra),
        EngineArgs("decode", model, options.decode_tp, extra),
    ) as (prefill, decode):
        # The prefill leg: one token, and the answer says where the KV lies.
        legs, _ = prefill.generate(prompts, 1, [{"do_remote_decode": True}] * len(prompts))
        handed = [leg["kv_transfer_params"] for leg in legs]
        # The decode leg: the same prompts with what prefill handed over.
        answers, counters = decode.generate(prompts, options.max_tokens, handed)
        bytes_read = int(counters[BYTES_READ])
        leases = leases_left(prefill)

    good = bytes_read > 0 and leases == 0
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        verdict = ""
        if expected:
            equal = answer["token_ids"] == expected[index]["token_ids"]
            good &= equal
            verdict = "equal  " if equal else "UNEQUAL  "
        print(f"{verdict}{prompt!r} ({answer['prompt_tokens']} tokens) -> {answer['text']!r}")
    print(f"bytes of KV read by decode: {bytes_read}; leases alive on prefill: {leases}")
    return 0 if good else 1


def leases_left(prefill: Engine) -> int:
    """Leases that still hold blocks once decode has had time to give them back.

    An offline engine tells its counters with its answers, so each look is a request.
    """
    end = time.monotonic() + RELEASE_TIMEOUT_S
    while True:
        _, counters = prefill.generate(["still there?"], 1)
        leases = int(counters[LEASES_ALIVE])
        if leases == 0 or time.monotonic() > end:
            return leases
        time.sleep(0.1)


def tiny_model() -> tuple[str, dict[str, Any]]:
    """The demo's grouped-query model, for a CPU in fp32: equal input then gives equal tokens."""
    from hetero_kv.demo.engines import BASE_ENV
    from hetero_kv.demo.run import model_folder, prepare_model

    for name, value in BASE_ENV.items():
        os.environ.setdefault(name, value)
    prepare_model("gqa")
    arguments = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 32 << 20}
    return str(model_folder("gqa")), arguments


if __name__ == "__main__":
    sys.exit(main())
