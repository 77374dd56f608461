"""Datasets: all formats and layouts give the same rows, any range of them; malformed ones are set aside by line."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.extract import formats
from penstock.extract.content import Reading
from penstock.extract.formats import Format
from penstock.extract.source import Document, Refused, Source, SourceSpec, documents
from penstock.objects.inputs import Changed
from penstock.ports.objects import Damaged

ROWS: list[dict[str, object]] = [
    {"text": f"row {number} of é", "name": f"n{number}", "tokens": [number, 1]} for number in range(700)
]
Write = Callable[[Path], Path]


def jsonl(path: Path, rows: list[dict[str, object]] | None = None) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in (ROWS if rows is None else rows)))
    return path


def opened(*data: Path | str, **options: object) -> Source:
    how = {name: options.pop(name) for name in list(options) if name in Reading.__struct_fields__}
    return Source.open(SourceSpec(data=tuple(map(str, data)), reading=Reading(**how), **options))  # type: ignore[arg-type]


def texts(source: Source, start: int = 0, stop: int | None = None) -> list[str | None]:
    return [document.text for document in documents(source, start, stop)]


def _jsonl(folder: Path) -> Path:
    return jsonl(folder / "a.jsonl")


def _two_files(folder: Path) -> Path:
    jsonl(folder / "part-0.jsonl", ROWS[:300])
    jsonl(folder / "part-1.jsonl", ROWS[300:])
    return folder


def _gzip(folder: Path) -> Path:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(folder / "a.jsonl").read_bytes()))
    return folder / "a.jsonl.gz"


def _zstd(folder: Path) -> Path:
    (folder / "a.jsonl.zst").write_bytes(zstd.compress(jsonl(folder / "a.jsonl").read_bytes()))
    return folder / "a.jsonl.zst"


def _text(folder: Path) -> Path:
    (folder / "a.txt").write_text("".join(f"{row['text']}\r\n" for row in ROWS).rstrip("\r\n"))
    return folder / "a.txt"


def _parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "train-00000-of-00001.parquet", row_group_size=90)
    return folder


def _arrow_stream(folder: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=130)
    return folder / "a.arrow"


def _arrow_file(folder: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=130)
    return folder / "a.arrow"


def _saved_to_disk(folder: Path, split: str = "") -> Path:
    """As `datasets.Dataset.save_to_disk` lays it out, with two files of data."""
    place = folder / split
    place.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(ROWS)
    names = []
    for number, part in enumerate((table.slice(0, 400), table.slice(400))):
        names.append(f"data-{number:05d}-of-00002.arrow")
        with pa.ipc.new_stream(place / names[-1], table.schema) as writer:
            writer.write_table(part, max_chunksize=100)
    (place / "state.json").write_bytes(msgspec.json.encode({"_data_files": [{"filename": name} for name in names]}))
    (place / "dataset_info.json").write_text("{}")
    return folder


LAYOUTS = [
    _jsonl,
    _two_files,
    _gzip,
    _zstd,
    _text,
    _parquet,
    _arrow_stream,
    _arrow_file,
    _saved_to_disk,
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_rows_and_any_range_of_them(layout: Write, tmp_path: Path) -> None:
    source = opened(layout(tmp_path))
    assert source.rows == len(ROWS)
    expected = [row["text"] for row in ROWS]
    assert texts(source) == expected
    for start, stop in [(0, 1), (299, 302), (130, 130), (89, 181), (650, 700), (699, 700)]:
        assert texts(source, start, stop) == expected[start:stop]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_found_is_plain_data_that_survives_a_plan(layout: Write, tmp_path: Path) -> None:
    source = opened(layout(tmp_path))
    again = msgspec.json.decode(msgspec.json.encode(source), type=Source)
    assert again == source
    assert texts(again, 400, 410) == [row["text"] for row in ROWS[400:410]]
    assert all(file.fingerprint.startswith(("sha256:", ledger.BLOCKS_KIND)) for file in source.files)


def test_a_document_says_where_it_came_from(tmp_path: Path) -> None:
    source = opened(_two_files(tmp_path))
    (found,) = documents(source, 302, 303)
    assert found == Document(id="302", row=302, file=str(tmp_path / "part-1.jsonl"), offset=2, text="row 302 of é")
    named = opened(_two_files(tmp_path), id="name")
    assert [document.id for document in documents(named, 299, 301)] == ["n299", "n300"]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    mark=st.integers(1, 200),
    chunk=st.integers(1, 64),
    newline=st.booleans(),
    data=st.data(),
)
def test_ranges_of_lines_join_to_the_whole_wherever_marks_fall(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    mark: int,
    chunk: int,
    newline: bool,
    data: st.DataObject,
) -> None:
    lines = [f"{'x' * size}{number}" for number, size in enumerate(sizes)]
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_text("\n".join(lines) + "\n" * newline)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "MARK_BYTES", mark)
        patch.setattr(formats, "_CHUNK_BYTES", chunk)
        source = opened(path)
        assert source.rows == len(lines)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(lines)), max_size=4)))
        edges = [0, *cuts, len(lines)]
        joined = [text for at in range(len(edges) - 1) for text in texts(source, edges[at], edges[at + 1])]
    assert joined == lines


def test_malformed_rows_are_set_aside_with_their_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(
        b'{"text": "one"}\n'
        b'{"text": "two\n'
        b"\n"
        b"[1, 2]\n"
        b'{"other": 1}\n'
        b'{"text": 7}\n'
        b'{"text": "\xff"}\n'
        b'{"text": null}\n' + b"[" * 100_000 + b"\n"
        b'{"text": "last"}'
    )
    refused: list[Refused] = []
    found = list(documents(opened(path), refuse=refused.append))
    assert [document.text for document in found] == ["one", "last"]
    assert [document.row for document in found] == [0, 9]
    assert [(each.line, each.row) for each in refused] == [(line, line - 1) for line in range(2, 10)]
    reasons = [each.reason for each in refused]
    assert reasons[0].startswith("is not JSON")
    assert reasons[1] == "is a blank line"
    assert reasons[2] == "is a JSON list, not an object"
    assert reasons[3] == "has no column 'text'; it has other"
    assert reasons[4] == "column 'text' is a number, not text"
    assert reasons[5].startswith("is not JSON")
    assert reasons[6] == "column 'text' is null, not text"
    assert refused[0].excerpt == '{"text": "two'
    assert refused[4].excerpt == '{"text":7}'
    assert {each.file for each in refused} == {str(path)}


def test_a_malformed_row_keeps_the_id_that_can_be_read(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"id": "a", "text": 5},
        {"id": 7, "other": 1},
        {"id": "", "text": "x"},
        {"text": "x"},
    ]
    path = jsonl(tmp_path / "a.jsonl", rows)
    refused: list[Refused] = []
    assert not list(documents(opened(path, id="id"), refuse=refused.append))
    assert [each.id for each in refused] == ["a", "7", None, None]


def test_a_malformed_row_that_nobody_wants_set_aside_is_an_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": 2}])
    with pytest.raises(BadInput, match="line 2 column 'text' is a number, not text; mend it"):
        texts(opened(path))


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LINE_BYTES_MAX", 50)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 5000 + b'"}\n{"text": "' + b"y" * 37 + b'"}\n{"text": "z"}\n')
    refused: list[Refused] = []
    assert [found.text for found in documents(opened(path), refuse=refused.append)] == ["y" * 37, "z"]
    assert [(each.line, each.reason) for each in refused] == [(1, "is longer than 50 bytes")]


def test_a_text_file_may_be_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("three")
    assert texts(opened(tmp_path, format=Format.FILE)) == ["one\ntwo\n", "three"]


def test_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert texts(opened(tmp_path / "a.txt")) == ["one", "two"]


def test_globs_take_what_they_match(tmp_path: Path) -> None:
    _two_files(tmp_path)
    assert opened(tmp_path / "part-*.jsonl").rows == 700
    assert opened(tmp_path / "*-1.jsonl").rows == 400
    (tmp_path / "deep" / "er").mkdir(parents=True)
    jsonl(tmp_path / "deep" / "er" / "c.jsonl", ROWS[:5])
    assert opened(tmp_path / "**" / "c.jsonl").rows == 5


def test_a_split_is_found_by_the_names_of_files_and_folders(tmp_path: Path) -> None:
    _parquet(tmp_path)
    pq.write_table(pa.Table.from_pylist(ROWS[:9]), tmp_path / "test-00000-of-00001.parquet")
    assert opened(tmp_path, split="test").rows == 9
    assert opened(tmp_path).rows == 709
    (tmp_path / "validation").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[:4]), tmp_path / "validation" / "0000.parquet")
    assert opened(tmp_path, split="validation").rows == 4
    with pytest.raises(BadInput, match="split: 'dev' is in no name under"):
        opened(tmp_path, split="dev")


def test_a_saved_dict_of_datasets_has_splits(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    _saved_to_disk(tmp_path, "train")
    assert opened(tmp_path, split="train").rows == 700
    with pytest.raises(BadInput, match="has the splits train, test; choose one with split"):
        opened(tmp_path)
    with pytest.raises(BadInput, match=r"split: 'dev' is not in .*; there are train, test"):
        opened(tmp_path, split="dev")
    with pytest.raises(BadInput, match=r"has no state\.json; was it saved to the end"):
        opened(tmp_path, split="test")


def test_a_saved_dataset_with_a_file_missing_is_refused(tmp_path: Path) -> None:
    _saved_to_disk(tmp_path)
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(BadInput, match=r"lacks .*data-00001-of-00002\.arrow; copy it again"):
        opened(tmp_path)


def test_a_saved_dataset_with_its_order_elsewhere_is_refused(tmp_path: Path) -> None:
    _saved_to_disk(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}')
    with pytest.raises(BadInput, match="flatten_indices"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: [folder / "nothing.jsonl"], "matches no file"),
        (lambda folder: [folder], "matches no file"),
        (lambda folder: [], "names nothing"),
        (lambda folder: [_jsonl(folder), _text(folder)], "several formats: jsonl, text"),
        (lambda folder: [(folder / "a.csv").write_text("x") and folder / "a.csv"], "has no file that ends in .jsonl"),
        (lambda folder: [(folder / "a.parquet").write_text("x") and folder / "a.parquet"], "is not Parquet"),
        (lambda folder: [(folder / "a.arrow").write_text("ARROW1") and folder / "a.arrow"], "is not Arrow"),
        (lambda folder: [(folder / "a.jsonl").touch() or folder / "a.jsonl"], "has no rows in 1 files"),
        (lambda folder: ["ftp://somewhere/a.jsonl"], "is no place we can read"),
    ],
)
def test_what_is_no_dataset_is_refused_in_one_line(
    make: Callable[[Path], list[Path | str]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        opened(*make(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_column_that_is_not_there_is_told_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no column 'body'; it has text, name, tokens; name one of these"):
        opened(_parquet(tmp_path), column="body")


def test_a_file_that_changed_since_it_was_listed_is_an_error(tmp_path: Path) -> None:
    source = opened(_jsonl(tmp_path))
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(Changed, match="it was changed"):
        texts(source)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, 701)])
def test_rows_that_are_not_there_are_refused(start: int, stop: int, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="are not among the dataset's 700"):
        texts(opened(_jsonl(tmp_path)), start, stop)


@pytest.mark.parametrize("layout", [_gzip, _zstd, _parquet, _arrow_stream, _arrow_file])
def test_a_file_that_was_damaged_is_an_error_that_names_it(layout: Write, tmp_path: Path) -> None:
    place = layout(tmp_path)
    source = opened(place)
    path = Path(source.files[0].address)
    data = bytearray(path.read_bytes())
    data[200 : len(data) // 2] = bytes(len(data) // 2 - 200)
    path.write_bytes(data)
    with pytest.raises(Exception, match=path.name) as caught:
        texts(source)
    assert isinstance(caught.value, Damaged | BadInput | Changed)
    assert "\n" not in str(caught.value)


def edited(path: Path, old: bytes = b"row 55", new: bytes = b"row 66") -> None:
    """Some bytes in place: neither the size nor the date of the file differs afterwards."""
    facts, data = path.stat(), path.read_bytes()
    assert old in data
    with path.open("r+b") as file:
        file.write(data.replace(old, new))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert path.stat().st_size == facts.st_size


def by_older_version(source: Source) -> Source:
    """As plans were before marks had hashes: every file's SHA-256 only."""
    return msgspec.structs.replace(
        source,
        files=tuple(
            msgspec.structs.replace(
                file,
                fingerprint=f"sha256:{hashlib.sha256(Path(file.address).read_bytes()).hexdigest()}",
                marks=tuple(msgspec.structs.replace(mark, digest="", size=0) for mark in file.marks),
            )
            for file in source.files
        ),
    )


@pytest.mark.parametrize("older", [False, True], ids=["", "older plan"])
@pytest.mark.parametrize("layout", [_jsonl, _two_files, _text, _arrow_file, _arrow_stream, _saved_to_disk])
def test_bytes_that_were_replaced_are_an_error_and_not_a_mixture(layout: Write, older: bool, tmp_path: Path) -> None:
    source = opened(layout(tmp_path))
    if older:
        source = by_older_version(source)
    assert len(texts(source)) == len(ROWS)
    edited(Path(source.files[0].address))
    with pytest.raises(Changed, match=r"is not the file that the plan was made from.*; put it back, or make a new run"):
        texts(source)


@pytest.mark.parametrize("kind", [Format.FILE, Format.TEXT])
def test_a_change_behind_the_rows_that_were_asked_for_is_seen_within_a_piece_only(
    kind: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compared is what was read: a worker is not made to hash the whole set for a unit of it."""
    monkeypatch.setattr(formats, "MARK_BYTES", 1000)
    monkeypatch.setattr(formats, "_CHUNK_BYTES", 100)
    source = opened(_text(tmp_path), format=kind)
    path = tmp_path / "a.txt"
    edited(path, b"row 699", b"row 599")
    if kind is Format.FILE:
        with pytest.raises(Changed, match="differs behind row 0"):
            texts(source)
        return
    assert len(source.files[0].marks) > 5
    assert texts(source, 0, 600) == [row["text"] for row in ROWS[:600]]
    with pytest.raises(Changed, match="differs behind row 6"):
        texts(source, source.files[0].marks[-1].row, source.files[0].marks[-1].row + 1)


def _long_lines(folder: Path) -> Path:
    """More than is read ahead: what was read before a change is right, and stays so."""
    return jsonl(folder / "a.jsonl", [{"text": "long " * 1000} for _ in range(1000)])


@pytest.mark.parametrize("layout", [_long_lines, _arrow_file, _parquet])
def test_a_change_while_a_range_is_read_is_an_error_before_its_end(layout: Write, tmp_path: Path) -> None:
    source = opened(layout(tmp_path))
    path = Path(source.files[0].address)
    rows = documents(source)
    next(rows)
    with path.open("r+b") as file:  # behind what was read ahead, but within what is still to be read
        file.seek(-40, os.SEEK_END)
        file.write(b"x" * 20)
    with pytest.raises((Changed, Damaged)):
        list(rows)


@pytest.mark.parametrize("layout", [_gzip, _zstd, _arrow_stream, _parquet])
def test_a_file_that_breaks_off_is_refused_when_it_is_looked_over(layout: Write, tmp_path: Path) -> None:
    place = layout(tmp_path)
    path = place if place.is_file() else next(place.glob("*.parquet"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises((Damaged, BadInput)) as caught:
        opened(path)
    assert path.name[:1] in str(caught.value)
    assert "\n" not in str(caught.value)


# Not ru_maxrss: a child inherits that of the process that started it.
MEASURED = """
import re, sys
from pathlib import Path
import pyarrow.parquet
from penstock.extract.source import Source, SourceSpec, documents

def peak_kb():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak_kb()
source = Source.open(SourceSpec(data=(sys.argv[1],)))
count = sum(len(document.text) for document in documents(source))
print(count, (peak_kb() - before) // 1024)
"""


@pytest.mark.parametrize(
    ("kind", "rows", "limit_mb"),
    [("jsonl", 5_000, 25), pytest.param("parquet", 16_000, 110, marks=pytest.mark.long)],
)
def test_memory_does_not_grow_with_the_dataset(kind: str, rows: int, limit_mb: int, tmp_path: Path) -> None:
    """A file is read with the memory of some pieces of it, in a process of its own, where nothing else counts.

    Parquet's library needs about 75 MB, however large the file is (seen with 52 and with 209 MB).
    """
    text = "é memory " * 1100
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        line = msgspec.json.encode({"text": text}) + b"\n"
        with path.open("wb") as file:
            for _ in range(rows // 100):
                file.write(line * 100)
    else:
        # One row group and no dictionary: the worst case of a reader that fetches a group at a time.
        table = pa.table({"text": [f"{number:09d}{text[9:]}" for number in range(rows)]})
        pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=rows)
    assert path.stat().st_size > 1.5 * limit_mb * 2**20
    done = subprocess.run([sys.executable, "-c", MEASURED, str(path)], capture_output=True, text=True, check=True)
    count, grown_mb = map(int, done.stdout.split())
    assert count == len(text) * rows
    assert grown_mb < limit_mb
