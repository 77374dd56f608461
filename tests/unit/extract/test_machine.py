"""What a worker takes of its machine where nobody has said otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.extract.machine import platform, usual_cache, usual_processes


@pytest.mark.parametrize(
    ("of", "processors", "processes"),
    [("cpu", 64, 0), ("gpu", 16, 8), ("gpu", 4, 2), ("tpu", 224, 8), ("tpu", 1, 0)],
)
def test_an_accelerator_has_half_of_the_processors_tokenise_for_it(of: str, processors: int, processes: int) -> None:
    assert usual_processes(of, processors) == processes


@pytest.mark.parametrize(
    ("of", "environment", "folder"),
    [
        ("gpu", {"HOME": "/home/u"}, "/home/u/.cache/penstock/jax"),
        ("tpu", {"HOME": "/home/u", "XDG_CACHE_HOME": "/fast"}, "/fast/penstock/jax"),
        ("tpu", {"HOME": "/home/u", "JAX_COMPILATION_CACHE_DIR": "/job"}, None),
        ("tpu", {}, None),
        ("cpu", {"HOME": "/home/u"}, None),
    ],
)
def test_programs_are_kept_in_the_users_cache(of: str, environment: dict[str, str], folder: str | None) -> None:
    assert usual_cache(of, environment) == (None if folder is None else Path(folder))


def test_here_is_a_cpu() -> None:
    assert platform() == "cpu"
