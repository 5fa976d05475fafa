"""Splats to a budget: the choice of Gaussians, degree and precision, by a scene that is counted and by one drawn."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from f3rm_ext.data.pinhole_cameras import PinholeCameras
from f3rm_ext.errors import CaptureError, ConfigError, SplatFileError
from f3rm_ext.export.budget import BudgetSearch, Limit, SplatBudget, reduce_splats
from f3rm_ext.export.splats import SplatRun, load_splat_run
from f3rm_ext.scripts.cli import main
from f3rm_ext.splat import pruning
from f3rm_ext.splat.files import SplatInfo, read_splats, write_splats
from f3rm_ext.splat.files.pruning import SizeSearch
from f3rm_ext.splat.files.scores import GaussianScores
from f3rm_ext.splat.gaussians import Gaussians, sh_rest_count
from f3rm_ext.splat.mip import MipOptions
from f3rm_ext.splat.pruning import PruningOrder
from f3rm_ext.splat.rendering import SplatScene, render

COUNT, BASE = 4000, 5000


class CountedBudget(SplatBudget):
    """A budget whose PSNR is the share of the importance that is kept, and what degree and rounding leave of it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.judges, self.tried = "held-out", 0
        self.importance = torch.rand(COUNT, generator=generator) ** 6
        widths = {"scales": 3, "quats": 4, "opacities": 1, "features_dc": 3}
        self.gaussians = Gaussians(
            means=torch.randn(COUNT, 3, generator=generator),
            features_rest=torch.zeros(COUNT, sh_rest_count(2), 3),
            **{name: torch.zeros(COUNT, width) for name, width in widths.items()},
        )

    def psnr(self, gaussians: Gaussians) -> float:
        return 30.0

    def stored_psnr(self, rows: torch.Tensor, degree: int) -> float:
        self.tried += 1
        share = float(self.importance[rows].sum() / self.importance.sum())
        return 30 * share - 0.8 * (2 - degree)

    def size(self, rows: torch.Tensor, degree: int) -> int:
        """Gaussians far apart compress worse."""
        per_gaussian = 13 + 3 * sh_rest_count(degree)
        return BASE + int(len(rows) * per_gaussian * (1.2 - 0.2 * len(rows) / COUNT))

    def search(self) -> BudgetSearch:
        return BudgetSearch(self, self.choose, self.size)

    def choose(self, count: int) -> torch.Tensor:
        return self.importance.argsort(descending=True)[:count]


def fitted(size: float) -> tuple[CountedBudget, Any]:
    budget = CountedBudget()
    return budget, budget.search().fit_size(size, range(2, -1, -1))


SIZES = (8e3, 15e3, 30e3, 60e3, 110e3)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_keeps_its_size_and_uses_it(size: float) -> None:
    budget, kept = fitted(size)
    assert 0.9 * size < budget.size(kept.rows, kept.sh_degree) <= size
    first = budget.importance.argsort(descending=True)[: len(kept.rows)]
    assert kept.rows.sort().values.tolist() == first.sort().values.tolist(), "the most important ones"
    assert budget.tried <= 3 or kept.fine_mb, "one picture per degree"


def test_a_larger_file_shows_more() -> None:
    shown = [fitted(size)[1] for size in SIZES]
    assert all(a.psnr < b.psnr for a, b in pairwise(shown))
    degrees = [kept.sh_degree for kept in shown]
    assert degrees == sorted(degrees) and degrees[0] == 0 and degrees[-1] == 2


def test_what_fits_is_left_as_it_is() -> None:
    budget = CountedBudget()
    search = BudgetSearch(budget, lambda count: pytest.fail("nothing is to be ranked"), budget.size)
    kept = search.fit_size(1e6, range(2, -1, -1))
    assert len(kept.rows) == COUNT and kept.sh_degree == 2 and f"All {COUNT}" in str(kept)


def test_a_file_without_room_for_a_gaussian_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.005"):
        fitted(float(BASE))


def test_a_ruined_picture_comes_with_a_size_that_keeps_it() -> None:
    _, ruined = fitted(7e3)
    assert ruined.full_psnr - ruined.psnr > 3 and ruined.fine_mb is not None
    assert f"{ruined.fine_mb:.2g}" in str(ruined) and "Warning" in str(ruined)
    budget, fine = fitted(1e6 * ruined.fine_mb)
    whole = budget.stored_psnr(torch.arange(COUNT), ruined.sh_degree)
    assert whole - 1.1 < fine.psnr and fine.fine_mb is None and "Warning" not in str(fine)
    largest = budget.size(torch.arange(COUNT), ruined.sh_degree)
    assert budget.size(fine.rows, fine.sh_degree) < largest, "a smaller one does"


def test_few_sizes_are_measured_where_they_are_not_in_proportion() -> None:
    """As with a palette, for which twice the Gaussians take less than twice the bytes."""
    measured = []

    def size(rows: torch.Tensor, degree: int) -> int:
        measured.append(len(rows))
        return BASE + int(400 * len(rows) ** 0.75)

    budget = CountedBudget()
    search = SizeSearch(budget.gaussians, budget.choose, size)
    for wanted in (40e3, 80e3, 120e3):
        measured.clear()
        sizes = {count: search.size(count, 2) for count in (1, COUNT)}
        count, per_gaussian = search.largest_count(2, wanted, sizes)
        assert 0.95 * wanted < size(torch.arange(count), 2) <= wanted and len(measured) <= 2 + 3 + 1
        assert per_gaussian == pytest.approx(400 * count**-0.25, rel=0.01)


@pytest.mark.parametrize("loss", [0.0, 0.05, 0.5, 2.0])
def test_a_loss_is_kept_with_few_gaussians(loss: float) -> None:
    budget = CountedBudget()
    kept = budget.search().fit_loss(loss, range(2, -1, -1))
    assert kept.psnr >= 30 - loss
    assert kept.sh_degree == (0 if loss > 1 else 2)
    fewer = budget.importance.argsort(descending=True)[: int(0.93 * len(kept.rows))]
    assert budget.stored_psnr(fewer, kept.sh_degree) < 30 - loss


@pytest.fixture
def run(splat_config: Path) -> SplatRun:
    return load_splat_run(splat_config)


def test_colours_brighter_than_white_lose_nothing_on_white(run: SplatRun, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = SplatBudget(run, Path("a.ply"))
    over = torch.full_like(budget.gaussians.features_dc, 3.0)
    bright = replace(budget.gaussians, features_dc=over, features_rest=torch.zeros_like(budget.gaussians.features_rest))
    bright = replace(
        bright, opacities=torch.full_like(bright.opacities, 9.0), scales=torch.full_like(bright.scales, 1.0)
    )
    white = lambda batch, background: torch.ones_like(batch["image"])  # noqa: E731
    monkeypatch.setattr(run.model, "true_colors", white)
    assert picture(run, bright).max() > 1.2 and budget.psnr(bright) > 60


def picture(run: SplatRun, gaussians: Gaussians) -> torch.Tensor:
    scene = SplatScene(gaussians, replace(run.model.config.mip, filter_3d=False))
    return render(scene, PinholeCameras.of(run.photos.cameras[:1])).rasterization.colors


def test_the_order_of_pruning_keeps_the_picture(run: SplatRun) -> None:
    budget = SplatBudget(run, Path("a.ply"))
    specks = budget.gaussians[torch.arange(200)]
    specks = replace(specks, scales=specks.scales - 3, opacities=torch.full_like(specks.opacities, 5))
    budget.gaussians = Gaussians.from_tensors(
        {name: torch.cat([value, specks.tensors()[name]]) for name, value in budget.gaussians.tensors().items()}
    )
    truth, order = picture(run, budget.gaussians), budget.order()

    def error(rows: torch.Tensor) -> float:
        return float((picture(run, budget.gaussians[rows]) - truth).square().mean())

    kept = order.last(250)
    assert set(order.last(100).tolist()) < set(kept.tolist()), "what fewer keep is among what more keep"
    assert error(kept) < 0.1 * error(budget.gaussians.alphas().argsort(descending=True)[:250])


def test_in_many_views_rounds_take_turns(run: SplatRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_VIEWS", 2)
    budget, seen = SplatBudget(run, Path("a.ply")), list[int]()
    scene, cameras = run.scene(budget.gaussians), PinholeCameras.of(run.manager.train_dataset.cameras)
    order = budget.order(seen.append)

    def error(rows: torch.Tensor) -> float:
        parts, total = (scene, run.scene(budget.gaussians[rows])), 0.0
        for index in range(len(cameras.widths)):
            view = cameras.take(slice(index, index + 1))
            whole, rest = (render(part, view).rasterization.colors for part in parts)
            total += float((rest - whole).square().mean())
        return total

    kept, views = order.last(150), len(run.manager.train_dataset)
    assert seen[:views] == [views] * views and set(seen[views:]) <= {1, 2}, "all views only in the first round"
    one_view = SplatBudget(run, Path("a.ply")).order()
    one_view._views = one_view._views.take(slice(0, 1))
    assert error(kept) < error(one_view.last(150)), "what only views of other rounds show stays"


def test_of_gaussians_that_stand_in_for_each_other_one_stays() -> None:
    """Each of two opaque ones at one place may go alone; after one, the other counts more than a fainter one."""
    near_black = torch.full((3, 3), -1.5)
    gaussians = Gaussians(
        means=torch.tensor([[0.0, 0, 2], [0, 0, 2], [0.5, 0, 2]]),
        scales=torch.full((3, 3), -2.0),
        quats=torch.tensor([[1.0, 0, 0, 0]] * 3),
        opacities=torch.tensor([[7.0], [7.0], [0.0]]),
        features_dc=near_black,
        features_rest=torch.zeros(3, 0, 3),
    )
    K = torch.tensor([[[60.0, 0, 40], [0, 60, 30], [0, 0, 1]]])
    views = PinholeCameras(torch.eye(4)[None], K, torch.tensor([80]), torch.tensor([60]))
    order = PruningOrder(gaussians, lambda rest: SplatScene(rest, MipOptions(), background=torch.ones(3)), views)
    costs, shown = order.costs(torch.arange(3), order._views)
    first, second, faint = costs.tolist()
    assert shown.all()
    assert max(first, second) < faint, "each of the two costs less alone"
    assert 2 in order.last(2) and order.last(1).item() in (0, 1)


@pytest.mark.parametrize("limit", [["--max-mb", "0.012"], ["--max-mb", "50"], ["--max-loss-db", "0.5"]])
def test_gaussians_with_bad_values_are_dropped_before_the_choice(
    splat_config: Path, tmp_path: Path, limit: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    broken = {"means": 3, "opacities": 5}

    def splats(self: SplatRun, fused: bool = True) -> Gaussians:
        made = whole(self, fused)
        for name, row in broken.items():
            made.tensors()[name][row] = torch.nan
        return made

    whole = SplatRun.splats
    given = whole(load_splat_run(splat_config))
    monkeypatch.setattr(SplatRun, "splats", splats)
    out = tmp_path / "room.ply"
    typed = ["export", "splats", "--load-config", str(splat_config), "--out", str(out), *limit]
    assert main(typed) == 2
    assert main([*typed, "--bad-values", "drop"]) == 0
    said = capsys.readouterr().out
    kept = read_splats(out)[0]
    assert "of 298 Gaussians are kept" in said.replace("All 298", "of 298") and "2 Gaussians are left out" in said
    first = {tuple(row) for row in given.quats.tolist()}
    lost = {tuple(given.quats[row].tolist()) for row in broken.values()}
    chosen = {tuple(row) for row in kept.quats.tolist()}
    assert len(chosen) == len(kept) and chosen <= first - lost


def scene(count: int = 2000) -> Gaussians:
    """Gaussians of all sizes and opacities, of SH degree 1."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, generator=generator)

    return Gaussians(draw(3), draw(1) - 4 + torch.zeros(3), draw(4), 2 * draw(1), draw(3), draw(3, 3) / 9)


@pytest.mark.parametrize("name", ["b.ply", "b.compressed.ply", "b.spz", "b.sog", "b.splat", "b.glb"])
def test_a_file_alone_keeps_its_largest_and_most_opaque_gaussians(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    given, source, out = scene(), tmp_path / "a.ply", tmp_path / name
    scores = GaussianScores.of_queries({"mug": np.arange(2000, dtype=np.float32) / 2000}, 0.5)
    write_splats(source, given, SplatInfo(scores=scores))
    assert main(["export", "convert", str(source), str(out)]) == 0
    whole = out.stat().st_size
    for file in tmp_path.glob("b*"):
        file.unlink()
    assert main(["export", "convert", str(source), str(out), "--max-mb", str(0.6 * whole / 1e6)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert 0.5 * whole < out.stat().st_size <= 0.6 * whole and "of 2000 Gaussians are kept" in said
    assert "export splats --load-config" in said
    if name.endswith("glb"):
        return
    kept, info = read_splats(out)
    volume = given.scales.sum(dim=1) + torch.nn.functional.logsigmoid(given.opacities[:, 0])
    first = volume.argsort(descending=True)[: len(kept)]
    spread = torch.cdist(kept.means, given.means[first]).min(dim=1).values
    assert len(kept) < 2000 and spread.max() < 0.01, "neighbours are farther apart"
    assert kept.sh_degree == (0 if name.endswith("splat") else 1)
    assert info.scores is not None and torch.allclose(
        torch.from_numpy(info.scores.scores[:, 0]), torch.cdist(kept.means, given.means).argmin(dim=1) / 2000
    )


def test_a_file_alone_that_fits_is_whole_and_bad_values_are_dropped(tmp_path: Path) -> None:
    given, source, out = scene(), tmp_path / "a.ply", tmp_path / "b.ply"
    write_splats(source, given, SplatInfo())
    source.write_bytes(source.read_bytes().replace(given.means[7].numpy().tobytes(), b"\xff" * 12))
    assert main(["export", "convert", str(source), str(out), "--max-mb", "50"]) == 2
    assert main(["export", "convert", str(source), str(out), "--max-mb", "50", "--bad-values", "drop"]) == 0
    assert len(read_splats(out)[0]) == 1999
    assert main(["export", "convert", str(source), str(out), "--max-mb", "0.05", "--bad-values", "drop"]) == 0
    assert out.stat().st_size < 50_000


@pytest.mark.parametrize("limit", [["--max-mb", "0.001"], ["--max-mb", "0"], ["--max-loss-db", "0.1"]])
def test_limits_that_a_file_alone_cannot_have(tmp_path: Path, limit: list[str], capsys: pytest.CaptureFixture) -> None:
    source, out = tmp_path / "a.ply", tmp_path / "b.glb"
    write_splats(source, scene(), SplatInfo())
    assert main(["export", "convert", str(source), str(out), *limit]) == 2
    assert limit[0] in capsys.readouterr().err and not out.exists()


def test_training_photos_judge_where_none_are_held_out(run: SplatRun) -> None:
    limit = Limit(2, max_mb=1.0)
    assert "held-out photos" in str(reduce_splats(run, lambda rows, degree: 10, Path("a.ply"), limit))
    run.manager.eval_dataset = None
    assert "training photos" in str(reduce_splats(run, lambda rows, degree: 10, Path("a.ply"), limit))


def test_photos_that_masks_hide_cannot_judge(run: SplatRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.model, "get_metrics_dict", lambda outputs, batch: {})
    with pytest.raises(CaptureError, match="held-out"):
        SplatBudget(run, Path("a.ply")).psnr(run.splats())


def test_broken_values_are_refused_by_the_name_of_the_file(run: SplatRun) -> None:
    run.model.gauss_params["means"].data[3, 1] = torch.nan
    with pytest.raises(SplatFileError, match=r"room\.spz"):
        reduce_splats(run, lambda rows, degree: 10, Path("room.spz"), Limit(2, max_mb=1.0))


@pytest.mark.parametrize(
    "name", ["room.ply", "room.compressed.ply", "room.spz", "room.splat", "room.glb", "room.usda", "room.html"]
)
def test_the_command_keeps_the_size_of_every_format(
    splat_config: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / name
    command = ["export", "page" if name.endswith("html") else "splats", "--load-config", str(splat_config)]
    command += ["--out", str(out), "--sh-degree", "0"]
    assert main(command) == 0
    whole = out.stat().st_size
    out.unlink()  # .splat files do not say who wrote them, and so are not replaced
    wanted = whole - (2600 if name == "room.html" else 1500)
    assert main([*command, "--max-mb", str(wanted / 1e6)]) == 0
    assert 0.85 * wanted < out.stat().st_size <= wanted and "of 300 Gaussians are kept" in capsys.readouterr().out
    out.unlink()
    assert main([*command, "--max-mb", "50"]) == 0
    assert "All 300 Gaussians are kept" in capsys.readouterr().out
    assert -0.05 * whole < out.stat().st_size - whole < 200, "neighbours side by side may compress better"


def test_the_degree_of_splats_can_be_lowered(splat_config: Path, tmp_path: Path) -> None:
    for name, limit in {"a.ply": [], "b.ply": ["--max-loss-db", "0.5"]}.items():
        out = tmp_path / name
        options = ["export", "splats", "--load-config", str(splat_config), "--out", str(out), "--sh-degree", "1"]
        assert main([*options, *limit]) == 0
        assert read_splats(out)[0].sh_degree <= 1


@pytest.mark.parametrize("command", ["splats", "page"])
@pytest.mark.parametrize(
    "limits",
    [
        ["--max-mb", "-1"], ["--max-mb", "0"], ["--max-mb", "nan"], ["--max-mb", "inf"], ["--max-loss-db", "-0.1"],
        ["--max-loss-db", "nan"], ["--max-mb", "1", "--max-loss-db", "1"],
    ],
)  # fmt: skip
def test_limits_that_are_none(command: str, limits: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / ("a.html" if command == "page" else "a.ply")
    options = ["export", command, "--load-config", str(tmp_path / "none.yml"), "--out", str(out)]
    assert main([*options, *limits]) == 2
    error = capsys.readouterr().err
    assert all(option in error for option in limits[::2]) and not list(tmp_path.iterdir())
