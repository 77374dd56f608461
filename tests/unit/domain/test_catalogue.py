"""The accelerator catalogue: the table agrees with itself; every spelling finds one shape or is refused."""

from datetime import date
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain import catalogue
from penstock.domain.catalogue import Accelerator, UnknownAccelerator
from penstock.domain.catalogue_table import PRICES, ZONES

JSON_KEYS = (
    "name",
    "generation",
    "topology",
    "chips",
    "cores",
    "jax_devices",
    "hosts",
    "chips_per_host",
    "gke_accelerator",
    "gke_machine_type",
    "runtime_version",
    "providers",
    "zones",
    "usd_per_chip_hour",
    "usd_per_chip_hour_spot",
)
ALL = catalogue.all_accelerators()
rows = pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
any_row = st.sampled_from(ALL)


def edges(row: Accelerator) -> list[int]:
    return [int(edge) for edge in row.topology.split("x")]


def test_the_fields_are_the_published_keys() -> None:
    assert Accelerator.__struct_fields__ == JSON_KEYS


def test_names_and_shapes_are_unique() -> None:
    assert len({row.name for row in ALL}) == len(ALL)
    assert len({(row.generation, row.topology, row.chips_per_host) for row in ALL}) == len(ALL)


@rows
def test_chips_agree_with_topology_and_hosts(row: Accelerator) -> None:
    assert row.chips == prod(edges(row)) == row.hosts * row.chips_per_host
    assert row.chips_per_host in (1, 4, 8)
    assert len(edges(row)) == (3 if row.generation in ("v4", "v5p", "7x") else 2)
    assert row.cores == row.chips * (1 if row.generation in ("v5e", "v6e") else 2)
    assert row.jax_devices == row.chips * (2 if row.generation in ("v2", "v3", "7x") else 1)


@rows
def test_the_number_in_the_name_counts_what_the_generation_counts(row: Accelerator) -> None:
    counted = row.chips if row.generation in ("v5e", "v6e") else row.cores
    assert int(row.name.split("-")[1]) == counted


@rows
def test_name_to_shape_to_name(row: Accelerator) -> None:
    assert catalogue.find(row.name) == row
    if row.gke_accelerator is not None:
        assert catalogue.find_gke(row.gke_accelerator, row.topology, row.chips_per_host) == row


@rows
def test_every_alias_finds_the_same_row(row: Accelerator) -> None:
    spellings = catalogue.aliases(row)
    assert spellings
    assert row.name not in spellings
    for spelling in spellings:
        assert catalogue.find(spelling) == row
        assert catalogue.find(f"  {spelling.upper()} ") == row
        assert catalogue.find(spelling.replace(":", " ")) == row


@rows
def test_machine_types_and_providers_belong_together(row: Accelerator) -> None:
    on_gke = "gke" in row.providers
    assert on_gke == (row.gke_accelerator is not None) == (row.gke_machine_type is not None)
    assert ("tpu_vm" in row.providers) <= (row.runtime_version is not None)
    if row.gke_machine_type is not None:
        assert row.gke_machine_type.endswith(f"-{row.chips_per_host}t")


@given(any_row, any_row)
def test_two_rows_never_share_a_spelling(left: Accelerator, right: Accelerator) -> None:
    if left != right:
        assert {left.name, *catalogue.aliases(left)}.isdisjoint({right.name, *catalogue.aliases(right)})


@given(
    st.sampled_from(("v4", "v5p")),
    st.lists(st.integers(1, 16).map(lambda edge: 4 * edge), min_size=3, max_size=3).map(sorted),
)
def test_any_box_of_whole_cubes_keeps_its_own_shape_through_its_name(generation: str, box: list[int]) -> None:
    topology = "x".join(map(str, box))
    sizes = {row.chips for row in catalogue.family(generation)}
    if prod(box) not in sizes:
        with pytest.raises(UnknownAccelerator):
            catalogue.find(f"{generation}-{topology}")
        return
    row = catalogue.find(f"{generation}-{topology}")
    assert row.topology == topology
    assert row.chips == prod(box) == row.hosts * row.chips_per_host
    assert catalogue.find(row.name) == row
    for spelling in catalogue.aliases(row):
        assert catalogue.find(spelling) == row


@pytest.mark.parametrize(
    ("spelling", "name", "topology", "chips", "cores", "jax_devices", "hosts", "chips_per_host"),
    [
        ("v2-8", "v2-8", "2x2", 4, 8, 8, 1, 4),
        ("v3-8", "v3-8", "2x2", 4, 8, 8, 1, 4),
        ("v3-2048", "v3-2048", "32x32", 1024, 2048, 2048, 256, 4),
        ("v4-8", "v4-8", "2x2x1", 4, 8, 4, 1, 4),
        ("v4-32", "v4-32", "2x2x4", 16, 32, 16, 4, 4),
        ("v4-4096", "v4-4096", "8x16x16", 2048, 4096, 2048, 512, 4),
        ("v5litepod-1", "v5e-1", "1x1", 1, 1, 1, 1, 1),
        ("v5litepod-8", "v5e-8", "2x4", 8, 8, 8, 1, 8),
        ("v5litepod-16", "v5e-16", "4x4", 16, 16, 16, 4, 4),
        ("v5e-16", "v5e-16", "4x4", 16, 16, 16, 4, 4),
        ("tpu-v5-lite-podslice 16x16", "v5e-256", "16x16", 256, 256, 256, 64, 4),
        ("v5p-8", "v5p-8", "2x2x1", 4, 8, 4, 1, 4),
        ("tpu-v5p-slice 2x2x4", "v5p-32", "2x2x4", 16, 32, 16, 4, 4),
        ("tpu-v5p-slice:2x2x4", "v5p-32", "2x2x4", 16, 32, 16, 4, 4),
        ("v5p-3072", "v5p-3072", "8x12x16", 1536, 3072, 1536, 384, 4),
        ("v5p-12288", "v5p-12288", "16x16x24", 6144, 12288, 6144, 1536, 4),
        ("v6e-8", "v6e-8", "2x4", 8, 8, 8, 1, 8),
        ("v6e-256", "v6e-256", "16x16", 256, 256, 256, 64, 4),
        ("tpu7x-8", "tpu7x-8", "2x2x1", 4, 8, 8, 1, 4),
        ("7x-128", "tpu7x-128", "4x4x4", 64, 128, 128, 16, 4),
        ("tpu7x 16x24x24", "tpu7x-18432", "16x24x24", 9216, 18432, 18432, 2304, 4),
    ],
)
def test_known_shapes(
    spelling: str,
    name: str,
    topology: str,
    chips: int,
    cores: int,
    jax_devices: int,
    hosts: int,
    chips_per_host: int,
) -> None:
    row = catalogue.find(spelling)
    found = (row.name, row.topology, row.chips, row.cores, row.jax_devices, row.hosts, row.chips_per_host)
    assert found == (name, topology, chips, cores, jax_devices, hosts, chips_per_host)


def test_the_7x_shapes_are_the_98_that_users_prepare_policies_for() -> None:
    shapes = [row.topology for row in catalogue.family("7x")]
    assert len(shapes) == 98
    assert shapes[0] == "2x2x1"
    assert shapes[-1] == "16x24x24"
    assert {"4x4x244", "12x12x36", "8x20x28", "16x16x32", "16x20x28"} <= set(shapes)
    assert "1x2x2" not in shapes


@pytest.mark.parametrize(
    ("generation", "runtime"),
    [
        ("v4", "tpu-ubuntu2204-base"),
        ("v5e", "v2-alpha-tpuv5-lite"),
        ("v5p", "v2-alpha-tpuv5"),
        ("v6e", "v2-alpha-tpuv6e"),
        ("7x", None),
    ],
)
def test_runtime_versions(generation: str, runtime: str | None) -> None:
    assert {row.runtime_version for row in catalogue.family(generation)} == {runtime}


def test_old_generations_are_not_on_gke_and_7x_is_only_there() -> None:
    assert {row.providers for row in catalogue.family("v2") + catalogue.family("v3")} == {("tpu_vm",)}
    assert {row.providers for row in catalogue.family("7x")} == {("gke",)}


@pytest.mark.parametrize(
    ("accelerator", "stem"), [("tpu-v5-lite-podslice", "ct5lp-hightpu"), ("tpu-v6e-slice", "ct6e-standard")]
)
def test_an_8_chip_slice_is_one_host_or_two_by_what_is_asked(accelerator: str, stem: str) -> None:
    one = catalogue.find_gke(accelerator, "2x4")
    assert (one.hosts, one.chips_per_host, one.gke_machine_type) == (1, 8, f"{stem}-8t")
    assert catalogue.find_gke(accelerator, "2x4", 8) == one == catalogue.find(f"{stem}-8t 2x4")
    two = catalogue.find_gke(accelerator, "2x4", 4)
    assert (two.hosts, two.chips_per_host, two.gke_machine_type) == (2, 4, f"{stem}-4t")
    assert two.providers == ("gke",)
    assert catalogue.find(two.name) == two == catalogue.find(f"{stem}-4t:2x4")


def test_defects_of_the_older_systems_stay_away() -> None:
    assert catalogue.find("v5e-128") == catalogue.find("v5litepod-128")
    assert catalogue.find("v5e-128").chips == 128
    assert catalogue.find_gke("tpu-v6e-slice", "2x4", 8).hosts == 1
    for size, hosts in ((64, 16), (128, 32), (256, 64)):
        row = catalogue.find(f"v5e-{size}")
        assert (row.chips, row.hosts, row.chips_per_host) == (size, hosts, 4)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("v5e-100", ("v5e-64", "v5e-128")),
        ("v5litepod-2", ("v5e-1", "v5e-4")),
        ("v5p-4", ("v5p-8",)),
        ("v5p-12416", ("v5p-12288",)),
        ("v2-64", ("v2-32", "v2-128")),
        ("tpu-v5p-slice 2x2x3", ("v5p-16", "v5p-32")),
        ("v4-2x4x2", ("v4-32",)),
        ("v5p-8x4x4", ("v5p-256",)),
        ("v4-4x4x256", ("v4-8192",)),
        ("v6e-4x2", ("v6e-8",)),
        ("tpu7x-1x2x2", ("tpu7x-8",)),
        ("ct6e-standard-8t:4x4", ("v6e-16",)),
        ("v6e-8-1t", ("v6e-8", "v6e-8-4t")),
        ("v5e", ("v5e-1", "v5e-4", "v5e-8")),
    ],
)
def test_bad_sizes_are_refused_with_the_nearest_names(text: str, nearest: tuple[str, ...]) -> None:
    with pytest.raises(UnknownAccelerator) as refusal:
        catalogue.find(text)
    assert refusal.value.nearest == nearest
    assert repr(text) in str(refusal.value)
    assert all(name in str(refusal.value) for name in nearest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v6-8", "v6e-8"),
        ("v5-8", "v5p-8"),
        ("v5lite-16", "v5e-16"),
        ("v5e128", "v5e-128"),
        ("v5e-128x", "v5e-128"),
        ("v5e-8 spot", "v5e-8"),
        ("v5e-016", "v5e-16"),
        ("tpu-v5-slice 2x2x4", "v5p-32"),
    ],
)
def test_misspelt_names_are_refused_with_one_that_is_alike(text: str, expected: str) -> None:
    with pytest.raises(UnknownAccelerator) as refusal:
        catalogue.find(text)
    assert expected in refusal.value.nearest


@pytest.mark.parametrize("text", ["", "h100-8", "-", "v5e-", "a\nb", "x" * 500, "v5e-9999999"])
def test_nonsense_is_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(UnknownAccelerator) as refusal:
        catalogue.find(text)
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < 400
    for name in refusal.value.nearest:
        assert catalogue.find(name).name == name


@given(st.text(max_size=40))
def test_any_text_is_found_or_refused_with_valid_names(text: str) -> None:
    try:
        names: tuple[str, ...] = (catalogue.find(text).name,)
    except UnknownAccelerator as refusal:
        names = refusal.nearest
    assert names
    assert all(catalogue.find(name).name == name for name in names)


@pytest.mark.parametrize(
    ("accelerator", "topology", "chips_per_host", "said"),
    [
        ("nvidia-l4", "2x2", None, "write GENERATION-SIZE"),
        ("tpu-v5p-slice", "2x2x4", 8, "4 chips per host, not 8"),
        ("tpu-v5p-slice", "2 x 2", None, "write GENERATION-SIZE"),
        ("ct6e-standard-4t", "2x4", 8, "4 chips per host, not 8"),
    ],
)
def test_wrong_gke_pairs_are_refused(accelerator: str, topology: str, chips_per_host: int | None, said: str) -> None:
    with pytest.raises(UnknownAccelerator, match=said):
        catalogue.find_gke(accelerator, topology, chips_per_host)


def test_families_answer_to_every_spelling() -> None:
    assert catalogue.family("v5litepod") == catalogue.family("v5e") == catalogue.family("tpu-v5-lite-podslice")
    assert catalogue.family("tpu7x") == catalogue.family("7x")
    assert tuple(row for name in catalogue.generations() for row in catalogue.family(name)) == ALL
    assert not catalogue.is_family("v5e-8")
    with pytest.raises(UnknownAccelerator) as refusal:
        catalogue.family("v6")
    assert "v6e" in refusal.value.nearest


def test_gaps_are_exactly_the_nulls() -> None:
    listed = {(name, gap.field) for gap in catalogue.gaps() for name in gap.names}
    nulls = {
        (row.name, field)
        for row in ALL
        for field in ("zones", "usd_per_chip_hour", "usd_per_chip_hour_spot")
        if getattr(row, field) is None
    }
    assert listed == nulls
    assert ("tpu7x-8", "usd_per_chip_hour") in nulls
    assert all(gap.reason for gap in catalogue.gaps())


@rows
def test_every_fact_that_is_not_null_has_a_source_and_a_day(row: Accelerator) -> None:
    found = {fact.fact: fact for fact in catalogue.sources(row)}
    assert ("zones" in found) == (row.zones is not None)
    assert ("price" in found) == (row.usd_per_chip_hour is not None)
    for fact in found.values():
        assert fact.source.title
        assert fact.source.address.startswith("https://")
        assert date.fromisoformat(fact.source.read_on) >= date(2026, 11, 15)
        assert (fact.region is not None) == (fact.fact == "price")


def test_rows_of_facts_name_accelerators_that_exist() -> None:
    known = {row.name for row in ALL}
    named = {name for zone in ZONES for name in zone.names} | {name for price in PRICES for name in price.names}
    assert named
    assert named <= known


@rows
def test_spot_is_cheaper_and_zones_are_zones(row: Accelerator) -> None:
    if row.usd_per_chip_hour is not None and row.usd_per_chip_hour_spot is not None:
        assert 0 < row.usd_per_chip_hour_spot < row.usd_per_chip_hour
    for zone in row.zones or ():
        assert zone.count("-") == 2
    assert len(set(row.zones or ())) == len(row.zones or ())
