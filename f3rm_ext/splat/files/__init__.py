"""Files of Gaussian splats: PLY, compressed PLY, SPZ, SOG and ``.splat`` to read and write, ``.ksplat`` to read, glTF
and USD to write."""

from f3rm_ext.splat.files.checks import BadValues
from f3rm_ext.splat.files.convert import ConversionResult, convert_splats, export_splats
from f3rm_ext.splat.files.formats import SUFFIXES, read_splats, write_splats
from f3rm_ext.splat.files.info import Format, RenderMode, SplatInfo
from f3rm_ext.splat.files.spz import Axes, SpzVersion

__all__ = [
    "SUFFIXES",
    "Axes",
    "BadValues",
    "ConversionResult",
    "Format",
    "RenderMode",
    "SplatInfo",
    "SpzVersion",
    "convert_splats",
    "export_splats",
    "read_splats",
    "write_splats",
]
