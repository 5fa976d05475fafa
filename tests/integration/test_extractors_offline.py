"""Extractors in fresh processes without network: what doctor and a training run meet on a bare machine."""

import json
import os
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
ENVIRONMENTS = ({"HF_HUB_OFFLINE": "1"}, {"https_proxy": "http://127.0.0.1:9"})
IN_EACH = """
import json, os, sys
import torch, torchvision, f3rm_ext.features.extractors.registry
assert "huggingface_hub" not in sys.modules, "it reads its environment when it is imported"
code, *environments = json.load(sys.stdin)
for environment in environments:
    child = os.fork()
    if not child:
        os.environ.update(environment)
        exec(code, {"__name__": "__main__"})
        print("end", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process that has imported torch")
def test_missing_weights_are_seen_at_once_and_fail_soon_and_say_how_to_place_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_EACH],
        input=json.dumps([STATUS + MISSING_WEIGHTS, *ENVIRONMENTS]),
        env=BARE,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    *each, nothing = done.stdout.split("end\n")
    assert len(each) == len(ENVIRONMENTS) and not nothing, done.stderr
    for said in each:
        *status, clip, dino, dinov2 = said.splitlines()
        found = dict(line.split() for line in status)
        expected = {"clip": "True", "dino": "True", "dinov2": "True", "dense-daisy": "False"}
        assert {name: found[name] for name in expected} == expected
        assert [clip, dino, dinov2] == ["clip True", "dino True", "dinov2:model=vitb14_reg True"]
