"""Pieces hold what the tensors held, once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memscale.errors import TierError
from memscale.tiers.layout import pack, rebuild
from support.tensors import assert_same, groups


def restored(tensors):
    flats, views = pack(tensors)
    copies = [flat.run.clone() for flat in flats]
    return [
        rebuild(copies[view.piece], view)
        if view.piece >= 0
        else torch.empty_strided(view.shape, view.stride, dtype=view.dtype)
        for view in views
    ]


@given(groups())
def test_any_group_of_views_comes_back(tensors):
    for loaded, original in zip(restored(tensors), tensors, strict=True):
        assert_same(loaded, original)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=3, max_size=3),
    st.permutations(range(3)),
)
def test_a_lone_slice_never_drags_along_more_than_it_holds(cuts, order):
    base = torch.randn(5, 6, 7)
    tensor = base[tuple(slice(start, None, step) for start, step in cuts)].permute(order)
    flats, _ = pack([tensor])
    assert sum(flat.run.numel() for flat in flats) <= 2 * tensor.numel()
    assert_same(restored([tensor])[0], tensor)


def test_queries_keys_and_values_of_one_projection_are_one_piece():
    queries, keys, values = torch.randn(2, 4, 9).split(3, dim=-1)
    flats, _ = pack([queries, keys, values])
    assert [flat.run.numel() for flat in flats] == [72]


def test_a_column_is_stored_without_its_matrix():
    matrix = torch.randn(100, 100)
    flats, _ = pack([matrix[:, 3]])
    assert [flat.run.numel() for flat in flats] == [100]
    assert_same(restored([matrix[:, 3]])[0], matrix[:, 3])


def test_far_ends_of_a_storage_are_stored_without_its_middle():
    base = torch.randn(1000)
    flats, _ = pack([base[:10], base[-10:]])
    assert [flat.run.numel() for flat in flats] == [10, 10]


def test_an_expanded_tensor_is_stored_as_its_one_row():
    flats, _ = pack([torch.randn(1, 5).expand(1000, 5)])
    assert [flat.run.numel() for flat in flats] == [5]


def test_loaded_tensors_are_no_views_for_autograd():
    # A view made without gradients may not be changed in place with them.
    loaded = restored([torch.randn(3, 4).t()])[0]
    weight = torch.ones(3, requires_grad=True)
    loaded.mul_(weight)
    loaded.sum().backward()
    assert weight.grad is not None


def test_tensors_that_share_memory_share_it_again():
    base = torch.arange(6.0)
    flats, views = pack([base, base.view(2, 3).t()])
    copy = flats[0].run.clone()
    first, second = (rebuild(copy, view) for view in views)
    first[1] = 9
    assert second[1, 0] == 9


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    ],
    ids=["sparse", "meta", "quantized", "nested"],
)
def test_what_has_no_memory_of_its_own_is_refused(make):
    with pytest.raises(TierError, match="no memory of its own"):
        pack([make()])


def test_nothing_is_nothing():
    assert pack([]) == ([], [])
    flats, views = pack([torch.empty(0, 3, dtype=torch.bfloat16)])
    assert not flats
    assert views[0].shape == (0, 3)
