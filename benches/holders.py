"""What do several equal holders of the same KV give, beside one?

`hetero-kv lab` with source ranks that hold the same MLA latents, over sockets. Three questions: a
read striped over 2, 4 and 8 holders whose links are limited, beside the rate of those links; the
same without a limit, striped and from one holder; and eight readers whose transfers are spread over
eight limited holders, beside the same readers when every transfer reads the first holder.

The cases of a round follow one another, and so do the rounds. A case's figure is its best round: a
limited link is never quicker than its limit, so whatever else the host does can only take away. The
rates are of the time in which reads were under way; filling and comparing blocks is not in them.

Exit status 0 when the bars hold, 1 when not, 2 when the executable is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from support import kernel

from hetero_kv.demo.engines import EngineError
from hetero_kv.demo.witness import executable

# Of a link: slow enough that eight of them do not fill two shared cores.
STRIPE_MB_PER_S = 40
SPREAD_MB_PER_S = 4
STRIPE_BYTES_MIN = 1_000_000
HOLDERS = (1, 2, 4, 8)
STRIPE_BAR = 0.9
UNLIMITED_BAR = 0.97
SPREAD_BAR = 7.5
# A run that a hang holds up.
TIMEOUT_S = 1200

MLA = "--kv mla:576 --transport tcp"
# One read of 37.7 MB at a time.
LARGE = f"{MLA} --layers 16 --prompt-tokens 2048-2048 --concurrency 1"
# Many of 0.3 MB. Choice by hash leaves holders without work when few requests are under way: 256
# over 8 holders keep each busy for 97 % of the time.
SMALL = f"{MLA} --layers 4 --prompt-tokens 64-64 --concurrency 256"


@dataclass(frozen=True)
class Case:
    name: str
    words: str


def limited(mb_per_s: int) -> str:
    return f"--fault slow-prefill@0={mb_per_s}"


def cases(requests: int) -> list[Case]:
    stripe = f"{LARGE} --decode dp=1,tp=1 --stripe-bytes-min {STRIPE_BYTES_MIN}"
    one = f"{LARGE} --decode dp=1,tp=1 --prefill dp=1,tp=8 --requests 60"
    spread = f"{SMALL} --prefill dp=1,tp=8 --decode dp=8,tp=1 {limited(SPREAD_MB_PER_S)}"
    return [
        *(
            Case(
                f"striped over {k}, limited",
                f"{stripe} --prefill dp=1,tp={k} --requests 20 {limited(STRIPE_MB_PER_S)}",
            )
            for k in HOLDERS
        ),
        Case("striped over 8", f"{one} --stripe-bytes-min {STRIPE_BYTES_MIN}"),
        Case("one holder", one),
        Case("spread over 8, limited", f"{spread} --policy hash --requests {requests}"),
        # An eighth of the rate: as long with an eighth of the requests.
        Case("first holder, limited", f"{spread} --policy fixed --requests {requests // 8}"),
    ]


def run(hetero_kv: str, case: Case) -> dict[str, Any]:
    command = [hetero_kv, "lab", *case.words.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8192, help="of the case spread over 8")
    arguments = parser.parse_args(argv)
    try:
        hetero_kv = executable("hetero-kv", "HETERO_KV_CLI")
    except EngineError as reason:
        print(f"holders: skipped: {reason}")
        return 2
    todo = cases(arguments.requests)
    for case in todo:
        print(f"{case.name}: hetero-kv lab {case.words}")
    rates: dict[str, list[float]] = {case.name: [] for case in todo}
    for index in range(arguments.rounds):
        for case in todo:
            found = run(hetero_kv, case)
            rates[case.name].append(found["read_gb_per_s"] * 1e3)
            print(
                f"round {index}: {case.name:24} {rates[case.name][-1]:8.2f} MB/s, load "
                f"{found['load_ms']['p50']:.1f} ms in the median, processors "
                f"{found['cpu_s']:.1f} s (load {kernel.load_average():.1f})",
                flush=True,
            )
    return judge({name: max(found) for name, found in rates.items()})


def judge(best: dict[str, float]) -> int:
    one, first = best["one holder"], best["first holder, limited"]
    rows: list[tuple[str, str, str, float, float]] = [
        (
            f"one read striped over {k} holders of {STRIPE_MB_PER_S} MB/s",
            f"striped over {k}, limited",
            f"{k} x {STRIPE_MB_PER_S} MB/s",
            k * STRIPE_MB_PER_S,
            STRIPE_BAR,
        )
        for k in HOLDERS
    ]
    rows.append(
        (
            "one read striped over 8 holders, no limit",
            "striped over 8",
            f"one holder, {one:.0f} MB/s",
            one,
            UNLIMITED_BAR,
        )
    )
    rows.append(
        (
            f"8 readers spread over 8 holders of {SPREAD_MB_PER_S} MB/s",
            "spread over 8, limited",
            f"all at the first, {first:.2f} MB/s",
            first,
            SPREAD_BAR,
        )
    )
    print("\n| what | MB/s | beside | ratio | bar | |\n|---|---|---|---|---|---|")
    for what, name, beside, base, bar in rows:
        ratio = best[name] / base
        verdict = "holds" if ratio >= bar else "MISSED"
        print(f"| {what} | {best[name]:.1f} | {beside} | {ratio:.3f} | {bar} | {verdict} |")
    return 0 if all(best[name] / base >= bar for _, name, _, base, bar in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
