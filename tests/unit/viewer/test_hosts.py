"""Nerfstudio's viewer listens on this machine only, unless another address is typed: real servers, by their sockets."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.viewer.viewer import Viewer

from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.method_configs.splat_presets import make_splat_config


@pytest.mark.parametrize(
    ("make", "method", "typed"),
    [(make_config, "f3rm-ext", None), (make_splat_config, "sugar-ext", None), (make_config, "f3rm-ext", "0.0.0.0")],
)
def test_addresses(
    make: Callable[[str], Any],
    method: str,
    typed: str | None,
    free_port: Callable[[], int],
    listening_hosts: Callable[[int, int], set[str]],
    tmp_path: Path,
) -> None:
    options, port = make(method).viewer, free_port()
    options.websocket_port, options.websocket_host = port, typed or options.websocket_host
    pipeline: Any = SimpleNamespace(model=torch.nn.Module(), datamanager=SimpleNamespace(includes_time=False))
    viewer = Viewer(options, log_filename=tmp_path / "viewer.log", datapath=tmp_path, pipeline=pipeline)
    try:
        assert listening_hosts(os.getpid(), port) == {typed or "127.0.0.1"}
    finally:
        viewer.viser_server.stop()
