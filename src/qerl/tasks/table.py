"""Rows from wherever a user keeps them, by split: {"train": rows(), "test": rows()}.

| source | splits |
|---|---|
| file.jsonl, file.parquet, file.csv, file.tsv | one, called after the file |
| folder with such files (`train.jsonl`, `test.parquet`; also `train-00000-of-00002.parquet`) | one for each name |
| folder written by `datasets`' `save_to_disk` | the data set's own, else "train" |
| anything else that may be a name (`openai/gsm8k`, with `subset` "main") | those of `datasets.load_dataset` |

A row is a dict of plain Python values. Cells of CSV are text, so that `007` and `1e5` stay what they were. Files are
read directly and leave nothing in a cache; only a named data set is downloaded, to where `datasets` keeps it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Splits = dict[str, Callable[[], list[Row]]]

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_PATIENCE = 3.0
"""Seconds until a person is told what is waited for: without a network the Hub takes half a minute."""


def open_table(source: str, subset: str | None = None) -> Splits:
    """Return a reader for each split; nothing is read yet. ValueError for a source that is none of the above."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in _READERS:
            raise ValueError(f"{path}: only {', '.join(_READERS)} files can be read")
        return {path.stem: lambda: _READERS[path.suffix](path)}
    if path.is_dir():
        return _open_folder(path)
    if not _HUB_NAME.fullmatch(source) or path.suffix in _READERS:
        raise ValueError(f"there is no file or folder {source}")
    return _open_named(source, subset)


def fingerprint(rows: Sequence[Any]) -> str:
    """Sixteen hexadecimal digits that change with the rows, by which a resumed run knows its data."""
    text = json.dumps(rows, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def _open_folder(path: Path) -> Splits:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        import datasets  # slow to import, and only some data need it

        data = datasets.load_from_disk(str(path))
        parts = data if isinstance(data, datasets.DatasetDict) else {"train": data}
        return {str(name): part.to_list for name, part in parts.items()}
    files: dict[str, list[Path]] = {}
    for file in sorted(path.iterdir()):
        if file.suffix in _READERS:
            files.setdefault(_SHARD.sub("", file.stem), []).append(file)
    if not files:
        raise ValueError(f"the folder {path} has no {', '.join(_READERS)} file")

    def reader(shards: list[Path]) -> Callable[[], list[Row]]:
        return lambda: [row for shard in shards for row in _READERS[shard.suffix](shard)]

    return {name: reader(shards) for name, shards in files.items()}


def _open_named(name: str, subset: str | None) -> Splits:
    import datasets

    told = Timer(
        _PATIENCE, logger.warning, ("no file or folder %s: the Hub is asked for a data set of that name", name)
    )
    told.daemon = True
    told.start()
    try:
        splits = datasets.get_dataset_split_names(name, subset)
    except Exception as error:  # network, spelling, a subset that must be named: the library's text says which
        raise ValueError(
            f"there is no file or folder {name}, and `datasets` cannot load a data set of that name: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        told.cancel()

    def reader(split: str) -> Callable[[], list[Row]]:
        return lambda: datasets.load_dataset(name, subset, split=split).to_list()

    return {split: reader(split) for split in splits}


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not valid JSON ({error}); one object a line is expected"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: one object a line is expected, found {type(row).__name__}")
        rows.append(row)
    return rows


def _text(path: Path) -> str:
    """All of it, line ends as they are. ValueError: it is not UTF-8."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from None


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet  # comes with `datasets`

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no readable Parquet file: {error}") from None


def _read_csv(path: Path) -> list[Row]:
    lines = io.StringIO(_text(path), newline="")
    rows = list(csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True))
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ValueError(f"{path}, row {number}: the number of cells is not that of the header")
    return rows


_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
