"""Pictures that evaluation shows."""

import torch

from f3rm_ext.model_components.visualization import comparison_images, depth_colors


def test_comparison_images() -> None:
    names = ("rgb", "normal", "normal_from_depth")
    outputs = {name: torch.rand(24, 32, 3) for name in names} | {"accumulation": torch.rand(24, 32, 1)}
    outputs["depth"] = 1 + torch.rand(24, 32, 1)
    truth = torch.rand(24, 32, 3)
    images = comparison_images(outputs, truth)
    assert {name: tuple(image.shape) for name, image in images.items()} == {
        "img": (24, 64, 3),
        "accumulation": (24, 32, 3),
        "depth": (24, 32, 3),
        "normal": (24, 64, 3),
    }
    assert torch.equal(images["img"][:, :32], truth) and torch.equal(images["img"][:, 32:], outputs["rgb"])
    assert all(0 <= image.min() and image.max() <= 1 for image in images.values())
    del outputs["normal"], outputs["normal_from_depth"]
    assert "normal" not in comparison_images(outputs, truth)


def test_one_far_pixel_does_not_flatten_the_depth_colors() -> None:
    depth = torch.linspace(1.0, 2.0, 200).view(10, 20, 1)
    opaque = torch.ones(10, 20, 1)
    plain = depth_colors(depth, opaque)
    depth[0, 0] = 1000.0
    torch.testing.assert_close(depth_colors(depth, opaque)[1:], plain[1:], atol=0.05, rtol=0)


def test_masked_out_depth_does_not_flatten_the_colors() -> None:
    mask = torch.zeros(12, 20, 1, dtype=torch.bool)
    mask[:, :10] = True
    depth, opaque = torch.rand(12, 20, 1), torch.ones(12, 20, 1)
    far = torch.where(mask, depth, 1000.0)
    colors = [depth_colors(values, opaque, mask)[:, :10] for values in (depth, far)]
    torch.testing.assert_close(*colors)
