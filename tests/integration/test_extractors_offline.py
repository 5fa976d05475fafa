"""Extractors in a fresh process without network: what doctor and a training run meet on a bare machine."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

BARE = {"HF_HOME": "/nonexistent", "TORCH_HOME": "/nonexistent", "HOME": "/nonexistent", "PATH": ""}
REFUSE_NETWORK = """
import socket
def refuse(*args, **kwargs): raise AssertionError("went on-line")
socket.socket.connect = refuse
"""


def run(code: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], env=BARE | environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_weights_status_neither_loads_networks_nor_goes_on_line() -> None:
    lines = run(
        REFUSE_NETWORK
        + """
import torch
torch.load = refuse
from f3rm_ext.features.extractors.registry import available_extractors
for info in available_extractors().values():
    print(info.name, info.weights_status().missing)
"""
    )
    found = dict(line.split() for line in lines)
    expected = {"clip": "True", "dino": "True", "dinov2": "True", "dense-daisy": "False"}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"https_proxy": "http://127.0.0.1:9"}])
def test_missing_weights_without_network_fail_soon_and_say_how_to_place_them(environment: dict[str, str]) -> None:
    # Port 9 refuses connections: what a machine without network looks like to the hub's libraries.
    lines = run(
        """
import time, torch
from f3rm_ext.errors import WeightsNotFoundError
from f3rm_ext.features.extractors.registry import build_extractor
for text, option in (("clip", "pretrained"), ("dino", "weights"), ("dinov2:model=vitb14_reg", "weights")):
    started = time.monotonic()
    try:
        build_extractor(text, device=torch.device("cpu"))
    except WeightsNotFoundError as error:
        assert f"{option}=PATH" in str(error) and "/nonexistent" in str(error), error
        # clip: the time includes importing open_clip.
        print(text, text == "clip" or time.monotonic() - started < 30)
""",
        **environment,
    )
    assert lines == ["clip True", "dino True", "dinov2:model=vitb14_reg True"]
