"""Which processes are started where."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from f3rm_ext.engine import launch
from f3rm_ext.errors import ConfigError
from f3rm_ext.moco import run
from f3rm_ext.moco.processes import CpuSyncBatchNorm, start_processes, sync_batch_norms


@pytest.mark.parametrize(("gpus", "machines", "here"), [(0, 1, 0), (1, 1, 0), (0, 2, 1), (3, 1, 3), (2, 4, 2)])
def test_one_process_per_gpu_or_one_on_the_cpu(
    gpus: int,
    machines: int,
    here: int,
    monkeypatch: pytest.MonkeyPatch,
    pretend_gpus: Callable[[int], None],
    set_command_line: Callable[..., None],
) -> None:
    started: list[list[str]] = []
    pretend_gpus(gpus)
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    set_command_line("f3rm-ext", "moco")
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


def test_each_process_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(launch, "place", lambda: (3, 4))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert run._open_device("cuda") == torch.device("cuda:3") and current == [torch.device("cuda:3")]
    assert run._open_device("cpu").type == "cpu" and len(current) == 1


@pytest.mark.parametrize(("cuda", "kind"), [(False, CpuSyncBatchNorm), (True, nn.SyncBatchNorm)])
def test_batch_norms_are_torchs_on_a_gpu(cuda: bool, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4)))
    before = {**network.state_dict(keep_vars=True)}
    if cuda:
        monkeypatch.setattr(nn.Parameter, "device", torch.device("cuda:0"), raising=False)
    sync_batch_norms(network)
    monkeypatch.undo()
    assert type(network[1][0]) is kind  # type: ignore[index]
    after = network.state_dict(keep_vars=True)
    assert after.keys() == before.keys() and all(after[name] is value for name, value in before.items())
