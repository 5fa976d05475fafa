"""Has the shapes and types of f3rm_ext's functions checked while tests run."""

import sys

# Before any test or other conftest imports the package. The jaxtyping that Python 3.10 gets wraps functions before
# numba compiles them, whatever @no_type_check says, so that the tests go without there.
if sys.version_info >= (3, 11):
    from jaxtyping import install_import_hook

    install_import_hook("f3rm_ext", "beartype.beartype")
