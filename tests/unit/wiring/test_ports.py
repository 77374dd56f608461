"""Ports that can be had, and one line about those that cannot."""

from __future__ import annotations

import os
import socket

import pytest

from penstock.wiring import ports
from penstock.wiring.home import Unusable


def test_any_free_port_is_taken_for_nought() -> None:
    with ports.open_port("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0
        assert not listener.get_inheritable()


def test_who_has_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        pid, words = next(ports.holders(port))
        assert pid == os.getpid()
        assert 0 < len(words) <= 61
        with pytest.raises(Unusable, match=rf"^port {port} of 127.0.0.1 is in use by process {pid} \(.*; stop it, or"):
            ports.open_port("127.0.0.1", port)
    assert os.getpid() not in [pid for pid, _ in ports.holders(port)]


def test_who_cannot_be_seen_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "holders", lambda _: iter(()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unusable, match=rf"^port {port} of 127.0.0.1 is in use; stop what uses it, or"):
            ports.open_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused_with_the_reason() -> None:
    with pytest.raises(Unusable, match=r"^cannot listen on 192.0.2.1 port 0: .*; name an address of this machine"):
        ports.open_port("192.0.2.1", 0)
