"""The ``vllm.general_plugins`` entry point: vLLM calls it in every one of its processes."""

from __future__ import annotations

CONNECTOR = "HeteroKVConnector"


def register() -> None:
    """Makes ``"kv_connector": "HeteroKVConnector"`` known to vLLM; any number of calls are one."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, "hetero_kv.connector", CONNECTOR)
    except ValueError:
        # vLLM may load its plugins more than once in a process; the first registration stands.
        return
