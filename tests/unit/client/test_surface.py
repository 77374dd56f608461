"""What `import penstock` gives: both clients with the same methods, nothing of the server, and soon."""

import inspect
import subprocess
import sys
from typing import Any

import pytest

import penstock
from penstock.client.aio import AsyncClient
from penstock.client.client import Client
from penstock.client.job import AsyncJob, Job


def methods(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}


@pytest.mark.parametrize(("sync", "twin"), [(Client, AsyncClient), (Job, AsyncJob)], ids=["client", "job"])
def test_both_kinds_have_the_same_methods_and_arguments(sync: type, twin: type) -> None:
    ours, theirs = methods(sync), methods(twin)
    theirs.pop("state", None)  # a property of the sync handle; asking takes time, so the async one has a method
    assert ours.keys() == theirs.keys()
    for name, method in ours.items():
        assert list(inspect.signature(method).parameters.values()) == list(
            inspect.signature(theirs[name]).parameters.values()
        ), name


@pytest.mark.parametrize("kind", [Client, AsyncClient, Job, AsyncJob])
def test_what_is_not_plain_from_its_name_is_documented(kind: type) -> None:
    plain = {"cancel", "edit", "artifact", "pools", "pool", "delete_pool", "queues", "queue", "put_queue", "slices",
             "set_secret", "delete_secret", "put_blob", "get_blob", "put_snapshot"}  # fmt: skip
    assert [name for name, method in methods(kind).items() if not method.__doc__ and name not in plain] == []


def test_names_are_there_and_others_are_not() -> None:
    assert penstock.Client is Client
    assert penstock.AsyncClient is AsyncClient
    assert penstock.payload.stage() == 0
    assert {"Client", "AsyncClient", "ApiError", "JobFailed", "payload"} <= set(dir(penstock))
    with pytest.raises(AttributeError, match="Clint"):
        penstock.Clint  # type: ignore[attr-defined]  # noqa: B018


def loaded(code: str) -> set[str]:
    """Modules a fresh interpreter holds after `code`."""
    show = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_each_import_loads_only_its_part() -> None:
    assert not {"msgspec", "http.client"} & loaded("import penstock")
    client = loaded("import penstock; penstock.Client")
    heavy = {"httpx2", "asyncio", "numpy", "click", "json", "penstock.server", "penstock.controller"}
    assert not heavy & client
    assert "penstock.client.upload" not in client
    payload = loaded("from penstock import payload")
    assert not {"msgspec", "http.client", "jax", "numpy"} & payload
    assert {name for name in payload if name.startswith("penstock.")} <= {
        "penstock.payload",
        *(f"penstock.payload.{part}" for part in ("gang", "places", "reporting", "stopping")),
    }
