"""Training: nerfstudio's loop with checkpoints that survive anything and resume exactly."""

from f3rm_ext import compat

# Nerfstudio's trainer imports the viewer, the viewer splatfacto, and splatfacto gsplat.
compat.tolerate_missing_gsplat()
# Every ns-* command imports this package through our methods, and then loads checkpoints in its own way.
compat.register_safe_globals()
