"""Rows from files, folders and data sets that `datasets` saved."""

from __future__ import annotations

import json
import logging
import threading

import datasets
import pytest

from qerl.tasks import table
from qerl.tasks.table import open_table

ROWS = [{"question": "a\u2028b ½", "answer": "007"}, {"question": 'c, "d"\ne', "answer": "1e5"}]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "jsonl.jsonl").write_text(
        "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n", encoding="utf-8"
    )
    data = datasets.Dataset.from_list(ROWS)
    data.to_parquet(tmp_path / "parquet.parquet")
    (tmp_path / "csv.csv").write_text('question,answer\na\u2028b ½,007\n"c, ""d""\ne",1e5\n', encoding="utf-8-sig")
    (tmp_path / "tsv.tsv").write_text('question\tanswer\na\u2028b ½\t007\n"c, ""d""\ne"\t1e5\n', encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "tsv"])
def test_a_file_is_one_split_called_after_it(folder, kind):
    splits = open_table(str(folder / f"{kind}.{kind}"))
    assert list(splits) == [kind]
    assert splits[kind]() == ROWS


def test_a_folder_has_a_split_for_each_file(folder):
    splits = open_table(str(folder))
    assert sorted(splits) == ["csv", "jsonl", "parquet", "tsv"]
    assert all(rows() == ROWS for rows in splits.values())


def test_numbered_files_are_one_split(tmp_path):
    for i, row in enumerate(ROWS):
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / f"train-0000{i}-of-00002.parquet")
    splits = open_table(str(tmp_path))
    assert list(splits) == ["train"]
    assert splits["train"]() == ROWS


def test_what_datasets_saved(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(tmp_path / "many"))
    one, many = open_table(str(tmp_path / "one")), open_table(str(tmp_path / "many"))
    assert {name: rows() for name, rows in one.items()} == {"train": ROWS}
    assert {name: rows() for name, rows in many.items()} == {"train": ROWS, "test": ROWS[1:]}


def test_a_name_goes_to_datasets(monkeypatch):
    data = datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, subset: ["train", f"{name}-{subset}"])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset, split: data if split == "train" else None)
    splits = open_table("owner/name", "main")
    assert list(splits) == ["train", "owner/name-main"]
    assert splits["train"]() == ROWS

    def fails(name, subset):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "get_dataset_split_names", fails)
    with pytest.raises(ValueError, match=r"no file or folder owner/name, and .*ConnectionError: no network"):
        open_table("owner/name")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{no', r"a\.jsonl, line 2: not valid JSON"),
        ("a.jsonl", "[1, 2]", r"a\.jsonl, line 1: one object a line is expected, found list"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", r"a\.csv, row 2: the number of cells is not that of the header"),
        ("a.csv", "a,b\n1\n", r"a\.csv, row 1: the number of cells"),
        ("a.txt", "", r"a\.txt: only \.jsonl, \.parquet, \.csv, \.tsv files can be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        for rows in open_table(str(tmp_path / name)).values():
            rows()


def test_a_byte_order_mark_is_skipped(tmp_path):
    for name, text in (("a.jsonl", '{"a": "1"}'), ("b.csv", "a\n1\n")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert open_table(str(tmp_path / name))[name[0]]() == [{"a": "1"}]


def test_sources_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"the folder .* has no \.jsonl, "):
        open_table(str(tmp_path))
    for source in ("/nowhere/at/all", "nowhere.jsonl", "../nowhere"):
        with pytest.raises(ValueError, match="there is no file or folder"):
            open_table(source)


def test_who_waits_for_the_hub_is_told(monkeypatch):
    """Without a network it takes half a minute to find out that a folder's name is misspelt."""
    asked, words = threading.Event(), []

    class Told(logging.Handler):
        def emit(self, record):
            words.append(record.getMessage())
            asked.set()

    def slow(name, subset):
        assert asked.wait(30)
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "get_dataset_split_names", slow)
    monkeypatch.setattr(table, "_PATIENCE", 0.01)
    monkeypatch.setattr(table.logger, "handlers", [Told()])
    with pytest.raises(ValueError, match="there is no file or folder data/mine, and"):
        open_table("data/mine")
    assert words == ["no file or folder data/mine: the Hub is asked for a data set of that name"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_another_encoding_is_told_with_its_place(tmp_path, name):
    (tmp_path / name).write_bytes('{"question": "x"}\n{"question": "caf\u00e9"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{name}, line 2: not UTF-8 .*save the file as UTF-8"):
        open_table(str(tmp_path / name))["a"]()
