"""Extractors with real weights on real photos, and CLIP at its real size; skipped where the test data are absent."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from f3rm_ext.features.base import Extractor, TextExtractor
from f3rm_ext.features.extractors.registry import available_extractors, build_extractor

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")
_GIVEN = os.environ.get("F3RM_EXT_TEST_DATA")
DATA = Path(_GIVEN) if _GIVEN else Path(__file__).parents[2].parent / "shared" / "data"
DINOV2 = DATA / "weights" / "dinov2_vits14_saliency_fp16.pth"

FACES = {"0001.jpg": ((180, 280), (440, 500)), "0033.jpg": ((180, 0), (560, 290))}
"""Photos of the fox, and the box (top, left), (bottom, right) in pixels in which its face lies."""


def photo(name: str) -> np.ndarray:
    path = DATA / "fox" / "images" / name
    if not path.is_file():
        pytest.skip(f"{path} is not there: set F3RM_EXT_TEST_DATA to the folder with fox/ and weights/")
    return np.asarray(Image.open(path).convert("RGB"))


def inside(extractor: Extractor, image: np.ndarray, box: tuple[tuple[int, int], tuple[int, int]]) -> np.ndarray:
    """Which patches have their centre in the box."""
    centres = extractor.patch_grid(*image.shape[:2]).centres_px()
    return np.asarray(((centres >= box[0]) & (centres < box[1])).all(axis=-1))


@pytest.fixture(scope="module")
def dinov2() -> Extractor:
    if not DINOV2.is_file():
        pytest.skip(f"{DINOV2} is not there: set F3RM_EXT_TEST_DATA")
    return build_extractor(f"dinov2:weights={DINOV2},layers=6+7+8+9", device=CPU)


class TestDinov2:
    def test_weights_are_a_vits14(self, dinov2: Extractor) -> None:
        assert dinov2.dim == 384
        assert dinov2.identity.model == "ViT 384x12/14"
        status = available_extractors()["dinov2"].weights_status(f"weights={DINOV2}")
        assert status.path == DINOV2

    @pytest.mark.parametrize(("query", "target"), [(0, 1), (1, 0)])
    def test_face_in_one_photo_finds_the_face_in_another(self, dinov2: Extractor, query: int, target: int) -> None:
        images = [photo(name) for name in FACES]
        maps = dinov2.extract(images)
        faces = [
            torch.from_numpy(inside(dinov2, image, box)) for image, box in zip(images, FACES.values(), strict=True)
        ]
        mean = torch.cat([features.flatten(0, 1) for features in maps]).mean(dim=0)
        centred = [functional.normalize(features - mean, dim=-1) for features in maps]
        score = centred[target] @ functional.normalize(centred[query][faces[query]].mean(dim=0), dim=0)
        best = score.flatten().topk(score.numel() // 20).indices
        share, area = faces[target].flatten()[best].float().mean(), faces[target].float().mean()
        # By chance the best twentieth of the patches would lie in the face in proportion to its area.
        assert share > 2.5 * area, f"{share:.2f} of the best patches, area {area:.2f}"


@pytest.fixture(scope="module")
def conse() -> Extractor:
    pytest.importorskip("f3rm_ext_conse", reason="the package examples/extractor_conse is not installed")
    weights = DATA / "weights"
    if not (weights / "minilm").is_dir():
        pytest.skip(f"{weights} is not there: set F3RM_EXT_TEST_DATA")
    return build_extractor(f"conse:weights={weights}", device=CPU)


class TestConse:
    @pytest.mark.parametrize("name", FACES)
    def test_a_fox_peaks_at_its_head(self, conse: Extractor, name: str) -> None:
        assert isinstance(conse, TextExtractor)
        image = photo(name)
        (features,) = conse.extract([image])
        (query,) = conse.encode_text(["a fox"])
        score = functional.normalize(features, dim=-1) @ query
        face = inside(conse, image, FACES[name])
        peak = np.unravel_index(int(score.argmax()), score.shape)
        assert face[peak], f"the peak is at {conse.patch_grid(*image.shape[:2]).centres_px()[peak]}"

    def test_text_embeddings(self, conse: Extractor) -> None:
        assert isinstance(conse, TextExtractor)
        fox, red_fox, teapot = conse.encode_text(["a fox", "red fox", "teapot"])
        torch.testing.assert_close(fox.norm(), torch.tensor(1.0))
        assert fox @ red_fox > 0.7 > 0.4 > fox @ teapot


@pytest.fixture(scope="module")
def clip() -> Extractor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision's import warns on new versions of torch.
        return build_extractor("clip:model=ViT-B-16,pretrained=random,short_side_px=224", device=CPU)


class TestClipAtItsRealSize:
    """ViT-B-16 of open_clip with random weights: no real ones are needed to compare two implementations."""

    @torch.no_grad()
    def test_tokens_and_pooled_output_agree_with_open_clip(self, clip) -> None:
        from f3rm_ext.features.extractors.clip import tokens_before_last_block

        visual = clip.model.visual
        pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        seen: list[Tensor] = []
        last = visual.transformer.resblocks[-1]
        hook = last.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        expected = clip.model.encode_image(pixels)
        hook.remove()
        tokens = tokens_before_last_block(visual, pixels)
        torch.testing.assert_close(tokens, seen[0], atol=1e-4, rtol=1e-4)
        pooled = visual.ln_post(last(tokens)[:, 0]) @ visual.proj
        torch.testing.assert_close(pooled, expected, atol=1e-4, rtol=1e-4)

    def test_dense_features_and_text_share_a_space(self, clip) -> None:
        image = np.random.default_rng(0).integers(0, 256, (240, 427, 3), dtype=np.uint8)
        (features,) = clip.extract([image])
        assert features.shape == (14, 25, 512)
        assert clip.encode_text(["a chair"]).shape == (1, 512)
        assert torch.isfinite(features).all()
