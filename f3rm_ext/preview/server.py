"""A file in viser's viewer: its content, the frusta of cameras, and buttons that go from camera to camera."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError
from f3rm_ext.preview.cameras import NamedCamera, extent_of, nerfstudio_cameras, overview
from f3rm_ext.preview.content import Content, MeshContent, PointContent, SplatContent, Up, splat_colors
from f3rm_ext.splat.gaussians import Gaussians
from f3rm_ext.utils.pictures import to_bytes
from f3rm_ext.viewer.first_view import first_view
from f3rm_ext.viewer.status import plain

if TYPE_CHECKING:
    from viser import ClientHandle, ViserServer

RADIUS = 5.0
"""Size of the content in the viewer, whose cameras see nothing nearer than 0.05."""
_FRUSTUM = 0.12
_MAX_FRUSTA = 300
_CHUNK = 1 << 18
_SIZES = (2e-4, 5e4)
"""Smallest and largest standard deviation of a Gaussian in the viewer, which keeps them as 16-bit floats."""
_THINNEST = 1e-5
"""Smallest ratio of the standard deviations of a Gaussian, for the viewer's Cholesky factors."""


@dataclass(frozen=True)
class Placement:
    """Where the content is in the viewer: z up, around the origin, with the size :data:`RADIUS`."""

    rotation: Float[np.ndarray, "3 3"]
    middle: Float[np.ndarray, "3"]
    """The point that comes to the origin, in the coordinates of the content."""
    scale: float
    """Units of the viewer per unit of the content."""

    @classmethod
    def of(cls, content: Content, up: Up | None) -> "Placement":
        """Returns the place of a content, one of whose axes is up, by default the one that the file tells."""
        middle, radius = extent_of(content.places)
        return cls(content.turn_up(up), middle, RADIUS / radius)

    def points(self, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
        """Returns points in the viewer."""
        return (points - self.middle) @ self.rotation.T * self.scale

    def camera(self, named: NamedCamera) -> NamedCamera:
        """Returns a camera in the viewer."""
        (center,) = self.points(named.camera.center[None])
        turned = named.turn(self.rotation)
        return turned._replace(camera=turned.camera._replace(center=center))


def serve_content(
    content: Content, title: str, cameras: Sequence[NamedCamera], host: str, port: int, up: Up | None = None
) -> "ViserServer":
    """Starts a server that shows a content.

    Args:
        cameras: to go to; in the coordinates of the content.
        up: axis of the file that points up; None for the one that the file tells.

    Raises:
        ConfigError: the port cannot be used.
    """
    try:
        server = compat.open_server(host, port)
    except OSError as error:
        raise ConfigError(
            f"Port {port} of {host} cannot be used ({error.strerror or error}): choose another --port, or --host."
        ) from error
    place = Placement.of(content, up)
    if isinstance(content, SplatContent):
        _add_splats(server, content.gaussians, place)
    elif isinstance(content, MeshContent):
        _add_mesh(server, content, place)
    elif isinstance(content, PointContent):
        size = RADIUS / 2 / max(len(content.positions), 1) ** (1 / 3)
        server.scene.add_point_cloud(
            "/content", place.points(content.positions).astype(np.float32), content.colors, point_size=min(size, 0.05)
        )
    views = _Views.of([place.camera(one) for one in cameras], place.points(content.places))
    server.on_client_connect(lambda client: _Panel(client, views, f"**{plain(title)}**: {content.summary}").open())
    return server


def _add_splats(server: "ViserServer", gaussians: Gaussians, place: Placement) -> None:
    """Adds Gaussians in chunks, so that their matrices take little memory; the viewer sorts all of them together."""
    for start in range(0, len(gaussians), _CHUNK):
        part = gaussians[slice(start, start + _CHUNK)]
        sizes = np.exp(np.clip(part.scales.double().numpy() + np.log(place.scale), *np.log(_SIZES)))
        sizes = np.maximum(sizes, _THINNEST * sizes.max(axis=1, keepdims=True))
        axes = place.rotation @ part.rotations().double().numpy() * sizes[:, None, :]
        compat.show_splats(
            server,
            f"/content/{start}",
            place.points(part.means.double().numpy()),
            axes @ axes.transpose(0, 2, 1),
            splat_colors(part),
            to_bytes(part.alphas().numpy())[:, None],
        )


def _add_mesh(server: "ViserServer", content: MeshContent, place: Placement) -> None:
    from viser.transforms import SO3

    server.scene.add_glb(
        "/content",
        content.glb(),
        scale=place.scale,
        wxyz=SO3.from_matrix(place.rotation @ content.glb_rotation()).wxyz,
        position=place.points(np.zeros((1, 3)))[0],
    )


class _Views(NamedTuple):
    """The views of pages, in the coordinates of the viewer."""

    cameras: Sequence[NamedCamera]
    """At least one."""
    start: int
    """Index of that on which a page opens."""

    @classmethod
    def of(cls, cameras: Sequence[NamedCamera], places: Float[np.ndarray, "n 3"]) -> "_Views":
        """Returns the views of cameras, or one of the content where there are none."""
        if not cameras:
            return cls([overview(places)], 0)
        return cls(cameras, first_view(nerfstudio_cameras(cameras)).index)

    def go_to(self, client: "ClientHandle", index: int) -> None:
        """Moves a page to a view, which then turns about the middle of the content, or about a place as deep."""
        camera = self.cameras[index].camera
        c2w = np.column_stack([camera.rotation.T * [1.0, -1.0, -1.0], camera.center])
        distance = max(float(-camera.center @ camera.rotation[2]), 0.2 * RADIUS)  # the middle is the origin
        compat.place_page(client, c2w, 2 * float(np.arctan2(camera.height / 2, camera.focal[1])), distance)


class _Panel:
    """The elements of one page."""

    def __init__(self, client: "ClientHandle", views: _Views, summary: str) -> None:
        self._client, self._views, self._summary = client, views, summary
        self._frusta: dict[int, Any] = {}
        self._are_shown = True

    def open(self) -> None:
        """Builds the elements, and moves a new page to the first view."""
        client, views = self._client, self._views
        client.gui.add_markdown(self._summary)
        if compat.is_new_page(client):
            views.go_to(client, views.start)
        if len(views.cameras) == 1:
            client.gui.add_button("Reset view").on_click(lambda _: views.go_to(client, views.start))
            return
        self._add_frusta()
        options = [f"{i + 1}: {name}" for i, (name, _) in enumerate(views.cameras)]
        chosen = client.gui.add_dropdown("Camera", options, initial_value=options[views.start])
        for label, step in (("Previous camera", -1), ("Next camera", 1), ("Reset view", 0)):

            def go(_: Any, step: int = step) -> None:
                index = (options.index(chosen.value) + step) % len(options) if step else views.start
                if options[index] == chosen.value:
                    self._go_to(index)
                else:
                    chosen.value = options[index]  # calls what follows

            client.gui.add_button(label).on_click(go)
        chosen.on_update(lambda _: self._go_to(options.index(chosen.value)))
        shown = client.gui.add_checkbox("Show cameras", initial_value=True)

        @shown.on_update
        def _(_: Any) -> None:
            self._are_shown = shown.value
            for frustum in self._frusta.values():
                frustum.visible = shown.value

    def _go_to(self, index: int) -> None:
        for number, frustum in self._frusta.items():  # the frustum around the page would hide the view
            frustum.visible = self._are_shown and number != index
        self._views.go_to(self._client, index)

    def _add_frusta(self) -> None:
        from viser.transforms import SO3

        cameras = self._views.cameras
        for index in range(0, len(cameras), -(-len(cameras) // _MAX_FRUSTA)):
            camera = cameras[index].camera
            self._frusta[index] = self._client.scene.add_camera_frustum(
                f"/cameras/{index}",
                fov=float(2 * np.arctan2(camera.height / 2, camera.focal[1])),
                aspect=camera.width / camera.height,
                scale=_FRUSTUM,
                wxyz=SO3.from_matrix(camera.rotation.T).wxyz,
                position=camera.center,
                visible=index != self._views.start,
            )
