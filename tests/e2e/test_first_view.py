"""Where a page opens: on a training view, of fields and splats alike; and it stays where its user moves it."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from f3rm_ext.viewer import passes

WAIT_S = 180
LEAST_CONTRAST = 0.05
"""Standard deviation of a picture that shows something."""


def client_of(viewer: Any) -> Any:
    """The viewer's only page."""
    (client,) = viewer.viser_server.get_clients().values()
    return client


def place_of(client: Any) -> np.ndarray:
    """Position and orientation of a page's camera; the quaternion's sign is arbitrary."""
    wxyz = np.asarray(client.camera.wxyz)
    return np.concatenate([client.camera.position, wxyz * np.sign(wxyz[np.abs(wxyz).argmax()])])


def is_there(client: Any, place: np.ndarray) -> bool:
    """Whether a page's camera is at a place; positions are in the viewer's units, a tenth of the scene's."""
    return bool(np.abs(place_of(client) - place).max() < 1e-3)


def training_views(viewer: Any) -> list[np.ndarray]:
    """Where the training cameras are."""
    return [place_of(SimpleNamespace(camera=handle)) for handle in viewer.camera_handles.values()]


class Relay:
    """Passes connections on to a port, until it is told to cut them."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Breaks all connections; new ones are passed on."""
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    @classmethod
    @contextmanager
    def to(cls, port: int) -> Iterator["Relay"]:
        """A relay for as long as the context lasts."""
        relay = cls(port)
        try:
            yield relay
        finally:
            relay._server.close()
            relay.cut()


@pytest.fixture
def open_alone(open_page: Callable[[str], Any], wait_until: Callable[..., None]) -> Callable[..., Any]:
    """Opens a viewer's only page, and waits until it is on a training view; gives the page and the viewer's client."""

    def open_one(viewer: Any, port: int) -> tuple[Any, Any]:
        wait_until(lambda: not viewer.viser_server.get_clients(), WAIT_S, "pages of other tests leaving")
        page = open_page(f"http://127.0.0.1:{port}")
        wait_until(lambda: page.output() != "not set" and page.resolution() != (0, 0), WAIT_S, "a first picture")
        # What the panel says may be of an earlier page.
        wait_until(lambda: bool(viewer.viser_server.get_clients()), WAIT_S, "the page being known to the viewer")
        client, views = client_of(viewer), training_views(viewer)
        wait_until(lambda: any(is_there(client, view) for view in views), WAIT_S, "a training view")
        return page, client

    return open_one


@pytest.fixture
def turn(wait_until: Callable[..., None]) -> Callable[[Any, Any], None]:
    """Turns a page's view, and waits until the viewer has heard the end of it."""

    def drag(page: Any, client: Any) -> None:
        places = [place_of(client)]
        page.drag(150)

        def has_settled() -> bool:
            places.append(place_of(client))
            return np.ptp(places[-10:], axis=0).max() == 0.0 and not is_there(client, places[0])

        wait_until(has_settled, WAIT_S, "the page to turn")

    return drag


@pytest.mark.parametrize("name", ["viewer", pytest.param("labelled_splat_viewer", marks=pytest.mark.release)])
def test_a_page_opens_on_a_training_view_and_shows_it(
    request: pytest.FixtureRequest, name: str, open_alone: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    viewer = request.getfixturevalue(name)
    page, client = open_alone(viewer, viewer.config.websocket_port)
    cameras = viewer.pipeline.datamanager.train_dataset.cameras
    assert client.camera.fov == pytest.approx(2 * np.arctan(float(cameras.height[0] / cameras.fy[0]) / 2), abs=1e-3)
    if page.output() != "rgb":  # the panel is shared, and an earlier test has chosen something
        page.choose_output("rgb")
    wait_until(lambda: page.picture().std() > LEAST_CONTRAST, WAIT_S, "a picture of the scene")


def test_a_slow_picture_grows(
    viewer: Any, open_alone: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    monkeypatch.setattr(passes, "_PATIENCE_S", 0.0)
    page, client = open_alone(viewer, viewer.config.websocket_port)
    before, heights = max(page.resolution()), []
    show = client.scene.set_background_image

    def note(picture: np.ndarray, **options: Any) -> None:
        heights.append(len(picture))
        show(picture, **options)

    monkeypatch.setattr(client.scene, "set_background_image", note)
    page.set_max_res(240)
    wait_until(lambda: max(page.resolution()) == 240, WAIT_S, "the whole picture")
    assert heights[-2:] == [heights[-1] // 2, heights[-1]]
    page.set_max_res(before)


@pytest.mark.release
def test_a_second_page_opens_there_too_and_does_not_move_the_first(
    viewer: Any,
    open_alone: Callable[..., Any],
    turn: Callable[[Any, Any], None],
    open_page: Callable[[str], Any],
    wait_until: Callable[..., None],
) -> None:
    page, first = open_alone(viewer, viewer.config.websocket_port)
    opened = place_of(first)
    turn(page, first)
    moved = place_of(first)
    open_page(f"http://127.0.0.1:{viewer.config.websocket_port}")
    wait_until(lambda: max(viewer.viser_server.get_clients(), default=-1) > first.client_id, WAIT_S, "the second page")
    clients = viewer.viser_server.get_clients()
    second = clients[max(clients)]
    wait_until(lambda: is_there(second, opened), WAIT_S, "the second page on the training view")
    assert is_there(first, moved), "the first page was moved"


def test_a_page_that_comes_back_stays_where_it_was(
    viewer: Any, open_alone: Callable[..., Any], turn: Callable[[Any, Any], None], wait_until: Callable[..., None]
) -> None:
    def come_back(relay: Relay, client: Any) -> Any:
        """Breaks the connection; the page makes a new one by itself, and says where it is."""
        relay.cut()
        clients = viewer.viser_server.get_clients
        wait_until(lambda: bool(clients()) and client.client_id not in clients(), WAIT_S, "the page's coming back")
        return client_of(viewer)

    with Relay.to(viewer.config.websocket_port) as relay:
        page, first = open_alone(viewer, relay.port)
        opened = place_of(first)
        second = come_back(relay, first)
        assert is_there(second, opened)
        turn(page, second)
        moved = place_of(second)
        third = come_back(relay, second)
        assert is_there(third, moved) and not is_there(third, opened)
