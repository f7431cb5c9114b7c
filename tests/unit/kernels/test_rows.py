"""Addresses of strided rows, against the elements that they have to reach."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_rmsnorm.kernels.rows import RowAddress, addresses, memory_order, row_address

COLUMNS = 3


@st.composite
def views(draw):
    """A view of numbers that are their own places in memory: with gaps, strides,
    dimensions in any order.
    """
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    gaps = [draw(st.integers(0, 2)) for _ in sizes]
    last_gap = draw(st.sampled_from([0, 0, 0, 2]))
    whole = [size + gap for size, gap in zip(sizes, gaps, strict=True)]
    whole.append(COLUMNS + last_gap)
    numbers = torch.arange(torch.Size(whole).numel())
    numbers = numbers.view(whole)
    places = [slice(size) for size in sizes]
    places.append(slice(last_gap, None))
    view = numbers[tuple(places)]
    if draw(st.booleans()):
        view = view[..., :1].expand(*sizes, COLUMNS)
    return view.permute(*order, len(sizes))


def in_order(view, order):
    if order is None:
        return view
    return view.permute(*order, view.dim() - 1)


@given(views())
def test_an_address_reaches_every_row_in_its_order(view):
    for order in (None, memory_order(view.shape, view.stride())):
        address = row_address(view.shape, view.stride(), order)
        rows = in_order(view, order).reshape(-1, COLUMNS)
        if address is None:
            assert view.stride(-1) != 1 or view.dim() > 3, (
                "two dimensions of rows are always within reach"
            )
            continue
        for r, row in enumerate(rows):
            group, place = divmod(r, address.length)
            start = view.storage_offset()
            start += group * address.outer
            start += place * address.inner
            expected = range(start, start + COLUMNS)
            assert row.tolist() == list(expected)


@given(views())
def test_the_order_of_memory_is_from_the_slowest_dimension_to_the_fastest(view):
    order = memory_order(view.shape, view.stride())
    if view.stride(-1) == 1:
        ordered = in_order(view, order)
        strides = ordered.stride()[:-1]
        sizes = ordered.shape[:-1]
        real = []
        for s, size in zip(strides, sizes, strict=True):
            if size > 1:
                real.append(s)
        assert real == sorted(real, reverse=True)
    else:
        assert order is None


def test_rows_that_need_no_copy():
    batch_first = torch.empty(2, 8, 5, 16)
    packed = torch.empty(2, 5, 3 * 64)[..., 64:128].unflatten(-1, (4, 16))
    for view, two_levels in (
        (batch_first, (80, 0, 16)),
        # three strides: only in the order of memory
        (batch_first.transpose(1, 2), None),
        (packed, (4, 192, 16)),
        (torch.empty(16), (1, 0, 0)),
        (torch.empty(16)[:1], (1, 0, 0)),
        (torch.empty(4, 32)[:, ::2], None),
    ):
        expected = None
        if two_levels is not None:
            expected = RowAddress(*two_levels)
        assert row_address(view.shape, view.stride(), None) == expected
    transposed = batch_first.transpose(1, 2)
    order = memory_order(transposed.shape, transposed.stride())
    assert order == (0, 2, 1)
    address = row_address(transposed.shape, transposed.stride(), order)
    assert address == RowAddress(80, 0, 16)
    output = torch.empty_like(transposed)
    read = {"x": transposed, "other": None}
    for name, where in (("copied", None), ("in place", order)):
        in_place, flat, arguments = addresses(where, [output], read)
        assert in_place == (name == "in place")
        assert flat
        assert (arguments["x_len"], arguments["x_inner"]) == (80, 16)
