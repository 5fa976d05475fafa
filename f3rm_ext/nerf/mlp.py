"""Small MLPs without biases, as tiny-cuda-nn builds them, and a positional encoding."""

import itertools

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


class Mlp(nn.Module):
    """Linear layers with ReLU between them and without biases, so that a zero input gives a zero output.

    Args:
        out_dim: output dimension; if None, the output is the last hidden layer after its ReLU.
    """

    def __init__(self, in_dim: int, hidden_dim: int, num_hidden: int, out_dim: int | None) -> None:
        super().__init__()
        widths = [in_dim] + [hidden_dim] * num_hidden + ([out_dim] if out_dim is not None else [])
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths))
        for layer in self.layers:
            # Keeps the variance through ReLU layers (He et al. 2015).
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
        self.linear_output = out_dim is not None

    def forward(self, x: Float[Tensor, "*batch in_feat"]) -> Float[Tensor, "*batch out_feat"]:
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index < last or not self.linear_output:
                x = functional.relu(x, inplace=True)
        return x


class RaySplitMlp(nn.Module):
    """An MLP on [per-ray | per-sample] inputs whose first layer does the per-ray part once per ray.

    It computes the same function as an MLP on the concatenated inputs, since W [a; b] = W_a a + W_b b. At 24 samples
    per ray this saves two thirds of the first layer, and the concatenated inputs are never written.

    Args:
        ray_dim: dimension of the inputs that all samples of a ray share.
        sample_dim: dimension of the inputs of each sample.
    """

    def __init__(self, ray_dim: int, sample_dim: int, hidden_dim: int, num_hidden: int, out_dim: int) -> None:
        super().__init__()
        self.ray_dim = ray_dim
        first = nn.Linear(ray_dim + sample_dim, hidden_dim, bias=False)
        nn.init.kaiming_uniform_(first.weight, nonlinearity="relu")
        self.first = first
        self.rest = Mlp(hidden_dim, hidden_dim, num_hidden - 1, out_dim)

    def forward(
        self, per_ray: Float[Tensor, "rays ray_feat"], per_sample: Float[Tensor, "rays samples sample_feat"]
    ) -> Float[Tensor, "rays samples out_feat"]:
        weight = self.first.weight
        shared = functional.linear(per_ray, weight[:, : self.ray_dim])
        own = functional.linear(per_sample, weight[:, self.ray_dim :])
        return self.rest(functional.relu(own + shared[:, None, :], inplace=True))


def frequency_encoding(points: Float[Tensor, "points 3"], num_frequencies: int) -> Float[Tensor, "points feat"]:
    """Returns sines and cosines of the coordinates at frequencies 2^0 π … 2^(n-1) π (Mildenhall et al. 2020, eq. 4).

    Args:
        points: positions in [0, 1]³.
        num_frequencies: n ≥ 1.

    Returns:
        feat = 6 n values per point.

    >>> frequency_encoding(torch.tensor([[0.5, 0.0, 0.25]]), num_frequencies=1).round(decimals=3)
    tensor([[1.0000, 0.0000, 0.7070, -0.0000, 1.0000, 0.7070]])
    """
    octaves = torch.pi * 2.0 ** torch.arange(num_frequencies, device=points.device, dtype=points.dtype)
    angles = (points[..., None, :] * octaves[:, None]).flatten(-2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
