"""Memory of a query does not grow with the dimension of the features."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from torch.utils._python_dispatch import TorchDispatchMode

from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.queryable import Scorer, score_image

SIZE_PX, CHUNK = 24, 64


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def queries(dim: int) -> list[Query]:
    vectors = Embeddings.of_full(torch.randn(6, dim), tuple("abcdef"))
    return [
        Query("a", "dense", Embeddings(vectors.values[:2], ("a", "b")), Embeddings(vectors.values[2:], tuple("cdef")))
    ]


@pytest.fixture
def largest(make_model: Callable[..., Any], make_spec: Callable[..., Any], make_camera: Callable[..., Cameras]) -> Any:
    def measure(dim: int) -> int:
        model = make_model((make_spec(dim=dim),), eval_num_rays_per_chunk=CHUNK, backend="torch").eval()
        made, camera = queries(dim), make_camera(SIZE_PX)
        # Vectors are brought into the few coordinates of rendered values once, before any ray.
        scorer = Scorer.of_model(model, made)
        with Largest() as seen:
            outputs = model.render_camera(camera, {"scores": lambda _, rendered_of: scorer(rendered_of)})
        assert outputs["scores"].shape == (SIZE_PX, SIZE_PX, 1)
        return seen.elements

    return measure


def test_the_largest_tensor_is_the_same_whatever_the_dimension(largest: Callable[[int], int]) -> None:
    sizes = {dim: largest(dim) for dim in (16, 64, 768)}
    assert sizes[16] == sizes[64] == sizes[768]
    assert sizes[768] < CHUNK * 768


def test_keeping_features_would_be_seen(
    make_model: Callable[..., Any], make_spec: Callable[..., Any], make_camera: Callable[..., Cameras]
) -> None:
    model = make_model((make_spec(dim=768),), eval_num_rays_per_chunk=CHUNK, backend="torch", output_features=True)
    with Largest() as seen:
        score_image(model.eval(), make_camera(SIZE_PX), queries(768))
    assert seen.elements >= SIZE_PX**2 * 768
