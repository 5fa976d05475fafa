"""Runs of splats opened again, and their splats in files: what is in a file is what the run draws."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import CaptureError, ConfigError
from f3rm_ext.export.splats import SplatRun, export_run, load_splat_run
from f3rm_ext.mesh.mesh_files import same_frame
from f3rm_ext.scripts.cli import main
from f3rm_ext.splat.files import read_splats
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.rendering import SplatScene, render


@pytest.fixture
def run(splat_config: Path) -> SplatRun:
    return load_splat_run(splat_config)


def drawn(gaussians: Gaussians, run: SplatRun, mip: MipOptions, degree: int | None = None) -> torch.Tensor:
    """What somebody sees who knows of no 3D filter, over the background of the run."""
    scene = SplatScene(gaussians, replace(mip, filter_3d=False), sh_degree=degree, background=run.model.background)
    return render(scene, PinholeCameras.of(run.photos.cameras[:1])).rasterization.colors.clamp(0, 1)


def own_picture(run: SplatRun) -> torch.Tensor:
    return run.model.get_outputs_for_camera(run.photos.cameras[:1])["rgb"]


def test_a_run_is_opened(run: SplatRun, splat_config: Path) -> None:
    checkpoint = splat_config.parent / "nerfstudio_models" / "step-000000007.ckpt"
    assert run.checkpoint.resolve() == checkpoint.resolve() and run.step == 7
    assert run.describe() == {"checkpoint": str(checkpoint.resolve()), "step": 7, "method": "sugar-ext-lite"}
    assert not run.model.training and run.model.num_gaussians == 300 and (run.model.filter_3d > 0).all()
    assert len(run.photos) == 3 and run.photos.cameras.width[0] == 32


@pytest.mark.parametrize(("filter_2d", "mode", "dilation"), [(True, "mip", "0.1"), (False, "default", "0.3")])
def test_a_file_with_the_filter_in_it_shows_what_the_run_shows(
    make_splat_run: Any, tmp_path: Path, filter_2d: bool, mode: str, dilation: str
) -> None:
    run = load_splat_run(make_splat_run(tmp_path, filter_2d=filter_2d))
    export_run(run, tmp_path / "out.ply")
    gaussians, info = read_splats(tmp_path / "out.ply")
    truth = own_picture(run)
    assert truth.std() > 0.05
    mip = MipOptions(filter_2d=filter_2d)
    torch.testing.assert_close(drawn(gaussians, run, mip), truth, atol=1e-4, rtol=0)
    other = drawn(gaussians, run, MipOptions(filter_2d=not filter_2d))
    assert (other - truth).abs().max() > 5e-3, "the way of drawing makes no difference here, so this tests nothing"
    assert (info.render_mode, info.filters_fused, info.count) == (mode, True, 300)
    told = {"made_by: f3rm-ext export splats", "step: 7", "method: sugar-ext-lite", f"dilation_px2: {dilation}"}
    assert told <= set(info.comments) and f"checkpoint: {run.checkpoint.resolve()}" in info.comments
    record = dict(comment.split(": ", 1) for comment in info.comments)
    assert same_frame(record, run.frame) and not same_frame(record, replace(run.frame, scale=2 * run.frame.scale))


def test_without_the_filter_the_file_has_the_parameters(run: SplatRun, tmp_path: Path) -> None:
    export_run(run, tmp_path / "out.ply", fused=False)
    gaussians, info = read_splats(tmp_path / "out.ply")
    torch.testing.assert_close(gaussians.scales, run.model.gauss_params["scales"].data, atol=1e-6, rtol=0)
    assert info.filters_fused is False and info.render_mode == "mip"
    assert (drawn(gaussians, run, MipOptions()) - own_picture(run)).abs().max() > 5e-3


def test_a_run_without_the_filter_has_none_to_put_in(make_splat_run: Any, tmp_path: Path) -> None:
    run = load_splat_run(make_splat_run(tmp_path, filter_3d=False))
    export_run(run, tmp_path / "out.ply")
    gaussians, info = read_splats(tmp_path / "out.ply")
    assert info.filters_fused is False
    torch.testing.assert_close(drawn(gaussians, run, MipOptions()), own_picture(run), atol=1e-4, rtol=0)


def test_only_colors_that_were_in_use_are_exported(make_splat_run: Any, tmp_path: Path) -> None:
    run = load_splat_run(make_splat_run(tmp_path, sh_degree_in_use=1))
    assert run.model.current_sh_degree == 1 and run.model.config.sh_degree == 2
    assert export_run(run, tmp_path / "out.ply").sh_degree == 1
    gaussians, _ = read_splats(tmp_path / "out.ply")
    torch.testing.assert_close(drawn(gaussians, run, MipOptions()), own_picture(run), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["room.ply", "room.compressed.ply", "room.spz", "room.sog", "room.splat"])
def test_the_command_writes_every_format(
    splat_config: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "new" / name
    assert main(["export", "splats", "--load-config", str(splat_config), "--output", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    gaussians, info = read_splats(out)
    assert len(gaussians) == 300 and f"300 Gaussians (SH degree {info.sh_degree}" in said
    lossy = name.endswith("splat")
    assert ("cannot record that the splats need anti-aliasing" in said) is lossy
    assert (info.render_mode, info.filters_fused) == ((None, None) if lossy else ("mip", True))


def test_the_command_says_what_a_file_without_the_filter_lacks(
    splat_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["export", "splats", "--load-config", str(splat_config), "--out", str(tmp_path / "a.ply")]
    assert main([*arguments, "--no-fused"]) == 0
    assert "The 3D filter is not in the file" in capsys.readouterr().out
    assert main(arguments) == 0, "its own file is replaced"
    assert "The 3D filter is not in the file" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["theirs.ply", "room.obj"])
def test_files_that_cannot_be_written_are_refused_before_the_run_is_opened(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / name
    if name == "theirs.ply":
        out.write_bytes(b"somebody's")
    code = main(["export", "splats", "--load-config", str(tmp_path / "none.yml"), "--out", str(out)])
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1
    assert ("is there already" if name == "theirs.ply" else "has no format for splats") in said
    assert not out.exists() or out.read_bytes() == b"somebody's"


def test_a_run_of_another_method_is_refused(untrained: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"f3rm-ext-lite.*sugar-ext"):
        load_splat_run(untrained.config)
    out = tmp_path / "out.ply"
    assert main(["export", "splats", "--load-config", str(untrained.config), "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not out.exists()


def test_there_are_no_photos_to_compare_with(run: SplatRun) -> None:
    run.manager.eval_dataset = None
    with pytest.raises(CaptureError, match="no evaluation images"):
        _ = run.photos


def test_filters_are_switched(make_splat_run: Any, tmp_path: Path, run: SplatRun) -> None:
    with_filter, filters = own_picture(run), run.model.filter_3d.clone()
    run.set_filters(None, None)
    assert torch.equal(own_picture(run), with_filter)
    run.set_filters(None, False)
    without = own_picture(run)
    assert (without - with_filter).abs().max() > 5e-3
    run.set_filters(None, True)
    torch.testing.assert_close(own_picture(run), with_filter)
    run.set_filters(False, None)
    assert run.model.config.mip.eps2d == 0.3 and (own_picture(run) - with_filter).abs().max() > 5e-3
    # A run that has no filter yet gets the one of its training cameras.
    bare = load_splat_run(make_splat_run(tmp_path, filter_3d=False))
    assert not bare.model.filter_3d.any()
    torch.testing.assert_close(own_picture(bare), without)
    bare.set_filters(None, True)
    torch.testing.assert_close(bare.model.filter_3d, filters)
    torch.testing.assert_close(own_picture(bare), with_filter)
