"""The feature field: linear rendering, several heads, and checkpoints that describe themselves."""

from typing import Any

import torch

from f3rm_ext.features.spec import FeatureSpec
from f3rm_ext.nerf.feature_field import FeatureField
from f3rm_ext.nerf.fields import GridOptions, UnitCube

SMALL = GridOptions(num_levels=3, features_per_level=4, base_res=4, max_res=32, log2_hashmap_size=10)


def _field(*specs: FeatureSpec) -> FeatureField:
    cube = UnitCube(torch.tensor([[-1.0] * 3, [1.0] * 3]), contract=True)
    field = FeatureField(specs, cube, SMALL, hidden_dim=8, num_hidden=2, pe_frequencies=2, backend="auto")
    torch.nn.init.normal_(field.grid.table)
    return field


def test_rendering_hidden_values_equals_rendering_features(make_spec: Any) -> None:
    field = _field(make_spec("a", 12))
    positions, weights = torch.randn(5, 7, 3), torch.rand(5, 7, 1)
    rendered = field.head("a").decode(field.render_hidden(positions, weights)["a"])
    # The slow way: features of D dimensions at every sample, then the weighted sum.
    one = torch.ones(1, 1, 1)
    per_sample = torch.stack(
        [field.head("a").decode(field.render_hidden(p[None, None], one)["a"])[0] for p in positions.reshape(-1, 3)]
    )
    expected = (per_sample.view(5, 7, 12) * weights).sum(dim=1)
    torch.testing.assert_close(rendered, expected, atol=1e-5, rtol=1e-4)


def test_heads_have_their_own_dimension_and_parameters(make_spec: Any) -> None:
    field = _field(make_spec("clip", 12), make_spec("dino", 5))
    hidden = field.render_hidden(torch.randn(4, 3, 3), torch.rand(4, 3, 1))
    clip, dino = (field.head(name).decode(hidden[name]) for name in ("clip", "dino"))
    assert clip.shape == (4, 12) and dino.shape == (4, 5)
    clip.sum().backward()
    assert all(parameter.grad is None for parameter in field.head("dino").parameters())
    assert field.grid.table.grad is not None


def test_positions_receive_no_gradient(make_spec: Any) -> None:
    positions = torch.randn(2, 3, 3, requires_grad=True)
    hidden = _field(make_spec("a")).render_hidden(positions, torch.rand(2, 3, 1, requires_grad=True))
    hidden["a"].sum().backward()
    assert positions.grad is None


def test_features_are_accumulated_in_float32_under_autocast(make_spec: Any) -> None:
    field = _field(make_spec("a"))
    positions, weights = torch.randn(4, 30, 3), torch.rand(4, 30, 1)
    per_sample: list[torch.Tensor] = []
    field.head("a").trunk.register_forward_hook(lambda *call: per_sample.append(call[-1]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = field.render_hidden(positions, weights)["a"]
        assert hidden.dtype == torch.float32 and per_sample[0].dtype == torch.bfloat16
        expected = (per_sample[0].double().view(4, 30, -1) * weights).sum(dim=1)
        torch.testing.assert_close(hidden.double(), expected, rtol=1e-5, atol=1e-5)
        assert field.head("a").decode(hidden).dtype == torch.float32


def test_display_equals_projecting_the_decoded_features(make_spec: Any) -> None:
    field = _field(make_spec("a"))
    head = field.head("a")
    head.display_mean.normal_()
    hidden = torch.randn(9, 8)
    projected = (head.decode(hidden) - head.display_mean) @ head.display_components.T
    expected = ((projected + 1) / 2).clamp(0, 1)
    torch.testing.assert_close(head.display(hidden), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(head.colors(head.decode(hidden)), expected, atol=1e-5, rtol=1e-4)


def test_a_checkpoint_brings_its_heads(make_spec: Any) -> None:
    trained = _field(make_spec("clip", 12), make_spec("dino", 5))
    empty = _field()
    empty.load_state_dict(trained.state_dict())
    assert empty.names == ("clip", "dino")
    for name in empty.names:
        before, after = trained.head(name).spec, empty.head(name).spec
        assert (after.dim, after.extractor, after.identity) == (before.dim, before.extractor, before.identity)
        torch.testing.assert_close(after.display.components, before.display.components)
    positions, weights = torch.randn(4, 3, 3), torch.rand(4, 3, 1)
    for name, value in trained.render_hidden(positions, weights).items():
        torch.testing.assert_close(empty.render_hidden(positions, weights)[name], value)


def test_the_state_dict_is_plain(make_spec: Any, tmp_path) -> None:
    path = tmp_path / "state.pt"
    torch.save(_field(make_spec("a")).state_dict(), path)
    assert "_extra_state" in torch.load(path, weights_only=True)
