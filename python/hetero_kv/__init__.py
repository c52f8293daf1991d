"""KV transfer for vLLM between prefill and decode engines of unlike parallel layouts.

Importing this package needs neither torch nor vLLM and starts nothing. vLLM finds the connector
through the ``vllm.general_plugins`` entry point (:mod:`hetero_kv.plugin`), or through
``"kv_connector_module_path": "hetero_kv.connector"``.
"""

from __future__ import annotations

from typing import Any

from hetero_kv import _core

__version__: str = _core.VERSION
__all__ = ["HeteroKVConnector", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "HeteroKVConnector":
        from hetero_kv.connector import HeteroKVConnector

        return HeteroKVConnector
    raise AttributeError(f"module 'hetero_kv' has no attribute {name!r}")
