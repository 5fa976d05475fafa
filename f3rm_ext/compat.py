"""The one place that knows versions: what torch, numpy, viser, gsplat and nerfstudio 1.1.5 need from us.

Nothing heavier than the standard library is imported when this module is.
"""

import contextlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from f3rm_ext.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from nerfstudio.cameras.cameras import Cameras
    from nerfstudio.configs.base_config import ViewerConfig
    from nerfstudio.viewer.viewer import Viewer
    from nerfstudio.viewer.viewer_elements import ViewerControl
    from viser import ClientHandle

LOCAL_HOST = "127.0.0.1"
_ANY_HOST = "0.0.0.0"
_VISER_START = (3.0, 3.0, 3.0)
"""Where viser 0.2.7 opens a page, in its own frame."""
_VIEWER_MODULES = ("nerfstudio.viewer.render_state_machine", "nerfstudio.viewer_legacy.server.render_state_machine")


# --- checkpoints -----------------------------------------------------------------------------------------------------


def register_safe_globals() -> None:
    """Lets ``torch.load(weights_only=True)`` read the checkpoints nerfstudio itself writes.

    Nerfstudio's schedulers compute learning rates with numpy, so its checkpoints hold numpy scalars, which torch ≥ 2.6
    refuses by default. Just those types are allowed; ``weights_only`` stays on. Safe to call twice.
    """
    import numpy as np
    import torch

    if not hasattr(torch.serialization, "add_safe_globals"):
        return  # torch < 2.4 has no list of safe globals and loads with weights_only=False by default
    try:
        from numpy._core import multiarray  # numpy 2
    except ImportError:
        from numpy.core import multiarray
    scalar = multiarray.scalar  # type: ignore[attr-defined]
    allowed: list[Any] = [np.dtype, np.dtypes.Float64DType, np.dtypes.Float32DType, np.dtypes.Int64DType]
    # A checkpoint written under numpy 1 is read under numpy 2 and the other way round, hence both names.
    allowed += [(scalar, "numpy.core.multiarray.scalar"), (scalar, "numpy._core.multiarray.scalar")]
    try:
        torch.serialization.add_safe_globals(allowed)
    except (AttributeError, TypeError):  # torch 2.4 and 2.5 take no (object, name) pairs
        torch.serialization.add_safe_globals([*allowed[:-2], scalar])


# --- configs ---------------------------------------------------------------------------------------------------------


def installed_method_packages() -> frozenset[str]:
    """Top-level packages whose configs a run may be made of: nerfstudio, and what is registered with it or with us.

    All registered methods and dataparsers are imported when this returns.
    """
    from nerfstudio.configs import dataparser_configs, method_configs  # noqa: F401

    groups = ("nerfstudio.method_configs", "nerfstudio.dataparser_configs", "f3rm_ext.extractors")
    modules = [point.module for group in groups for point in importlib.metadata.entry_points(group=group)]
    for variable in ("NERFSTUDIO_METHOD_CONFIGS", "NERFSTUDIO_DATAPARSER_CONFIGS"):
        definitions = os.environ.get(variable, "").split(",")
        modules += [definition.partition("=")[2].partition(":")[0] for definition in definitions if definition]
    return frozenset({"nerfstudio", "f3rm_ext", *(module.partition(".")[0] for module in modules)} - {""})


# --- devices ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def has_cuda() -> bool:
    """Whether torch sees a CUDA GPU; does not start the CUDA runtime where that can be avoided."""
    import torch

    with _environment("PYTORCH_NVML_BASED_CUDA_CHECK", "1"):
        return torch.cuda.is_available()


def default_device_type() -> str:
    """``cuda`` where there is a CUDA GPU, else ``cpu``.

    Apple's ``mps`` has to be asked for: its kernels do not cover everything nerfstudio uses.
    """
    return "cuda" if has_cuda() else "cpu"


def check_device(device_type: str, num_devices: int = 1) -> None:
    """Checks that this machine has the device that was asked for.

    Args:
        device_type: ``cpu``, ``cuda`` or ``mps``.
        num_devices: How many of them.

    Raises:
        ConfigError: It has not, or not that many.
    """
    import torch

    if num_devices < 1:
        raise ConfigError(
            f"The number of devices is {num_devices}, but training needs one: use --machine.num-devices 1."
        )
    if device_type == "cuda":
        if not has_cuda():
            why = "this PyTorch is built without it" if torch.version.cuda is None else "PyTorch sees no such GPU here"
            raise ConfigError(
                f"The device cuda was asked for, but {why}: use --machine.device-type cpu, "
                "or run `f3rm-ext doctor` to see what is missing."
            )
        if num_devices > torch.cuda.device_count():
            raise ConfigError(
                f"{num_devices} CUDA devices were asked for, but there are {torch.cuda.device_count()}: "
                f"use --machine.num-devices {torch.cuda.device_count()}."
            )
    elif device_type == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError(
                "The device mps was asked for, but this machine has no Apple GPU that PyTorch can use: "
                "use --machine.device-type cpu."
            )
    elif num_devices > 1:
        raise ConfigError(
            f"{num_devices} devices of type {device_type} were asked for, but nerfstudio trains on several devices "
            "with CUDA only: use --machine.num-devices 1."
        )


def set_cuda_allocator(settings: str) -> bool:
    """Gives CUDA's allocator settings while CUDA is running already.

    Args:
        settings: as in ``PYTORCH_CUDA_ALLOC_CONF``; all of them, since some versions of torch forget the others.

    Returns:
        Whether torch took them.
    """
    import torch

    try:
        if hasattr(torch._C, "_accelerator_setAllocatorSettings"):  # torch ≥ 2.9
            torch._C._accelerator_setAllocatorSettings(settings)
        else:
            torch.cuda.memory._set_allocator_settings(settings)
    except (AttributeError, RuntimeError, ValueError):
        return False
    return True


# --- viewer ----------------------------------------------------------------------------------------------------------


def is_viewer_thread() -> bool:
    """Whether the caller runs in a render thread of nerfstudio's viewer, where an exception freezes the page."""
    thread = threading.current_thread()
    modules = (sys.modules.get(name) for name in _VIEWER_MODULES)
    return any(isinstance(thread, module.RenderStateMachine) for module in modules if module is not None)


def viewer_interrupts() -> tuple[type[BaseException], ...]:
    """Exceptions by which the viewer stops a render that is out of date; they must always be raised again."""
    module = sys.modules.get("nerfstudio.viewer_legacy.server.viewer_utils")
    return () if module is None else (module.IOChangeException,)


def _viewer_of(control: "ViewerControl") -> "Viewer | None":
    """The viewer that a control was found by, if any: nerfstudio 1.1.5 keeps it as an attribute."""
    return getattr(control, "viewer", None)


def viewer_lock(control: "ViewerControl") -> contextlib.AbstractContextManager[Any]:
    """What has to be held while the model is used outside of a viewer element's callback, which holds it already."""
    viewer = _viewer_of(control)
    return contextlib.nullcontext() if viewer is None or viewer.train_lock is None else viewer.train_lock


def viewer_redraw(control: "ViewerControl") -> None:
    """Has every page's picture computed anew; a render that is under way is interrupted. Does nothing off-line."""
    viewer = _viewer_of(control)
    if viewer is not None:
        # A page may leave meanwhile.
        with contextlib.suppress(KeyError):
            viewer._trigger_rerender()


def viewer_show_output(control: "ViewerControl", name: str, instead_of: str) -> None:
    """Chooses an output in the viewer where another one is chosen and this one is offered."""
    viewer = _viewer_of(control)
    if viewer is not None:
        element = viewer.control_panel._output_render
        if element.value == instead_of and name in element.options:
            element.value = name


def viewer_cameras(viewer: "Viewer") -> "Cameras | None":
    """The training cameras of the run that a viewer shows, if it has them."""
    manager = getattr(getattr(viewer, "pipeline", None), "datamanager", None)
    cameras = getattr(getattr(manager, "train_dataset", None), "cameras", None)
    return None if cameras is None or len(cameras) == 0 else cameras


def viewer_open_at(viewer: "Viewer", index: int, c2w: "np.ndarray", fov_rad: float, distance: float) -> None:
    """Has pages show the view of a training camera when they are opened.

    A page that comes back after its connection was lost is where its user has moved it, and stays there.

    Args:
        viewer: Whose pages; it may still be under construction.
        index: Of the camera; its photo, which would stand in front of the view, is hidden.
        c2w: Its pose (3, 4) in the scene frame, OpenGL axes.
        fov_rad: Vertical field of view.
        distance: To the point the view is turned about, scene units.
    """
    import numpy as np
    from nerfstudio.viewer.viewer import VISER_NERFSTUDIO_SCALE_RATIO
    from viser.transforms import SO3

    # Viser's cameras look along z, with y down.
    rotation = SO3.from_matrix(c2w[:3, :3] * np.array([1.0, -1.0, -1.0]))
    position = c2w[:3, 3] * VISER_NERFSTUDIO_SCALE_RATIO
    look_at = position - c2w[:3, 2] * distance * VISER_NERFSTUDIO_SCALE_RATIO

    def move(client: "ClientHandle") -> None:
        camera = client.camera
        if not np.allclose(camera.position, _VISER_START, atol=1e-3):
            return
        with client.atomic():
            camera.position = position
            camera.wxyz = rotation.wxyz
            camera.look_at = look_at
            camera.fov = fov_rad

    draw = viewer.init_scene

    def draw_without_the_photo(*args: Any, **kwargs: Any) -> None:
        draw(*args, **kwargs)
        if index in viewer.camera_handles:  # not where there are more cameras than the viewer shows
            viewer.camera_handles[index].visible = False

    viewer.init_scene = draw_without_the_photo
    viewer.viser_server.on_client_connect(move)


def local_viewer_host(viewer: "ViewerConfig", argv: Sequence[str]) -> "ViewerConfig":
    """Keeps the viewer on this machine unless the command line says otherwise.

    ``ns-viewer`` replaces a run's viewer settings by its own, whose default is to listen on every interface.

    Args:
        viewer: Settings about to be used; changed in place.
        argv: Command line of the process; an explicit ``--viewer.websocket-host`` is left alone.

    Returns:
        The same settings.
    """
    names = {argument.split("=", 1)[0].replace("_", "-") for argument in argv}
    if viewer.websocket_host == _ANY_HOST and "--viewer.websocket-host" not in names:
        viewer.websocket_host = LOCAL_HOST
    return viewer


def export_command(argv: Sequence[str]) -> str | None:
    """Which of its commands ``ns-export`` is running; None in every other program.

    Args:
        argv: Command line of the process.
    """
    if not argv or os.path.splitext(os.path.basename(argv[0]))[0] != "ns-export":
        return None
    return next((argument for argument in argv[1:] if not argument.startswith("-")), None)


# --- noise -----------------------------------------------------------------------------------------------------------


def quiet_known_warnings() -> None:
    """Silences what nerfstudio 1.1.5 triggers in today's torch at every image, and a user can do nothing about."""
    # Cameras index with lists; torch has announced a change since 2.1 and not made it.
    warnings.filterwarnings("ignore", message="Using a non-tuple sequence", module=r"nerfstudio\.cameras")


# --- programs --------------------------------------------------------------------------------------------------------


def provide_ffmpeg() -> str | None:
    """Lets nerfstudio and mediapy find an ffmpeg where none is installed: they look for that name on the PATH.

    The program of the package imageio-ffmpeg has another name, so the cache folder ($F3RM_EXT_CACHE, else
    ~/.cache/f3rm_ext) gets a link to it, and the end of the PATH that folder. An ffmpeg on the PATH goes first. Costs
    next to nothing once the link is there; safe to call twice.

    Returns:
        Path of the ffmpeg that will be used; None where there is none, or where the link cannot be written.
    """
    if found := shutil.which("ffmpeg"):
        return found
    folder = Path(os.environ.get("F3RM_EXT_CACHE") or "~/.cache/f3rm_ext").expanduser() / "bin"
    link = folder / ("ffmpeg.exe" if os.name == "nt" else "ffmpeg")
    if not os.access(link, os.X_OK):  # nor is a link whose environment has been removed
        try:
            import imageio_ffmpeg

            program = Path(imageio_ffmpeg.get_ffmpeg_exe()).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as fresh:
                os.symlink(program, Path(fresh, link.name))
                os.replace(Path(fresh, link.name), link)
        except (ImportError, RuntimeError, OSError):
            return None
    os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH", os.defpath), str(folder.absolute()))))
    return shutil.which("ffmpeg")


# --- gsplat ----------------------------------------------------------------------------------------------------------


def _gsplat_stand_in(reason: str) -> dict[str, types.ModuleType]:
    """The modules nerfstudio's splatfacto imports names from, with names that say what is wrong when used."""

    class DefaultStrategy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise ImportError(f"gsplat cannot be imported ({reason}): `pip install gsplat==1.4.0` and try again.")

    package, strategy, rendering = (types.ModuleType(f"gsplat{part}") for part in ("", ".strategy", ".rendering"))
    package.__path__ = []
    strategy.DefaultStrategy = DefaultStrategy  # type: ignore[attr-defined]
    rendering.rasterization = DefaultStrategy  # type: ignore[attr-defined]
    return {module.__name__: module for module in (package, strategy, rendering)}


def tolerate_missing_gsplat() -> None:
    """Lets every method but splatfacto run where gsplat is missing or broken.

    Nerfstudio 1.1.5 imports gsplat at the top of splatfacto, and splatfacto wherever a trainer or a viewer is imported,
    so without gsplat no ``ns-*`` command starts. Where its import fails, splatfacto is imported here over a stand-in
    that is taken away again at once: for everybody else gsplat stays as missing as it is. Must be called before
    nerfstudio reaches splatfacto; costs nothing where gsplat is fine.
    """
    if "nerfstudio.models.splatfacto" in sys.modules:
        return
    try:
        import gsplat.strategy  # noqa: F401

        return
    except Exception as error:  # a broken build can raise anything: OSError, RuntimeError ...
        stand_in = _gsplat_stand_in(f"{type(error).__name__}: {error}")
    before = {name: sys.modules[name] for name in stand_in if name in sys.modules}
    sys.modules.update(stand_in)
    try:
        import nerfstudio.models.splatfacto  # noqa: F401
    finally:
        for name in stand_in:
            del sys.modules[name]
        sys.modules.update(before)


def _gsplat_kernels() -> Any:
    """gsplat's CUDA kernels, compiled now where that is needed and possible (minutes); None where it is not."""
    from gsplat.cuda import _backend

    return _backend._C  # type: ignore[attr-defined]


def gsplat_wheels() -> str | None:
    """The index of gsplat 1.4.0 with kernels compiled for this Python, torch and CUDA; None where there is none."""
    import torch

    version = torch.__version__.split("+")[0].split(".")
    cuda = (torch.version.cuda or "").replace(".", "")
    built = {"20": ("118",), "21": ("118", "121"), "22": ("118", "121"), "23": ("118", "121")}
    built["24"] = ("118", "121", "124")
    if sys.version_info[:2] != (3, 10) or cuda not in built.get("".join(version[:2]), ()):
        return None
    return f"https://docs.gsplat.studio/whl/pt{''.join(version[:2])}cu{cuda}"


def gsplat_advice() -> str:
    """What to do where gsplat has no CUDA kernels; the middle of a sentence."""
    import torch

    toolkit = f"install the CUDA toolkit {torch.version.cuda or 'of the same version as PyTorch'} (its compiler nvcc)"
    wheels = gsplat_wheels()
    if wheels is None:
        return f"{toolkit}, with which gsplat compiles them at its first use"
    return f"`pip install gsplat==1.4.0 --index-url {wheels}`, or {toolkit}"


def check_gsplat_kernels() -> None:
    """Makes sure that gsplat can draw on CUDA; compiles its kernels where that was not done yet.

    gsplat from PyPI comes as source. Where it cannot be compiled it is imported nonetheless, and fails at its first
    use with ``'NoneType' object has no attribute 'CameraModelType'``.

    Raises:
        ConfigError: it cannot.
    """
    try:
        if _gsplat_kernels() is not None:
            return
        reason = "they are not compiled and there is no CUDA toolkit to do it"
    except Exception as error:  # whatever compilers, linkers and loaders say
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    raise ConfigError(
        f"Splats cannot be drawn on CUDA, because gsplat has no kernels here ({reason}): {gsplat_advice()}, or use "
        "--machine.device-type cpu."
    )


def describe_gsplat() -> tuple[bool, str, str]:
    """Whether gsplat can draw on CUDA as far as can be told without compiling anything, what was found, and advice."""
    import importlib.util

    if not has_cuda():
        return True, "importable; its CUDA kernels are not needed without a GPU", ""
    try:
        if importlib.util.find_spec("gsplat.csrc") is not None:
            import gsplat.csrc  # noqa: F401  # pyright: ignore[reportMissingImports]

            return True, "with CUDA kernels", ""
        reason = "not compiled"
    except ImportError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if shutil.which("nvcc"):
        return True, f"its CUDA kernels ({reason}) are compiled at first use, which takes minutes", ""
    advice = gsplat_advice()
    return False, f"without CUDA kernels ({reason}, and no nvcc)", f"For sugar-ext and splatfacto {advice}."
