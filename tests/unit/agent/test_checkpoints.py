"""Which checkpoints are finished, what is sent of them, and what comes back: with a server that is a dictionary."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.agent import checkpoints, restoring
from penstock.agent.checkpoint_looks import Looks
from penstock.agent.checkpoints import Copies
from penstock.agent.link import Refused, Silent
from penstock.agent.restoring import restore
from penstock.domain import limits
from penstock.wire.agent import PiecesQuery, PiecesReply, Restorable, RestoreReply, Saved
from penstock.wire.problems import problem


class Server:
    """What an agent's link reaches: pieces and lists. `fails` answers that many calls with silence."""

    def __init__(self) -> None:
        self.older: list[Saved] = []  #: newest first
        self.gone: set[str] = set()
        self.pieces: dict[str, bytes] = {}
        self.saved = Saved(number=0)
        self.sent: list[str] = []
        self.fails = 0

    async def call(self, method: str, path: str, body: bytes = b"", **_: Any) -> bytes:
        if self.fails:
            self.fails -= 1
            raise Silent("away")
        what = path.partition("/checkpoints")[2].partition("?")[0]
        if method == "PUT" and what.startswith("/pieces/"):
            name = what.removeprefix("/pieces/")
            assert hashlib.sha256(body).hexdigest() == name
            assert len(body) <= limits.CHECKPOINT_PIECE_BYTES
            self.pieces[name] = body
            self.sent.append(name)
        elif method == "PUT":
            saved = msgspec.json.decode(body, type=Saved)
            if any(name not in self.pieces for file in saved.files for name in file.pieces):
                raise Refused(problem("conflict", "pieces: are missing", field="pieces"))
            assert saved.number == self.saved.number + 1
            self.older.insert(0, self.saved)
            self.saved = saved
        elif what == "/missing":
            asked = msgspec.json.decode(body, type=PiecesQuery).pieces
            return msgspec.json.encode(PiecesReply(tuple(name for name in asked if name not in self.pieces)))
        elif what == "":
            if "/restore?" in path:
                whole = [each for each in (self.saved, *self.older) if each.files]
                skip = int(path.partition("skip=")[2] or "0")
                found = tuple(Restorable(job="j1", fence=3, rank=0, saved=each) for each in whole[skip : skip + 1])
                return msgspec.json.encode(RestoreReply(found))
            if "/restore/" in path:
                name = path.partition("/restore/")[2].partition("?")[0]
                if name in self.gone:
                    raise Refused(problem("not_found", f"sha256: there is no piece {name}", field="sha256"))
                return self.pieces[name]
            return msgspec.json.encode(self.saved)
        return b""

    async def ask(self, method: str, path: str, sent: object, answer: type[Any], **_: Any) -> Any:
        return msgspec.json.decode(await self.call(method, path, msgspec.json.encode(sent)), type=answer)

    @property
    def names(self) -> list[str]:
        return sorted(file.path for file in self.saved.files)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "RETRY_FIRST_S", 0.001)


def write(folder: Path, name: str, data: bytes, *, renamed: bool = True) -> None:
    """A checkpoint of one file in a directory, named last as careful programs do."""
    part = folder / (f"{name}.tmp" if renamed else name)
    part.mkdir(parents=True)
    (part / "state").write_bytes(data)
    for path in (part / "state", part):  # long before the rename, whatever the kernel's clock ticks in
        os.utime(path, (1_000_000, 1_000_000))
    if renamed:
        part.rename(folder / name)
    else:
        for path in (part / "state", part):
            os.utime(path, ns=(path.stat().st_ctime_ns + 10**9,) * 2)


def copies(server: Server, folder: Path, said: list[str] | None = None) -> Copies:
    return Copies(server, "a1", folder, folder.parent / "pins", (said if said is not None else []).append)  # type: ignore[arg-type]


# --- what is finished ---
def test_a_renamed_directory_counts_at_once_and_a_temporary_one_never(tmp_path: Path) -> None:
    now = [0.0]
    looks = Looks(tmp_path, print, lambda: now[0])
    write(tmp_path, "10", b"x")
    for name in (
        "20.orbax-checkpoint-tmp",
        "20.orbax-checkpoint-tmp-17",
        "a.tmp",
        "b.tmp-1f",
        "c.partial",
        "tmpab12cd_9",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state").write_bytes(b"half")
    (tmp_path / "30" / "default.orbax-checkpoint-tmp").mkdir(parents=True)
    ready, pending = looks.look()
    assert sorted(ready) == ["10"]
    assert pending
    now[0] += 1000
    assert sorted(looks.look()[0]) == ["10"]
    assert sorted(looks.look(ended=True)[0]) == ["10"], "nobody will finish them"


def test_what_is_written_in_place_counts_when_it_rests_or_its_writer_left(tmp_path: Path) -> None:
    now = [0.0]
    looks = Looks(tmp_path, print, lambda: now[0])
    (tmp_path / "model.npz").write_bytes(b"half")
    write(tmp_path, "10", b"x", renamed=False)
    assert looks.look() == ({}, True)
    now[0] += limits.CHECKPOINT_SETTLE_S / 2
    (tmp_path / "model.npz").write_bytes(b"whole now")
    looks.look()
    now[0] += limits.CHECKPOINT_SETTLE_S / 2
    assert sorted(looks.look()[0]) == ["10"]
    assert sorted(looks.look(ended=True)[0]) == ["10", "model.npz"]
    now[0] += limits.CHECKPOINT_SETTLE_S
    assert sorted(looks.look()[0]) == ["10", "model.npz"]


def test_orbax_marks_what_is_finished_and_dots_are_no_sign_of_the_opposite(tmp_path: Path) -> None:
    write(tmp_path, "10", b"x", renamed=False)
    (tmp_path / "10" / "_CHECKPOINT_METADATA").touch()
    (tmp_path / "10" / ".zarray").touch()
    assert sorted(Looks(tmp_path, print).look()[0]) == ["10"]


# --- there and back ---
def test_what_was_saved_comes_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHECKPOINT_PIECE_BYTES", 1000)
    server, folder = Server(), tmp_path / "checkpoints"
    data = os.urandom(4321)
    write(folder, "10", data)
    (folder / "10" / "empty").touch(mode=0o640)
    (folder / "10" / "nothing in it").mkdir()

    async def story() -> None:
        server.fails = 3
        await copies(server, folder).finish(by_itself=True)
        assert server.names == ["10/empty", "10/state"]
        assert len(server.pieces) == 5
        for _ in range(2):  # the second finds it done
            brought = await back(server, tmp_path)
            assert brought == tmp_path / "restored" / "3"
        assert (tmp_path / "restored/3/10/state").read_bytes() == data
        assert (tmp_path / "restored/3/10/state").stat().st_mtime_ns == (folder / "10/state").stat().st_mtime_ns
        assert (tmp_path / "restored/3/10/empty").read_bytes() == b""
        assert (tmp_path / "restored/3/10/nothing in it").is_dir()

    asyncio.run(story())
    assert not (tmp_path / "pins").exists() or not any((tmp_path / "pins").iterdir())


def test_only_what_is_new_is_sent_and_what_was_deleted_goes(tmp_path: Path) -> None:
    server, folder = Server(), tmp_path / "checkpoints"

    async def story() -> None:
        made = copies(server, folder)
        write(folder, "10", b"ten")
        await made.finish(by_itself=True)
        write(folder, "20", b"twenty")
        await made.finish(by_itself=True)
        assert (server.names, len(server.sent)) == (["10/state", "20/state"], 2)
        (folder / "10" / "state").unlink()
        (folder / "10").rmdir()
        # The next agent, after a kill -9: it sends nothing again.
        await copies(server, folder).finish(by_itself=True)
        assert (server.names, len(server.sent), server.saved.number) == (["20/state"], 2, 3)
        await copies(server, folder).finish(by_itself=True)
        assert server.saved.number == 3

    asyncio.run(story())


def test_the_last_whole_one_stays_while_its_successor_is_written(tmp_path: Path) -> None:
    server, folder = Server(), tmp_path / "checkpoints"

    async def story() -> None:
        made = copies(server, folder)
        write(folder, "10", b"ten")
        await made.finish(by_itself=False)
        (folder / "10" / "state").unlink()
        (folder / "10").rmdir()
        (folder / "20.tmp").mkdir()
        (folder / "20.tmp" / "state").write_bytes(b"half")
        await made.finish(by_itself=False)
        assert server.names == ["10/state"]

    asyncio.run(story())


def test_pieces_that_were_cleared_away_are_sent_again(tmp_path: Path) -> None:
    server, folder = Server(), tmp_path / "checkpoints"

    async def story() -> None:
        made = copies(server, folder)
        write(folder, "10", b"ten")
        await made.finish(by_itself=True)
        server.pieces.clear()
        write(folder, "20", b"twenty")
        await made.finish(by_itself=True)
        assert server.names == ["10/state", "20/state"]
        assert len(server.pieces) == 2

    asyncio.run(story())


def test_links_and_devices_stay_where_they_are(tmp_path: Path) -> None:
    server, folder, said = Server(), tmp_path / "checkpoints", list[str]()
    (tmp_path / "secret").write_text("not yours")
    write(folder, "10", b"ten")
    (folder / "10" / "out").symlink_to(tmp_path / "secret")
    (folder / "whole").symlink_to(tmp_path)
    os.mkfifo(folder / "10" / "pipe")
    asyncio.run(copies(server, folder, said).finish(by_itself=True))
    assert server.names == ["10/state"]
    assert sum("stays here" in line for line in said) == 3


async def back(server: Server, home: Path, said: list[str] | None = None) -> Path | None:
    return await restore(server, "a2", 0, home / "restored", (said if said is not None else []).append)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a/../../b", "a//b"])
def test_a_list_cannot_lead_out_of_its_folder(tmp_path: Path, path: str) -> None:
    server, folder, said = Server(), tmp_path / "checkpoints", list[str]()
    write(folder, "10", b"ten")

    async def story() -> None:
        await copies(server, folder).finish(by_itself=True)
        (file,) = server.saved.files
        bad = msgspec.structs.replace(file, path=path)
        server.saved = msgspec.structs.replace(server.saved, files=(bad,))
        assert await back(server, tmp_path, said) is None

    asyncio.run(story())
    assert "plain relative path" in said[0]
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith("out")) == []


# --- damage ---
@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_copy_with_a_bad_piece_is_skipped_for_the_one_before(tmp_path: Path, how: str) -> None:
    server, folder, said = Server(), tmp_path / "checkpoints", list[str]()

    async def story() -> None:
        made = copies(server, folder)
        write(folder, "10", b"ten")
        await made.finish(by_itself=True)
        write(folder, "20", b"twenty")
        await made.finish(by_itself=True)
        name = hashlib.sha256(b"twenty").hexdigest()
        if how == "gone":
            server.gone.add(name)
        else:
            server.pieces[name] = b"ytnewt"
        brought = await back(server, tmp_path, said)
        assert brought is not None
        assert [each.name for each in brought.iterdir()] == ["10"]
        assert (brought / "10/state").read_bytes() == b"ten"
        assert len(said) == 1
        assert said[0].startswith("checkpoint 2 of attempt 3 is skipped: 20/state, host 0: ")

    asyncio.run(story())


def test_with_no_whole_copy_left_it_starts_anew_and_says_so(tmp_path: Path) -> None:
    server, folder, said = Server(), tmp_path / "checkpoints", list[str]()
    write(folder, "10", b"ten")

    async def story() -> None:
        await copies(server, folder).finish(by_itself=True)
        server.pieces = dict.fromkeys(server.pieces, b"net")
        assert await back(server, tmp_path, said) is None

    asyncio.run(story())
    assert not (tmp_path / "restored").exists()
    assert "SHA-256" in said[0]
    assert said[-1] == "no whole checkpoint of an earlier attempt is left: it starts anew"


def test_a_storage_that_is_away_is_waited_for_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "RETRY_MAX_S", 0.01)
    server, folder = Server(), tmp_path / "checkpoints"
    write(folder, "10", b"ten")

    async def story() -> None:
        await copies(server, folder).finish(by_itself=True)
        monkeypatch.setattr(restoring, "SILENT_S", 0.1)
        server.fails = 1_000_000
        with pytest.raises(restoring.Unreadable, match="did not answer for"):
            await back(server, tmp_path)
        server.fails = 5
        monkeypatch.setattr(restoring, "SILENT_S", 60.0)
        assert await back(server, tmp_path) == tmp_path / "restored" / "3"

    asyncio.run(story())


# --- after a killed agent ---
class Struck(BaseException):
    """An agent is killed here."""


def killed_while_sending(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent pins what is finished, sends a piece, and is gone before the list; its links stay."""
    made = copies(server, folder)

    def stays() -> None:
        return None

    async def dies(*_: object) -> None:
        raise Struck

    with monkeypatch.context() as patched:
        patched.setattr(made, "_unpin", stays)
        patched.setattr(made, "_commit", dies)
        with pytest.raises(Struck):
            asyncio.run(made.finish(by_itself=False))


def test_what_a_killed_agent_held_is_copied_when_nothing_newer_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = Server(), tmp_path / "checkpoints"
    write(folder, "10", b"ten")
    killed_while_sending(server, folder, monkeypatch)
    (folder / "10" / "state").unlink()  # the payload makes room for the next one, and is lost before it is written
    (folder / "10").rmdir()
    asyncio.run(copies(server, folder).finish(by_itself=False))
    assert server.names == ["10/state"]
    assert server.pieces == {hashlib.sha256(b"ten").hexdigest(): b"ten"}
    assert server.saved.number == 1, "and it is not taken away again"


def test_links_of_a_killed_agent_do_not_hide_what_came_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, folder = Server(), tmp_path / "checkpoints"
    write(folder, "10", b"ten")
    killed_while_sending(server, folder, monkeypatch)
    (folder / "10" / "state").unlink()
    (folder / "10").rmdir()
    write(folder, "20", b"twenty")
    asyncio.run(copies(server, folder).finish(by_itself=True))
    assert server.names == ["20/state"]


def test_links_that_were_not_all_made_are_no_checkpoint(tmp_path: Path) -> None:
    server, folder = Server(), tmp_path / "checkpoints"
    folder.mkdir()
    write(tmp_path / "pins" / "17-1", "10", b"half of it")
    asyncio.run(copies(server, folder).finish(by_itself=False))
    assert server.names == []


# --- gangs, and compiled code ---
def test_a_host_of_a_gang_says_that_it_is_there_and_that_it_begins(tmp_path: Path) -> None:
    server, folder = Server(), tmp_path / "checkpoints"
    folder.mkdir()

    async def story() -> None:
        made = Copies(server, "a1", folder, tmp_path / "pins", print, gang=True)  # type: ignore[arg-type]
        for _ in range(2):
            await made._look_and_copy()
            assert server.saved == Saved(number=1)
        (folder / "10.tmp").mkdir()
        for _ in range(2):
            await made._look_and_copy()
            assert server.saved == Saved(number=2, writing=True)

    asyncio.run(story())


def test_compiled_code_stays_in_the_bucket_when_this_host_has_it_not(tmp_path: Path) -> None:
    server, folder = Server(), tmp_path / "jax-cache"
    folder.mkdir()

    async def story() -> None:
        for name in ("jit_a", "jit_b"):
            (folder / name).write_bytes(name.encode())
            made = Copies(server, "a1", folder, tmp_path / "pins", print, compiled=True)  # type: ignore[arg-type]
            await made.finish(by_itself=True)
            (folder / name).unlink()
        assert server.names == ["jit_a", "jit_b"]
        (tmp_path / "other").mkdir()
        await restoring.bring_compiled(server, "a2", 0, tmp_path / "other")  # type: ignore[arg-type]
        assert {each.name: each.read_bytes() for each in (tmp_path / "other").iterdir()} == {
            "jit_a": b"jit_a",
            "jit_b": b"jit_b",
        }
        (tmp_path / "third").mkdir()
        server.pieces = dict.fromkeys(server.pieces, b"bad")
        await restoring.bring_compiled(server, "a3", 0, tmp_path / "third")  # type: ignore[arg-type]
        assert not list((tmp_path / "third").iterdir()), "then it is compiled again"

    asyncio.run(story())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["jax-cache", "other", "pins", "third"]
