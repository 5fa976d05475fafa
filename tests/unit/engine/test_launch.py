"""What is checked before several processes start, and what torchrun's variables mean; no process is started here."""

from collections.abc import Callable

import pytest
from nerfstudio.configs.base_config import MachineConfig

from f3rm_ext.engine import launch
from f3rm_ext.errors import ConfigError

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch, pretend_gpus: Callable[[int], None]) -> None:
    pretend_gpus(2)
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def is_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def machine(**options: object) -> MachineConfig:
    return MachineConfig(**{"device_type": "cuda", **options})  # type: ignore[arg-type]


def test_devices_that_are_there_are_accepted() -> None:
    launch.check_machines(machine(num_devices=2))
    launch.check_machines(machine(num_devices=2, num_machines=2, machine_rank=1, dist_url="tcp://first:29500"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_devices": 3}, "num-devices is 3.* 2 CUDA"),
        ({"num_machines": 2}, "num-machines is 2.*dist-url"),
        ({"num_machines": 2, "dist_url": "tcp://a:1", "machine_rank": 2}, "machine-rank is 2.* 0 to 1"),
        ({"num_machines": 0}, "num-machines is 0"),
        ({"num_machines": 2, "device_type": "cpu"}, "num-machines is 2.* cpu"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        launch.check_machines(machine(**options))


@pytest.mark.usefixtures("is_torchrun")
@pytest.mark.parametrize(("devices", "says"), [(2, "--machine.num-devices.* 2 "), (1, "--nproc-per-node 2")])
def test_torchrun_starts_processes_alone_and_not_more_than_devices(devices: int, says: str) -> None:
    with pytest.raises(ConfigError, match=f"torchrun.* 4 .*{says}"):
        launch.check_machines(machine(num_devices=devices))


@pytest.mark.usefixtures("is_torchrun")
def test_the_command_that_continues_starts_as_many() -> None:
    assert launch.command_prefix() == "torchrun --nproc-per-node 4 --no-python "


@pytest.mark.parametrize("missing", [*TORCHRUN, None])
def test_variables_of_other_programs_mean_nothing(monkeypatch: pytest.MonkeyPatch, missing: str | None) -> None:
    for name, value in TORCHRUN.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    if missing is None:
        monkeypatch.setenv("WORLD_SIZE", "1")
    assert not launch.is_torchrun() and launch.command_prefix() == ""


def test_a_process_alone_works_and_keeps_what_it_has() -> None:
    done: list[int] = []
    launch.first_only(lambda: done.append(1))
    assert done == [1] and launch.broadcast_first("stamp") == "stamp" and launch.place() is None
