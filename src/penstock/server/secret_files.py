"""Where secrets' values are: a file each, readable by the server only, under the team that owns it.

`server.settings` writes them for users and lists their names; `server.agents` reads values for the one host that is
about to run a job which names them. Nobody else may. Values never enter the store, an event or a log.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

from penstock.domain.admission import BadInput

#: A secret becomes an environment variable and a file name.
NAME_PATTERN: Final = "^[A-Za-z_][A-Za-z0-9_]{0,127}$"


def check_secret_name(name: str) -> None:
    if re.search(NAME_PATTERN, name, re.ASCII) is None or name.endswith("\n"):
        raise BadInput("name", name, "is not a name for a secret", "use letters, digits and _ such as WANDB_API_KEY")


class SecretFiles:
    """Values by team and name. `given` are those of the server's own environment, (team, name) -> value."""

    def __init__(self, directory: Path, given: Mapping[tuple[str, str], str] | None = None) -> None:
        self._directory = directory
        self._given = dict(given or {})

    def names(self, team: str) -> tuple[str, ...]:
        home = self._home(team)
        kept = {path.name for path in home.iterdir() if not path.name.startswith(".")} if home.is_dir() else set()
        return tuple(sorted(kept | {name for owner, name in self._given if owner == team}))

    def get(self, team: str, name: str) -> str | None:
        check_secret_name(name)
        try:
            return (self._home(team) / name).read_bytes().decode()
        except FileNotFoundError:
            return self._given.get((team, name))

    def put(self, team: str, name: str, value: str) -> None:
        """Whole or not at all, and never readable by others, not even for a moment."""
        check_secret_name(name)
        home = self._home(team)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=home, prefix=".")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(value)
                file.flush()
                os.fsync(file.fileno())
            Path(draft).replace(home / name)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise

    def delete(self, team: str, name: str) -> bool:
        """Whether there was one."""
        check_secret_name(name)
        try:
            (self._home(team) / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _home(self, team: str) -> Path:
        """Team names are any text: escaped, so that none of them is a path."""
        return self._directory / quote(team, safe="").replace(".", "%2E")
