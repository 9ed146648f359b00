"""The "Where is X?" table of docs/architecture.md, and the README's tree, name things that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| .+? \| `(src/[^`]+)` \| `(\w+)` \|$", (ROOT / "docs" / "architecture.md").read_text(), re.M)


def test_the_table_is_found():
    assert len(ROWS) > 20


@pytest.mark.parametrize("path, name", ROWS)
def test_every_row_exists(path, name):
    text = (ROOT / path).read_text()
    assert re.search(rf"^(def|class|async def) {name}\b|^{name}\b", text, re.M), f"{path} defines no {name}"


def test_the_readme_names_every_package_and_module():
    tree = (ROOT / "README.md").read_text().split("## The tree")[1]
    for path in (ROOT / "src" / "qerl").iterdir():
        if path.name.startswith("__") or path.name == "py.typed":
            continue
        assert path.name in tree, f"README's tree lacks {path.name}"
