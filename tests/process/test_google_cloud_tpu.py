"""Google's own Python client for Cloud TPU, over REST, against the emulator.

It reads typed answers, so a field of the wrong kind fails here where gcloud would pass it on.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.missing import missing
from tests.process.google_cloud import GoogleCloud, google_cloud

PARENT = "projects/p1/locations/us-central1-a"
NODE = {"accelerator_type": "v5litepod-16", "runtime_version": "v2-alpha-tpuv5-lite", "labels": {"job": "j1"}}
WITHIN_S = 30


@pytest.fixture
def tpu_v2() -> Any:
    try:
        return importlib.import_module("google.cloud.tpu_v2")
    except ImportError:
        missing("google-cloud-tpu: the emulator's conformance to it is not checked")


@pytest.fixture
def cloud() -> Iterator[GoogleCloud]:
    with google_cloud() as cloud:
        yield cloud


@pytest.fixture
def client(tpu_v2: Any, cloud: GoogleCloud) -> Any:
    credentials = importlib.import_module("google.auth.credentials").AnonymousCredentials()
    return tpu_v2.TpuClient(transport="rest", credentials=credentials, client_options={"api_endpoint": cloud.url})


def test_a_node_from_create_to_delete(tpu_v2: Any, client: Any) -> None:
    node = client.create_node(parent=PARENT, node_id="n1", node=tpu_v2.Node(NODE)).result(timeout=WITHIN_S)
    assert (node.state, node.health) == (tpu_v2.Node.State.READY, tpu_v2.Node.Health.HEALTHY)
    assert len(node.network_endpoints) == 4
    assert node.accelerator_config.type_ == tpu_v2.AcceleratorConfig.Type.V5LITE_POD
    client.create_node(parent=PARENT, node_id="n2", node=tpu_v2.Node(NODE)).result(timeout=WITHIN_S)
    listed = client.list_nodes(request={"parent": PARENT, "page_size": 1})
    assert [each.name.rpartition("/")[2] for each in listed] == ["n1", "n2"]
    changed = tpu_v2.Node(name=f"{PARENT}/nodes/n1", labels={"x": "y"})
    updated = client.update_node(node=changed, update_mask={"paths": ["labels"]}).result(timeout=WITHIN_S)
    assert dict(updated.labels) == {"x": "y"}
    client.delete_node(name=f"{PARENT}/nodes/n1").result(timeout=WITHIN_S)
    errors = importlib.import_module("google.api_core.exceptions")
    with pytest.raises(errors.NotFound):
        client.get_node(name=f"{PARENT}/nodes/n1")
    with pytest.raises(errors.Conflict):
        client.create_node(parent=PARENT, node_id="n2", node=tpu_v2.Node(NODE))


def test_a_stockout_is_resource_exhausted(tpu_v2: Any, client: Any, cloud: GoogleCloud) -> None:
    cloud.control("POST", "capacity", [{"chips": 0}])
    errors = importlib.import_module("google.api_core.exceptions")
    begun = client.create_node(parent=PARENT, node_id="n1", node=tpu_v2.Node(NODE))
    with pytest.raises(errors.ResourceExhausted, match="There is no more capacity in the zone"):
        begun.result(timeout=WITHIN_S)


def test_a_queued_resource_from_create_to_delete(tpu_v2: Any, client: Any) -> None:
    spec = {"parent": PARENT, "multislice_params": {"node_count": 2, "node_id_prefix": "ms"}, "node": NODE}
    wanted = tpu_v2.QueuedResource({"tpu": {"node_spec": [spec]}, "spot": {}})
    begun = client.create_queued_resource(parent=PARENT, queued_resource_id="q1", queued_resource=wanted)
    begun.result(timeout=WITHIN_S)
    found = client.get_queued_resource(name=f"{PARENT}/queuedResources/q1")
    assert found.state.state == tpu_v2.QueuedResourceState.State.ACTIVE
    assert [each.multislice_node for each in client.list_nodes(parent=PARENT)] == [True, True]
    errors = importlib.import_module("google.api_core.exceptions")
    with pytest.raises(errors.BadRequest):
        client.delete_queued_resource(name=found.name)
    client.delete_queued_resource(request={"name": found.name, "force": True}).result(timeout=WITHIN_S)
    assert list(client.list_queued_resources(parent=PARENT)) == []


def test_what_is_offered(client: Any) -> None:
    types = [each.type_ for each in client.list_accelerator_types(parent=PARENT)]
    assert "v5litepod-16" in types
    assert client.get_runtime_version(name=f"{PARENT}/runtimeVersions/v2-alpha-tpuv5-lite").version
    locations = client.list_locations(request={"name": "projects/p1"}).locations
    assert "us-central1-a" in [each.location_id for each in locations]
