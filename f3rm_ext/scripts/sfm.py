"""``f3rm-ext sfm``: cameras from photos."""

from typing import Annotated, Union

import tyro

from f3rm_ext.scripts.sfm_eval import Eval
from f3rm_ext.scripts.sfm_points import Points
from f3rm_ext.scripts.sfm_process import Process, View
from f3rm_ext.scripts.sfm_train import Prepare, Train

SfmCommand = Union[  # noqa: UP007 - tyro reads the annotations of a Union's members
    Annotated[Process, tyro.conf.subcommand("process")],
    Annotated[Points, tyro.conf.subcommand("points")],
    Annotated[View, tyro.conf.subcommand("view")],
    Annotated[Eval, tyro.conf.subcommand("eval")],
    Annotated[Prepare, tyro.conf.subcommand("prepare")],
    Annotated[Train, tyro.conf.subcommand("train")],
]
