"""The check of `tpu solve` about versions: whether jax, jaxlib and libtpu fit each other wherever a job may run.

`solving` has it in its registry. What jax asks for is read from its own metadata, so that no table of versions grows
old here. Nothing is imported: loading jax would take the devices. An environment that does not fit is removed unless
something runs in it; the next job that wants it makes it anew. The Python that came with the agent is unpacked anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.agent.devices import find
from penstock.agent.shelf import discard, in_use
from penstock.agent.surroundings import CannotFix, Surroundings, Trouble

_WANTED: Final = re.compile(r"Requires-Dist: *([A-Za-z0-9._-]+) *\(?([^;)]*)\)?(?:;(.*))?")
_RULE: Final = re.compile(r"(===|==|!=|~=|>=|<=|>|<)\s*([0-9][0-9A-Za-z.*+!-]*)")
_NAMES: Final = ("jax", "jaxlib", "libtpu", "libtpu-nightly")
_METADATA_BYTES_MAX: Final = 1 << 20


def look_at_jax(around: Surroundings) -> Trouble | None:
    wrong: list[tuple[Path, str]] = []
    homes: list[Path] = []
    for place in around.packages:
        wrong += [(place, said) for said in misfits(place, around)]
    environments = around.cache / "environments"
    for place in environments.glob("*/venv/lib/python3*/site-packages"):
        found = [(place, said) for said in misfits(place, around)]
        if found:
            wrong += found
            homes.append(environments / place.relative_to(environments).parts[0])
    if not wrong:
        return None
    evidence = "; ".join(f"{place}: {said}" for place, said in wrong)
    own = any(place in around.packages for place, _ in wrong)
    if own and around.reinstall is None:
        return Trouble(evidence, "the agent's own Python does not fit: mend the server's environment and restart it")
    fixes = [f"remove environment {', '.join(home.name for home in homes)}"] if homes else []
    fixes += ["unpack the agent's own Python anew from its bundle"] if own else []
    return Trouble(evidence, "; ".join(fixes), lambda: _mend(around, environments, homes, own))


def _mend(around: Surroundings, environments: Path, homes: list[Path], own: bool) -> None:
    if own and around.attempts:
        raise CannotFix("the agent's own Python is in use; it is put back when the job has ended")
    if own and around.reinstall is not None:
        around.reinstall()
    _discard(environments, homes)


def _discard(environments: Path, homes: list[Path]) -> None:
    used = in_use(environments)
    kept = [home.name for home in homes if home.name in used or not discard(home)]
    if kept:
        raise CannotFix(f"environment {', '.join(kept)} is in use; it goes when its job has ended")


def misfits(place: Path, around: Surroundings) -> Iterator[str]:
    """What does not fit in one folder of packages."""
    found = {name: version for name in _NAMES if (version := _installed(place, name)) is not None}
    if "jax" not in found:
        return
    if "libtpu" in found and "libtpu-nightly" in found:
        yield f"both libtpu {found['libtpu']} and libtpu-nightly {found['libtpu-nightly']} are installed"
    asked = {**_requirements(place, "jaxlib"), **_requirements(place, "jax")}
    for name in _NAMES[1:]:
        rule, extra = asked.get(name, ("", ""))
        if name in found and rule and not fits(found[name], rule):
            by = f"jax {found['jax']}" + (f" [{extra}]" if extra else "")
            yield f"{by} asks for {name} {rule}, and {found[name]} is installed"
    if "jaxlib" not in found:
        yield f"jax {found['jax']} is installed without jaxlib"
    if find(around.dev).kind == "tpu" and not {"libtpu", "libtpu-nightly"} & found.keys():
        yield f"jax {found['jax']} is installed without libtpu, and this host has TPUs"


def _metadata(place: Path, name: str) -> tuple[str, Path] | None:
    """A package's version and its metadata file."""
    prefix = name.replace("-", "_") + "-"
    for folder in place.glob(f"{prefix}*.dist-info"):
        version = folder.name.removeprefix(prefix).removesuffix(".dist-info")
        if version[:1].isdigit():
            return version, folder / "METADATA"
    return None


def _installed(place: Path, name: str) -> str | None:
    found = _metadata(place, name)
    return None if found is None else found[0]


def _requirements(place: Path, name: str) -> dict[str, tuple[str, str]]:
    """What a package asks of the others, always or for TPUs: name -> rule, and the extra that asks for it."""
    found = _metadata(place, name)
    if found is None:
        return {}
    with found[1].open("rb") as file:
        text = file.read(_METADATA_BYTES_MAX).decode("utf-8", "replace")
    asked: dict[str, tuple[str, str]] = {}
    for line in text.partition("\n\n")[0].splitlines():
        match = _WANTED.fullmatch(line.strip())
        if match is None:
            continue
        other, rule, condition = match[1].lower().replace("_", "-"), match[2].strip(), match[3] or ""
        extra = re.search(r"extra *== *['\"]([^'\"]+)['\"]", condition)
        if other in _NAMES and (extra is None or extra[1] == "tpu"):
            asked[other] = (rule, extra[1] if extra else "")
    return asked


def fits(version: str, rules: str) -> bool:
    """Whether a version obeys rules such as `<=0.8.1,>=0.8.0` or `==0.0.24.*`."""
    return all(_obeys(version, match[1], match[2]) for match in _RULE.finditer(rules))


def _obeys(version: str, sign: str, wanted: str) -> bool:
    have, want = _numbers(version), _numbers(wanted.removesuffix(".*"))
    if wanted.endswith(".*"):
        same = have[: len(want)] == want
        return same if sign != "!=" else not same
    width = max(len(have), len(want))
    left, right = have + (0,) * (width - len(have)), want + (0,) * (width - len(want))
    match sign:
        case "==" | "===":
            return left == right
        case "!=":
            return left != right
        case ">=":
            return left >= right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case "<":
            return left < right
        case _:  # ~=
            return left >= right and have[: len(want) - 1] == want[:-1]


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version; what follows it (dev, rc, +local) says nothing about which package it fits."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()
