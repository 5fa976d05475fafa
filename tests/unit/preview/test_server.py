"""Where a content is in the viewer, and a port that is taken."""

import socket

import numpy as np
import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.preview.cameras import overview
from f3rm_ext.preview.content import PointContent
from f3rm_ext.preview.server import RADIUS, Placement, serve_content


@pytest.fixture
def content() -> PointContent:
    """Points far from the origin, whose -y is up."""
    positions = np.random.default_rng(0).normal(size=(200, 3)) * 1000 + [5e4, 0, 0]
    return PointContent("200 points", positions, "-y", positions=positions, colors=np.zeros((200, 3), np.uint8))


def test_the_content_is_upright_around_the_origin(content: PointContent) -> None:
    place = Placement.of(content, None)
    shown = place.points(content.positions)
    assert np.abs(np.median(shown, axis=0)).max() < 1e-6 * RADIUS
    assert np.quantile(np.linalg.norm(shown, axis=1), 0.9) == pytest.approx(RADIUS)
    above = place.points(content.positions + [0, -1000, 0]) - shown
    assert (above[:, 2] > 0).all() and np.abs(above[:, :2]).max() < 1e-9
    named = overview(content.places)
    pixels = named.camera.project(content.positions)[0]
    np.testing.assert_allclose(place.camera(named).camera.project(shown)[0], pixels, rtol=1e-6, atol=1e-6)


def test_a_port_that_is_taken_is_refused(content: PointContent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"{port} .*--port"):
            serve_content(content, "a.ply", [], "127.0.0.1", port)
