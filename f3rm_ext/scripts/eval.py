"""``f3rm-ext eval``: meshes, queries and pictures measured against the truth."""

from typing import Annotated, Union

import tyro

from f3rm_ext.scripts.eval_mesh import EvalMesh
from f3rm_ext.scripts.eval_query import EvalQuery
from f3rm_ext.scripts.eval_scales import EvalScales
from f3rm_ext.scripts.eval_texture import EvalTexture

EvalCommand = Union[  # noqa: UP007 - tyro reads the annotations of a Union's members
    Annotated[EvalMesh, tyro.conf.subcommand("mesh")],
    Annotated[EvalQuery, tyro.conf.subcommand("query")],
    Annotated[EvalScales, tyro.conf.subcommand("scales")],
    Annotated[EvalTexture, tyro.conf.subcommand("texture")],
]
