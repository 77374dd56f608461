"""Settings of a server: who wins, where each value came from, and how a mistake is answered."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from penstock.domain.admission import BadInput
from penstock.wiring.settings import (
    KEYS,
    Value,
    cloud_settings,
    load,
    load_cloud,
    load_regions,
    load_retention,
    retention,
    server_settings,
    shown,
    variable,
)


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "penstock.toml"
    file.write_text(text)
    return file


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def values(
    home: Path, *, directory: Path | None = None, flags: dict[str, object] | None = None, **env: str
) -> dict[str, Value]:
    return load({"PENSTOCK_HOME": str(home), **env}, flags, directory)[1]  # fmt: skip


def test_without_any_word_everything_is_under_the_state_directory(home: Path) -> None:
    state, found = load({"PENSTOCK_HOME": str(home)})
    settings = server_settings(state, found)
    assert (settings.store, settings.root) == (str(home / "penstock.db"), str(home / "root"))
    assert (settings.host, settings.port) == ("127.0.0.1", 0)
    assert settings.embedded
    assert {value.source for value in found.values()} == {"default"}
    assert not home.exists(), "reading settings makes nothing"


def test_later_wins_and_every_value_knows_its_source(home: Path, tmp_path: Path) -> None:
    own = write(home, '[server]\nport = 1001\nlocal_hosts = 3\ndrain_s = 5\nlog_level = "debug"')
    project = write(tmp_path / "project", "[server]\nport = 1002\nlocal_hosts = 4\ndrain_s = 6.5")
    deep = tmp_path / "project" / "a" / "b"
    deep.mkdir(parents=True)
    found = values(
        home, directory=deep, flags={"port": 1004, "store": None}, PENSTOCK_PORT="1003", PENSTOCK_LOCAL_HOSTS="5"
    )
    assert found["log_level"] == Value("debug", str(own))
    assert found["drain_s"] == Value(6.5, str(project))
    assert found["local_hosts"] == Value(5, "PENSTOCK_LOCAL_HOSTS")
    assert found["port"] == Value(1004, "--port")
    assert found["store"] == Value(str(home / "penstock.db"), "default")


def test_only_the_nearest_project_counts_and_only_when_asked_for(home: Path, tmp_path: Path) -> None:
    write(tmp_path / "project", "[server]\nport = 1")
    write(tmp_path / "project" / "inner", "[server]\nlocal_hosts = 2")
    found = values(home, directory=tmp_path / "project" / "inner")
    assert (found["port"].value, found["local_hosts"].value) == (0, 2)
    assert values(home)["local_hosts"].source == "default"


def test_a_chosen_file_stands_for_the_state_directorys(home: Path, tmp_path: Path) -> None:
    write(home, "[server]\nport = 1")
    chosen = write(tmp_path / "else", "[server]\nport = 2")
    assert values(home, PENSTOCK_CONFIG=str(chosen))["port"] == Value(2, str(chosen))
    with pytest.raises(BadInput, match=r"PENSTOCK_CONFIG: .* is not there"):
        values(home, PENSTOCK_CONFIG=str(tmp_path / "nowhere.toml"))


def test_paths_in_a_file_are_read_from_where_it_lies(home: Path, tmp_path: Path) -> None:
    write(tmp_path / "project", '[server]\nstore = "data/p.db"\nroot = "/var/penstock"')
    found = values(home, directory=tmp_path / "project")
    assert found["store"].value == str(tmp_path / "project" / "data/p.db")
    assert found["root"].value == "/var/penstock"
    write(tmp_path / "project", '[server]\nstore = "postgresql://h/db"')
    assert values(home, directory=tmp_path / "project")["store"].value == "postgresql://h/db"


def test_a_shared_store_has_no_local_slices_unless_it_is_said(home: Path) -> None:
    found = values(home, PENSTOCK_STORE="postgresql://h/db")
    assert found["local_hosts"].value == 0
    assert "shared store" in found["local_hosts"].source
    found = values(home, PENSTOCK_STORE="postgresql://h/db", PENSTOCK_LOCAL_HOSTS="2")
    assert found["local_hosts"].value == 2
    assert not server_settings(home, found).embedded


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[server]\nstor = 1", "server.stor: 1 .* nobody knows; did you mean server.store?"),
        ("[sever]\nport = 1", "sever: .* nobody knows; did you mean server?"),
        ("port = 1", "port: .* nobody knows; there are server, retention, client, run"),
        ("server = 3", "server: 3 is not a table; write \\[server\\]"),
        ("[client]\nulr = 'x'", "client.ulr: .* did you mean client.url?"),
        ("[server]\nport = 'x'", "server.port: 'x' is not a whole number from 0 to 65535"),
        ("[server]\nport = true", "server.port: True is not a whole number"),
        ("[server]\nport = 70000", "server.port: 70000 is not a whole number"),
        ("[server]\nport = 1.5", "server.port: 1.5 is not a whole number"),
        ("[server]\ndrain_s = -1", "server.drain_s: -1 is not a number of seconds"),
        ("[server]\ndrain_s = nan", "server.drain_s: nan is not a number of seconds"),
        ("[server]\nstore = ''", "server.store: .* is not a word"),
        ("[server]\nlog_level = 'loud'", "server.log_level: 'loud' is not one of debug"),
        ("[server]\ndefault_on = ['v99-8']", "server.default_on: .* accelerator nobody knows"),
        ("[server\n", "cannot be read: .*line 1"),
    ],
)
def test_a_mistake_is_answered_in_one_line(home: Path, text: str, line: str) -> None:
    file = write(home, text)
    with pytest.raises(BadInput, match=line) as caught:
        values(home)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_bytes_that_are_no_text_are_refused(home: Path) -> None:
    write(home, "").write_bytes(b"\xff\xfe[server]")
    with pytest.raises(BadInput, match="cannot be read"):
        values(home)


@pytest.mark.parametrize("name", ["PENSTOCK_PORT", "PENSTOCK_LOCAL_HOSTS"])
def test_a_variable_is_checked_like_a_file(home: Path, name: str) -> None:
    with pytest.raises(BadInput, match=f"^{name}: 'many' is not a whole number"):
        load({"PENSTOCK_HOME": str(home), name: "many"})


def test_a_flag_is_checked_too(home: Path) -> None:
    with pytest.raises(BadInput, match=r"^--local-hosts: -1 is not a whole number"):
        values(home, flags={"local_hosts": -1})


def test_an_empty_variable_says_nothing(home: Path) -> None:
    assert values(home, PENSTOCK_PORT="")["port"].source == "default"


def test_a_project_may_not_choose_where_tokens_go(home: Path, tmp_path: Path) -> None:
    write(tmp_path / "clone", "[client]\nurl = 'https://elsewhere'")
    with pytest.raises(BadInput, match="may not say here which server is used"):
        values(home, directory=tmp_path / "clone")
    write(home, "[client]\nurl = 'https://ours'\ntoken_file = 't'")
    assert values(home)["port"].value == 0


def test_a_projects_own_table_is_left_to_its_reader(home: Path, tmp_path: Path) -> None:
    write(tmp_path / "project", "[run]\nwhatever = 1\n[server]\nport = 9")
    assert values(home, directory=tmp_path / "project")["port"].value == 9


def test_names_of_accelerators_are_made_canonical(home: Path) -> None:
    assert values(home, PENSTOCK_DEFAULT_ON="v5litepod-8, v4-8")["default_on"].value == ("v5e-8", "v4-8")


def test_a_password_is_never_shown() -> None:
    assert shown("postgresql://me:hunter2@db:5432/p?x=1") == "postgresql://me:***@db:5432/p?x=1"
    assert shown("postgresql://:hunter2@db/p") == "postgresql://***@db/p"
    assert shown("/var/p.db") == "/var/p.db"


def test_every_key_has_a_variable_of_its_own() -> None:
    assert variable("local_hosts") == "PENSTOCK_LOCAL_HOSTS"
    assert not {variable(name) for name in KEYS} & {
        "PENSTOCK_HOME",
        "PENSTOCK_URL",
        "PENSTOCK_TOKEN",
        "PENSTOCK_CONFIG",
    }


# --- retention ---
def test_the_policy_comes_from_the_own_file_then_variables(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[retention]\nlogs = "7d"\nresults = "never"\nevery = 90\n')
    values = load_retention({"PENSTOCK_HOME": str(tmp_path), "PENSTOCK_RETENTION_LOGS": "12h"})
    policy = retention(values)
    assert (policy.logs_s, policy.results_s, policy.every_s) == (12 * 3600.0, math.inf, 90.0)
    assert (policy.checkpoints_s, policy.jobs_s, policy.unused_s) == (30 * 86400.0, 30 * 86400.0, 86400.0)
    assert values["logs"].source == "PENSTOCK_RETENTION_LOGS"
    assert values["results"].source == str(tmp_path / "penstock.toml")
    assert values["jobs"].source == "default"
    assert server_settings(*load({"PENSTOCK_HOME": str(tmp_path)}), values).retention == policy
    assert not retention({"every": Value(math.inf, "")}).by_itself


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('logs = "5m"', "retention.logs: '5m' is not at least 15m"),
        ('jobs = "7d"', "retention.jobs: '7d' is not at least 30d"),
        ('unused = "1h"', "retention.unused: '1h' is not at least 1d"),
        ('logs = "soon"', "is neither a time such as 30d, 12h, 90m nor never"),
        ("logs = true", "is neither a time"),
        ("logs = nan", "is neither a time"),
        ('log = "30d"', "did you mean retention.logs?"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "penstock.toml").write_text(f"[retention]\n{line}\n")
    with pytest.raises(BadInput) as caught:
        load_retention({"PENSTOCK_HOME": str(tmp_path)})
    assert told in str(caught.value)


def test_a_cloned_project_cannot_say_what_is_deleted(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "penstock.toml").write_text('[retention]\nlogs = "15m"\n')
    with pytest.raises(BadInput, match="may not say here how long the logs and results of others are kept"):
        load({"PENSTOCK_HOME": str(tmp_path / "home")}, directory=project)


# --- regions ---
def test_regions_have_roots_from_the_own_file_or_the_variable(tmp_path: Path) -> None:
    file = write(tmp_path, '[regions]\nus-central1 = "gs://a"\neurope-west4 = "/srv/eu"\n')
    home = {"PENSTOCK_HOME": str(tmp_path)}
    values = load_regions(home)
    assert values == {"us-central1": Value("gs://a", str(file)), "europe-west4": Value("/srv/eu", str(file))}
    settings = server_settings(*load(home), None, None, values)
    assert settings.regions == (("us-central1", "gs://a"), ("europe-west4", "/srv/eu"))
    assert server_settings(*load(home)).regions == ()
    said = load_regions({**home, "PENSTOCK_REGIONS": "us-east5=gs://b/x, asia-east1=s3://c"})
    assert {region: value.value for region, value in said.items()} == {"us-east5": "gs://b/x", "asia-east1": "s3://c"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('us-central1-a = "gs://a"', "regions.us-central1-a: 'us-central1-a' is not a region"),
        ('Europe = "gs://a"', "is not a region"),
        ('us-central1 = "bucket"', "regions.us-central1: 'bucket' is not a root"),
        ("us-central1 = 7", "regions.us-central1: 7 is not a root"),
    ],
)
def test_regions_that_make_no_sense_are_refused(tmp_path: Path, line: str, told: str) -> None:
    write(tmp_path, f"[regions]\n{line}\n")
    with pytest.raises(BadInput) as caught:
        load_regions({"PENSTOCK_HOME": str(tmp_path)})
    assert told in str(caught.value)


def test_a_cloned_project_cannot_say_where_checkpoints_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "project", '[regions]\nus-central1 = "gs://mine"\n')
    with pytest.raises(BadInput, match="may not say here where the checkpoints of others are kept"):
        load({"PENSTOCK_HOME": str(tmp_path / "home")}, directory=tmp_path / "project")


# --- a cloud ---
def test_a_cloud_is_what_the_own_file_and_variables_say(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text(
        '[tpu_vm]\nproject = "p-1"\nzones = ["us-*", "europe-west4-a"]\nagents_url = "https://a.example/"\n'
    )
    values = load_cloud({"PENSTOCK_HOME": str(tmp_path), "PENSTOCK_TPU_VM_BUNDLE": "jax, numpy"})
    settings = cloud_settings(values)
    assert settings is not None
    assert (settings.project, settings.zones) == ("p-1", ("us-*", "europe-west4-a"))
    assert (settings.agents_url, settings.endpoint) == ("https://a.example", "https://tpu.googleapis.com")
    assert (settings.bundle, settings.network) == (("jax", "numpy"), "default")
    assert not settings.emulated
    assert settings._replace(endpoint="http://127.0.0.1:9090").emulated
    assert values["bundle"].source == "PENSTOCK_TPU_VM_BUNDLE"
    assert server_settings(*load({"PENSTOCK_HOME": str(tmp_path)}), None, values).cloud == settings


def test_without_a_project_there_is_no_cloud(tmp_path: Path) -> None:
    assert cloud_settings(load_cloud({"PENSTOCK_HOME": str(tmp_path)})) is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('project = "My Project"', "tpu_vm.project: 'My Project' is not a project's id"),
        ("project = 7", "is not a project's id"),
        ('endpoint = "tpu.googleapis.com"', "is not an address such as https://"),
        ('agents_url = "https://user:secret@a.example"', "is not an address such as https://"),
        ('zones = "us-central1-a; rm"', "is not a list of zones"),
        ("zones = []", "is not a list of zones"),
        ('bundle = "../jax"', "is not a list of packages"),
        ('network = "a\\n"', "is not a word"),
        ('projct = "p"', "did you mean tpu_vm.project?"),
    ],
)
def test_a_cloud_that_makes_no_sense_is_refused(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "penstock.toml").write_text(f"[tpu_vm]\n{line}\n")
    with pytest.raises(BadInput) as caught:
        load_cloud({"PENSTOCK_HOME": str(tmp_path)})
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_cloned_project_cannot_say_who_pays(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "penstock.toml").write_text('[tpu_vm]\nproject = "mine"\n')
    with pytest.raises(BadInput, match="may not say here which cloud project is billed"):
        load({"PENSTOCK_HOME": str(tmp_path / "home")}, directory=project)
