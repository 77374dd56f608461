"""What keeps a job from starting, seen by its user: what no retry can mend ends at the first try and says what to do.

Real server, agents and set-ups. Beside it the other side of set-ups: the environment they make is the one that runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.shop import Shop, soon

pytestmark = pytest.mark.slow
#: A set-up that needs no package index: a module of its own in the environment.
INSTALL = 'echo "VALUE = {value}" > "$(python -c "import site; print(site.getsitepackages()[0])")/penstock_probe.py"'


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("launches") / "home")
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


@pytest.fixture(scope="module")
def project(shop: Shop) -> Path:
    folder = shop.desk / "project"
    (folder / "folder").mkdir(parents=True)
    (folder / "folder" / "file").write_text("1")
    (folder / "plain.sh").write_text("#!/bin/sh\necho hi\n")
    (folder / "lost.sh").write_text("#!/there/is/no/sh\necho hi\n")
    (folder / "lost.sh").chmod(0o755)
    return folder


def run(shop: Shop, *words: str) -> str:
    done = shop.command("run", "--detach", "--on", "v5e-1", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


def check_first_try(view: Any, code: int, said: str) -> None:
    assert (view["state"], view["cause"], view["exit_code"]) == ("failed", "user_error", code), view
    assert len(view["attempts"]) == 1
    assert said in view["error"]["message"] + view["error"]["traceback"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--", "no-such-program"), 127, "no-such-program: not found"),
        (("--", "./plain.sh"), 126, "Permission denied"),
        (("--", "./lost.sh"), 127, "not found"),
        (("--", "./folder"), 126, "Permission denied"),
        (("--setup", "echo why; exit 7", "--", "true"), 7, "the set-up failed with exit code 7"),
        (("--setup", "no-such-tool", "--", "true"), 127, "no-such-tool: not found"),
    ],
    ids=["missing", "not-executable", "no-interpreter", "folder", "set-up", "set-up-missing"],
)
def test_what_can_never_start_ends_at_the_first_try(
    shop: Shop, project: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    check_first_try(shop.ended(run(shop, "--dir", str(project), *words)), code, said)


def held(shop: Shop, project: Path, *words: str) -> tuple[str, str]:
    """A job that waits for another one, and that one: what it needs can be taken away before it starts."""
    first = shop.submit("gate('go')")
    soon(lambda: shop.view(first)["state"] == "running")
    return first, run(shop, "--dir", str(project), "--after", first, *words, "--", "cat", "plain.sh")


def snapshots(shop: Shop) -> set[Path]:
    return {path for path in (shop.home.path / "root").rglob("*") if path.is_file() and "snapshots" in path.parts}


def test_a_snapshot_or_a_secret_that_is_gone_is_said_and_not_retried(shop: Shop, project: Path) -> None:
    assert shop.command("secret", "set", "GONE", stdin=b"a-value-of-a-secret").returncode == 0
    (project / "only-here").write_text("its blob is in no other snapshot")
    before = snapshots(shop)
    first, job = held(shop, project)
    first_too, secret = held(shop, project, "--secret", "GONE")
    new = snapshots(shop) - before
    for path in new:
        path.unlink()
    assert shop.command("secret", "rm", "GONE").returncode == 0
    for each in (first, first_too):
        shop.open_gate(each, "go")
    check_first_try(shop.ended(secret), 1, "tpu secret set GONE")
    assert new
    check_first_try(shop.ended(job), 1, "submit it again")


def test_a_set_up_that_did_not_reach_its_index_may_do_elsewhere(shop: Shop, project: Path) -> None:
    setup = "pip install --retries 1 --index-url http://127.0.0.1:9/simple no-such-package"
    job = run(shop, "--dir", str(project), "--setup", setup, "--rule", "pass", "--", "true")
    view = shop.ended(job)
    assert (view["state"], view["attempts"][0]["cause"]) == ("failed", "infra"), view
    assert "did not reach" in view["error"]["message"]


def test_a_snippet_runs_in_the_environment_its_set_up_makes(shop: Shop) -> None:
    """One environment and one warm parent for both; without a set-up it is the agent's own Python, as ever."""
    environments = shop.home.path / "cache" / "environments"
    before = set(environments.glob("*/ready"))
    code = (
        "import penstock_probe, sys, os\n"
        "result = [penstock_probe.VALUE, sys.prefix == os.environ['VIRTUAL_ENV'], float(jnp.ones(3).sum())]"
    )
    with shop.client() as client:
        for value in (41, 42, 41):
            assert client.exec(code, on="v5e-1", setup=INSTALL.format(value=value), wait_s=120) == [value, True, 3.0]
        outcome = client.wait(client.start(code, on="v5e-1").id, 120)
        assert outcome.error is not None
        assert outcome.error.type == "ModuleNotFoundError"
    words = ("exec", "--on", "v5e-1", "--setup", INSTALL.format(value=42), "-c", code)
    done = shop.command(*words)
    assert (done.returncode, done.stdout) == (0, b"[42,true,3.0]\n"), done.stderr
    done = shop.command(*words, "--isolation", "inline")
    assert (done.returncode, done.stdout) == (0, b"[42,true,3.0]\n"), done.stderr
    assert len(set(environments.glob("*/ready")) - before) == 2


def test_a_requirements_file_is_spelled_out_and_bad_lines_are_named(shop: Shop) -> None:
    wanted = shop.desk / "wanted.txt"
    wanted.write_text("# tools\nnumpy >= 1.20 ; python_version > '3'  # is here\n\n")
    done = shop.command("exec", "--on", "v5e-1", "--requirements", str(wanted), "-c", "import numpy; result = 1")
    assert (done.returncode, done.stdout) == (0, b"1\n"), done.stderr
    wanted.write_text("numpy\n-r other.txt\n")
    done = shop.command("exec", "--on", "v5e-1", "--requirements", str(wanted), "-c", "result = 1")
    assert done.returncode == 2
    assert b"line 2: '-r other.txt': only packages by name" in done.stderr
