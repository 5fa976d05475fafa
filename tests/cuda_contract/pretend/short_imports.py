"""For ``pytest -p``: processes of tests that neither show a viewer nor compile are spared 3 s of imports."""

from f3rm_ext.compat import shorten_imports

shorten_imports()
