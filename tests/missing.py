"""The one way in which a test is left out for want of something: skipped on a desk, failed in CI, where nothing may be
missing. Fixtures and tests of every folder call it; a test of the tree refuses any other skip."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from types import ModuleType
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skip for want of `what`; fail in CI, so that green never means unseen."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"needs {what}, and in CI that is no reason to skip", pytrace=False)
    pytest.skip(f"needs {what}", allow_module_level=True)


def need_module(name: str) -> ModuleType:
    """A package that only `make parity` installs: what Hugging Face's own code says."""
    if importlib.util.find_spec(name) is None:
        missing(f"{name}, which `make parity` installs")
    return importlib.import_module(name)


def need_root(why: str) -> None:
    if os.geteuid() != 0:
        missing(f"root: {why}")


def need_machines() -> None:
    """Emulated hosts are process groups in a network of their own."""
    if os.geteuid() != 0 or shutil.which("bwrap") is None or shutil.which("nsenter") is None:
        missing("root, bubblewrap and nsenter: emulated hosts are made of them")
