"""A model of two things side by side, rendered exactly; and what the panel needs of a viewer."""

import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.cameras.cameras import Cameras
from torch import Tensor, nn

from f3rm_ext.errors import ExtractorError
from f3rm_ext.features.spec import DisplayBasis, FeatureSpec
from f3rm_ext.query.embeddings import Embeddings, Query
from f3rm_ext.query.encoders import TextEncoder
from f3rm_ext.query.queryable import GroupedPoints
from f3rm_ext.splat.features.heads import LiftedHead
from f3rm_ext.viewer.panel import QueryPanel

MUG, BOOK, REST = torch.eye(3)
WORDS = {"mug": MUG, "book": BOOK, "object": REST, "thing": torch.ones(3)}


def make_head(name: str) -> LiftedHead:
    """Three-dimensional features, rendered as they are."""
    display = DisplayBasis(torch.ones(3), torch.eye(3), torch.zeros(3), torch.ones(3))
    spec = FeatureSpec(name=name, dim=3, extractor="dense-daisy", identity={}, display=display)
    return LiftedHead(spec, torch.zeros(0, 3, dtype=torch.float16))


class ToyModel(nn.Module):
    """Where x > 0 there is a mug, elsewhere a book, 2 units away; nothing is above the horizon."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.heads = {name: make_head(name) for name in names or ("toy",)}
        self.was_training: list[bool] = []
        self.boxes: list[Any] = []
        self.groups: Tensor | None = None
        self.queries = QueryPanel(self)

    def grouped_points(self, name: str) -> GroupedPoints | None:
        if self.groups is None:
            return None
        return GroupedPoints(torch.zeros(len(self.groups), 3), torch.zeros(len(self.groups), 3), self.groups)

    def group_map(self, camera: Cameras, name: str, obb_box: Any = None) -> Any:
        self.was_training.append(self.training)
        x, y, _ = camera.generate_rays(camera_indices=0, keep_shape=True).directions.unbind(dim=-1)
        return torch.where(y <= 0.2, (x > 0).long(), -1).numpy()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def query_heads(self) -> Mapping[str, LiftedHead]:
        return self.heads

    def render_camera(self, camera: Cameras, extra: Mapping[str, Any], obb_box: Any = None) -> dict[str, Tensor]:
        self.was_training.append(self.training)
        self.boxes.append(obb_box)
        rays = camera.generate_rays(camera_indices=0, keep_shape=True)
        directions = rays.directions.flatten(0, 1)
        outputs = self.render(directions, extra)
        return {name: value.view(*rays.shape, -1) for name, value in outputs.items() if value is not None}

    def render(self, directions: Tensor, extra: Mapping[str, Any]) -> dict[str, Any]:
        solid = (directions[:, 1:2] <= 0.2).float()
        # A little of each in the other, so that nothing is degenerate.
        features = solid * torch.where(directions[:, :1] > 0, MUG + 0.1 * BOOK, BOOK + 0.1 * MUG)
        outputs: dict[str, Any] = {
            "rgb": directions.abs(),
            "accumulation": solid,
            "depth": torch.full_like(solid, 2.0),
        }
        for name, compute in extra.items():
            outputs[name] = compute(outputs, lambda head: features * (1.0 if head == "toy" else 0.5))
        return outputs

    def render_points(self, points: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError


class ToyEncoder(TextEncoder):
    """Knows the words above at once; ``slow`` waits until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.at_work = threading.Event(), threading.Event()
        self.failure: Exception | None = None
        self.read: list[tuple[str, ...]] = []

    def encode(self, head: Any, prompts: Sequence[str], *, known: Sequence[str] = ()) -> Embeddings:
        self.at_work.set()
        self.read.append(tuple(prompts))
        if "slow" in prompts:
            assert self.go_on.wait(30)
        if self.failure is not None:
            raise self.failure
        if "no class" in known:
            raise ExtractorError("There is no class 'no class'.")
        vectors = torch.stack([WORDS.get(prompt, torch.tensor([1.0, 1.0, 0.0])) for prompt in prompts])
        return Embeddings.from_full(vectors, prompts)


@pytest.fixture
def make_toy() -> Callable[..., ToyModel]:
    """Makes the model with heads named as given."""
    return ToyModel


@pytest.fixture
def toy() -> ToyModel:
    """The model, with one head, ``toy``."""
    return ToyModel()


@pytest.fixture
def encoder() -> ToyEncoder:
    """What reads texts in the panel."""
    return ToyEncoder()


@pytest.fixture
def server() -> SimpleNamespace:
    """The part of a viewer that a panel reaches through its control."""
    scene = SimpleNamespace(callback=None)

    def on_pointer_event(event_type: str) -> Callable[[Any], Any]:
        def register(callback: Any) -> Any:
            scene.callback = callback
            return callback

        return register

    def remove_pointer_callback() -> None:
        scene.callback = None

    scene.on_pointer_event, scene.remove_pointer_callback = on_pointer_event, remove_pointer_callback
    return SimpleNamespace(scene=scene)


@pytest.fixture
def viewer(server: SimpleNamespace) -> SimpleNamespace:
    """A viewer that shows rgb and counts how often it was told to draw again."""
    shown = SimpleNamespace(value="rgb", options=["rgb", "relevancy_overlay"])
    view = SimpleNamespace(
        viser_server=server,
        train_lock=threading.Lock(),
        render_statemachines={},
        control_panel=SimpleNamespace(_output_render=shown),
        drawn=0,
    )

    def draw() -> None:
        view.drawn += 1

    view._trigger_rerender = draw
    return view


@pytest.fixture
def panel(toy: ToyModel, encoder: ToyEncoder, viewer: SimpleNamespace) -> QueryPanel:
    """The panel of the toy model in a viewer."""
    toy.queries = QueryPanel(toy, encoder)
    toy.queries.viewer_control._setup(viewer)  # type: ignore[arg-type]
    toy.queries.sync()
    return toy.queries


@pytest.fixture
def query_for() -> Callable[..., Query]:
    """A query for a word against another."""

    def make(word: str, negative: str = "object", head: str = "toy") -> Query:
        positives, negatives = (Embeddings.from_full(WORDS[text][None], [text]) for text in (word, negative))
        return Query(word, head, positives, negatives)

    return make


@pytest.fixture
def directions() -> Tensor:
    """Rays to the mug, to the book, and into nothing."""
    return torch.tensor([[0.6, 0.0, -0.8], [-0.6, 0.0, -0.8], [0.0, 0.8, -0.6]])
