"""Options and steps that several commands share. Imports nothing slow, so that ``--help`` comes at once."""

import json
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from f3rm_ext.errors import ConfigError, MeshError
from f3rm_ext.utils.console import note, say
from f3rm_ext.utils.ranges import Range, check_ranges

if TYPE_CHECKING:
    import trimesh
    from viser import ViserServer

    from f3rm_ext.export.budget import Reduction
    from f3rm_ext.export.splats import SplatRun
    from f3rm_ext.mesh.texture.photos import PhotoSource
    from f3rm_ext.splat.files.checks import BadValues
    from f3rm_ext.splat.files.pruning import SizeOf

Vector = tuple[float, float, float]
OutArg = tyro.conf.arg(aliases=["--output"])
"""Marks the option --out of a command."""


@dataclass(kw_only=True)
class FrameOption:
    """The option that chooses the frame of the coordinates in a file."""

    frame: Literal["capture", "scene"] = "capture"
    """Coordinates of the file: those of the capture, in the units of transforms.json, or those of the scene as the
    model sees it, with cameras within about ±1."""


@dataclass(kw_only=True)
class SplatBudgetOptions:
    """Options that limit the size of a file of splats."""

    sh_degree: Literal[0, 1, 2, 3] | None = None
    """Lower the spherical harmonics to this degree, for a smaller file; by default the degree stays."""
    max_mb: Annotated[float | None, Range(0.001)] = None
    """Largest size of the file, MB, 0.001 or more: chooses the SH degree, and prunes the Gaussians without
    which the training views change least. The command says what that costs on held-out photos."""
    max_loss_db: Annotated[float | None, Range(0)] = None
    """Make the file as small as possible at this loss of PSNR on held-out photos, dB, 0 or more, beyond what the
    format's own compression loses."""

    def check_budget(self) -> None:
        """Raises ConfigError if a limit cannot work."""
        check_ranges(self)
        if self.max_mb is not None and self.max_loss_db is not None:
            raise ConfigError("--max-mb and --max-loss-db both choose what is kept: give one of them.")

    def reduce(
        self, run: "SplatRun", size_of: "SizeOf", out: Path, bad_values: "BadValues" = "error"
    ) -> "Reduction | None":
        """Chooses what a file keeps and says so; None where there is no limit. Losses are of the format of ``out``."""
        from f3rm_ext.export.budget import Limit, reduce_splats
        from f3rm_ext.splat.gaussians import MAX_SH_DEGREE

        if self.max_mb is None and self.max_loss_db is None:
            return None
        degree = MAX_SH_DEGREE if self.sh_degree is None else self.sh_degree
        kept = reduce_splats(run, size_of, out, Limit(degree, self.max_mb, self.max_loss_db), bad_values)
        note(*kept.notices, str(kept))
        return kept


@dataclass(kw_only=True)
class MeshOutput:
    """The mesh file that a command writes."""

    out: Annotated[Path, OutArg]
    """File to write: .ply, .obj or .glb."""
    up: Literal["auto", "z", "y"] = "auto"
    """Axis of the file that takes the frame's z axis. auto is y for .glb, whose readers expect it, else z, which leaves
    the coordinates as they are."""

    def require_other(self, mesh: Path) -> None:
        """Raises MeshError where the file is the mesh that is read."""

        if self.out.resolve() == mesh.resolve():
            raise MeshError(f"--out is the mesh itself, {mesh}: choose another name, so that both stay.")

    def write(self, mesh: "trimesh.Trimesh", what: str, record: Mapping[str, Any]) -> None:
        """Writes the mesh and says so.

        Args:
            mesh: z up, in the frame that the record names.
            what: what is in the file, for the message.
            record: its provenance; of its entries ``seconds`` and ``peak_mib`` are printed too.
        """
        from f3rm_ext.mesh.mesh_files import axis_up, write_mesh

        up = axis_up(self.out, self.up)
        write_mesh(self.out, mesh, record, up)
        cost = f"; {record['seconds']} s, {record['peak_mib']} MiB" if "seconds" in record else ""
        say(f"{what} are in {self.out} (frame of the {record['frame']}, {up} up{cost}).")


@dataclass(kw_only=True)
class MeshPhotos:
    """The photos of a mesh: those of a run or of a capture."""

    load_config: Path | None = None
    """config.yml of a run on the capture."""
    data: Path | None = None
    """The capture (transforms.json or COLMAP's sparse/0), instead of a run."""
    frame: Literal["auto", "capture", "scene"] = "auto"
    """Coordinates of the mesh: those of the capture, or those of the scene as the model sees it. auto is what the mesh
    file says, else capture."""

    def __post_init__(self) -> None:
        if (self.load_config is None) == (self.data is None):
            raise ConfigError("The photos are those of a run or of a capture: give either --load-config or --data.")

    def photo_source(self) -> "PhotoSource":
        """Returns the photos of the run, or of the capture."""
        from f3rm_ext.mesh.texture.photos import open_capture, open_run_capture

        if self.load_config is not None:
            return open_run_capture(self.load_config)
        assert self.data is not None
        return open_capture(self.data)


def check_crop(low: Vector | None, high: Vector | None) -> None:
    """Raises ConfigError where a crop box is empty."""
    if low and high and any(a >= b for a, b in zip(low, high, strict=True)):
        raise ConfigError("The crop box is empty: each value of --crop-min must be below that of --crop-max.")


def check_suffix(path: Path | None, suffix: str) -> None:
    """Raises ConfigError where --out does not end in a suffix."""
    if path is not None and path.suffix.lower() != suffix:
        raise ConfigError(f"--out is {path}, but the result is written as {suffix[1:].upper()}: end it in {suffix}.")


def require_own_file(path: Path, maker: str, option: str = "--out") -> None:
    """Raises ConfigError unless a command may write a file and can: a new one, or one that it wrote."""
    from f3rm_ext.utils.output_file import require_writable
    from f3rm_ext.utils.provenance import require_ours

    require_ours(path, maker, option)
    require_writable(path, option)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record as JSON, which has null for NaN and infinity.

    Raises:
        ConfigError: the file cannot be written.
    """
    from f3rm_ext.utils.output_file import write_file

    finite = json.loads(json.dumps(record), parse_constant=lambda constant: None)
    write_file(path, (json.dumps(finite, indent=1) + "\n").encode())


def print_training(data: Path, *methods: str) -> None:
    """Prints the commands that train on a capture, with the presets for the CPU where there is no GPU."""
    from f3rm_ext.compat import has_cuda

    preset = "" if has_cuda() else "-lite"
    print("Train: " + ", or ".join(f"ns-train {method}{preset} --data {shlex.quote(str(data))}" for method in methods))


def serve_until_interrupt(server: "ViserServer") -> int:
    """Prints the address of a server, waits for Ctrl-C, stops the server, and returns the exit code."""
    print(f"Open http://{server.get_host()}:{server.get_port()} in a browser; press Ctrl-C to stop.", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        server.stop()
    return 0


@contextmanager
def measured_cost() -> Iterator[dict[str, float]]:
    """Measures a block: afterwards the dictionary holds its ``seconds`` and its ``peak_mib`` of main memory."""
    import torch

    from f3rm_ext.engine.cost import peak_mib, reset_peak

    cpu, cost = torch.device("cpu"), dict[str, float]()
    reset_peak(cpu)
    began = time.perf_counter()
    yield cost
    cost |= {"seconds": round(time.perf_counter() - began, 1), "peak_mib": round(peak_mib(cpu))}
