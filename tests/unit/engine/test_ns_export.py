"""ns-export on our runs: one sentence that names what to use where it cannot know them."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from nerfstudio.cameras.cameras import Cameras

from f3rm_ext.engine.ns_export import check_export, check_image_sizes, export_command
from f3rm_ext.errors import CheckpointError, ConfigError
from f3rm_ext.method_configs.presets import make_config
from f3rm_ext.scripts.export import ExportCommand
from f3rm_ext.scripts.switches import parse_command

LINE = ["/env/bin/ns-export", "gaussian-splat", "--load-config", "my run/config.yml", "--output-dir", "out"]


@pytest.mark.parametrize("line", [LINE, [LINE[0], LINE[1], "--load_config=my run/config.yml", "--output_dir=out/"]])
def test_our_command_has_the_same_run_and_folder(line: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        check_export("gaussian-splat", line, splats=True)
    found = re.search(r"`(.*?)`", str(raised.value))
    assert found and shlex.split(found[1]) == [
        *("f3rm-ext", "export", "splats", "--load-config", "my run/config.yml", "--output", "out/splat.ply")
    ]


def test_our_command_has_the_name_that_was_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"--output out/mine.ply`"):
        check_export("gaussian-splat", [*LINE, "--output-filename", "mine.ply"], splats=True)


@pytest.mark.parametrize("command", ["pointcloud", "poisson", "tsdf", "marching-cubes"])
def test_splats_have_no_rays(command: str) -> None:
    with pytest.raises(ConfigError, match=f"{command}.*f3rm-ext export") as raised:
        check_export(command, LINE, splats=True)
    for ours in re.findall(r"`f3rm-ext export (.*?)`", str(raised.value)):
        parse_command(ExportCommand, "f3rm-ext export", shlex.split(ours))


@pytest.mark.parametrize(("command", "instead"), [("gaussian-splat", "sugar-ext"), ("marching-cubes", "tsdf")])
def test_fields_have_no_splats_and_no_distances(command: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        check_export(command, LINE, splats=False)


@pytest.mark.parametrize("command", ["pointcloud", "poisson"])
def test_a_field_without_normals_has_them_estimated(command: str) -> None:
    with pytest.raises(ConfigError, match="--normal-method open3d"):
        check_export(command, LINE, splats=False)
    check_export(command, [*LINE, "--normal-method", "open3d"], splats=False)
    check_export(command, LINE, splats=False, normals=True)


@pytest.mark.parametrize(("command", "splats"), [("cameras", True), ("cameras", False), ("tsdf", False)])
def test_what_works_is_let_through(command: str, splats: bool) -> None:
    check_export(command, LINE, splats=splats)


def test_photos_of_several_sizes_are_no_array_for_tsdf() -> None:
    poses = torch.eye(4)[None, :3].expand(2, -1, -1)
    mixed, same = (
        Cameras(poses, 9.0, 9.0, 4.0, 4.0, torch.tensor([[8], [w]]), torch.tensor([[8], [8]])) for w in (6, 8)
    )
    check_image_sizes([LINE[0], "tsdf", *LINE[2:]], same)
    check_image_sizes([LINE[0], "cameras", *LINE[2:]], mixed)
    with pytest.raises(ConfigError, match=r"--load-config 'my run/config.yml'.*out/"):
        check_image_sizes([LINE[0], "tsdf", *LINE[2:]], mixed)


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (LINE, "gaussian-splat"),
        (["C:/env/ns-export.exe", "cameras"], "cameras"),
        (["ns-export", "--help"], None),
        (["ns-train", "gaussian-splat"], None),
        ([], None),
    ],
)
def test_the_command_that_runs(argv: list[str], command: str | None) -> None:
    assert export_command(argv) == command


def test_a_run_of_splats_is_refused_before_it_is_loaded(splat_run: Path, set_command_line: Callable[..., None]) -> None:
    from nerfstudio.utils.eval_utils import eval_setup

    set_command_line(*LINE[:3], splat_run, *LINE[4:])
    with pytest.raises(ConfigError, match=f"export splats.*{re.escape(str(splat_run))}"):
        eval_setup(splat_run, test_mode="inference")


def test_a_run_of_a_field_passes_the_commands_that_can(tmp_path: Path, set_command_line: Callable[..., None]) -> None:
    config = make_config("f3rm-ext-lite")
    config.data, config.output_dir, config.timestamp = tmp_path, tmp_path, "t"
    folder = config.get_base_dir() / "nerfstudio_models"
    folder.mkdir(parents=True)
    loaded = yaml.load(yaml.dump(config), Loader=yaml.Loader)
    set_command_line("ns-export", "tsdf")
    with pytest.raises(CheckpointError, match="no checkpoint"):  # the next question
        loaded.get_checkpoint_dir()


@pytest.fixture
def splat_run(tmp_path: Path) -> Path:
    """config.yml of a run that cannot be loaded, for it has no checkpoint and no capture."""
    from f3rm_ext.method_configs.splat_presets import make_splat_config

    config = make_splat_config("sugar-ext-lite")
    config.data, config.output_dir, config.timestamp = tmp_path / "capture", tmp_path, "t"
    config.save_config()
    return config.get_base_dir() / "config.yml"
