"""Whole steps with Triton's kernels, interpreted; run by test_splat_triton.py in a process of its own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.4", reason="Triton is not installed")

from nerfstudio.data.scene_box import SceneBox
from pretend.gsplat_kernels import gsplat_kernels
from pretend.small import grids_of, small
from pretend.steps import Run, make_run, write_capture
from pretend.tensors import pretended
from pretend.triton_kernels import Launch, triton_kernels
from test_budget import WITH_TRITON, check_budget

from f3rm_ext.features.spec import DisplayBasis, FeatureSpec
from f3rm_ext.nerf import hash_grid
from f3rm_ext.nerf.fields import GridOptions
from f3rm_ext.nerf.hash_levels import LevelTensors, grid_levels
from f3rm_ext.nerf.hash_triton import hash_grid_triton
from f3rm_ext.nerf.model import F3rmModel, F3rmModelConfig, ProposalOptions
from f3rm_ext.splat import triton_kernels as found_kernels

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def noise_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos little larger than the window of SSIM: the interpreter takes long for each pixel."""
    return write_capture(tmp_path_factory.mktemp("noise") / "capture", size_px=(16, 12))


@pytest.fixture(autouse=True, scope="module")
def forgetful() -> Iterator[None]:
    """What is found out about Triton here, once, is forgotten."""
    yield
    for found in (found_kernels._load_kernels, found_kernels._explain):
        found.cache_clear()


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    """What is launched on a pretended GPU that has Triton."""
    with pretended("backward"), gsplat_kernels(), triton_kernels() as found:
        yield found


def _run(method: str, mode: str, capture: Path, folder: Path) -> Run:
    def change(config: Any) -> None:
        small(method, mode)(config)
        if mode == "planar":
            config.pipeline.model.surface.patches = 16
        if method == "f3rm-ext":
            model = config.pipeline.model
            model.backend = "triton"
            for grid in grids_of(model):
                grid.num_levels = 2  # a launch has them all: fewer take the interpreter less time

    return make_run(method, capture, folder, change)


FOR_RELEASES = ("sugar-ext vanilla, Triton", "sugar-ext density, Triton")
"""The planar step has all kernels but the field's, and test_budget.py counts these steps without Triton; the
interpreter takes long for each."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.release] * (name in FOR_RELEASES)) for name in WITH_TRITON]
)
def test_budget(name: str, launches: list[Launch], noise_capture: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    method, mode, step = WITH_TRITON[name]
    run = _run(method, mode, noise_capture, tmp_path)
    run.step(step - 1)
    del launches[:]
    counts = run.step(step)
    assert {"f3rm-ext": "_backward", "sugar-ext": "_step"}[method] in {launch.kernel for launch in launches}
    check_budget(name, counts)


@pytest.mark.parametrize(
    "make", [lambda out: out.sum(), lambda out: (out.T.contiguous() * 2).sum()], ids=["expanded", "transposed"]
)
def test_gradients_need_not_be_contiguous(make: Callable[[torch.Tensor], torch.Tensor], launches: list[Launch]) -> None:
    made = LevelTensors.from_levels(grid_levels(2, 4, 8, 9))
    levels = LevelTensors(made.levels, made.scales.to("cuda"), made.rows.to("cuda"))
    rows = made.levels[-1].offset + made.levels[-1].size
    table = torch.ones(rows, 2).to("cuda").requires_grad_()
    make(hash_grid_triton(torch.rand(5, 3).to("cuda"), table, levels)).backward()
    assert [launch.kernel for launch in launches] == ["_forward", "_backward"]
    assert table.grad is not None


def test_normals_need_no_gradient_of_the_table(launches: list[Launch], noise_capture: Path, tmp_path: Path) -> None:
    run = _run("f3rm-ext", "none", noise_capture, tmp_path)
    run.model.config.render_normals = True
    run.before(0)
    inputs, _ = run.pipeline.datamanager.next_train(0)
    run.model.eval()
    del launches[:]
    with torch.no_grad():
        assert "normals" in run.model(inputs)
    flags = [launch.options["FOR_TABLE"] for launch in launches if launch.kernel == "_backward"]
    assert flags == [False]


# --- a mixed-precision step, on the CPU -------------------------------------------------------------------------------

SMALL = GridOptions(num_levels=3, features_per_level=2, base_res=4, max_res=32, log2_hashmap_size=10)
RAYS, FEATURES = 16, 16


def _model() -> F3rmModel:
    torch.manual_seed(0)
    display = DisplayBasis(torch.zeros(FEATURES), torch.eye(3, FEATURES), -torch.ones(3), torch.ones(3))
    spec = FeatureSpec(name="a", dim=FEATURES, extractor="a", identity={"extractor": "a"}, display=display)
    proposals = (ProposalOptions(num_samples=8, hidden_dim=16, grid=SMALL),)
    config = F3rmModelConfig(
        grid=SMALL, feature_grid=SMALL, num_samples=6, init_density=1.0, proposals=proposals, backend="torch"
    )
    metadata = {"feature_specs": (spec,), "feature_ray_fraction": 0.5}
    box = SceneBox(torch.tensor([[-1.0] * 3, [1.0] * 3]))
    model: F3rmModel = config.setup(scene_box=box, num_train_data=5, metadata=metadata)
    for name, parameter in model.named_parameters():
        if name.endswith("table"):
            parameter.data.normal_()
    return model.train()


def test_a_mixed_step_has_the_gradients_of_single_precision(
    monkeypatch: pytest.MonkeyPatch, make_rays: Callable[..., Any]
) -> None:
    """Autocast, scaled loss, backward pass and optimiser: the pretended GPU has no backward pass under autocast."""
    monkeypatch.setattr(hash_grid.HashGrid, "resolve_backend", lambda self, device: "triton")
    model = _model()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-15)
    scaler = torch.amp.GradScaler("cpu")
    gradients: list[dict[str, torch.Tensor]] = []
    for half in (False, True):
        torch.manual_seed(3)
        rays = make_rays(RAYS, torch.device("cpu"))
        rays.metadata["directions_norm"] = torch.ones(RAYS, 1)
        batch = {"image": torch.rand(RAYS, 3), "features": {"a": torch.randn(RAYS // 2, FEATURES).half()}}
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            assert model.collider is not None
            outputs = model.get_outputs(model.collider(rays))
            losses = model.get_loss_dict(outputs, batch, model.get_metrics_dict(outputs, batch))
            loss = torch.stack(list(losses.values())).sum()
        assert all(value.dtype == torch.float32 for value in losses.values())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        gradients.append(found)
        if half:
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() >= before, "a gradient was not finite"
        else:
            scaler.update()
    single, mixed = gradients
    assert mixed.keys() == single.keys() and {"field.grid.table", "feature_field.grid.table"} <= mixed.keys()
    for name, gradient in mixed.items():
        assert gradient.dtype == torch.float32 and bool(gradient.isfinite().all())
        likeness = torch.nn.functional.cosine_similarity(gradient.flatten(), single[name].flatten(), dim=0)
        assert float(likeness) > 0.999, name
