"""Which processes are started where."""

import os
import sys

import pytest
import torch

from f3rm_ext.errors import ConfigError
from f3rm_ext.moco.processes import start_processes


@pytest.mark.parametrize(("gpus", "machines", "here"), [(0, 1, 0), (1, 1, 0), (0, 2, 1), (3, 1, 3), (2, 4, 2)])
def test_one_process_per_gpu_or_one_on_the_cpu(
    gpus: int, machines: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["f3rm-ext", "moco"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    start_processes(machines, machines - 1, "tcp://host:99")
    assert bool(started) == bool(here)
    for words in started:
        given = dict(zip(words[3:-3:2], words[4:-3:2], strict=True))
        assert given["--nnodes"] == str(machines) and given["--node-rank"] == str(machines - 1)
        assert given["--nproc-per-node"] == str(here) and given["--master-port"] == "99"
        assert words[-3:] == ["--no-python", "f3rm-ext", "moco"]


@pytest.mark.parametrize(("rank", "url", "option"), [(2, "tcp://host:99", "--rank"), (0, "tcp://host", "--dist-url")])
def test_numbers_that_contradict_each_other_are_refused(rank: int, url: str, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        start_processes(2, rank, url)
