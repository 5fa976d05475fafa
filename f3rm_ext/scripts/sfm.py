"""``f3rm-ext sfm``: cameras from photos."""

from f3rm_ext.scripts.sfm_eval import Eval
from f3rm_ext.scripts.sfm_points import Points
from f3rm_ext.scripts.sfm_process import Process, View
from f3rm_ext.scripts.sfm_train import Prepare, Train

SfmCommand = Process | Points | View | Eval | Prepare | Train
