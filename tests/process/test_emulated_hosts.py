"""Emulated hosts for real: processes that run a node's startup script, alone with their metadata server and storage.

What a host finds out about itself it publishes as guest attributes, which the API shows; so nothing here looks inside.
"""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec
import pytest

from tests.missing import need_machines
from tests.process.google_cloud import BUCKET, GoogleCloud, google_cloud
from tests.process.machine import until

ZONE = "/v2/projects/p1/locations/us-central1-a"
SCRIPT = """#!/bin/sh
M=http://metadata.google.internal/computeMetadata/v1/instance
ask() { curl -sS -m 60 -H 'Metadata-Flavor: Google' "$@"; }
publish() { ask -X PUT --data-binary "$2" "$M/guest-attributes/test/$1"; }
reach() { curl -s -m "${2:-50}" -o /dev/null "$1" && echo yes || echo no; }
publish worker "$(ask $M/attributes/agent-worker-number)"
publish name "$(hostname)"
publish python "$(command -v python3 || echo absent)"
publish storage "$(reach http://STORAGE/storage/v1/b/BUCKET)"
publish server "$(reach http://SERVER/)"
publish elsewhere "$(reach http://ELSEWHERE/ 5)"
publish files "$(ls /root /home/ubuntu /work 2>/dev/null | tr '\\n' ' ')"
publish room "$(bwrap --ro-bind / / --dev /dev --proc /proc --unshare-pid echo fits)"
boots=$(cat /var/boots 2>/dev/null | wc -l)
echo >>/var/boots
publish boots "$boots"
setsid nohup sh -c '
    while [ "$seen" != TRUE ]; do
        seen=$(curl -sS -m 60 -H "Metadata-Flavor: Google" \
            "http://metadata.google.internal/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec=30")
    done
    curl -sS -X PUT -H "Metadata-Flavor: Google" --data-binary "$seen" \
        http://metadata.google.internal/computeMetadata/v1/instance/guest-attributes/test/notice
' >/dev/null 2>&1 &
publish done "$(ask $M/id)"
"""


@pytest.fixture
def server() -> Iterator[str]:
    """A server outside that answers anybody who reaches it; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    caller, _ = listener.accept()
                except OSError:
                    return
                with caller:
                    caller.recv(4096)
                    caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def cloud() -> Iterator[GoogleCloud]:
    need_machines()
    with google_cloud(machines=True) as cloud:
        yield cloud


def call(cloud: GoogleCloud, method: str, path: str, content: object = None) -> Any:
    body = None if content is None else msgspec.json.encode(content)
    with urlopen(Request(cloud.url + ZONE + path, body, method=method), timeout=30) as answer:
        return msgspec.json.decode(answer.read())


def create(cloud: GoogleCloud, name: str, kind: str, server: str, elsewhere: str) -> None:
    storage = urlsplit(cloud.url).netloc
    script = SCRIPT.replace("STORAGE", storage).replace("BUCKET", BUCKET)
    script = script.replace("SERVER", server).replace("ELSEWHERE", elsewhere)
    body = {
        "acceleratorType": kind,
        "runtimeVersion": "v2-alpha-tpuv5-lite",
        "schedulingConfig": {"spot": True},
        "metadata": {"startup-script": script},
    }
    call(cloud, "POST", f"/nodes?nodeId={name}", body)


def published(cloud: GoogleCloud, name: str) -> list[dict[str, str]]:
    """What each host has published."""
    found = call(cloud, "POST", f"/nodes/{name}:getGuestAttributes", {"queryPath": "test/"})["guestAttributes"]
    return [{item["key"]: item["value"] for item in each["queryValue"]["items"]} for each in found]


def all_have(cloud: GoogleCloud, name: str, key: str) -> Callable[[], bool]:
    return lambda: all(key in each for each in published(cloud, name))


def processes_on(disk: str) -> list[int]:
    """Processes of this machine that were started for a host's disk."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if disk.encode() in words:
                found.append(int(entry.name))
    return found


def test_hosts_run_their_startup_script_alone_and_are_told_before_they_go(cloud: GoogleCloud, server: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        elsewhere = f"127.0.0.1:{closed.getsockname()[1]}"
        cloud.control("POST", "ways", [server])
        create(cloud, "pod", "v5litepod-16", server, elsewhere)
        until(all_have(cloud, "pod", "done"))
    hosts = published(cloud, "pod")
    assert [each["worker"] for each in hosts] == ["0", "1", "2", "3"]
    assert len({each["name"] for each in hosts}) == len({each["done"] for each in hosts}) == 4
    for each in hosts:
        assert (each["storage"], each["server"], each["elsewhere"]) == ("yes", "yes", "no")
        assert each["python"] in ("absent", "/usr/bin/python3.10")
        assert each["room"] == "fits", "the agent's own walls must stand inside"
        assert "main" not in each["files"], "the machine's own files are not there"
    cloud.control("POST", "happen", [{"what": "preempt", "name": "pod", "notice_s": 15.0}])
    until(all_have(cloud, "pod", "notice"))
    disks = [host["disk"] for host in cloud.control("GET", "nodes")[0]["hosts"]]
    until(lambda: call(cloud, "GET", "/nodes/pod")["state"] == "PREEMPTED")
    assert [processes_on(disk) for disk in disks] == [[], [], [], []]


def test_a_disk_outlives_a_power_cut_but_not_its_machine(cloud: GoogleCloud, server: str) -> None:
    create(cloud, "one", "v5litepod-8", server, server)
    until(all_have(cloud, "one", "done"))
    first = published(cloud, "one")[0]
    assert first["boots"] == "0"
    disk = cloud.control("GET", "nodes")[0]["hosts"][0]["disk"]
    assert processes_on(disk)
    cloud.control("POST", "happen", [{"what": "stop_host"}])
    assert processes_on(disk) == []
    cloud.control("POST", "happen", [{"what": "start_host"}])
    until(lambda: published(cloud, "one")[0]["boots"] == "1")
    cloud.control("POST", "happen", [{"what": "replace_host"}])
    until(lambda: published(cloud, "one")[0].get("boots") == "0" and "done" in published(cloud, "one")[0])
    assert published(cloud, "one")[0]["done"] != first["done"], "another machine has another id"
    until(lambda: not Path(disk).exists())
    call(cloud, "DELETE", "/nodes/one")
    until(lambda: cloud.control("GET", "nodes") == [])


def test_nothing_of_the_hosts_outlives_the_emulator(server: str) -> None:
    need_machines()
    disks = []
    for end in ("terminate", "kill"):
        with google_cloud(machines=True) as cloud:
            create(cloud, "one", "v5litepod-8", server, server)
            until(all_have(cloud, "one", "done"))
            disks.append(cloud.control("GET", "nodes")[0]["hosts"][0]["disk"])
            if end == "kill":
                assert cloud.process is not None
                cloud.process.kill()
    until(lambda: not any(processes_on(disk) for disk in disks))
    assert not Path(disks[0]).parent.exists()
    shutil.rmtree(Path(disks[1]).parent)  # nobody could clean up after that one
