#!/bin/bash
# Writes rust/hetero-kv-transport/src/verbs/sys.rs from the headers of libibverbs.
#
#   apt-get install libibverbs-dev bindgen libclang1-14 rustfmt
#   tools/gen_verbs_bindings.sh [--check]
#
# The output is committed: neither a build nor a wheel needs the headers or the library. Only types
# and constants are taken; functions are found at run time (see verbs/library.rs). With --check
# nothing is written, and the exit status says whether the committed file is what would be.
set -euo pipefail
cd "$(dirname "$0")/.."
target=rust/hetero-kv-transport/src/verbs/sys.rs

for needed in bindgen rustfmt; do
    command -v "$needed" >/dev/null || { echo "skipped: $needed is missing" >&2; exit 0; }
done
header=/usr/include/infiniband/verbs.h
[ -e "$header" ] || { echo "skipped: $header is missing (libibverbs-dev)" >&2; exit 0; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/head.rs" <<'HEAD'
//! Types and constants of libibverbs, as its headers have them. Written by
//! `tools/gen_verbs_bindings.sh`; do not edit.
#![allow(
    clippy::all,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    unreachable_pub
)]

// Their sizes differ between architectures.
use libc::{pthread_cond_t, pthread_mutex_t};

HEAD

# What this crate calls. Everything that these types name is taken along; what they only point to
# and nobody here looks into stays opaque.
types='(ibv_context|ibv_device|ibv_device_attr|ibv_port_attr|ibv_gid|ibv_gid_entry|ibv_pd|ibv_mr
|ibv_comp_channel|ibv_cq|ibv_wc|ibv_qp|ibv_qp_init_attr|ibv_qp_attr|ibv_send_wr|ibv_recv_wr
|ibv_sge|ibv_async_event|ibv_access_flags|ibv_send_flags|ibv_gid_type|ibv_wc_flags
|ibv_qp_attr_mask)'
values='IBV_LINK_LAYER_.*'
bindgen "$header" \
    --no-layout-tests --no-doc-comments --no-prepend-enum-name \
    --default-enum-style consts \
    --allowlist-type "${types//$'\n'/}" \
    --allowlist-var "$values" \
    --opaque-type '(_ibv_device_ops|ibv_srq|ibv_ah|ibv_mw|ibv_mw_bind|ibv_wq)' \
    --blocklist-type '_*pthread_.*' --blocklist-function '.*' \
    >"$work/body.rs" 2>"$work/log" \
    -- -I"$(gcc -print-file-name=include)" || { cat "$work/log" >&2; exit 1; }

# The edition of this workspace writes `unsafe` before foreign items; bindgen's header line names
# its own version, which differs between machines.
sed -e '1{/automatically generated/d}' -e 's/^extern "C" {/unsafe extern "C" {/' "$work/body.rs" \
    >"$work/clean.rs"
cat "$work/head.rs" "$work/clean.rs" >"$work/sys.rs"
rustfmt --edition 2024 "$work/sys.rs"

if [ "${1:-}" = --check ]; then
    diff -u "$target" "$work/sys.rs" && exit 0
    echo "$target is not what the headers give: run tools/gen_verbs_bindings.sh" >&2
    exit 1
fi
mkdir -p "$(dirname "$target")"
cp "$work/sys.rs" "$target"
