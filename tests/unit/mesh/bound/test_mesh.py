"""The refined mesh."""

import torch

from f3rm_ext.mesh.bound.gaussians import bind
from f3rm_ext.mesh.bound.mesh import refined_mesh
from f3rm_ext.mesh.mesh_files import vertex_colors
from f3rm_ext.splat.gaussians import rgb_to_sh


def test_vertices_have_the_colors_of_the_gaussians_around_them() -> None:
    vertices = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]])
    bound = bind(vertices, torch.tensor([[0, 1, 2], [1, 3, 2]]), None, 1, 0, 0.5, 1e-6)
    bound.features_dc.copy_(rgb_to_sh(torch.tensor([[1.0, 0, 0], [0, 0, 1.0]])))
    mesh = refined_mesh(bound)
    colors = vertex_colors(mesh)
    assert colors is not None and mesh.faces.tolist() == bound.faces.tolist()
    assert colors.tolist() == [[255, 0, 0], [128, 0, 128], [128, 0, 128], [0, 0, 255]]
    bound.opacities[1] = -50.0  # one that is transparent has no say
    colors = vertex_colors(refined_mesh(bound))
    assert colors is not None and colors[:3].tolist() == [[255, 0, 0]] * 3
