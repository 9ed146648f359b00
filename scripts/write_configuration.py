"""Write docs/configuration.md from the docstrings in src/qerl/config.py: `python scripts/write_configuration.py`.

A test holds the file against what this prints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from qerl.config import RunConfig, Section

TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

A run is one TOML file. `qerl train RUN.toml section.key=value` overrides single settings; `qerl config RUN.toml` prints
the whole of it, defaults included. Unknown keys are errors. `section.key=null` opens a setting again whose default is
empty. This page is written by `scripts/write_configuration.py`.
"""


def render() -> str:
    """The page."""
    sections = {name: f.annotation for name, f in RunConfig.model_fields.items() if _is_section(f.annotation)}
    parts = [HEAD, _table("The run", RunConfig, skip=sections)]
    parts += [_table(f"[{name}]", section) for name, section in sections.items()]
    return "\n".join(parts)


def _table(title: str, section: Any, skip: Any = ()) -> str:
    lines = [f"## {title}", "", section.__doc__.split("\n")[0], "", "| key | default | meaning |", "|---|---|---|"]
    for name, field in section.model_fields.items():
        if name in skip:
            continue
        choices = (
            f" One of {', '.join(map(str, get_args(field.annotation)))}."
            if get_origin(field.annotation) is Literal
            else ""
        )
        default = "" if field.default is None else f"`{json.dumps(field.default)}`"
        meaning = " ".join(field.description.split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | {meaning}{choices} |")
    return "\n".join([*lines, ""])


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


if __name__ == "__main__":
    TARGET.write_text(render())
    print(TARGET)
