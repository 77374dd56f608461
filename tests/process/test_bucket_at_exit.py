"""A process that ends right after a bucket's answer ends with its own code: the library's threads do not abort it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

#: The thread that wakes the loop is slow to come back from it, as on a busy machine; then the command runs.
SLOW = """
import asyncio.selector_events, sys, threading, time
import penstock.objects.bucket as bucket
from penstock.cli.main import main
from penstock.extract.calls import Calls

loops = asyncio.selector_events.BaseSelectorEventLoop
wake = loops._write_to_self

def slow(loop):
    wake(loop)
    if threading.current_thread() is not threading.main_thread():
        print("slow", flush=True)
        for _ in range(400):
            time.sleep(0.001)  # and wants the interpreter after each

loops._write_to_self = slow
bucket._RETRY["max_retries"] = 0
Calls.patiently = lambda self, call: call()
main()
"""


def test_a_command_that_cannot_reach_its_bucket_ends_with_the_code_for_that() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        environment = {**os.environ, "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{nobody.getsockname()[1]}"}
        command = [sys.executable, "-c", SLOW, "extract", "status", "--run", "gs://b/r"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (3, 1), ended.stderr
    assert ended.stdout == "slow\n", "no thread of the library was inside at the end: this test shows nothing"
