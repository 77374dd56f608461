"""Recipes: which one a snapshot calls for, and when two jobs may share the environment it makes."""

from __future__ import annotations

import hashlib

import pytest

from penstock.agent.recipes import BadRecipe, Recipe, recipe_for
from penstock.objects.manifest import File, Link, Manifest

PROJECT = '[project]\nname = "mine"\ndependencies = ["jax", "optax"]\n'
LOCK = 'version = 1\n[[package]]\nname = "mine"\nsource = { editable = "." }\n'


def recipe(
    files: dict[str, str], setup: str = "", *, env: dict[str, str] | None = None, team: str = "t", links: str = ""
) -> Recipe | None:
    entries: list[File | Link] = [Link(path, "x") for path in links.split()]
    entries += [File(path, 0o644, 1, hashlib.sha256(text.encode()).hexdigest()) for path, text in files.items()]
    snapshot = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    return recipe_for(
        snapshot=snapshot,
        manifest=Manifest((), tuple(entries)),
        read=files.__getitem__,
        setup=setup,
        env=env or {},
        team=team,
    )


def kind(files: dict[str, str], setup: str = "") -> str | None:
    found = recipe(files, setup)
    return None if found is None else found.kind


def test_the_most_exact_source_is_taken() -> None:
    everything = {"uv.lock": LOCK, "pyproject.toml": PROJECT, "requirements.txt": "jax\n"}
    assert kind(everything, "make") == "setup"
    assert kind(everything) == "uv.lock"
    assert kind({"pyproject.toml": PROJECT, "requirements.txt": "jax\n"}) == "requirements.txt"
    assert kind({"pyproject.toml": PROJECT}) == "pyproject.toml"
    assert kind({"train.py": "", "sub/requirements.txt": "jax\n"}) is None
    assert kind({"train.py": ""}, "  \n") is None
    assert kind({"pyproject.toml": '[project]\nname = "mine"\n'}) is None


def shared(files: dict[str, str], setup: str = "") -> bool:
    """Whether the environment outlives a change of code."""
    one, two = recipe({**files, "train.py": "1"}, setup), recipe({**files, "train.py": "2"}, setup)
    assert one is not None
    assert two is not None
    assert (one.key == two.key) is not one.whole
    return one.key == two.key


@pytest.mark.parametrize(
    "requirements",
    [
        "jax\noptax>=0.2  # a comment with ./path\n",
        "# -e .\n\njax[tpu]\n--extra-index-url https://packages.invalid/simple\n",
        "tool @ git+https://host.invalid/tool.git@main\n",
        "jax==0.4 \\\n    --hash=sha256:00\n",
        "-r more.txt\n-cpins.txt\n--requirement=more.txt\n",
        "foo; python_version < '3.12'\n",
    ],
)
def test_requirements_that_name_packages_outlive_a_change_of_code(requirements: str) -> None:
    assert shared({"requirements.txt": requirements, "more.txt": "numpy\n", "pins.txt": "numpy<3\n"})


@pytest.mark.parametrize(
    "requirements",
    [
        "-e .\n", ".\n", ".[dev]\n", "--editable=.\n", "-e.\n", "./lib\n", "lib/tool\n", "tool @ file:///x/y\n",
        "wheels/a-1-py3-none-any.whl\n", "a-1-py3-none-any.whl\n", "--find-links wheels\n", "-f wheels\n",
        "-r more.txt\n", "-r absent.txt\n", "/opt/tool\n",
    ],
)  # fmt: skip
def test_requirements_that_reach_into_the_tree_do_not(requirements: str) -> None:
    assert not shared({"requirements.txt": requirements, "more.txt": "-e lib\n"})


@pytest.mark.parametrize(
    "setup",
    [
        "pip install jax",
        "pip install -r requirements.txt && pip install 'wandb>=0.16'",
        "python -m pip install --upgrade jax[tpu] -f https://packages.invalid/releases.html",
        "uv pip install jax  # fast\npip3 install optax; pip install flax",
    ],
)
def test_a_setup_that_only_installs_packages_outlives_a_change_of_code(setup: str) -> None:
    assert shared({"requirements.txt": "jax\n"}, setup)


@pytest.mark.parametrize(
    "setup",
    [
        "make deps", "bash setup.sh", "pip install -e .", "pip install .", "pip install ./lib", "pip install lib/",
        "pip install jax\nmake", "pip install jax || make", "pip install jax & make", "(pip install jax)",
        "pip install $PACKAGES", "pip install `cat list`", "pip install $(cat list)", "FOO=1 pip install jax",
        "pip install 'unclosed", "pip install jax \\", "pip download jax", "pip install -r local.txt",
        "pip install -r absent.txt", "pip install *.whl", "pip install a.whl", "cd lib && pip install jax",
        "pip install jax > log; python gen.py", "pip install jax;make", "pip install jax&&make",
    ],
)  # fmt: skip
def test_any_other_setup_does_not(setup: str) -> None:
    assert not shared({"requirements.txt": "jax\n", "local.txt": "-e .\n"}, setup)


def test_what_a_recipe_reads_is_in_its_key() -> None:
    def key(more: str = "numpy\n", setup: str = "", **changes: object) -> str:
        files = {"requirements.txt": "-r sub/more.txt\n", "sub/more.txt": "-c pins.txt\n", "sub/pins.txt": more}
        found = recipe(files, setup, **changes)  # type: ignore[arg-type]
        assert found is not None
        assert not found.whole
        return found.key

    setup = "pip install -r requirements.txt"
    keys = [
        key(),
        key("numpy<2\n"),
        key(team="other"),
        key(env={"PIP_INDEX_URL": "https://packages.invalid"}),
        key(setup=setup),
        key("numpy<2\n", setup=setup),
        key(setup=setup, env={"FLAVOUR": "tpu"}),
    ]
    assert len(set(keys)) == len(keys)
    assert key(env={"FLAVOUR": "tpu"}) == key()  # pip does not read it


def test_a_project_is_keyed_by_what_it_depends_on() -> None:
    def key(text: str) -> tuple[str, bool]:
        found = recipe({"pyproject.toml": text})
        assert found is not None
        return found.key, found.whole

    assert key(PROJECT) == key(PROJECT + "[tool.ruff]\nline-length = 99\n")
    assert key(PROJECT) != key(PROJECT.replace("optax", "flax"))
    for unknown in (
        '[project]\nname = "mine"\ndynamic = ["dependencies"]\n',
        '[tool.poetry.dependencies]\njax = "*"\n',
        '[project]\nname = "mine"\ndependencies = ["lib @ file:./lib"]\n',
    ):
        assert key(unknown)[1], unknown


@pytest.mark.parametrize(
    ("more", "alone"),
    [
        ("", True),
        ('[[package]]\nname = "jax"\nsource = { registry = "https://packages.invalid" }\n', True),
        ('[[package]]\nname = "lib"\nsource = { editable = "lib" }\n', False),
        ('[[package]]\nname = "lib"\nsource = { directory = "lib" }\n', False),
        ('[[package]]\nname = "lib"\nsource = { path = "a.whl" }\n', False),
    ],
)
def test_a_lock_with_packages_of_the_tree_goes_with_the_tree(more: str, alone: bool) -> None:
    assert shared({"uv.lock": LOCK + more, "pyproject.toml": PROJECT}) is alone


@pytest.mark.parametrize("path", ["requirements.txt", "pyproject.toml", "uv.lock"])
def test_a_link_in_place_of_the_file_is_refused(path: str) -> None:
    with pytest.raises(BadRecipe, match="is a link; replace it by the file itself"):
        recipe({}, links=path)
