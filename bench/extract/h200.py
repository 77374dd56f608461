"""Extraction on one H200: all variants in one run, as figures and as ratios of one another.

`python bench/extract/h200.py [--out FOLDER] [--quick]`, on a machine with an NVIDIA GPU, JAX, PyTorch and transformers;
nothing is fetched. Each part runs in a process of its own. Prints a table and writes `h200.json` and `h200.md` there.
Packages that the machine lacks (msgspec, blake3, pyarrow: wheels for its Python, unpacked) come on PYTHONPATH; on the
device machine, with `build/speed/pkgs` carried: `PYTHONPATH=build/speed/pkgs python3 bench/extract/h200.py --only
ceiling,disk --out $OUT`, about two minutes.
Weights are random-initialised of the true shapes; `corpus.py` says what the documents are. `--quick` leaves out the
sites and the tuned rival. Exits with 1 when a figure is under its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PART_S_MAX = 180
TUNED_S_MAX = 400  #: max-autotune times every product with every way it knows


def part(script: str, *words: str, folder: Path) -> bool:
    began = time.monotonic()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            (str(HERE), str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")]))
        ),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TOKENIZERS_PARALLELISM": "false",
    }
    named = words[:1] if script != "kernels.py" else ()
    command = [sys.executable, str(HERE / script), *named, str(folder), *words[1:]]
    try:
        most = TUNED_S_MAX if words[0] == "tuned" else PART_S_MAX
        code = subprocess.run(command, env=environment, timeout=most, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    print(f"-- {script} {' '.join(words)}: {code}, {time.monotonic() - began:.0f} s", flush=True)
    return code == 0


def lines(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What was measured, the figure, its bound, and whether it holds."""
    out: list[tuple[str, str, str, bool]] = []
    ours, rival, ceiling = (found.get(name) for name in ("speed-0.5b", "rival-speed-0.5b", "ceiling"))
    if ours and rival and ceiling:
        rate, theirs, top = ours["tokens_s"], rival["tokens_s"], ceiling["0.5b"]["tokens_s"]
        better = found.get("rival-tuned-0.5b")
        best = max(theirs, better["tokens_s"]) if better else theirs
        out += [
            ("matrix products alone, 0.5B, 19 layers", f"{top:,.0f} tokens/s", "", True),
            ("compiled Hugging Face, packed, same steps", f"{theirs:,.0f} tokens/s ({theirs / top:.0%})", "", True),
        ]
        if better:
            figure = f"{better['tokens_s']:,.0f} tokens/s"
            out.append(("the same, max-autotune", figure, "", True))
        figure = f"{rate:,.0f} tokens/s ({rate / top:.0%} of the products alone, {ours['host_gb_s']:.1f} GB/s)"
        out += [
            ("**0.5B, 3 layers, model and copies**", figure, "820,000", rate >= 820_000),
            ("the same per compiled Hugging Face", f"{rate / best:.2f} ×", "1.2 ×", rate >= 1.2 * best),
        ]
    if found.get("speed-7b") and ceiling:
        rate, top = found["speed-7b"]["tokens_s"], ceiling["7b"]["tokens_s"]
        figure = f"{rate:,.0f} tokens/s ({rate / top:.0%} of the products alone)"
        out.append(("**7B, 3 layers, model and copies**", figure, "53,000", rate >= 53_000))
    out += to_disk(found.get("disk"))
    for name, each in (found.get("numerics") or {}).items():
        if isinstance(each, dict):
            figure = f"{each['ours']:.2e} (Hugging Face's own bfloat16: {each['theirs']:.2e})"
            out.append((f"error of {name} against float32", figure, "1.5 ×", each["ours"] <= 1.5 * each["theirs"]))
    out += by_sites(found)
    for each in (found.get("kernels") or {}).get("cases", ()):
        more = "".join(
            f", {name} {each[key]}" for key, name in (("window", "window"), ("soft_cap", "cap")) if each[key]
        )
        what = f"{each['kernel']}, {each['heads']}/{each['kv_heads']} heads of {each['size']}, {each['dtype']}{more}"
        figure = f"{each['error']:.2e} (the definition in that type: {each['definition']:.2e}); {each['ms']:.2f} ms"
        out.append((f"error of {what}", figure, "1.5 ×", each["holds"]))
    return out


def to_disk(found: dict[str, Any] | None) -> list[tuple[str, str, str, bool]]:
    """The product's worker from text to a sealed run, against the model's own rate in the same process."""
    if not found:
        return []
    model = found["model"]["tokens_s"]
    places = {
        "disk": ("to local disk, `--no-sync`", True),
        "disk-one": ("to local disk, `--no-sync --one-unit`", False),
        "memory": ("to /dev/shm", False),
        "synced": (f"to local disk, synced (the disk itself: {found['disk_synced_gb_s']:.1f} GB/s)", False),
    }
    out = []
    for name, (where, bound) in places.items():
        if name not in found:
            continue
        rounds = sorted(found[name], key=lambda each: float(each["tokens_s"]))
        each = rounds[len(rounds) // 2]  # the median
        share = each["tokens_s"] / model
        least, most = (each["tokens_s"] / model for each in (rounds[0], rounds[-1]))
        of = f"{share:.0%}" + (f", {least:.0%} to {most:.0%} in {len(rounds)} rounds," if rounds[1:] else "")
        speed = each["gb"] / each["seconds"]
        figure = f"{each['tokens_s']:,.0f} tokens/s ({of} of the model's {model:,.0f}; {speed:.1f} GB/s)"
        what = f"**the worker, text {where}**, {each['gb']:.1f} GB, read back and verified"
        out.append((what, figure, "85%" if bound else "", share >= 0.85 or not bound))
    return out


def by_sites(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """The bound of K sites is the model's own rate with one, or what the link can carry."""
    sites, ceiling = found.get("sites"), found.get("ceiling")
    if not sites or not ceiling:
        return []
    out = []
    for count, each in sites.items():
        if not isinstance(each, dict):
            continue
        link = ceiling["copy_gb_s"] * 1e9 / each["bytes_per_token"]
        bound = min(sites["1"]["tokens_s"], link)
        by = "link" if link < sites["1"]["tokens_s"] else "arithmetic"
        figure = (
            f"{each['tokens_s']:,.0f} tokens/s, {each['host_gb_s']:.1f} GB/s ({each['tokens_s'] / bound:.0%} of {by})"
        )
        share = each["tokens_s"] / bound
        out.append((f"24 layers run, {count} vectors saved", figure, "70%" if count == "24" else "", share >= 0.7))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/extract"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/penstock-extract"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)
    parts = [
        ("ours.py", "ceiling"),
        ("rival.py", "speed"),
        ("ours.py", "speed", "0.5b"),
        ("rival.py", "make"),
        ("ours.py", "numerics"),
        ("kernels.py", "kernels"),
        ("ours.py", "disk"),
        ("ours.py", "speed", "7b"),
        ("ours.py", "sites"),
        ("rival.py", "tuned"),
    ]
    if given.quick:
        parts = [each for each in parts if each[1] not in ("sites", "tuned")]
    failed, table, text = [], [], ""
    for script, *words in parts:
        if given.only and words[0] not in given.only.split(","):
            continue
        folder = given.work / "model" if words[0] == "make" else given.work
        folder.mkdir(exist_ok=True)
        if not part(script, *words, folder=folder):
            failed.append(" ".join((script, *words)))
        # After each part: a machine may be taken back before the last.
        found = {path.stem: json.loads(path.read_text()) for path in sorted(given.work.glob("*.json"))}
        (given.out / "h200.json").write_text(json.dumps(found, indent=1))
        table = lines(found)
        rows = [f"| {what} | {figure} | {bound} |" for what, figure, bound, _ in table]
        text = "\n".join(["| what | measured | bound |", "|---|---|---|", *rows])
        (given.out / "h200.md").write_text(text + "\n")
    print(text)
    missed = [what for what, _, _, holds in table if not holds]
    if failed or missed:
        print(f"failed: {failed}; under their bounds: {missed}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
