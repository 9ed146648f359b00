"""docs/configuration.md says what the config says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("write_configuration", ROOT / "scripts" / "write_configuration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "configuration.md").read_text() == module.render(), "run scripts/write_configuration.py"
