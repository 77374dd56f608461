"""`tpu catalog`: what is printed, what is JSON, and how a bad name is refused."""

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from penstock.cli.catalog import catalog
from penstock.domain import catalogue
from penstock.domain.catalogue import Accelerator


def run(*arguments: str) -> Result:
    return CliRunner().invoke(catalog, list(arguments))


def read(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_name_is_one_object_with_the_published_keys() -> None:
    shown = read("v5litepod-16")
    assert tuple(shown) == Accelerator.__struct_fields__
    assert (shown["name"], shown["chips"], shown["hosts"]) == ("v5e-16", 16, 4)
    assert shown["providers"] == ["tpu_vm", "gke"]


def test_missing_facts_are_null() -> None:
    shown = read("tpu7x-8")
    assert shown["usd_per_chip_hour"] is None
    assert shown["runtime_version"] is None


def test_a_family_and_everything_are_lists() -> None:
    assert [row["name"] for row in read("v5e")][:4] == ["v5e-1", "v5e-4", "v5e-8", "v5e-8-4t"]
    assert len(read()) == len(catalogue.all_accelerators())


@pytest.mark.parametrize("pair", [("tpu-v5p-slice", "2x2x4"), ("tpu-v5p-slice 2x2x4",), ("tpu-v5p-slice:2x2x4",)])
def test_a_gke_pair_is_a_name(pair: tuple[str, ...]) -> None:
    assert read(*pair)["name"] == "v5p-32"


def test_the_plain_table_is_aligned_and_tells_its_sources() -> None:
    result = run("v6e")
    assert result.exit_code == 0
    table, sources = result.stdout.split("\n\n")
    lines = table.splitlines()
    assert len(lines) == 1 + len(catalogue.family("v6e"))
    end = lines[0].index("CHIPS") + len("CHIPS")
    assert [line[:end].split()[-1] for line in lines[1:]] == [
        "1",
        "4",
        "8",
        "8",
        "16",
        "32",
        "64",
        "128",
        "256",
    ]
    assert all(line == line.rstrip() for line in lines)
    assert "zones:" in sources
    assert "v6e in us-central1" in sources
    assert "read 2026-11-15" in sources
    assert "copies between regions:" in sources


def test_one_name_shows_its_other_spellings() -> None:
    result = run("v5e-8")
    assert "v5litepod-8" in result.stdout
    assert "us-west4-a" in result.stdout
    assert "price:" in result.stdout


def test_only_the_sources_of_what_is_shown_are_told() -> None:
    assert "v3 in us-central1" in run("v3-8").stdout
    assert "v3 in europe-west4" not in run("v3-8").stdout
    assert "v3 in europe-west4" in run("v3").stdout


def test_gaps_in_words_and_json() -> None:
    assert "usd_per_chip_hour_spot" in run("--gaps").stdout
    gaps = read("--gaps")
    assert {gap["field"] for gap in gaps if gap["generation"] == "7x"} >= {"usd_per_chip_hour"}
    assert read("tpu7x-8", "--gaps")[0]["names"] == ["tpu7x-8"]
    assert read("v5e", "--gaps") == []
    assert run("v5e", "--gaps").stdout.startswith("no gaps")


@pytest.mark.parametrize("bad", [("v5e-100",), ("v6",), ("tpu-v5p-slice", "2x2x3"), ("v5e-8", "v5e-16"), ("a\nb",)])
def test_a_bad_name_exits_2_with_one_line(bad: tuple[str, ...]) -> None:
    result = run(*bad, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "nearest valid names: " in result.stderr
