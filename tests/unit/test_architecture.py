"""The layers that the documentation draws are those that the import contracts enforce."""

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]


def test_the_table_of_packages_is_that_of_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    enforced = {
        name.strip(" ()"): number for number, layer in enumerate(reversed(layers)) for name in re.split("[|:]", layer)
    }
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|.*\|$", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert {name: int(number) for number, name in rows} == enforced
