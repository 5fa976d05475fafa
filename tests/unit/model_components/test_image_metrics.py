"""Image metrics against their definitions, torchmetrics and known LPIPS values; LPIPS without weights."""

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from f3rm_ext.model_components import image_metrics
from f3rm_ext.model_components.image_metrics import ImageMetrics, Lpips

_DATA = Path(os.environ.get("F3RM_EXT_TEST_DATA", Path(__file__).parents[3].parent / "shared" / "data"))
REAL_WEIGHTS = _DATA / "weights" / "lpips_alex_v0.1.pth"
SLICES = {0: 1, 3: 2, 6: 3, 8: 4, 10: 5}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Every test finds out about LPIPS anew."""
    image_metrics.find_lpips.cache_clear()
    image_metrics._say_once.cache_clear()
    yield
    image_metrics.find_lpips.cache_clear()
    image_metrics._say_once.cache_clear()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty torch hub folder, and no way to the network."""

    def no_network(*_: Any, **__: Any) -> None:
        raise OSError("network is not for tests")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    return tmp_path


@pytest.fixture
def alexnet() -> dict[str, Tensor]:
    """Random convolutions in torchvision's names and sizes."""
    generator = torch.Generator().manual_seed(0)
    shapes = {0: (64, 3, 11, 11), 3: (192, 64, 5, 5), 6: (384, 192, 3, 3), 8: (256, 384, 3, 3), 10: (256, 256, 3, 3)}
    state = {}
    for layer, shape in shapes.items():
        state[f"features.{layer}.weight"] = torch.randn(shape, generator=generator) * 0.05
        state[f"features.{layer}.bias"] = torch.randn(shape[0], generator=generator) * 0.05
    return state


@pytest.fixture
def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    target = torch.rand(40, 56, 3, generator=generator)
    return (target + 0.1 * torch.randn(40, 56, 3, generator=generator)).clamp(0, 1), target


def place(home: Path, state: dict[str, Tensor]) -> Path:
    path = home / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth"
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    return path


class TestSimpleMetrics:
    def test_values(self, home) -> None:
        target = torch.full((32, 40, 3), 0.5)
        metrics = ImageMetrics()(target + 0.1, target)
        assert metrics["psnr"] == pytest.approx(20, abs=1e-4)
        assert metrics["l1"] == pytest.approx(0.1, abs=1e-6)
        noise = torch.rand(32, 40, 3)
        assert ImageMetrics()(noise, noise) == {"psnr": pytest.approx(100), "ssim": pytest.approx(1), "l1": 0}
        assert ImageMetrics()(torch.full((32, 32, 3), 1.2), torch.ones(32, 32, 3))["l1"] == 0, "clipped"

    @pytest.mark.parametrize(("level", "least", "most"), [(0.0, 1.0, 1.0), (0.5, 1.0, 1.0), (0.75, 0.9, 0.99)])
    def test_images_of_a_single_color_have_an_ssim(self, home, level, least, most) -> None:
        target = torch.full((32, 40, 3), 0.0 if level == 0 else 0.5)
        ssim = ImageMetrics()(torch.full((32, 40, 3), level), target)["ssim"]
        assert least - 1e-6 <= ssim <= most + 1e-6

    def test_ssim_and_psnr_are_those_nerfacto_reports(self, home, images) -> None:
        from torchmetrics.functional.image import structural_similarity_index_measure as ssim
        from torchmetrics.image import PeakSignalNoiseRatio

        pred, target = (image.permute(2, 0, 1)[None] for image in images)
        metrics = ImageMetrics()(*images)
        assert metrics["ssim"] == pytest.approx(float(ssim(target, pred)))
        assert metrics["psnr"] == pytest.approx(float(PeakSignalNoiseRatio(data_range=1.0)(target, pred)), abs=1e-4)


class TestLpips:
    def test_is_torchmetrics_value(self, home, images, alexnet) -> None:
        from torchmetrics.functional.image.lpips import _LPIPS

        place(home, alexnet)
        reference = _LPIPS(net="alex", pnet_rand=True, pretrained=True)
        own = {f"net.slice{SLICES[int(key.split('.')[1])]}.{key[9:]}": value for key, value in alexnet.items()}
        missing, unexpected = reference.load_state_dict(own, strict=False)
        assert not unexpected and all(not key.startswith("net.") for key in missing)
        with torch.no_grad():
            pred, target = (image.permute(2, 0, 1)[None] for image in images)
            expected = float(reference(pred, target, normalize=True))
        module = torch.nn.Linear(1, 1)
        module.image_metrics = ImageMetrics()
        before = torch.get_rng_state()
        with torch.inference_mode():
            assert module.image_metrics(*images)["lpips"] == pytest.approx(expected, rel=1e-5)
        assert module.image_metrics(*images)["lpips"] == pytest.approx(expected, rel=1e-5)
        assert torch.equal(torch.get_rng_state(), before), "it draws no random numbers"
        assert set(module.state_dict()) == {"weight", "bias"}, "it is no part of a module"

    @pytest.mark.skipif(not REAL_WEIGHTS.is_file(), reason=f"needs the real weights {REAL_WEIGHTS}")
    def test_real_weights_from_an_explicit_file_and_from_torch_home_agree(self, home, images) -> None:
        full = torch.load(REAL_WEIGHTS, weights_only=True)
        value = ImageMetrics(REAL_WEIGHTS)(*images)["lpips"]
        assert 0.001 < value < 0.5
        place(
            home,
            {
                f"features.{layer}.{part}": full[f"net.slice{index}.{layer}.{part}"]
                for layer, index in SLICES.items()
                for part in ("weight", "bias")
            },
        )
        assert ImageMetrics()(*images)["lpips"] == pytest.approx(value, rel=1e-6)

    def test_symmetric_and_zero_for_equal_images(self, home, images, alexnet) -> None:
        place(home, alexnet)
        lpips = image_metrics.find_lpips(None)
        assert isinstance(lpips, Lpips)
        pred, target = images
        assert lpips(pred, target) == pytest.approx(lpips(target, pred)) != 0
        assert lpips(pred, pred) == 0


class TestLpipsIsMissing:
    def test_everything_else_is_reported_and_one_line_says_why(self, home, images, capsys) -> None:
        metrics = [ImageMetrics()(*images) for _ in range(3)]
        assert all(list(one) == ["psnr", "ssim", "l1"] for one in metrics)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        for part in ("LPIPS", "alexnet-owt-7be5be79.pth", str(home), "--pipeline.model.lpips-weights"):
            assert part in lines[0]

    def test_network_is_tried_once(self, home, images, monkeypatch) -> None:
        tried: list[str] = []

        def count(request: urllib.request.Request, timeout: float) -> None:
            tried.append(request.full_url)
            assert timeout <= 10
            raise OSError("unreachable")

        monkeypatch.setattr(urllib.request, "urlopen", count)
        for _ in range(3):
            ImageMetrics()(*images)
        assert tried == [image_metrics.ALEXNET_URL]

    @pytest.mark.parametrize("content", ["other weights", "no weights", None])
    def test_file_of_something_else_or_none(self, home, images, capsys, content) -> None:
        path = home / "x.pth"
        if content == "other weights":
            torch.save({"a": torch.ones(1)}, path)
        elif content is not None:
            path.write_text("<html>")
        assert "lpips" not in ImageMetrics(path)(*images)
        assert "x.pth" in "".join(capsys.readouterr().out.split())

    def test_images_too_small_for_it(self, home, alexnet, capsys) -> None:
        place(home, alexnet)
        assert "lpips" not in ImageMetrics()(torch.rand(30, 64, 3), torch.rand(30, 64, 3))
        assert "31 px" in capsys.readouterr().out
        assert "lpips" in ImageMetrics()(torch.rand(31, 31, 3), torch.rand(31, 31, 3))


class TestMasks:
    @pytest.fixture
    def mask(self) -> Tensor:
        mask = torch.zeros(40, 56, 1, dtype=torch.bool)
        mask[10:30, 12:40] = True
        return mask

    @pytest.fixture
    def metrics(self, home: Path, alexnet: dict[str, Tensor]) -> ImageMetrics:
        place(home, alexnet)
        return ImageMetrics()

    def test_what_is_left_out_does_not_count(self, metrics, images, mask) -> None:
        pred, target = images
        found = metrics(pred, target, mask)
        assert set(found) == {"psnr", "ssim", "l1", "lpips"}
        assert metrics(torch.where(mask, pred, 1 - target), torch.where(mask, target, 0.3), mask) == pytest.approx(
            found
        )
        everything = torch.ones_like(mask)
        assert metrics(*images, everything) == metrics(*images) and metrics(*images, ~everything) == {}
        equal = metrics(torch.where(mask, target, pred), target, mask)
        assert equal == {"psnr": pytest.approx(100), "ssim": pytest.approx(1), "l1": 0, "lpips": 0}

    def test_what_is_kept_counts_as_much_as_a_picture_of_it_alone(self, metrics, images, mask) -> None:
        """Empty surroundings must not make an object look better; LPIPS and SSIM see edges, so they are not equal."""
        pred, target = images
        alone = metrics(pred[:35, :40], target[:35, :40])
        wide = torch.zeros(200, 200, 1, dtype=torch.bool)
        wide[80:115, 80:120] = True
        framed = [torch.zeros(200, 200, 3) for _ in images]
        for frame, image in zip(framed, images, strict=True):
            frame[80:115, 80:120] = image[:35, :40]
        found = metrics(*framed, wide)
        assert found["psnr"] == pytest.approx(alone["psnr"], abs=1e-3) and found["l1"] == pytest.approx(alone["l1"])
        assert found["ssim"] == pytest.approx(alone["ssim"], abs=0.05)
        assert found["lpips"] == pytest.approx(alone["lpips"], rel=0.5)
