"""vLLM finds the connector by its entry point, and registering twice is once."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from hetero_kv.plugin import CONNECTOR, register

pytestmark = pytest.mark.vllm


def test_registering_any_number_of_times_is_once() -> None:
    register()
    loader = KVConnectorFactory._registry[CONNECTOR]
    register()
    assert KVConnectorFactory._registry[CONNECTOR] is loader
    from hetero_kv.connector import HeteroKVConnector

    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR) is HeteroKVConnector


def test_the_entry_point_names_it() -> None:
    (point,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == "hetero_kv")
    assert point.load() is register
