"""Has the shapes and types of f3rm_ext's functions checked while tests run."""

import sys

import pytest

CHECKED = sys.version_info >= (3, 11)

# Before any test or other conftest imports the package. The jaxtyping that Python 3.10 gets wraps functions before
# numba compiles them, whatever @no_type_check says, so that the tests go without there.
if CHECKED:
    from jaxtyping import install_import_hook

    install_import_hook("f3rm_ext", "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves tests of these checks out where nothing is checked."""
    for item in items:
        if not CHECKED and item.get_closest_marker("shapes"):
            item.add_marker(pytest.mark.skip(reason="shapes are checked from Python 3.11 on"))
