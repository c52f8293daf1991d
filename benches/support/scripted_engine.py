"""An engine that only speaks: answers of fixed bytes, so that a proxy in front is what costs.

Run as `python -m support.scripted_engine`: prints its port, serves until its stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import sys

HEAD_BYTES_MAX = 64 << 10
BODY_BYTES_MAX = 1 << 20

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "hetero_version": 1,
    "transfer_id": "0123456789abcdef0123456789abcdef",
    "remote_engine_id": "scripted",
    "remote_incarnation": "0123456789abcdef",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_dp_rank": 0,
    "remote_request_id": "cmpl-scripted-0",
    "tp_size": 1,
    "pp_size": 1,
    "remote_block_ids": [[1, 2, 3]],
    "remote_num_tokens": 300,
    "lease_epoch": 1,
    "prompt_digest": "0" * 64,
}


def answer(params: dict[str, object] | None) -> bytes:
    body = json.dumps(
        {
            "id": "cmpl-scripted",
            "object": "text_completion",
            "created": 1,
            "model": "model",
            "choices": [{"index": 0, "text": " yes", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 300, "completion_tokens": 1, "total_tokens": 301},
            "kv_transfer_params": params,
        }
    ).encode()
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


PREFILLED, DECODED = answer(PARAMS), answer(None)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            _, found, rest = head.partition(b"content-length:")
            size = int(rest.split(b"\r\n", 1)[0]) if found else 0
            if size > BODY_BYTES_MAX:
                return
            body = await reader.readexactly(size)
            asks_prefill = b'"do_remote_decode":true' in body.replace(b" ", b"")
            writer.write(PREFILLED if asks_prefill else DECODED)
            await writer.drain()
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
