"""Splats as PLY in the layout of 3D Gaussian splatting (Kerbl et al. 2023): all numbers unchanged, in float32."""

import re
from collections.abc import Sequence
from io import BufferedIOBase
from pathlib import Path

import numpy as np
from jaxtyping import Float

from f3rm_ext.errors import ConfigError, SplatFileError
from f3rm_ext.splat.files.info import SplatInfo, read_tags, tag_comments
from f3rm_ext.splat.files.scores import LABEL, PREFIX, GaussianScores
from f3rm_ext.splat.gaussians import SH_C0, Gaussians, degree_from_count, sh_rest_count
from f3rm_ext.utils.ply import PlyTables, Table, write_ply

POSITION = ("x", "y", "z")
NORMAL = ("nx", "ny", "nz")
SCALE = ("scale_0", "scale_1", "scale_2")
ROTATION = ("rot_0", "rot_1", "rot_2", "rot_3")
"""Columns of the quaternion w, x, y, z."""
DC = ("f_dc_0", "f_dc_1", "f_dc_2")
RGB = ("red", "green", "blue")
OPACITY = "opacity"
COLUMNS = {"means": POSITION, "scales": SCALE, "quats": ROTATION, "opacities": (OPACITY,), "features_dc": DC}
"""Columns of each tensor of Gaussians but the SH coefficients beyond the first."""
_REST = re.compile(r"f_rest_(0|[1-9][0-9]*)")
_SHOWN = 6


def read_ply(path: Path, tables: PlyTables) -> tuple[Gaussians, SplatInfo]:
    """Reads splats, binary or ASCII, with properties in any order; float32, on the CPU, values not checked.

    Raises:
        SplatFileError: the file has no splats, lacks a property, has SH coefficients that fit no degree, or is damaged.
    """
    table = _require_splats(path, tables)
    colors = _colors(path, table)
    degree, count = rest_degree(path, table), table.count
    columns = {**COLUMNS, "features_dc": colors}
    arrays: dict[str, np.ndarray] = {field: np.empty((count, len(names)), "f4") for field, names in columns.items()}
    arrays["features_rest"] = np.empty((count, sh_rest_count(degree), 3), "f4")
    scored = {name: np.empty(count, "f4") for name in _scored_columns(table, tables.comments)}
    targets = scored | rest_columns(arrays["features_rest"])
    targets |= {name: arrays[field][:, i] for field, names in columns.items() for i, name in enumerate(names)}
    # Numbers beyond float32 become infinite; a later check finds them.
    with np.errstate(over="ignore", invalid="ignore"):
        for where, rows in tables.rows("vertex", list(targets)):
            for name, target in targets.items():
                target[where] = rows[name]
    if colors == RGB:
        arrays["features_dc"] = (arrays["features_dc"].astype(np.float64) / 255 - 0.5) / SH_C0
    mode, fused, comments = read_tags(tables.comments)
    scores, comments = _take_scores(scored, comments)
    notices = []
    if extra := [name for name in table.kinds if name not in targets and name not in NORMAL]:
        notices.append(f"{path.name} has further properties, which are left out: {_join(extra)}.")
    if tables.extra_bytes():
        notices.append(f"{path.name} has {tables.extra_bytes()} bytes after its last Gaussian, which are left out.")
    info = SplatInfo("ply", mode, fused, degree, count, comments, tuple(notices), scores=scores)
    return Gaussians.from_arrays(*arrays.values()), info


def write_ply_splats(stream: BufferedIOBase, gaussians: Gaussians, info: SplatInfo) -> None:
    """Writes splats; the normals of the layout are 0."""
    arrays = gaussians.arrays()
    columns: dict[str, np.ndarray] = dict(zip(POSITION, arrays["means"].T, strict=True))
    columns |= dict.fromkeys(NORMAL, np.zeros(len(gaussians), dtype=np.float32))
    columns |= dict(zip(DC, arrays["features_dc"].T, strict=True))
    columns |= rest_columns(arrays["features_rest"])
    columns[OPACITY] = arrays["opacities"][:, 0]
    columns |= dict(zip(SCALE, arrays["scales"].T, strict=True))
    columns |= dict(zip(ROTATION, arrays["quats"].T, strict=True))
    if info.scores is not None:
        # labels too are float: some readers take every column of splats for one
        columns |= {**info.scores.columns, LABEL: info.scores.labels.astype(np.float32)}
    write_ply(stream, columns, tag_comments(info))


def rest_columns(rest: Float[np.ndarray, "n coeffs 3"]) -> dict[str, Float[np.ndarray, " n"]]:
    """Returns views of SH coefficients as columns: first all of red, then green, then blue."""
    per_channel = rest.shape[1]
    return {f"f_rest_{i}": rest[:, i % per_channel, i // per_channel] for i in range(3 * per_channel)}


def _scored_columns(table: Table, comments: Sequence[str]) -> list[str]:
    """Returns the columns of scores and of labels; none unless comments say which queries they are of."""
    named = {comment.partition(": ")[0] for comment in comments}
    columns = [name for name in table.kinds if f"{name}_".startswith(f"{PREFIX}_") and name in named]
    return [*columns, LABEL] if columns and LABEL in table.kinds else []


def _take_scores(
    columns: dict[str, np.ndarray], comments: tuple[str, ...]
) -> tuple[GaussianScores | None, tuple[str, ...]]:
    """Returns scores, and the comments that do not name their queries."""
    *names, label = columns or [""]
    if not names:
        return None, comments
    told = {column: name for column, _, name in (comment.partition(": ") for comment in comments) if column in names}
    values = np.stack([columns[name] for name in names], axis=1)
    with np.errstate(invalid="ignore"):  # labels of others may be no whole numbers
        labels = columns[label].astype(np.int32)
    scores = GaussianScores(tuple(told[name] for name in names), values, labels)
    return scores, tuple(comment for comment in comments if comment.partition(": ")[0] not in names)


def rest_degree(path: Path, table: Table) -> int:
    """Returns the SH degree of the ``f_rest`` properties of an element.

    Raises:
        SplatFileError: some are missing, or their number fits no degree.
    """
    present = {name for name in table.kinds if _REST.fullmatch(name)}
    missing = [name for name in (f"f_rest_{i}" for i in range(len(present))) if name not in present]
    if missing:
        raise SplatFileError(f"{path} lacks {_join(missing)} among its SH coefficients: export the splats again.")
    try:
        if len(present) % 3:
            raise ConfigError("not as many for each colour")
        return degree_from_count(len(present) // 3)
    except ConfigError:
        raise SplatFileError(
            f"{path} has {len(present)} SH coefficients (f_rest) per Gaussian, which fit no degree from 0 to 3 (those "
            f"have {', '.join(str(3 * sh_rest_count(degree)) for degree in range(4))}): export the splats again."
        ) from None


def _require_splats(path: Path, tables: PlyTables) -> Table:
    """Returns the element that holds the Gaussians."""
    table = tables.tables.get("vertex", Table("vertex", 0))
    wanted = (*POSITION, OPACITY, *SCALE, *ROTATION)
    missing = [name for name in wanted if name not in table.kinds]
    if not any(name in table.kinds for name in wanted[3:]):
        what = (
            "a mesh" if "face" in tables.tables else "a point cloud" if table.kinds else "a PLY file of something else"
        )
        raise SplatFileError(
            f"{path} is {what} and holds no Gaussians (it lacks {_join(missing)}): give a file of splats."
        )
    if missing:
        raise SplatFileError(f"{path} lacks {_join(missing)}, without which there are no splats: export them again.")
    return table


def _colors(path: Path, table: Table) -> tuple[str, str, str]:
    """Returns the colour properties: SH coefficients, or bytes as ``ns-export --ply-color-mode rgb`` writes."""
    missing = [name for name in DC if name not in table.kinds]
    if not missing:
        return DC
    if all(table.kinds.get(name) == "u1" for name in RGB):
        return RGB
    raise SplatFileError(f"{path} lacks {_join(missing)}, so its splats have no colours: export them again.")


def _join(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
