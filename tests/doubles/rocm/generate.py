#!/usr/bin/env python3
"""Makes stand-ins for the libraries that the ``amd-mori`` wheel links and a machine without a GPU
lacks, so that the wheel's RDMA backend loads there.

They are generated from the wheel's own undefined symbols: what it asks for is what there is.

- ``libamdhip64``, ``libhsa-runtime64``: every call fails with "no device", which is what the real
  ones answer on such a machine.
- ``libgrpc*``, ``libgpr``, ``libprotobuf``: used by the wheel's key-value store alone. A call ends
  the process and names the function: it would be a mistake of the test that made it.
- ``librocm_smi64``: ``rocm_smi.c`` beside this file, compiled.

Usage: ``generate.py WHEEL_FOLDER OUT_FOLDER``, with gcc and binutils on PATH.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOL_TIMEOUT_S = 120
# Room for a global object of which only the name is known.
OBJECT_BYTES = 4096

# Answers of the two runtimes: hipErrorNoDevice and HSA_STATUS_ERROR.
NO_DEVICE = {"hip": 100, "hsa": 0x1000}
# Calls whose answer is no plain code.
SPECIAL = {
    "hipGetDeviceCount": "int {name}(int *count) {{ *count = 0; return 100; }}",
    "hipGetErrorString": 'const char *{name}(int error) {{ (void)error; return "no device"; }}',
    "hsa_status_string": (
        "int {name}(int status, const char **text)"
        ' {{ (void)status; *text = "no HSA agent"; return 0; }}'
    ),
}
# Called while the wheel is loaded, to no effect that its RDMA backend sees.
AT_LOAD = re.compile(r"AddDescriptors|OnShutdown|GrpcLibrary|InitSCC|VerifyVersion")
GRPC = ("libgrpc++.so.1", "libgrpc.so.10", "libgpr.so.10", "libprotobuf.so.23")


@dataclass
class Library:
    """One stand-in: its soname, its functions and objects, each with its symbol version."""

    soname: str
    functions: dict[str, str] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)


def run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def undefined_symbols(wheel: Path) -> dict[str, tuple[str, bool, bool]]:
    """Name to (symbol version, whether an object, whether it may stay undefined)."""
    found: dict[str, tuple[str, bool, bool]] = {}
    for path in sorted(wheel.rglob("*.so")):
        for line in run("readelf", "--dyn-syms", "--wide", str(path)).splitlines():
            fields = line.split()
            if len(fields) < 8 or fields[6] != "UND":
                continue
            kind, binding, name = fields[3], fields[4], fields[7]
            name, _, version = name.partition("@")
            found[name] = (version.strip("@"), kind == "OBJECT", binding == "WEAK")
    return found


def needed(wheel: Path) -> set[str]:
    names = set()
    for path in sorted(wheel.rglob("*.so")):
        text = run("readelf", "--dynamic", "--wide", str(path))
        names.update(re.findall(r"\(NEEDED\).*\[(.+?)\]", text))
    return names


def libraries(wheel: Path) -> list[Library]:
    sonames = needed(wheel)
    hip = next((n for n in sonames if n.startswith("libamdhip64.so")), "")
    hsa = next((n for n in sonames if n.startswith("libhsa-runtime64.so")), "")
    if not hip or not hsa:
        raise SystemExit("this wheel links neither HIP nor HSA: generate.py does not know it")
    out = {name: Library(name) for name in (hip, hsa, *(sonames & set(GRPC)))}
    store = out.get("libgrpc++.so.1") or out[hip]
    for name, (version, is_object, weak) in undefined_symbols(wheel).items():
        if re.match(r"(__)?hip[A-Z]", name):
            library = out[hip]
        elif name.startswith("hsa_"):
            library = out[hsa]
        elif not weak and re.match(r"grpc_|gpr_|_Z\w*?(4grpc|9grpc_impl|6google8protobuf)", name):
            library = store
        else:
            continue
        if is_object:
            library.objects.add(name)
        else:
            library.functions[name] = version
    return list(out.values())


def source(library: Library) -> str:
    lines = ["#include <stdio.h>", "#include <stdlib.h>"]
    store = library.soname in GRPC
    for index, name in enumerate(sorted(library.functions)):
        if name in SPECIAL:
            lines.append(SPECIAL[name].format(name=name))
        elif store and AT_LOAD.search(name):
            lines.append(f'long f{index}(void) __asm__("{name}");')
            lines.append(f"long f{index}(void) {{ return 0; }}")
        elif store:
            lines.append(f'void f{index}(void) __asm__("{name}");')
            lines.append(
                f'void f{index}(void) {{ fputs("stand-in called: {name}\\n", stderr); abort(); }}'
            )
        else:
            answer = NO_DEVICE["hsa" if name.startswith("hsa_") else "hip"]
            lines.append(f"long {name}(void) {{ return {answer}; }}")
    for index, name in enumerate(sorted(library.objects)):
        lines.append(f'char o{index}[{OBJECT_BYTES}] __asm__("{name}");')
    return "\n".join(lines) + "\n"


def version_script(library: Library) -> str:
    by_version: dict[str, list[str]] = {}
    for name, version in library.functions.items():
        if version:
            by_version.setdefault(version, []).append(name)
    return "".join(
        f"{version} {{ global: {' '.join(f'{n};' for n in sorted(names))} }};\n"
        for version, names in sorted(by_version.items())
    )


def build(library: Library, out: Path) -> None:
    stem = out / library.soname
    code = stem.with_suffix(stem.suffix + ".c")
    code.write_text(source(library), encoding="utf-8")
    options = ["-O1", "-fPIC", "-shared", "-w", f"-Wl,-soname,{library.soname}"]
    script = version_script(library)
    if script:
        script_file = stem.with_suffix(stem.suffix + ".map")
        script_file.write_text(script, encoding="utf-8")
        options.append(f"-Wl,--version-script={script_file}")
    run("gcc", *options, "-o", str(stem), str(code))


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise SystemExit(__doc__)
    wheel, out = Path(arguments[0]), Path(arguments[1])
    out.mkdir(parents=True, exist_ok=True)
    for library in libraries(wheel):
        build(library, out)
        print(
            f"{library.soname}: {len(library.functions)} functions, {len(library.objects)} objects"
        )
    smi = "librocm_smi64.so.1"
    run(
        *("gcc", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"),
        *(f"-Wl,-soname,{smi}", "-o", str(out / smi), str(HERE / "rocm_smi.c")),
    )
    print(f"{smi}: one GPU")


if __name__ == "__main__":
    main(sys.argv[1:])
