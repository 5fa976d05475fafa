"""Tensors without values: what depends on values is answered as the largest case."""

import torch

from f3rm_ext.memory.shapes import ShapeTensor, shapes_only


def test_masks_select_everything() -> None:
    with shapes_only():
        values, mask = torch.rand(5, 3), torch.rand(5) > 0.5
        assert values[mask].shape == (5, 3)
        assert mask.nonzero().shape == (5, 1)
        assert torch.masked_select(values, values > 0).shape == (15,)
        assert values.unique().shape == (15,)
        values[mask] = torch.zeros(5, 3)
        grid = torch.rand(4, 5, 3)
        assert grid[torch.rand(4, 5) > 0.5].shape == (20, 3)


def test_numbers_that_are_read_are_one() -> None:
    with shapes_only():
        values = torch.rand(5)
        assert float(values.max()) == 1.0 and int(values.argmax()) == 1
        assert bool((values > 2).any()) and torch.equal(values, values)


def test_small_tensors_from_outside_keep_their_values() -> None:
    width = torch.tensor([[640]])
    with shapes_only():
        assert int(width[0] // 2) == 320
        assert not isinstance(width + 1, ShapeTensor)
        assert isinstance(torch.zeros(3), ShapeTensor)
        assert isinstance(torch.zeros(3) + width, ShapeTensor)


def test_gradients_flow() -> None:
    with shapes_only():
        weight = torch.nn.Parameter(torch.rand(1 << 20, 64))
        (weight[torch.zeros(7, dtype=torch.int64)] ** 2).sum().backward()
        assert weight.grad is not None and weight.grad.shape == weight.shape
        assert isinstance(weight.grad, ShapeTensor)


def test_the_type_of_a_number_decides_about_the_type_of_the_result() -> None:
    """Results are remembered by what they depend on; 1 and 1.0 are equal, and so are True and 1."""
    with shapes_only():
        counts = torch.zeros(5000, dtype=torch.int64)
        for _ in range(2):
            assert (counts + 1).dtype == torch.int64
            assert (counts + 1.0).dtype == torch.float32
            assert (counts.t().expand(2, -1) * 1).stride() == (5000, 1)


def test_autocast_takes_them_for_tensors_of_the_cpu() -> None:
    with shapes_only(), torch.autocast("cpu", torch.float16):
        found = torch.nn.Linear(3, 4)(torch.rand(7, 3))
        assert found.dtype == torch.float16 and found.device.type == "cpu"


def test_views_made_in_inference_mode_share_memory() -> None:
    with shapes_only():
        table = torch.nn.Parameter(torch.rand(5000, 2))
        with torch.inference_mode():
            assert table.detach()[3:].untyped_storage()._cdata == table.untyped_storage()._cdata
            assert table.to("cpu", torch.float16).dtype == torch.float16


def test_memory_is_shared_where_the_schema_does_not_say_so() -> None:
    with shapes_only():
        values = torch.rand(2, 5000)
        for _ in range(2):
            found = torch.ops.aten._unsafe_view(values, [5000, 2])
            assert found.untyped_storage()._cdata == values.untyped_storage()._cdata


def test_several_results_are_remembered_each_with_its_layout() -> None:
    with shapes_only():
        images, kernel = torch.rand(2, 3, 40, 50), torch.rand(4, 3, 3, 3)
        for _ in range(2):
            values, places = images.transpose(2, 3).max(dim=1)
            assert values.shape == (2, 50, 40) and values.dtype == torch.float32 and places.dtype == torch.int64
            by_images, by_kernel, by_bias = torch.ops.aten.convolution_backward(
                images, images, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
            )
            assert by_images.shape == images.shape and by_kernel.shape == kernel.shape and by_bias is None
            assert by_images.untyped_storage()._cdata != images.untyped_storage()._cdata
