"""Real spherical harmonics of degrees 1 to 3: their constants and their values."""

import torch
from jaxtyping import Float
from torch import Tensor

C1 = 0.4886025119029199
"""√(3 / 4π)"""
C2_XY, C2_ZZ, C2_XX = 1.0925484305920792, 0.31539156525252005, 0.5462742152960396
"""√(15 / 4π), √(5 / 16π), √(15 / 16π)"""
C3_3, C3_2, C3_1, C3_0 = 0.5900435899266435, 2.890611442640554, 0.4570457994644658, 0.37317633259011546
"""√(35 / 32π), √(105 / 4π), √(21 / 32π), √(7 / 16π)"""


def sh_bases(degree: int, directions: Float[Tensor, "gaussians 3"]) -> Float[Tensor, "gaussians coeffs"]:
    """Evaluates the harmonics of degrees 1 to ``degree`` in directions of length 1.

    Within each degree l the order is m = −l … l. Signs include the Condon–Shortley phase, as in all splat files.

    >>> up = torch.tensor([[0.0, 0.0, 1.0]])
    >>> round(float(sh_bases(1, up)[0, 1]), 4)
    0.4886
    """
    x, y, z = directions.unbind(-1)
    values: list[Tensor] = []
    if degree >= 1:
        values += [-C1 * y, C1 * z, -C1 * x]
    if degree >= 2:
        xx, yy, zz = x * x, y * y, z * z
        values += [C2_XY * x * y, -C2_XY * y * z, C2_ZZ * (3 * zz - 1), -C2_XY * x * z, C2_XX * (xx - yy)]
        if degree >= 3:
            values += [
                -C3_3 * y * (3 * xx - yy),
                C3_2 * x * y * z,
                -C3_1 * y * (5 * zz - 1),
                C3_0 * z * (5 * zz - 3),
                -C3_1 * x * (5 * zz - 1),
                C3_2 / 2 * z * (xx - yy),
                -C3_3 * x * (xx - 3 * yy),
            ]
    return torch.stack(values, dim=-1) if values else directions.new_zeros(len(directions), 0)
