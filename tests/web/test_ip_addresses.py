"""Tests that the C library accepts the same addresses as `ipaddress`, with the same bytes."""

import ipaddress

import pytest

from baton.web.ip_addresses import address_bytes

TEXTS = (
    "127.0.0.1",
    "0.0.0.0",
    "255.255.255.255",
    "::",
    "::1",
    "2001:db8::8",
    "2001:DB8:0:0:0:0:0:8",
    "::ffff:10.0.0.7",
    "64:ff9b::192.0.2.33",
    "",
    "localhost",
    "127.1",
    "127.0.0.01",
    "0x7f.0.0.1",
    "1.2.3.4.5",
    "1.2.3.256",
    " 127.0.0.1",
    "127.0.0.1 ",
    "127.0.0.1\n",
    "127.0.0.1\0",
    "2130706433",
    ":::",
    "1::2::3",
    "12345::",
    "::1.2.3",
    "[::1]",
    "١٢٧.0.0.1",
    "\udcff",
)


@pytest.mark.parametrize("text", TEXTS)
def test_an_address_is_what_python_takes_for_one(text: str) -> None:
    try:
        wanted = ipaddress.ip_address(text).packed
    except ValueError:
        wanted = None
    assert address_bytes(text) == wanted
