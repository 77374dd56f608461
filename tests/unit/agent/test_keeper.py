"""The keeper's loop, with orders and output that arrive at the same moment."""

from __future__ import annotations

import os
import selectors
import socket
from pathlib import Path

import pytest

from penstock.agent import keeper
from penstock.agent.keeper import Keeper


@pytest.mark.parametrize("orders_first", [True, False])
def test_output_that_arrives_with_the_order_to_drain_is_kept(tmp_path: Path, orders_first: bool) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as asking:
        listener.bind(str(tmp_path / "k.sock"))
        listener.listen()
        kept = Keeper(listener)
        order: dict[str, object] = {"hidden": [], "cap": 1 << 20, "spare": 0}
        writer = kept._open("a1", str(tmp_path / "out"), order)
        os.write(writer, b"the last words")
        asking.connect(str(tmp_path / "k.sock"))
        keeper.send(asking, {"op": "drain", "key": "a1"})
        select = kept._selector.select

        def both() -> list[tuple[selectors.SelectorKey, int]]:
            """The kernel gives them in any order; here the worse one, and the end of the loop after them."""
            kept._quit = True
            return sorted(select(), key=lambda event: (event[0].data is not None) is orders_first)

        kept._selector.select = both  # type: ignore[method-assign,assignment]
        kept.run()
        assert keeper.receive(asking)[0] == {"ok": True}
        assert (tmp_path / "out").read_bytes() == b"the last words"
        os.close(writer)
