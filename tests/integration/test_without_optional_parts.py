"""Without any optional part, every command of nerfstudio still starts, with our methods and with others."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from nerfstudio.configs import external_methods

from f3rm_ext.compat import shorten_registration
from f3rm_ext.utils.libusb import provide_libusb

pytestmark = pytest.mark.integration

# One process in which all of them are missing: imports take most of the time.
CODE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {parts!r}:
            raise ModuleNotFoundError("No module named %r" % name, name=name)

sys.meta_path.insert(0, Missing())
from nerfstudio.scripts import train
METHODS = ("nerfacto", "f3rm-ext", "f3rm-ext-lite", "f3rm-ext-big", "sugar-ext")
for method in METHODS:
    sys.argv = ["ns-train", method, "-h"]
    try:
        train.entrypoint()
    except SystemExit as leaving:
        assert not leaving.code, (method, leaving.code)
from nerfstudio.configs.method_configs import all_methods
print("METHODS", *(type(all_methods[name]).__name__ for name in METHODS))
"""


PARTS = ("tinycudann", "triton", "open_clip", "gsplat", "transformers", "skimage", "trimesh")
"""Training needs no library of meshes; the machine of a GPU day has none."""


def test_help_of_every_method() -> None:
    result = subprocess.run(
        [sys.executable, "-c", CODE.format(parts=PARTS)], capture_output=True, text=True, check=False, timeout=200
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == "METHODS TrainerConfig" + 4 * " F3rmTrainerConfig"
    for method in ("nerfacto", "f3rm-ext", "f3rm-ext-lite", "f3rm-ext-big", "sugar-ext"):
        assert f"ns-train {method}" in result.stdout


def test_the_exporter_starts_without_libusb(run_command: Callable[..., Any]) -> None:
    """ns-export imports Open3D before anything of ours; a training has been run before it."""
    assert provide_libusb() is not None
    run_command("ns-export", "--help", fresh=True).succeeds()


def test_methods_to_install_are_listed_without_reading_source_and_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_registration()
    monkeypatch.setattr(inspect, "getmodule", lambda *_: pytest.fail("source is looked for"))
    monkeypatch.setattr("nerfstudio.configs.external_methods.Confirm.ask", lambda *_, **__: False)
    configs, _ = external_methods.get_external_methods()
    assert len(configs) > 20
    with pytest.raises(SystemExit):
        external_methods.ExternalMethodDummyTrainerConfig("nerfgs", external_methods.external_methods[0])
