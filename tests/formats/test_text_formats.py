"""Text formats: the same documents from any way of reading, and an error that names the place otherwise."""

import gzip
import io
import itertools
import json
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from fmsdata.errors import CountsError, DataError
from fmsdata.formats import SUFFIXES as ENDINGS
from fmsdata.formats import open_shard, open_stream, read_layout
from fmsdata.formats.base import read_from
from fmsdata.formats.line_index import LineIndex, index_lines
from fmsdata.formats.lines import split_lines
from tests.text_files import SUFFIXES, encode, expected, of_block, of_stream

LINES = [suffix for suffix in SUFFIXES if suffix != "parquet"]
ODD = ["one\u2028two", "a\x0bb\x0cc\x85d", "é漢😀", "\ttab ", " ", "None", "null", '"quoted" \\n', "\x00"]
# One line of text, without what is dropped or ends it.
line = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\ufeff"), max_size=30)


def name(suffix: str) -> str:
    return f"part-0.{suffix}"


def documents(data: bytes, suffix: str, column: str | None = None) -> list[bytes]:
    """All documents of a file in memory."""
    shard = open_shard(pa.py_buffer(data), name(suffix), column)
    return of_block(shard.read(0, shard.documents)) if shard.documents else []


def streamed(data: bytes, suffix: str, step: int, **options: Any) -> list[bytes]:
    stream = open_stream(name(suffix), **options)
    parts = [stream.feed(data[i : i + step]) for i in range(0, len(data), step)]
    return of_stream([*parts, stream.finish()])


# The same documents from any way of reading.


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.one_of(st.none(), line, st.sampled_from(ODD)), max_size=40),
    suffix=st.sampled_from(SUFFIXES),
    frame=st.integers(1, 200),
    rows=st.integers(1, 12),
    data=st.data(),
)
def test_every_way_of_reading_gives_the_same_documents(
    texts: list[str | None], suffix: str, frame: int, rows: int, data: st.DataObject
) -> None:
    file = encode(texts, suffix, frame=frame, rows=rows)
    shard = open_shard(pa.py_buffer(file), name(suffix))
    layout = read_from(file, read_layout(name(suffix), len(file)))
    wanted = expected(texts)
    assert shard.text
    assert layout.text
    assert shard.documents == layout.documents == len(texts)
    if suffix != "parquet":
        assert streamed(file, suffix, data.draw(st.integers(1, 300))) == wanted
        assert shard.known_tokens == layout.known_tokens == shard.tokens() == read_from(file, layout.tokens())
    for _ in range(3 if texts else 0):
        first = data.draw(st.integers(0, len(texts) - 1))
        stop = data.draw(st.integers(first + 1, len(texts)))
        assert of_block(shard.read(first, stop)) == wanted[first:stop]
        assert of_block(read_from(file, layout.block(first, stop))) == wanted[first:stop]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), "dictionary", pa.binary(), pa.string_view()], ids=str)
def test_a_parquet_column_of_any_text_type_is_read(kind: Any) -> None:
    texts = [*ODD, None, "", "dup", "dup", "line\nbreak"] * 3
    file = encode(texts, "parquet", kind=kind, rows=5)
    assert documents(file, "parquet") == expected(texts)


def test_null_and_empty_rows_keep_their_numbers_and_are_never_none() -> None:
    for suffix in SUFFIXES:
        assert documents(encode(["a", None, "", "b"], suffix), suffix) == [b"a", b"", b"", b"b"]


def test_the_column_is_the_field_of_json_and_the_column_of_parquet() -> None:
    for suffix in ("jsonl", "jsonl.gz", "parquet"):
        assert documents(encode(["a", "b"], suffix, column="body"), suffix, "body") == [b"a", b"b"]


@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.int32(), 2)], ids=str)
def test_a_list_column_of_parquet_holds_tokens(kind: Any) -> None:
    rows: list[Any] = [[1, 2], [3, 4], [5, 6]] * 5 if pa.types.is_fixed_size_list(kind) else [[1, 2], [], None, [7]] * 5
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": ["a"] * len(rows), "tokens": pa.array(rows, kind)}), sink, row_group_size=3)
    file = sink.getvalue()
    shard = open_shard(pa.py_buffer(file), "a.parquet")
    layout = read_from(file, read_layout("a.parquet", len(file)))
    total = sum(len(row or []) for row in rows)
    assert not shard.text
    assert not layout.text
    assert shard.tokens() == read_from(file, layout.tokens()) == total
    for block in (shard.read(1, len(rows)), read_from(file, layout.block(1, len(rows)))):
        found = [block.arrays[0][s : s + n].tolist() for s, n in zip(block.start, block.length, strict=True)]
        assert found == [row or [] for row in rows[1:]]
        assert block.arrays[0].dtype == np.dtype(str(kind.value_type))


def test_tokens_of_parquet_are_counted_where_the_footer_does_not_say() -> None:
    sink = io.BytesIO()
    rows = pa.array([[1, 2], [], None, [7]] * 5, pa.list_(pa.uint16()))
    pq.write_table(pa.table({"tokens": rows}), sink, row_group_size=3, write_statistics=False)
    file = sink.getvalue()
    shard = open_shard(pa.py_buffer(file), "a.parquet")
    assert shard.known_tokens is None
    assert shard.tokens() == read_from(file, read_from(file, read_layout("a.parquet", len(file))).tokens()) == 15


# Lines.


def test_lines_end_at_newlines_only_and_lose_a_return_and_a_mark() -> None:
    data = "\ufeffone\u2028 \x0b\x0c\x85\r\n\r\n\ufefftwo\r\r\nthree\rfour\nlast\r".encode()
    wanted = ["one\u2028 \x0b\x0c\x85", "", "\ufefftwo\r", "three\rfour", "last"]
    for suffix, stored in (("txt", data), ("txt.gz", gzip.compress(data)), ("zst", zstandard.compress(data))):
        assert documents(stored, suffix) == expected(wanted)
        for step in (1, 2, 3, 1000):
            assert streamed(stored, suffix, step) == expected(wanted)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", 0),
        (b"\n", 1),
        (b"\r\n", 1),
        (b"a", 1),
        (b"a\n", 1),
        (b"\n\n\n", 3),
        (b"\xef\xbb\xbf", 1),
        (b"\xef\xbb\xbf\n", 1),
    ],
)
def test_the_number_of_lines_is_that_of_newlines_and_a_rest(data: bytes, lines: int) -> None:
    assert len(split_lines(data)) == lines
    assert open_shard(pa.py_buffer(data), "a.txt").documents == lines
    assert len(documents(data, "txt")) == len(streamed(data, "txt", 2)) == lines


def test_blank_lines_of_json_are_empty_documents() -> None:
    data = b'\n{"text": "a"}\n  \n{"text": null}\n\r\n{"text": ""}\n'
    assert documents(data, "jsonl") == [b"", b"a", b"", b"", b"", b""]


# Frames and members.


def zstd_frame(data: bytes, **options: Any) -> bytes:
    """A frame that does not say how long it is."""
    parameters = zstandard.ZstdCompressionParameters(write_content_size=False, **options)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(data) + compressor.flush()


def test_all_frames_of_a_file_are_read_whatever_is_between_them() -> None:
    texts = [f"document {i}" for i in range(300)]
    data = "".join(f"{text}\n" for text in texts).encode()
    skipped = struct.pack("<II", 0x184D2A50, 7) + b"skipped"
    parts = [data[i : i + 500] for i in range(0, len(data), 500)]
    frames = [zstandard.compress(part) if i % 2 else zstd_frame(part) for i, part in enumerate(parts)]
    file = skipped + skipped.join(frames) + zstandard.compress(b"") + skipped
    assert documents(file, "txt.zst") == streamed(file, "txt.zst", 7) == expected(texts)
    members = [gzip.compress(part, mtime=0) for part in parts]
    file = gzip.compress(b"") + b"".join(members) + bytes(512)
    assert documents(file, "txt.gz") == streamed(file, "txt.gz", 7) == expected(texts)


def test_frames_with_the_longest_window_are_read() -> None:
    file = zstd_frame(b"one\ntwo\n" * 100, window_log=31, enable_ldm=True)
    with pytest.raises(zstandard.ZstdError, match="memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress(file)
    assert documents(file, "txt.zst") == [b"one", b"two"] * 100


@pytest.mark.parametrize("suffix", [suffix for suffix in SUFFIXES if suffix not in ("txt", "jsonl")])
def test_a_cut_file_is_an_error_and_never_fewer_documents(suffix: str) -> None:
    texts = [f"document {i} " + "x" * (i % 17) for i in range(60)]
    file = encode(texts, suffix, frame=400)
    frames = {len(encode(texts, suffix, frame=400)[:0])}
    if suffix != "parquet":  # a file that ends where a frame ends is a file
        plain = encode(texts, suffix.rpartition(".")[0] if "." in suffix else "txt")
        compress = gzip.compress if suffix.endswith("gz") else zstandard.ZstdCompressor().compress
        sizes = [len(compress(plain[i : i + 400])) for i in range(0, len(plain), 400)]
        frames = set(itertools.accumulate(sizes))
    refused = 0
    for cut in range(len(file)):
        if cut in frames:
            continue
        with pytest.raises(DataError, match=name(suffix)):
            documents(file[:cut], suffix)
        if suffix != "parquet":
            with pytest.raises(DataError, match=name(suffix)):
                streamed(file[:cut], suffix, 100)
        refused += 1
    assert refused > len(file) - 20


def test_bytes_behind_the_last_frame_are_an_error() -> None:
    for suffix in ("txt.gz", "txt.zst"):
        with pytest.raises(DataError, match=f"{name(suffix)}: the file is damaged"):
            documents(encode(["a"], suffix) + b"garbage", suffix)


# Bad input names the file and the line.

BAD_JSON = [
    (b'{"text": "a"', "it is not JSON"),
    (b"[1]", "it is a JSON array, not an object with the field 'text'"),
    (b"3", "it is a JSON number"),
    (b"null", "it is a JSON null"),
    (b'{"body": "a"}', "there is no field 'text'; its fields are: body"),
    (b'{"text": 3}', "the field 'text' is a number, not a string"),
    (b'{"text": ["a"]}', "the field 'text' is a array, not a string"),
    (b'{"text": true}', "the field 'text' is a boolean"),
    (b'{"text": "\\ud800"}', "surrogate"),
    (b'{"text": "\xff"}', "it is not UTF-8 text"),
    (b"[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_JSON, ids=[reason for _, reason in BAD_JSON])
def test_a_bad_line_is_an_error_that_names_it_or_is_skipped(bad: bytes, reason: str) -> None:
    data = b'{"text": "one"}\n\n' + bad + b'\r\n{"text": "two"}\n'
    for suffix, stored in (("jsonl", data), ("jsonl.gz", gzip.compress(data)), ("jsonl.zst", zstandard.compress(data))):
        for read in (documents, lambda file, kind: streamed(file, kind, 50)):
            with pytest.raises(DataError) as error:
                read(stored, suffix)
            assert f"{name(suffix)}: line 3: " in str(error.value)
            assert reason in str(error.value)
        stream = open_stream(name(suffix), skip_bad=True)
        parts = [stream.feed(stored), stream.finish()]
        assert of_stream(parts) == [b"one", b"", b"", b"two"]
        ((number, why),) = [each for part in parts for each in part.bad]
        assert number == 3
        assert reason in why
        shard = open_shard(pa.py_buffer(stored), name(suffix))
        assert of_block(shard.read(3, 4)) == [b"two"]  # other documents can be read


def test_text_that_is_not_utf8_names_its_line_or_row() -> None:
    data = "één\ntwo\n".encode() + b"th\xffree\nfour\n"
    with pytest.raises(DataError, match=r"part-0\.txt: line 3: it is not UTF-8"):
        documents(data, "txt")
    stream = open_stream("a.txt", skip_bad=True)
    assert of_stream([stream.feed(data)]) == ["één".encode(), b"two", b"", b"four"]
    cut = "é".encode()
    with pytest.raises(DataError, match="line 1"):
        documents(cut[:1] + b"\n" + cut[1:], "txt")
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array([b"a", b"b", b"\xff"], pa.binary())}), sink, row_group_size=2)
    with pytest.raises(DataError, match=r"part-0\.parquet: row 3: it is not UTF-8"):
        documents(sink.getvalue(), "parquet")


def test_numbers_of_any_size_and_other_fields_do_not_matter() -> None:
    data = ('{"n": ' + "9" * 5000 + ', "text": "a", "x": {"y": [1.5, NaN]}}\n').encode()
    assert documents(data, "jsonl") == [b"a"]


def test_a_parquet_file_without_a_known_column_says_what_it_has() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"id": [1], "input_ids": [[1]], "score": [0.5]}), sink)
    for column, problem in (
        (None, "no column 'text' or 'tokens'"),
        ("text", "no column 'text'"),
        ("score", "is double"),
    ):
        with pytest.raises(DataError) as error:
            documents(sink.getvalue(), "parquet", column)
        assert problem in str(error.value)
        assert "input_ids: list<element: int64>" in str(error.value)
        assert "documents.column" in str(error.value)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "txt", "txt.zst"])
def test_a_document_of_100_million_bytes_is_read(suffix: str) -> None:
    texts = ["short", "x" * 99_999_996 + "éé", "end"]
    file = encode(texts, suffix)
    shard = open_shard(pa.py_buffer(file), name(suffix))
    block = shard.read(0, 3)
    assert block.length.tolist() == [5, 100_000_000, 3]
    assert bytes(block.arrays[0][-7:]) == "éé".encode() + b"end"
    if suffix != "parquet":
        stream = open_stream(name(suffix))
        parts = [stream.feed(file[i : i + (1 << 20)]) for i in range(0, len(file), 1 << 20)]
        assert sum(len(part.tokens) for part in [*parts, stream.finish()]) == 100_000_008


# An index of lines.


def test_a_file_is_entered_near_a_block_and_not_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what is decompressed: at most the frames that a block is in."""
    texts = [f"document {i} " + "x" * (i % 300) for i in range(4000)]
    size = 16_384
    for suffix in ("txt", "txt.gz", "txt.zst", "jsonl.zst"):
        file = encode(texts, suffix, frame=size)
        index = read_from(file, index_lines(name(suffix), len(file)))
        assert index.largest < 3 * size
        read: list[int] = []
        pieces = LineIndex.inside

        def count(self: LineIndex, stretch: int, pieces: Any = pieces, read: list[int] = read) -> Any:
            read.append(int(np.diff(self.points[stretch : stretch + 2, 1])[0]))
            return pieces(self, stretch)

        monkeypatch.setattr(LineIndex, "inside", count)
        shard = open_shard(pa.py_buffer(file), name(suffix), index=index)
        for first in (0, 1700, 3990):
            read.clear()
            block = shard.read(first, first + 10)
            assert of_block(block) == expected(texts[first : first + 10])
            assert 0 < sum(read) < 4 * size
        monkeypatch.undo()


def test_points_are_not_far_apart_and_not_too_many() -> None:
    for lines, length in ((200_000, 20), (3, 2_000_000), (100, 100)):
        data = (b"x" * length + b"\n") * lines
        index = read_from(data, index_lines("a.txt", len(data)))
        assert index.documents == lines
        assert len(index.points) <= 1026
        assert index.largest <= max(4096, len(data) // 1024) + length + 2
        index.require(len(data))


def test_the_index_of_another_file_is_an_error() -> None:
    texts = [f"document {i}" for i in range(2000)]
    file = encode(texts, "txt")
    index = read_from(file, index_lines("a.txt", len(file)))
    with pytest.raises(CountsError, match="fmsdata index"):
        open_shard(pa.py_buffer(file + b"\n"), "a.txt", index=index)
    changed = bytearray(file)
    at = changed.index(b"document 1000") - 1
    changed[at : at + 2] = b"d\n"
    shard = open_shard(pa.py_buffer(bytes(changed)), "a.txt", index=index)
    whole = of_block(shard.read(0, 2000))  # a newline that moved: each document is a line of the file as it is
    assert whole == bytes(changed).split(b"\n")[:-1]
    changed[at] = ord("\n")
    shard = open_shard(pa.py_buffer(bytes(changed)), "a.txt", index=index)
    with pytest.raises(CountsError, match=r"a\.txt: lines .* are not where the index"):
        shard.read(0, 2000)


# Libraries.


def test_a_missing_library_is_an_error_that_names_the_extra() -> None:
    code = """
import sys
sys.modules["zstandard"] = None
import fmsdata.formats
from fmsdata.errors import ConfigError
fmsdata.formats.open_stream("a.txt.gz")
try:
    fmsdata.formats.open_stream("a.txt.zst")
except ConfigError as error:
    assert "pip install 'fmsdata[text]'" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_formats_does_not_import_their_libraries() -> None:
    code = "import sys, fmsdata.formats; assert not {'zstandard', 'pyarrow.parquet'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_ending_belongs_to_one_format() -> None:
    assert {f".{suffix}" for suffix in (*SUFFIXES, "arrow")} == set(ENDINGS)
    assert json.loads(encode(["a"], "jsonl").decode())["text"] == "a"
