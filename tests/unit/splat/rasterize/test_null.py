"""The null backend of the rasteriser: shapes, dtypes and gradients, and what gsplat allocates."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from f3rm_ext.memory.trace import tracing
from f3rm_ext.splat.gaussians import Ellipsoids
from f3rm_ext.splat.rasterize import prepare, rasterize
from f3rm_ext.splat.rasterize.camera import Camera
from f3rm_ext.splat.rasterize.null import CHANNELS


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("channels", [3, 40])
def test_pictures_have_the_shapes_of_other_backends(device: str, channels: int) -> None:
    with torch.device("meta") if device == "meta" else tracing(device):
        leaves = [torch.zeros(7, *shape, requires_grad=True) for shape in ((3,), (4,), (3,), (), (channels,))]
        shapes, camera = Ellipsoids(*leaves[:4]), Camera(torch.eye(4), torch.eye(3), 37, 29, antialiased=True)
        drawn = rasterize(shapes, leaves[4], camera, absgrad=True)
        drawn.means2d.retain_grad()
        assert drawn.colors.shape == (29, 37, channels) and drawn.radii.dtype == torch.int32
        assert drawn.depth.shape == drawn.alpha.shape == (29, 37)
        (drawn.colors.sum() + drawn.depth.sum() + drawn.alpha.sum()).backward()
        assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)
        assert drawn.means2d.absgrad.shape == (7, 2)  # type: ignore[attr-defined]
        strip = prepare(shapes, camera)((16, 29))
        assert strip(leaves[4]).shape == (13, 37, channels) and strip(leaves[0]).shape == (13, 37, 3)


def test_channels_are_padded_as_gsplat_pads_them() -> None:
    spec = importlib.util.find_spec("gsplat")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "cuda" / "_wrapper.py").read_text()
    known = ast.literal_eval(re.search(r"if channels not in (\([\d,\s]+\))", source)[1])  # type: ignore[index]
    assert [size for size in known if size <= max(CHANNELS)] == list(CHANNELS)
