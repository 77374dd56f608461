"""What a worker takes of the machine it is on, where nobody has said otherwise: processes, and a place for programs.

`wiring.extraction` asks when it starts a worker. None of it changes what is stored. It must not start anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

#: Processes that tokenise ahead of the device: more than this no device has been seen to need.
PROCESSES_MAX: Final = 8


def platform() -> str:
    """cpu, gpu or tpu."""
    import jax

    return str(jax.default_backend())


def usual_processes(platform: str, processors: int) -> int:
    """That tokenise: half of the processors, which otherwise would wait for the device. A CPU is the device itself."""
    return 0 if platform == "cpu" else min(PROCESSES_MAX, processors // 2)


def usual_cache(platform: str, environment: Mapping[str, str]) -> Path | None:
    """Where compiled programs are kept: in the user's cache, unless JAX was told a place (as every job is).

    None on a CPU: its programs are compiled in seconds and fit that very kind of processor, and homes are shared.
    """
    if platform == "cpu" or environment.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    above = environment.get("XDG_CACHE_HOME") or (f"{home}/.cache" if (home := environment.get("HOME")) else "")
    return Path(above) / "penstock" / "jax" if above else None
