from __future__ import annotations

import weakref

import pytest
import torch

from lachesis.common.errors import EngineError
from lachesis.transport import digest as module
from lachesis.transport.digest import Share, add_up, digests, digests_of_each, served_lora_b, share_digests
from tests.unit.transport.sharing import digest

MODULUS = 1 << 64


def by_hand(tensor: torch.Tensor) -> int:
    """The definition in plain Python."""
    rows = tensor.flatten(1) if tensor.ndim >= 2 else tensor.reshape(-1, 1)
    last = tensor.element_size() * (tensor.shape[-1] if tensor.ndim >= 2 else 1)
    width = next(width for width in (8, 4, 2, 1) if last % width == 0)
    total = 0
    for index, row in enumerate(rows):
        data = row.contiguous().view(torch.uint8).numpy().tobytes()
        words = [int.from_bytes(data[i : i + width], "little", signed=True) for i in range(0, len(data), width)]
        for place, word in enumerate(words):
            column = (2 * (place % (last // width)) + 1) * 0x9E3779B97F4A7C15 if tensor.ndim >= 2 else 0
            total += (2 * index + 1 + column) * word
    return total % MODULUS


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 8), (5, 3), (4, 1), (2, 3, 5), (0, 4), (4, 0)])
def test_a_digest_is_the_weighted_sum_of_rows(dtype, shape):
    tensor = (random(*shape) * 50).to(dtype)
    assert digest(tensor) == by_hand(tensor)
    assert 0 <= digest(tensor) < MODULUS


def test_tensors_that_are_let_go_one_by_one_have_the_same_digests():
    tensors = {
        str(shape): random(*shape, dtype=torch.bfloat16) for shape in ((), (7,), (5, 3), (2, 3, 5), (0, 4), (4, 0))
    }
    living: list[str] = []

    def made():
        for name, tensor in tensors.items():
            one = tensor.clone()
            weakref.finalize(one, living.remove, name)
            living.append(name)
            yield name, one
            del one

    seen: list[int] = []
    found = digests_of_each(pair for pair in made() if seen.append(len(living)) is None)
    assert found == digests(tensors) and [*found] == [*tensors]
    assert max(seen) <= 2 and digests_of_each([]) == {}
    with pytest.raises(EngineError, match=r"'w' of shape .* meta device"):
        digests_of_each([("w", torch.empty(2, 2, device="meta"))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(9,), (9, 8), (9, 3), (5, 2, 8), (1, 4)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_those_of_rows_add_up_on_however_many_ranks(dtype, shape, ranks):
    tensors = {name: (random(*shape, seed=seed) * 50).to(dtype) for seed, name in enumerate("ab")}
    rows = -(-shape[0] // ranks)  # the last may have fewer, or none
    says = []
    for rank in range(ranks):
        first = min(rank * rows, shape[0])
        shares = {name: Share(tensor[first : first + rows], shape, first) for name, tensor in tensors.items()}
        assert all(share.adds_up for share in shares.values())
        says.append(share_digests(shares))
    assert add_up(says, names=tensors) == digests(tensors)


@pytest.mark.parametrize(
    ("shape", "dimension", "fits"),
    [((4, 16), 1, True), ((4, 12), 1, False), ((4, 2, 8), 1, True), ((4, 8, 6), 2, False), ((4, 8, 8), 2, True)],
)
def test_those_of_columns_add_up_where_no_word_is_cut(shape, dimension, fits):
    tensor = random(*shape, dtype=torch.bfloat16)
    half = shape[dimension] // 2 if dimension == len(shape) - 1 else 0
    shares = [Share(part, shape, 0, place * half) for place, part in enumerate(tensor.chunk(2, dim=dimension))]
    assert [share.adds_up for share in shares] == [fits, fits]
    if fits:
        assert add_up([share_digests({"a": share}) for share in shares], names=["a"]) == digests({"a": tensor})


def test_a_tensor_of_which_nobody_has_a_part_is_no_other_ones_digest():
    tensor = random(4, 4)
    assert add_up([digests({"a": tensor}), {}], names=["a", "b"]) == {"a": digest(tensor), "b": 0}


def test_chunks_make_no_difference(monkeypatch):
    tensors = {"narrow": random(50, 3, dtype=torch.bfloat16), "vector": random(101), "wide": random(50, 4)}
    whole = digests(tensors)
    monkeypatch.setattr(module, "_CHUNK_WORDS", 7)
    assert digests(tensors) == whole


def test_large_words_wrap_around():
    tensor = torch.full((100, 4), torch.iinfo(torch.int64).max)
    assert digest(tensor) == by_hand(tensor)


@pytest.mark.parametrize("columns", [8, 3])
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_views_have_the_digest_of_their_copies(columns, offset):
    flat = random(200, dtype=torch.bfloat16)
    misaligned = flat[offset : offset + 5 * columns].view(5, columns)
    assert digest(misaligned) == digest(misaligned.clone()) == by_hand(misaligned)
    transposed = random(6, 10).T
    assert digest(transposed) == by_hand(transposed) != digest(transposed.T)
    fused = random(12, columns)
    assert digest(fused[4:8]) == digest(fused[4:8].clone())


def test_one_changed_bit_of_any_element_is_seen():
    tensor = random(4, 6, dtype=torch.bfloat16)
    before = digest(tensor)
    for row in range(4):
        for column in range(6):
            changed = tensor.clone()
            changed.view(torch.int16)[row, column] ^= 1
            assert digest(changed) != before


def test_rounding_a_swap_of_rows_and_a_cut_are_seen():
    tensor = random(6, 4)
    assert digest(tensor) != digest(tensor.to(torch.bfloat16).float())
    assert digest(tensor) != digest(tensor[[1, 0, 2, 3, 4, 5]])
    assert digest(tensor) != digest(tensor[:5])
    assert digest(tensor) != digest(tensor.double())
    vector = random(9)
    assert digest(vector) != digest(vector.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 16), (3, 5, 16)])
def test_columns_that_change_places_are_seen(dtype, shape):
    """As heads do that go to the output projection in another order, and a matrix with rows and columns exchanged."""
    tensor = random(*shape, dtype=dtype)
    heads = tensor.unflatten(-1, (4, 4))
    for order in ([1, 0, 2, 3], [3, 0, 1, 2], [3, 2, 1, 0]):
        assert digest(heads[..., order, :].flatten(-2)) != digest(tensor)
    assert digest(tensor.roll(4, dims=-1)) != digest(tensor)
    one = tensor.clone()
    one[0, ..., [0, 8]] = tensor[0, ..., [8, 0]]
    assert digest(one) != digest(tensor)
    square = random(16, 16, dtype=dtype)
    assert digest(square.T.contiguous()) != digest(square)


def test_names_and_order_are_kept():
    tensors = {"b": random(3, 4, seed=1), "a": random(5, seed=2), "c": torch.tensor(3.0)}
    found = digests(tensors)
    assert list(found) == ["b", "a", "c"]
    assert found == {name: digest(tensor) for name, tensor in tensors.items()}
    assert digests({}) == {}


def test_parameters_that_require_gradients_are_read_as_they_are():
    parameter = torch.nn.Parameter(random(3, 4))
    assert digest(parameter) == digest(parameter.detach())
    assert parameter.grad is None


def test_a_meta_tensor_has_no_digest():
    with pytest.raises(EngineError, match=r"'w' of shape \(3, 4\) is on the meta device") as caught:
        digests({"w": torch.empty(3, 4, device="meta")})
    assert caught.value.remedy


def test_b_is_scaled_in_the_dtype_of_the_engine():
    b = random(5, 3)
    served = served_lora_b(b, scaling=1.7, dtype=torch.bfloat16)
    assert served.dtype == torch.bfloat16
    assert torch.equal(served, b.to(torch.bfloat16) * 1.7)
    assert not torch.equal(served, (b * 1.7).to(torch.bfloat16)), "or the order of rounding would not matter"
