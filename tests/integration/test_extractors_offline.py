"""Extractors in a fresh process without network: what doctor and a training run meet on a bare machine."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

BARE = {"HF_HOME": "/nonexistent", "TORCH_HOME": "/nonexistent", "HOME": "/nonexistent", "PATH": ""}
STATUS = """
import socket, torch
from f3rm_ext.features.extractors.registry import available_extractors
def refuse(*args, **kwargs): raise AssertionError("went on-line or loaded a network")
kept, socket.socket.connect, torch.load = (socket.socket.connect, torch.load), refuse, refuse
for info in available_extractors().values():
    print(info.name, info.weights_status().missing)
socket.socket.connect, torch.load = kept
"""
MISSING_WEIGHTS = """
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
"""


# Port 9 refuses connections: what a machine without network looks like to the hub's libraries.
@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"https_proxy": "http://127.0.0.1:9"}])
def test_missing_weights_are_seen_at_once_and_fail_soon_and_say_how_to_place_them(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STATUS + MISSING_WEIGHTS],
        env=BARE | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    *status, clip, dino, dinov2 = done.stdout.splitlines()
    found = dict(line.split() for line in status)
    expected = {"clip": "True", "dino": "True", "dinov2": "True", "dense-daisy": "False"}
    assert {name: found[name] for name in expected} == expected
    assert [clip, dino, dinov2] == ["clip True", "dino True", "dinov2:model=vitb14_reg True"]
