"""What every layer of tests shares: tiny captures, real data where it is present, and the commands users type."""

import errno
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
BIN = Path(sys.executable).parent
COMMAND_LIMIT_S = 240
"""How long a command may take: less than a test may, so that what it said is shown."""


def _load_commands() -> ModuleType:
    spec = importlib.util.spec_from_file_location("f3rm_ext_test_commands", TESTS / "command_server.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclass
    spec.loader.exec_module(module)
    return module


COMMANDS = _load_commands()


def pytest_configure() -> None:
    """Lets commands of tests be interrupted: a shell starts background jobs with SIGINT ignored, which is inherited."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by their folder and skips what this machine cannot run, with the reason."""
    import torch

    for item in items:
        layer = next(iter(item.path.parts[len(TESTS.parts) :]), "") if item.path.is_relative_to(TESTS) else ""
        if layer in ("integration", "e2e", "gpu"):
            item.add_marker(getattr(pytest.mark, layer))
        if layer == "gpu" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """pytest's, without the checkpoints when the test is over: those of all tests would be gigabytes."""
    yield tmp_path
    for checkpoint in tmp_path.rglob("*.ckpt"):
        checkpoint.unlink(missing_ok=True)


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets no file be written to its end any more."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda: monkeypatch.setattr(os, "fsync", full)


@pytest.fixture
def set_free_space(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretends that so many bytes are free on every disk."""
    usage = shutil.disk_usage(REPOSITORY)
    return lambda free: monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))


@pytest.fixture
def pretend_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretends that this machine has so many GPUs, as long as nothing is computed on them."""
    import torch

    from f3rm_ext import compat

    def pretend(count: int) -> None:
        monkeypatch.setattr(compat, "has_cuda", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


@pytest.fixture
def set_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that a GPU has so many bytes free, and torch so many reserved and allocated."""
    import torch

    def pretend(free: int, total: int, *, reserved: int = 0, allocated: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)

    return pretend


@pytest.fixture
def as_viewer_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets what follows happen as if on the thread that renders for nerfstudio's viewer."""
    return lambda: monkeypatch.setattr("f3rm_ext.compat.is_viewer_thread", lambda: True)


@pytest.fixture
def set_command_line(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the words that this process was started with."""
    return lambda *words: monkeypatch.setattr(sys, "argv", [*map(str, words)])


@dataclass
class Call:
    """A call of a function: what it was given, and what it returned, None if that was an exception."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    result: Any = None


@pytest.fixture
def watch_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Call]]:
    """Notes, in a list that grows, the calls of a function of a module or a method of a class; it works as before."""

    def watch(owner: Any, name: str) -> list[Call]:
        calls: list[Call] = []
        real = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            calls.append(call := Call(args, options))
            call.result = real(*args, **options)
            return call.result

        monkeypatch.setattr(owner, name, noted)
        return calls

    return watch


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a benchmark by its name, as its siblings do."""
    folder = str(REPOSITORY / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)


@pytest.fixture(scope="session")
def open3d() -> ModuleType:
    """What nerfstudio exports with, and we make meshes with."""
    from f3rm_ext.utils.open3d_library import open3d

    return open3d()


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Real captures and weights, from F3RM_EXT_TEST_DATA or ../shared/data; skips where there are none."""
    root = Path(os.environ.get("F3RM_EXT_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (root / "fox").is_dir():
        pytest.skip(f"no real data at {root} (set F3RM_EXT_TEST_DATA)")
    return root


@pytest.fixture(scope="session")
def torch_home(make_once: Callable[..., Path]) -> Path:
    """A TORCH_HOME from which LPIPS can be built off-line where the weights are present, else an empty one."""
    root = Path(os.environ.get("F3RM_EXT_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    script = root / "make_torch_home.py"

    def fill(home: Path) -> None:
        if script.is_file():
            subprocess.run([sys.executable, str(script), str(home)], check=True, capture_output=True, timeout=100)

    return make_once("torch-home", fill)


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Makes a folder that tests only read: where they run in several processes, the first that needs it does."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def make(name: str, fill: Callable[[Path], None]) -> Path:
        import fcntl

        is_made = root / f"{name}-is-made"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_made.exists():
                (root / name).mkdir(exist_ok=True)
                fill(root / name)
                is_made.touch()
        return root / name

    return make


@pytest.fixture(scope="session")
def tiny_capture(make_once: Callable[..., Path]) -> Path:
    """A synthetic room of 12 images of 64 × 48 pixels; F3RM_EXT_TEST_ROOM may name one that was made elsewhere."""
    if given := os.environ.get("F3RM_EXT_TEST_ROOM"):
        return Path(given)
    from f3rm_ext.synthetic import SynthConfig, synthesize

    options = SynthConfig(num_images=12, width=64, height=48, seed=1, light_rays=1, holdout_every=4)
    return make_once("capture", lambda out: synthesize(out / "room", options, progress=False)) / "room"


@pytest.fixture(scope="session")
def as_colmap() -> Callable[..., Path]:
    """Writes a capture as a folder with ``images/`` and a COLMAP model, in the frame of its transforms.json."""
    return write_colmap_scene


def write_colmap_scene(
    capture: Path,
    out: Path,
    *,
    place: str = "sparse/0",
    text: bool = False,
    points: Any = (),
    models: Sequence[str] = ("PINHOLE",),
) -> Path:
    """See :func:`as_colmap`. ``models`` are dealt to the photos in turn; ``points`` are positions (N, 3)."""
    import json

    import numpy as np

    pycolmap = pytest.importorskip("pycolmap")
    meta = json.loads((capture / "transforms.json").read_text())
    model, size = pycolmap.Reconstruction(), {"width": meta["w"], "height": meta["h"]}
    more = {"PINHOLE": [], "FOV": [0.1], "OPENCV_FISHEYE": [0.0] * 4}
    for number, name in enumerate(models, start=1):
        params = [*(float(meta[key]) for key in ("fl_x", "fl_y", "cx", "cy")), *more[name]]
        model.add_camera_with_trivial_rig(pycolmap.Camera(model=name, camera_id=number, params=params, **size))
    (out / "images").mkdir(parents=True)
    (out / place).mkdir(parents=True)
    for number, frame in enumerate(meta["frames"]):
        source = capture / frame["file_path"]
        shutil.copy(source, out / "images" / source.name)
        viewmat = np.linalg.inv(np.array(frame["transform_matrix"]) @ np.diag([1.0, -1.0, -1.0, 1.0]))
        image = pycolmap.Image(name=source.name, camera_id=number % len(models) + 1, image_id=number + 1)
        model.add_image_with_trivial_frame(image, pycolmap.Rigid3d(viewmat[:3]))
    for point in points:
        model.add_point3D(np.asarray(point, dtype=np.float64), pycolmap.Track(), np.array([90, 120, 150], np.uint8))
    write = model.write_text if text else model.write_binary
    write(out / place)
    return out


@pytest.fixture(scope="session")
def command_environment(tmp_path_factory: pytest.TempPathFactory, torch_home: Path) -> dict[str, str]:
    """Environment of the commands under test: CPU only, own caches, nothing from the network."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "F3RM_EXT_CACHE": str(tmp_path_factory.mktemp("cache")),
        "TORCH_HOME": str(torch_home),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TORCHDYNAMO_DISABLE": "1",
        "COLUMNS": "200",
    }
    environment.pop("PYTHONPATH", None)
    return environment


@pytest.fixture(scope="session")
def shared_command_server(
    command_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Runs commands in forks of one process, in which everything is imported already."""
    if not hasattr(os, "fork"):
        pytest.skip("commands cannot be run in forks here")
    server = COMMANDS.CommandServer(command_environment, tmp_path_factory.mktemp("commands"))
    yield server
    server.stop()


@pytest.fixture
def command_server(shared_command_server: Any) -> Iterator[Any]:
    """Runs commands; one that a failed test did not finish takes no other test with it."""
    yield shared_command_server
    shared_command_server.abandon()


@pytest.fixture(scope="session")
def run_command(command_environment: dict[str, str], request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs a command of this environment's bin folder to its end."""

    def run(
        name: str, *arguments: object, timeout_s: float = COMMAND_LIMIT_S, fresh: bool = False, **environment: str
    ) -> Any:
        """``fresh``: the installed script in a process of its own, for what imports decide; that takes seconds more."""
        if fresh or not hasattr(os, "fork"):
            argv = [str(BIN / name), *map(str, arguments)]
            return COMMANDS.run_to_the_end(argv, {**command_environment, **environment}, timeout_s)
        server = request.getfixturevalue("shared_command_server")
        server.start(name, *arguments, environment=environment)
        return server.finish(timeout_s)

    return run


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], bool], float, str], None]:
    """Waits for something that only another process can bring about."""

    def wait(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"after {timeout_s} s still not: {what}"
            time.sleep(0.05)

    return wait


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Names a port nobody listens on."""
    return COMMANDS.free_port


@pytest.fixture(scope="session")
def listening_hosts() -> Callable[[int, int], set[str]]:
    """Addresses on which a process listens for a port; empty while it does not."""
    import psutil

    def hosts(pid: int, port: int) -> set[str]:
        process = psutil.Process(pid)
        connections = getattr(process, "net_connections", None) or process.connections
        found = connections("inet")
        return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port}

    return hosts


@dataclass
class Run:
    """A trained run."""

    folder: Path

    @property
    def config(self) -> Path:
        """Its config.yml."""
        return self.folder / "config.yml"

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints."""
        return self.folder / "nerfstudio_models"


SMALL_TABLES = tuple(
    word
    for grid in ("grid", "feature-grid", "proposals.0.grid")
    for word in (f"--pipeline.model.{grid}.log2-hashmap-size", "13")
)
"""Hash tables as small rooms need them: most of a step of few rays is the optimiser's pass over the tables."""
FAST_OPTIONS = (
    *("--vis", "tensorboard", "--pipeline.datamanager.train-num-rays-per-batch", "256"),
    *("--logging.local-writer.enable", "False", *SMALL_TABLES),
)
"""A batch of 256 rays and small tables; no viewer, which would keep training from ending."""


@pytest.fixture(scope="session")
def train(run_command: Callable[..., Any], tiny_capture: Path) -> Callable[..., Run]:
    """`ns-train f3rm-ext-lite` on the tiny capture."""

    def run(
        output_dir: Path, steps: int, *arguments: object, method: str = "f3rm-ext-lite", fresh: bool = False
    ) -> Run:
        run_command(
            "ns-train",
            method,
            *("--data", tiny_capture),
            *("--output-dir", output_dir, "--experiment-name", "e", "--timestamp", "t"),
            *("--max-num-iterations", steps),
            *FAST_OPTIONS,
            *arguments,
            fresh=fresh,
        ).succeeds()
        return Run(output_dir / "e" / method / "t")

    return run


@pytest.fixture(scope="session")
def trained(train: Callable[..., Run], make_once: Callable[..., Path]) -> Run:
    """A run of 60 steps that other tests look at but do not change."""
    return Run(make_once("trained", lambda out: train(out, 60, fresh=True)) / "e" / "f3rm-ext-lite" / "t")


SPLAT_STEPS = 60


@pytest.fixture(scope="session")
def train_splats(run_command: Callable[..., Any], tiny_capture: Path) -> Callable[..., Any]:
    """`ns-train sugar-ext-lite` on the tiny capture, with few Gaussians; what became of it."""

    def run(output_dir: Path, *arguments: object, steps: int = SPLAT_STEPS) -> Any:
        return run_command(
            *("ns-train", "sugar-ext-lite", "--data", tiny_capture, "--output-dir", output_dir),
            *("--experiment-name", "e", "--timestamp", "t", "--vis", "tensorboard", "--max-num-iterations", steps),
            *("--logging.local-writer.enable", "False", "--pipeline.model.num-random", 500),
            *("--pipeline.model.densify.max-gaussians", 800, "--pipeline.model.surface.samples", 500),
            *("--pipeline.datamanager.num-downscales", 0, "--pipeline.model.regularization", "none"),
            *("--pipeline.datamanager.stereo-points", "never"),
            *("--pipeline.model.surface.prune-opacity", 0.05, "--optimizers.means.scheduler.max-steps", SPLAT_STEPS),
            *arguments,
        )

    return run


@pytest.fixture(scope="session")
def labelled_splats(train_splats: Callable[..., Any], tiny_capture: Path, make_once: Callable[..., Path]) -> Run:
    """A run of splats with the capture's classes as features, which tests do not change."""

    def fill(out: Path) -> None:
        train_splats(out, "--pipeline.model.features", f"labels:data={tiny_capture}").succeeds()

    return Run(make_once("labelled-splats", fill) / "e" / "sugar-ext-lite" / "t")


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., Any]:
    """Makes the :class:`~f3rm_ext.features.spec.FeatureSpec` of a feature of some dimension."""
    import torch

    from f3rm_ext.features.spec import DisplayBasis, FeatureSpec

    def make(name: str = "dense", dim: int = 12) -> FeatureSpec:
        generator = torch.Generator().manual_seed(dim)
        components, _ = torch.linalg.qr(torch.randn(dim, 3, generator=generator))
        display = DisplayBasis(torch.zeros(dim), components.T.contiguous(), -torch.ones(3), torch.ones(3))
        return FeatureSpec(name=name, dim=dim, extractor=name, identity={"extractor": name}, display=display)

    return make


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """Makes a tiny :class:`~f3rm_ext.nerf.model.F3rmModel` with the heads of some specs."""
    import torch
    from nerfstudio.cameras.camera_optimizers import CameraOptimizerConfig
    from nerfstudio.data.scene_box import SceneBox

    from f3rm_ext.nerf.fields import GridOptions
    from f3rm_ext.nerf.model import F3rmModel, F3rmModelConfig, ProposalOptions

    def make(
        specs: tuple[Any, ...] = (), fraction: float = 0.5, metadata: Mapping[str, Any] | None = None, **options: Any
    ) -> F3rmModel:
        small = GridOptions(num_levels=3, features_per_level=2, base_res=4, max_res=16, log2_hashmap_size=10)
        defaults: dict[str, Any] = {
            "grid": small,
            "feature_grid": small,
            "proposals": (ProposalOptions(num_samples=8, hidden_dim=8, grid=small),),
            "num_samples": 6,
            "hidden_dim": 8,
            "color_hidden_dim": 8,
            "appearance_dim": 4,
            "feature_hidden_dim": 8,
            "feature_pe_frequencies": 2,
            "camera_optimizer": CameraOptimizerConfig(mode="SO3xR3"),
        }
        torch.manual_seed(0)
        config = F3rmModelConfig(**{**defaults, **options})
        return config.setup(
            scene_box=SceneBox(torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])),
            num_train_data=5,
            metadata={"feature_specs": specs, "feature_ray_fraction": fraction, **(metadata or {})},
        )

    return make


@pytest.fixture(scope="session")
def make_rays() -> Callable[[int], Any]:
    """Makes a bundle of random rays; new ones at every call, since training moves them by the poses' corrections."""
    import torch
    from nerfstudio.cameras.rays import RayBundle
    from torch.nn import functional

    def make(count: int) -> RayBundle:
        generator = torch.Generator().manual_seed(count)
        directions = functional.normalize(torch.randn(count, 3, generator=generator), dim=-1)
        return RayBundle(
            origins=torch.rand(count, 3, generator=generator) - 0.5,
            directions=directions,
            pixel_area=torch.full((count, 1), 1e-6),
            camera_indices=torch.arange(count)[:, None] % 5,
        )

    return make


@pytest.fixture(scope="session")
def make_camera() -> Callable[[int], Any]:
    """Makes a square camera that looks at the middle of the scene, on the CPU."""
    import torch
    from nerfstudio.cameras.cameras import Cameras

    def make(size_px: int) -> Cameras:
        pose = torch.eye(4)[None, :3]
        pose[0, 2, 3] = 0.8
        half = size_px / 2
        return Cameras(pose, fx=float(size_px), fy=float(size_px), cx=half, cy=half, width=size_px, height=size_px)

    return make


@pytest.fixture(scope="session")
def make_run(tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a run on the tiny capture that was saved before its first step, in this process; returns its config.yml."""
    import torch

    from f3rm_ext.method_configs.presets import make_config

    def make(
        extractors: tuple[str, ...], codes: int = 0, change: Callable[[dict[str, Any]], None] = lambda state: None
    ) -> Path:
        """``change`` may edit the state of the model before it is saved."""
        root = tmp_path_factory.mktemp("made")
        config = make_config("f3rm-ext-lite")
        config.data, config.output_dir = tiny_capture, root
        config.experiment_name, config.timestamp = "e", "t"
        model, manager = config.pipeline.model, config.pipeline.datamanager
        for grid in (model.grid, model.feature_grid, *(proposal.grid for proposal in model.proposals)):
            grid.log2_hashmap_size = 13
        manager.data = tiny_capture
        manager.features.extractors, manager.features.codes = extractors, codes
        manager.features.cache_dir = root / "cache"
        state = config.pipeline.setup(device="cpu", test_mode="val").state_dict()
        change(state)
        folder = config.get_base_dir() / "nerfstudio_models"
        folder.mkdir(parents=True)
        torch.save({"step": 0, "pipeline": state}, folder / "step-000000000.ckpt")
        config.save_config()
        return config.get_base_dir() / "config.yml"

    return make


@pytest.fixture(scope="session")
def untrained(make_run: Callable[..., Path], tiny_capture: Path) -> Run:
    """A run with one-hot labels as features, saved before the first step."""
    return Run(make_run((f"labels:data={tiny_capture}",)).parent)
