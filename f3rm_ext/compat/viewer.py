"""Workarounds for nerfstudio 1.1.5's viewer on viser 0.2.7."""

import atexit
import contextlib
import importlib.metadata
import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from types import FrameType

    import numpy as np
    from nerfstudio.cameras.cameras import Cameras
    from nerfstudio.configs.base_config import ViewerConfig
    from nerfstudio.viewer.viewer import Viewer
    from nerfstudio.viewer.viewer_elements import ViewerControl
    from viser import ClientHandle, ViserServer

LOCAL_HOST = "127.0.0.1"
_ANY_HOST = "0.0.0.0"
_VISER_START = (3.0, 3.0, 3.0)
"""Position of the camera at which viser 0.2.7 opens a page, in viser's frame."""
_PATIENCE_S = 10.0
"""How long each thread is given to drop the picture at which it is when the process ends."""
_VIEWER_MODULES = ("nerfstudio.viewer.render_state_machine", "nerfstudio.viewer_legacy.server.render_state_machine")


def is_viewer_thread() -> bool:
    """Returns whether the caller is a render thread of nerfstudio's viewer, where an exception freezes the page."""
    thread = threading.current_thread()
    modules = (sys.modules.get(name) for name in _VIEWER_MODULES)
    return any(isinstance(thread, module.RenderStateMachine) for module in modules if module is not None)


def viewer_interrupts() -> tuple[type[BaseException], ...]:
    """Returns the exceptions with which the viewer stops an outdated render; they must always be raised again."""
    module = sys.modules.get("nerfstudio.viewer_legacy.server.viewer_utils")
    return () if module is None else (module.IOChangeException,)


def release_viewer_locks() -> None:
    """Makes viser's ``atomic()`` release its lock when its body raises; safe to call twice.

    In viser 0.2.7 it does not. Nerfstudio's body raises when a camera's update arrives after its page was closed, and
    from then on every page of that viewer is frozen, and the viewer cannot be stopped.
    """
    if importlib.metadata.version("viser") != "0.2.7":
        return
    from viser.infra._infra import WebsockMessageHandler

    @contextlib.contextmanager
    def atomic(self: Any) -> Iterator[None]:
        thread = threading.get_ident()
        if self._locked_thread_id == thread:
            yield
            return
        with self._atomic_lock:
            self._locked_thread_id = thread
            try:
                yield
            finally:
                self._locked_thread_id = -1

    WebsockMessageHandler.atomic = atomic


def interrupt_at_calls() -> None:
    """Makes the viewer stop an outdated render only where a function of this package begins; safe to call twice.

    Nerfstudio raises at whatever line is traced next, also between the body of a ``with`` statement and its
    ``__exit__``. A lock, of any library that renders, is then never released, and the next render waits for ever.
    """
    from nerfstudio.viewer.render_state_machine import RenderStateMachine
    from nerfstudio.viewer_legacy.server.viewer_utils import IOChangeException

    package = __name__.partition(".")[0] + "."

    def check_interrupt(self: Any, frame: "FrameType", event: str, arg: Any) -> None:
        begins = frame.f_globals.get("__name__", "").startswith(package) and frame.f_code.co_name != "__exit__"
        if begins and self.interrupt_render_flag:
            self.interrupt_render_flag = False
            raise IOChangeException

    machine: Any = RenderStateMachine
    machine.check_interrupt = check_interrupt


def end_viewer_threads_at_exit(viewer: "Viewer") -> None:
    """Ends the threads that render for a viewer when the process is about to end.

    They are daemons. Python would stop them amid torch's C++ code, which aborts the process.
    """

    def end() -> None:
        threads = list(viewer.render_statemachines.values())
        for thread in threads:
            thread.running = False
            thread.interrupt_render_flag = True
        for thread in threads:
            thread.join(_PATIENCE_S)

    atexit.register(end)


class PassCameras(Protocol):
    """The cameras of the passes of one picture."""

    def camera(self, whole: "Cameras", divisor: int) -> "Cameras":
        """Returns the camera of the next pass, whose sides are divided."""
        ...


_next_pass: ContextVar[tuple[PassCameras, int] | None] = ContextVar("next_pass", default=None)


def render_in_passes(new_picture: Callable[[], PassCameras], next_divisor: Callable[[int | None, float], int]) -> None:
    """Makes still pictures appear in passes of growing size, where nerfstudio goes from the smallest to the whole.

    A pass that is no larger than what the page shows of the view is left out, so a training that goes on does not blur
    its page. Passes keep nothing of those before a step of the training. Safe to call twice.

    Args:
        new_picture: returns what the passes of a picture share.
        next_divisor: returns by what the sides of the next pass are divided, given that of the last one (None before
            the first) and the seconds it took; 1 is the whole picture.
    """
    from nerfstudio.viewer import render_state_machine
    from nerfstudio.viewer.render_state_machine import RenderAction

    module: Any = render_state_machine
    machine, get_camera = module.RenderStateMachine, module.get_camera
    render = machine._render_img

    def get_camera_of_pass(*args: Any) -> "Cameras":
        current, camera = _next_pass.get(), get_camera(*args)
        return camera if current is None else current[0].camera(camera, current[1])

    def draw(self: Any, camera_state: Any, rows: int) -> Any:
        begin = time.perf_counter()
        outputs = render(self, camera_state)
        self.drawn = rows, time.perf_counter() - begin
        return outputs

    def render_passes(self: Any, camera_state: Any) -> Any:
        height = self._calculate_image_res(camera_state.aspect)[0]
        if self.state != "high":
            outputs = draw(self, camera_state, height)
            if self.state == "low_static":  # the camera stands: nerfstudio would wait for 0.2 s once more
                self.action(RenderAction("static", camera_state))
            return outputs
        picture, step, divisor = new_picture(), self.viewer.step, next_divisor(None, 0.0)
        try:
            while divisor > 1:
                rows, (drawn_rows, seconds) = height // divisor, self.drawn
                if rows > drawn_rows:
                    _next_pass.set((picture, divisor))
                    self._send_output_to_viewer(draw(self, camera_state, rows))
                    drawn_rows, seconds = self.drawn
                divisor = next_divisor(divisor, seconds * (rows / drawn_rows) ** 2)
                if self.viewer.step != step:
                    picture, step = new_picture(), self.viewer.step
            _next_pass.set((picture, divisor))
            return draw(self, camera_state, height)
        finally:
            _next_pass.set(None)

    if render.__name__ != render_passes.__name__:
        machine.drawn, machine._render_img, module.get_camera = (1, 0.0), render_passes, get_camera_of_pass


def _get_viewer(control: "ViewerControl") -> "Viewer | None":
    """Returns the viewer to which a control belongs, if any: nerfstudio 1.1.5 keeps it as an attribute."""
    return getattr(control, "viewer", None)


def viewer_lock(control: "ViewerControl") -> contextlib.AbstractContextManager[Any]:
    """Returns the lock to hold while using the model, except in a viewer element's callback, which holds it already."""
    viewer = _get_viewer(control)
    return contextlib.nullcontext() if viewer is None or viewer.train_lock is None else viewer.train_lock


def viewer_redraw(control: "ViewerControl") -> None:
    """Renders every page anew, interrupting a render in progress. Does nothing without a viewer."""
    viewer = _get_viewer(control)
    if viewer is not None:
        # A page may disconnect meanwhile.
        with contextlib.suppress(KeyError):
            viewer._trigger_rerender()


def viewer_show_output(control: "ViewerControl", name: str, instead_of: str) -> None:
    """Selects an output in the viewer if it is available and ``instead_of`` is selected."""
    viewer = _get_viewer(control)
    if viewer is not None:
        element = viewer.control_panel._output_render
        if element.value == instead_of and name in element.options:
            element.value = name


def viewer_datamanager(control: "ViewerControl") -> Any:
    """Returns the datamanager of the run that is shown."""
    viewer = _get_viewer(control)
    assert viewer is not None, "there is no viewer yet"
    return viewer.pipeline.datamanager


def viewer_cameras(viewer: "Viewer") -> "Cameras | None":
    """Returns the training cameras of the run that a viewer shows; None if there are none."""
    manager = getattr(getattr(viewer, "pipeline", None), "datamanager", None)
    cameras = getattr(getattr(manager, "train_dataset", None), "cameras", None)
    return None if cameras is None or len(cameras) == 0 else cameras


def viewer_start_view(viewer: "Viewer", index: int, c2w: "np.ndarray", fov_rad: float, distance: float) -> None:
    """Makes pages open at the view of a training camera.

    A page that reconnects stays where its user has moved it.

    Args:
        viewer: the viewer; it may still be under construction.
        index: of the camera; its photo, which would hide the view, is not shown.
        c2w: pose of the camera (3, 4), scene frame, OpenGL axes.
        fov_rad: vertical field of view.
        distance: from the camera to the point about which the view rotates, scene units.
    """
    from nerfstudio.viewer.viewer import VISER_NERFSTUDIO_SCALE_RATIO

    def move(client: "ClientHandle") -> None:
        if is_new_page(client):
            place_page(client, c2w, fov_rad, distance, VISER_NERFSTUDIO_SCALE_RATIO)

    draw = viewer.init_scene

    def draw_without_the_photo(*args: Any, **kwargs: Any) -> None:
        draw(*args, **kwargs)
        if index in viewer.camera_handles:  # missing if the viewer does not show all cameras
            viewer.camera_handles[index].visible = False

    viewer.init_scene = draw_without_the_photo
    viewer.viser_server.on_client_connect(move)


def is_new_page(client: "ClientHandle") -> bool:
    """Returns whether a page is where pages open; one that reconnects is where its user has moved it."""
    import numpy as np

    return bool(np.allclose(client.camera.position, _VISER_START, atol=1e-3))


def place_page(client: "ClientHandle", c2w: "np.ndarray", fov_rad: float, distance: float, scale: float = 1.0) -> None:
    """Moves a page to the view of a camera.

    Args:
        c2w: pose of the camera (3, 4), OpenGL axes.
        fov_rad: vertical field of view.
        distance: from the camera to the point about which the view rotates.
        scale: viser's units per unit of the pose and the distance.
    """
    import numpy as np
    from viser.transforms import SO3

    # Viser's cameras look along z, with y down.
    rotation = SO3.from_matrix(c2w[:3, :3] * np.array([1.0, -1.0, -1.0]))
    position = c2w[:3, 3] * scale
    with client.atomic():
        client.camera.position = position
        client.camera.wxyz = rotation.wxyz
        client.camera.look_at = position - c2w[:3, 2] * distance * scale
        client.camera.fov = fov_rad


def open_server(host: str, port: int) -> "ViserServer":
    """Starts a server of viser's pages, without its messages.

    Raises:
        OSError: the port is taken or the host is not this machine's; viser itself would take the next free port.
    """
    import viser

    with socket.create_server((host, port)):
        pass
    release_viewer_locks()
    with contextlib.redirect_stdout(io.StringIO()):
        return viser.ViserServer(host=host, port=port, verbose=False)


def show_splats(
    server: "ViserServer",
    name: str,
    centers: "np.ndarray",
    covariances: "np.ndarray",
    rgbs: "np.ndarray",
    opacities: "np.ndarray",
) -> None:
    """Adds Gaussians to a scene; viser 0.2.7 calls this function experimental.

    Args:
        centers: (n, 3).
        covariances: (n, 3, 3).
        rgbs: (n, 3), bytes.
        opacities: (n, 1), bytes.
    """
    scene = server.scene
    add = getattr(scene, "add_gaussian_splats", None) or scene._add_gaussian_splats
    add(name, centers=centers, covariances=covariances, rgbs=rgbs, opacities=opacities)


def local_viewer_host(viewer: "ViewerConfig") -> "ViewerConfig":
    """Keeps the viewer on this machine unless the command line has ``--viewer.websocket-host``.

    ``ns-viewer`` replaces a run's viewer settings with its own, which listen on every interface by default. Settings
    are changed in place and returned.
    """
    names = {argument.split("=", 1)[0].replace("_", "-") for argument in sys.argv}
    if viewer.websocket_host == _ANY_HOST and "--viewer.websocket-host" not in names:
        viewer.websocket_host = LOCAL_HOST
    return viewer
