"""Addresses of strided rows, against the elements that they have to reach."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.counting import Operators
from hf_rmsnorm import rms_norm, use_backend
from hf_rmsnorm.rows import memory_order, row_address

COLUMNS = 3


@st.composite
def views(draw):
    """A view of numbers that are their own places in memory: with gaps, strides,
    dimensions in any order.
    """
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    last_gap = draw(st.sampled_from([0, 0, 0, 2]))
    whole = []
    for size in sizes:
        gap = draw(st.integers(0, 2))
        whole.append(size + gap)
    whole.append(last_gap + COLUMNS)
    count = torch.Size(whole).numel()
    view = torch.arange(count).view(whole)
    for dimension, size in enumerate(sizes):
        view = view.narrow(dimension, 0, size)
    view = view[..., last_gap:]
    if draw(st.booleans()):
        one_column = view[..., :1]
        view = one_column.expand(*sizes, COLUMNS)
    return view.permute(*order, len(sizes))


def order_of_memory(view):
    return memory_order(view.shape, view.stride())


def assert_reaches(address, view, rows):
    """The numbers in each row are those of the places that its address names."""
    for number, row in enumerate(rows):
        group, place = divmod(number, address.length)
        start = view.storage_offset()
        start += group * address.outer
        start += place * address.inner
        expected = range(start, start + COLUMNS)
        assert row.tolist() == list(expected)


@given(views())
def test_an_address_reaches_every_row_in_the_order_of_the_view(view):
    address = row_address(view.shape, view.stride(), None)
    if address is None:
        within_reach = view.stride(-1) == 1 and view.dim() <= 3
        assert not within_reach
    else:
        assert_reaches(address, view, view.reshape(-1, COLUMNS))


@given(views())
def test_an_address_reaches_every_row_in_the_order_of_memory(view):
    order = order_of_memory(view)
    if order is None:  # that of the view, or columns lie apart
        return
    assert view.stride(-1) == 1
    address = row_address(view.shape, view.stride(), order)
    if address is not None:
        ordered = view.permute(*order, view.dim() - 1)
        assert_reaches(address, view, ordered.reshape(-1, COLUMNS))


def test_a_backward_copies_the_gradient_alone_that_two_levels_do_not_reach():
    """x is a slice of a packed projection, and its gradient lies heads first, as eager
    attention gives it.
    """
    packed = torch.randn(2, 5, 7, 64)
    x = packed[:, :, :4].requires_grad_()
    weight = torch.randn(64, requires_grad=True)
    dy = torch.randn(2, 4, 5, 64).transpose(1, 2)
    gradients = []
    copied = []
    for gradient in (dy, dy.contiguous()):
        with use_backend("triton"):
            y = rms_norm(x, weight)
            with Operators() as operators:
                gradients.append(torch.autograd.grad(y, (x, weight), gradient))
        copied.append(operators.counts["clone"] + operators.counts["copy_"])
    assert copied == [1, 0]
    assert all(map(torch.equal, *gradients))
