"""``kv_connector_extra_config``: every fault at once, texts as numbers, bounds, cross checks."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_kv.config import SETTINGS, Settings, SettingsError


def faults(**given: Any) -> list[str]:
    """The faults of these settings."""
    with pytest.raises(SettingsError) as error:
        Settings(given)
    return error.value.faults


def test_defaults_are_valid_and_documented() -> None:
    settings = Settings({})
    for setting in SETTINGS:
        assert setting.meaning.endswith("."), setting.name
        assert settings[setting.name] is not None or setting.kind == "ports"
    assert Settings(None)["lease_s"] == 30.0


def test_every_fault_is_listed_with_the_valid_keys() -> None:
    with pytest.raises(SettingsError) as error:
        Settings(
            {
                "leese_s": 30,
                "lease_s": "long",
                "lease_slots": 1.5,
                "transport": "verb",
                "port_range": "80",
                "allow_ptracer": "yes",
                "host": "[::1]",
                "heartbeat_s": 10,
            }
        )
    assert [fault.split(":")[0] for fault in error.value.faults] == [
        "leese_s",
        "host",
        "port_range",
        "transport",
        "allow_ptracer",
        "lease_s",
        "lease_slots",
        "peer_silence_s",
    ]
    text = str(error.value)
    assert "8 fault(s)" in text
    for setting in SETTINGS:
        assert setting.name in text


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.kind in ("int", "seconds", "ms")])
def test_numbers_also_come_as_texts_and_within_bounds(setting: Any) -> None:
    for value in (setting.low, setting.high, setting.default):
        # Values that the cross checks take with any value of the key itself.
        others = {
            "lease_s": {"margin_ms": 0},
            "margin_ms": {"lease_s": 3600},
            "heartbeat_s": {"peer_silence_s": 3600},
            "peer_silence_s": {"heartbeat_s": 0.1},
        }.get(setting.name, {})
        as_number = Settings({**others, setting.name: value})[setting.name]
        text = str(int(value)) if value == int(value) else repr(value)
        as_text = Settings({**others, setting.name: text})
        assert as_number == as_text[setting.name] == value
        assert type(as_number) is (int if setting.kind == "int" else float)
        assert type(as_text[setting.name]) is type(as_number)
    for value in (setting.low - 1, setting.high + 1, "nan", "inf", "", "x", None, [1], True, 1e400):
        assert any(
            f.startswith(f"{setting.name}: must be") for f in faults(**{setting.name: value})
        )
    assert faults(**{setting.name: 10**400})


def test_a_bound_is_written_as_it_would_be_typed() -> None:
    assert faults(stripe_bytes_min=-1) == [
        "stripe_bytes_min: must be a whole number of 0 to 1125899906842624, not -1"
    ]
    assert faults(lease_slots=1.5) == [
        "lease_slots: must be a whole number of 1 to 1048576, not 1.5"
    ]
    assert faults(lease_s=0) == ["lease_s: must be a number of 0.5 to 3600 seconds, not 0"]


@pytest.mark.parametrize("value", [True, "true", "True", False, "false"])
def test_truth_values(value: Any) -> None:
    assert Settings({"require_kv": value})["require_kv"] is (str(value).lower() == "true")


@pytest.mark.parametrize("value", [1, 0, "yes", None, [], "1"])
def test_what_is_no_truth_value(value: Any) -> None:
    assert faults(require_kv=value)[0].startswith("require_kv: must be true or false")


@pytest.mark.parametrize(
    ("text", "ports"),
    [("7000-7010", (7000, 7010)), ("1-65535", (1, 65535)), (" 5 - 5 ", (5, 5)), ("", None)],
)
def test_port_ranges(text: str, ports: Any) -> None:
    assert Settings({"port_range": text})["port_range"] == ports


@pytest.mark.parametrize(
    "text", ["7000", 7000, "0-1", "10-9", "1-65536", "7000-", "-7000", "a-b", "1-2-3", [1, 2], True]
)
def test_what_is_no_port_range(text: Any) -> None:
    assert faults(port_range=text)[0].startswith("port_range: must be FIRST-LAST")


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "fe80::1", "node-7.example", ""])
def test_hosts(host: str) -> None:
    assert Settings({"host": host})["host"] == host


@pytest.mark.parametrize(
    "host",
    ["[::1]", "host:80", "a b", "x/y", "a" * 254, 7, None, "::1::2", "a\x00b", "0.0.0.0", "::"],
)
def test_what_is_no_host(host: Any) -> None:
    assert faults(host=host)[0].startswith("host: must be")


def test_only_bind_host_may_be_a_wildcard() -> None:
    assert Settings({"bind_host": "0.0.0.0"})["bind_host"] == "0.0.0.0"
    assert Settings({"bind_host": "::"})["bind_host"] == "::"


@pytest.mark.parametrize(
    ("value", "addresses"),
    [
        ([], ()),
        ("", ()),
        ("p0:7000", (("p0", 7000),)),
        ("p0:7000, 10.0.0.1:7001,", (("p0", 7000), ("10.0.0.1", 7001))),
        (["[::1]:65535", "p0:1", "p0:1"], (("::1", 65535), ("p0", 1))),
    ],
)
def test_addresses_to_connect_to(value: Any, addresses: Any) -> None:
    assert Settings({"connect": value})["connect"] == addresses
    assert Settings({"connect": value}).for_core("h")["connect"] == addresses


@pytest.mark.parametrize(
    "value",
    [1, None, {"p0": 7000}, "p0", ["p0:0"], ["p0:65536"], ["p0:7000/x"], ["::1:7000"], [7000],
     ["0.0.0.0:7000"], [":7000"], ["p 0:7000"], ["p0:7000"] * 257],
)  # fmt: skip
def test_addresses_that_cannot_be_dialled(value: Any) -> None:
    assert faults(connect=value)[0].startswith("connect: must be")


def test_cross_checks_name_the_key() -> None:
    assert faults(heartbeat_s=6, peer_silence_s=17.9) == [
        "peer_silence_s: must be at least three times heartbeat_s"
    ]
    assert Settings({"heartbeat_s": 6, "peer_silence_s": 18})
    assert faults(lease_s=2, margin_ms=1000) == ["margin_ms: must be below half of lease_s"]
    assert Settings({"lease_s": 2, "margin_ms": 999})


def test_a_long_value_is_shown_cut() -> None:
    (fault,) = faults(transport="x" * 10_000)
    assert len(fault) < 200


def test_for_core_fills_the_host_and_leaves_out_what_python_keeps() -> None:
    values = Settings({"port_range": "7000-7010"}).for_core("10.1.2.3")
    assert values["host"] == "10.1.2.3"
    assert values["bind_host"] is None
    assert values["port_range"] == (7000, 7010)
    assert "empty_step_wait_ms" not in values
    assert "lock_step_wait_ms" not in values
    assert Settings({"host": "::1"}).for_core("10.1.2.3")["host"] == "::1"


def test_a_device_name_is_a_name() -> None:
    for name in ("mlx5_0", "rxe0", "", " irdma-1.p0 "):
        assert Settings({"verbs_device": name})["verbs_device"] == name.strip()
    for bad in ("mlx5 0", "../rxe0", "x" * 64, 3, None, ["rxe0"], "r\u00e9"):
        assert faults(verbs_device=bad)[0].startswith("verbs_device: must be a device name")


@pytest.mark.parametrize(
    ("text", "url"),
    [("http://h:1", "http://h:1"), (" http://[::1]:80/a/ ", "http://[::1]:80/a"), ("", "")],
)
def test_urls(text: str, url: str) -> None:
    given = {"register_url": text, "register_public_url": text}
    assert Settings(given)["register_url"] == url


@pytest.mark.parametrize(
    "text",
    ["h:1", "https://h:1", "http://", "http://u@h", "http://h?x", "http://h#x", "http://h:0",
     "http://h:99999", "http://h:x", "http://a b", "http://a,b", "http://h\nx", "http://[x",
     1, None],
)  # fmt: skip
def test_what_is_no_url(text: Any) -> None:
    fault = faults(register_url=text, register_public_url="http://h:1")[0]
    assert fault.startswith("register_url: must be http://HOST:PORT"), fault


@pytest.mark.parametrize(
    ("public", "wanted"),
    [
        ("http://h:1/v1", "leave /v1 out: the paths of requests begin with it"),
        ("http://h:1/base/v1/", "leave /v1 out: the paths of requests begin with it"),
        ("http://0.0.0.0:8000", "means every interface and nobody can dial it"),
        ("http://[::]:8000/base", "means every interface and nobody can dial it"),
        ("http://[0:0::0]:8000", "means every interface and nobody can dial it"),
    ],
)
def test_a_public_url_that_no_request_reaches(public: str, wanted: str) -> None:
    (fault,) = faults(register_url="http://h:1", register_public_url=public)
    assert fault.startswith(f"register_public_url: {public.rstrip('/')}: {wanted}"), fault


@pytest.mark.parametrize("public", ["http://h:1/v1/base", "http://h:1/basev1", "http://127.0.0.1"])
def test_a_public_url_with_a_base_path(public: str) -> None:
    settings = Settings({"register_url": "http://h:1/v1", "register_public_url": public})
    assert settings["register_public_url"] == public


def test_the_two_urls_come_together() -> None:
    assert faults(register_url="http://h:1") == ["register_public_url: needed with register_url"]
    assert faults(register_public_url="http://h:1") == [
        "register_public_url: has no use without register_url"
    ]


@pytest.mark.parametrize("path", [1, None, "a\0b", "x" * 5000])
def test_what_is_no_path(path: Any) -> None:
    for name in ("register_key_file", "control_key_file"):
        assert faults(**{name: path})[0].startswith(f"{name}: must be the path")
