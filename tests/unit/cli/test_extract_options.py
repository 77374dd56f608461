"""`tpu extract`: which options go together, and what a dry run says of meshes, rows and accelerators; on no device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.terminal import size
from penstock.extract.fit import IN_FLIGHT, STEP_TOKENS
from penstock.extract.unit_writer import HELD_BYTES
from tests.unit.cli.stand_in import StandIn
from tests.unit.cli.test_extract import OWN, OWN_FLAGS, asked


def test_a_directory_is_one_however_it_is_written(
    tiny: list[str], tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.extract.work.OBJECT_BYTES", (1, 50_000))  # so that the size decides in a tiny run
    del tiny[tiny.index("--unit-rows") :]

    def run_of(out: str) -> str:
        found: str = json.loads(asked(capsys, *tiny, "--dry-run", "--json", "--out", out))["run"]
        return found

    folder = tmp_path / "acts"
    assert run_of(folder.as_uri()) == run_of(str(folder))
    assert run_of("gs://b/acts") == run_of("s3://b/acts") != run_of(str(folder))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--mesh", "fsdp=4"], "needs 1 × 4 × 1 = 4 devices, and there are 8"),
        (["--mesh", "data=8", "--rows", "12"], "12 = 1 × 8 + 4"),
        (["--rows", "3"], "3 = 0 × 8 + 3"),
    ],
)
def test_a_job_whose_workers_would_all_refuse_is_not_made(
    tiny: list[str],
    server: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    said: str,
) -> None:
    written: list[str] = []
    monkeypatch.setattr("penstock.wiring.extraction.make_run", lambda _plan, out: written.append(out))
    words = [*tiny, "--out", "gs://b/acts", "--workers", "1-3", "--on", "v5e-8", *more]
    for dry in ([], ["--dry-run"]):
        line = asked(capsys, *words, *dry, code=2)
        assert said in line
        assert line.count("\n") == 1
    assert (written, server.submitted) == ([], [])


#: Each with a value that it takes, and without --workers.
FOR_JOBS = (["--on", "v5e-8"], ["--spot"], ["--setup", "x"], ["--python", "p"], ["--tag", "t"], ["--timeout", "5m"])


@pytest.mark.parametrize("more", FOR_JOBS, ids=lambda words: words[0])
def test_what_is_for_a_job_is_refused_where_none_is_made(
    tiny: list[str],
    tmp_path: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
) -> None:
    for out in (str(tmp_path / "acts"), "gs://b/acts"):
        for where in ([], ["--here", "1"]):
            line = asked(capsys, *tiny, "--out", out, *where, *more, code=2)
            assert f"{more[0]} is for a job, and without --workers there is none" in line
            assert line.count("\n") == 1
    assert not (tmp_path / "acts").exists()


@pytest.mark.parametrize(
    "more", [*(list(pair) for pair in zip(OWN[::2], OWN[1::2], strict=True)), *([f] for f in OWN_FLAGS)]
)
def test_what_is_for_workers_is_refused_where_none_is_started(
    tiny: list[str], tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    line = asked(capsys, *tiny, "--out", str(tmp_path / "acts"), *more, code=2)
    assert f"{more[0]} is for workers, and without --workers or --here none is started" in line
    assert line.count("\n") == 1
    assert not (tmp_path / "acts").exists()
    shown = more[0] in ("--rows", "--mesh")
    assert asked(capsys, *tiny, "--dry-run", *more, code=0 if shown else 2)


def test_the_memory_of_a_dry_run_is_that_of_a_device_of_the_mesh(
    tiny: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def memory(*words: str) -> dict[str, int]:
        (cpu, accelerator) = json.loads(asked(capsys, *tiny, "--dry-run", "--json", *words))["memory"]
        assert (cpu["platform"], accelerator["platform"]) == ("cpu", "gpu")
        assert cpu["in_flight"] == accelerator["in_flight"] == IN_FLIGHT
        # Rows of 256 columns: 4,096 tokens on a CPU, 65,536 on an accelerator, each of them on every part of the mesh.
        parts = accelerator["rows"] // 256
        assert cpu["rows"] == 16 * parts
        assert accelerator["rows"] == parts * STEP_TOKENS["gpu"] // 256
        assert accelerator["host"] == accelerator["devices"] * accelerator["parts"]["results"] + HELD_BYTES
        found: dict[str, int] = accelerator["parts"]
        return found

    one = memory()
    assert memory("--mesh", "data=4") == one
    split, cut = memory("--mesh", "fsdp=2"), memory("--mesh", "tensor=2")
    # Norms and biases stay whole on some axis; the matrices are all there is otherwise.
    assert 0.45 * one["weights"] < split["weights"] < 0.55 * one["weights"]
    assert split["working"] > one["working"], "the layer that is gathered comes on top"
    assert cut["weights"] < 0.85 * one["weights"]
    assert cut["working"] < one["working"]
    assert memory("--mesh", "fsdp=2,tensor=2")["weights"] < min(split["weights"], cut["weights"])
    text = asked(capsys, *tiny, "--dry-run", "--mesh", "data=2,tensor=2")
    assert "a GPU or TPU, 4 devices, data=2,fsdp=1,tensor=2: " in text
    assert "with less memory a worker takes fewer rows, down to one a device" in text
    assert "are page-locked" in text
    assert "4 = 1 × 3 + 1" in asked(capsys, *tiny, "--dry-run", "--mesh", "tensor=3", code=2)


@pytest.fixture
def told(tiny: list[str], home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """What a dry run with these words says of memory."""

    def memory(*words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(asked(capsys, *tiny, "--dry-run", "--json", *words))["memory"]
        return found

    return memory


def test_the_memory_of_a_dry_run_is_that_of_the_rows_that_are_named(
    told: Callable[..., list[dict[str, Any]]],
    tiny: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, usual = told("--mesh", "data=2")
    assert (cpu["rows"], usual["rows"]) == (32, 512)
    for few in told("--mesh", "data=2", "--rows", "6"):
        assert (few["rows"], few["rows_full"]) == (6, 6)
        assert few["parts"]["results"] * 512 == usual["parts"]["results"] * 6
        assert few["total"] == few["total_full"] < usual["total"]
        assert few["total_one"] == usual["total_one"] or few["platform"] == "cpu"
    line = asked(capsys, *tiny, "--dry-run", "--mesh", "data=2", "--rows", "3", code=2)
    assert "3 = 1 × 2 + 1" in line
    assert line.count("\n") == 1
    (many,) = told("--on", "v5e-8", "--rows", "4096")
    assert (many["rows"], many["fits"]) == (4096, True)
    monkeypatch.setattr("penstock.wiring.extract_memory.device_memory", lambda _: many["total"])
    (less,) = told("--on", "v5e-8", "--rows", "4096")
    assert (less["rows"], less["rows_full"], less["fits"]) == (2048, 4096, True)


def test_a_dry_run_is_of_the_accelerators_that_are_named(
    told: Callable[..., list[dict[str, Any]]],
    tiny: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chip, pod, pool = told("--on", "v5litepod-8, v5p-16, pool:mine")
    assert (chip["on"], chip["devices"], chip["device"], chip["fits"]) == ("v5e-8", 8, 16 * 10**9, True)
    assert (chip["rows"], chip["mesh"]) == (8 * 256, "data=8,fsdp=1,tensor=1")
    assert (pod["on"], pod["devices"], pod["device"]) == ("v5p-16", 4, 95 << 30)
    assert (pool["on"], pool["device"], pool["fits"], pool["possible"]) == ("pool:mine", None, None, None)
    wrong = asked(capsys, *tiny, "--dry-run", "--on", "v5e-8", "--mesh", "tensor=2", code=2)
    assert "needs 1 × 1 × 2 = 2 devices, and there are 8" in wrong
    for memory, said, fits, possible in (
        (
            chip["total_full"] // 2,
            f"v5e-8: 2048 rows would take {size(chip['total_full'])}: a worker takes",
            True,
            True,
        ),
        (chip["total_one"], "v5e-8: DOES NOT FIT by this estimate, with one row a device: a worker tries", False, True),
        (chip["parts"]["weights"] // 2, "v5e-8: CANNOT FIT: weights and one row's results alone", False, False),
    ):
        monkeypatch.setattr("penstock.wiring.extract_memory.device_memory", lambda _, memory=memory: memory)
        (found,) = told("--on", "v5e-8")
        assert (found["fits"], found["possible"]) == (fits, possible)
        assert (found["total"] <= found["usable"]) is fits
        assert 8 <= found["rows"] < found["rows_full"] == 2048
        assert found["rows"] % 8 == 0
        assert said in asked(capsys, *tiny, "--dry-run", "--on", "v5e-8")
