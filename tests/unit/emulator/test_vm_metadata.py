"""What an emulated host can ask about itself."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.emulator.facts import PROBED_HOST
from penstock.emulator.vm_metadata import ROOT, Metadata, Told, etag, serve_metadata

GOOGLE = {"metadata-flavor": "Google"}
SPEC = msgspec.structs.replace(
    PROBED_HOST,
    node_number="12345",
    incarnation="12345-1-abc",
    metadata={"startup-script": "echo", "own": "value"},
    service_account="a@b",
    slice=1,
    slices=3,
    coordinator="127.16.0.9",
)


def get(path: str, metadata: Metadata | None = None, headers: dict[str, str] | None = None) -> Told:
    metadata = metadata or Metadata(SPEC, "host-1")
    return asyncio.run(metadata.answer("GET", f"{ROOT}/{path}", GOOGLE if headers is None else headers, b""))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("instance/attributes/own", "value"),
        ("instance/attributes/agent-worker-number", "1"),
        ("instance/attributes/worker-network-endpoints", "unknown:8470:127.16.0.1,unknown:8470:127.16.0.2"),
        ("instance/attributes/accelerator-type", "v5litepod-8"),
        ("instance/preempted", "FALSE"),
        ("instance/maintenance-event", "NONE"),
        ("instance/scheduling/preemptible", "TRUE"),
        ("instance/network-interfaces/0/ip", "127.16.0.2"),
        ("instance/service-accounts/default/email", "a@b"),
        ("instance/zone", "projects/0/zones/us-central1-a"),
        ("project/project-id", "p1"),
    ],
)
def test_values_are_plain_text(path: str, text: str) -> None:
    assert get(path) == Told(200, text)


def test_a_slice_of_several_tells_which_one_it_is() -> None:
    lines = get("instance/attributes/tpu-env").text.splitlines()
    assert "MEGASCALE_NUM_SLICES: '3'" in lines
    assert "MEGASCALE_SLICE_ID: '1'" in lines
    assert "MEGASCALE_COORDINATOR_ADDRESS: '127.16.0.9'" in lines
    assert "WORKER_ID: '1'" in lines


def test_tables_list_their_names_or_come_whole() -> None:
    assert get("instance/attributes/").text.splitlines()[-1] == "worker-network-endpoints"
    assert "attributes/\n" in get("instance").text
    whole = get("instance/?recursive=true")
    assert whole.json
    assert msgspec.json.decode(whole.text)["attributes"]["own"] == "value"
    token = msgspec.json.decode(get("instance/service-accounts/default/token").text)
    assert (token["token_type"], token["expires_in"]) == ("Bearer", 3599)


def test_who_does_not_say_the_word_gets_nothing() -> None:
    assert get("instance/preempted", headers={}).status == 403
    assert get("instance/nothing").status == 404
    metadata = Metadata(SPEC, "h")
    assert asyncio.run(metadata.answer("POST", f"{ROOT}/instance/preempted", GOOGLE, b"")).status == 405
    assert asyncio.run(metadata.answer("GET", "/elsewhere", GOOGLE, b"")).status == 404


@pytest.mark.parametrize(
    ("notice", "path", "text"),
    [("preempted", "preempted", "TRUE"), ("maintenance", "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")],
)
def test_who_waits_for_a_notice_is_told_at_once(notice: Any, path: str, text: str) -> None:
    async def story() -> Told:
        metadata = Metadata(SPEC, "h")
        target = f"{ROOT}/instance/{path}?wait_for_change=true"
        waiting = asyncio.create_task(metadata.answer("GET", target, GOOGLE, b""))
        await asyncio.sleep(0)
        metadata.describe({"own": "other"})  # a change, but not of this
        await asyncio.sleep(0)
        assert not waiting.done()
        metadata.notify(notice)
        return await asyncio.wait_for(waiting, 5)

    assert asyncio.run(story()) == Told(200, text)


def test_waiting_ends_when_its_time_is_up_or_the_change_was_before() -> None:
    metadata = Metadata(SPEC, "h")
    before = etag(get("instance/preempted", metadata))
    assert get("instance/preempted?wait_for_change=true&timeout_sec=0", metadata).text == "FALSE"
    metadata.notify("preempted")
    assert get(f"instance/preempted?wait_for_change=true&last_etag={before}", metadata).text == "TRUE"
    metadata.notify("maintenance")
    metadata.restarted()
    assert get("instance/maintenance-event", metadata).text == "NONE"


def test_connections_carry_several_requests_and_survive_nonsense() -> None:
    async def talk(*parts: bytes) -> bytes:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve_metadata(Metadata(SPEC, "h"), reader, writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for part in parts:
                writer.write(part)
                await writer.drain()
            writer.write_eof()
            got = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            return got

    path = b"/computeMetadata/v1/instance/guest-attributes/a/b HTTP/1.1\r\n"
    put = b"PUT " + path + b"Metadata-Flavor: Google\r\nContent-Length: 2\r\n\r\nhi"
    look = b"GET " + path + b"metadata-flavor: Google\r\n\r\n"
    got = asyncio.run(talk(put[:40], put[40:], look))
    assert got.count(b"HTTP/1.1 200 OK") == 2
    assert got.endswith(b"\r\n\r\nhi")
    assert asyncio.run(talk(b"nonsense\r\n\r\n")) == b""
    assert asyncio.run(talk(b"GET / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")) == b""
