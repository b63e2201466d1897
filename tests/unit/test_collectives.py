"""Groups and collectives, over real processes where more than one rank is claimed (X-03)."""

import pytest
import torch

from steelyard.collectives import Group, current_ranks, groups_of, tensor_parallel_group
from steelyard.errors import ConfigError
from steelyard.ranks import Ranks

START = (
    "start the ranks with torchrun (torchrun --nproc-per-node=N ...) and call "
    "torch.distributed.init_process_group in each, before the load"
)
HERE = "support.ranks_collectives"


def test_a_group_of_one_rank_gives_its_input_back():
    x = torch.ones(2, 3)
    assert Group().all_reduce(x) is x
    assert Group().all_gather(x, dim=0) is x
    assert (Group().size, Group().rank) == (1, 0)


def test_a_group_of_one_rank_gives_its_rows_back():
    x, ids = torch.ones(2, 3), torch.arange(2)
    own, gathered = Group().gather_rows(x, ids)
    assert own == slice(0, 2)
    assert all(mine is theirs for mine, theirs in zip(gathered, (x, ids), strict=True))
    assert Group().gather_rows(x[:0])[0] == slice(0, 0)


def test_one_rank_is_alone_in_every_group():
    groups = groups_of(Ranks())
    assert [(one.size, one.rank) for one in (groups.tensor, groups.experts, groups.replicas)] == [(1, 0)] * 3


def test_groups_of_several_ranks_need_torch_distributed():
    with pytest.raises(
        ConfigError, match=r"^world=2, rank=1 were asked for, but torch\.distributed is not initialised"
    ):
        groups_of(Ranks.of(ep=2, rank=1))


def test_one_rank_needs_no_torch_distributed():
    assert tensor_parallel_group(Ranks()).size == 1
    assert current_ranks() == Ranks()


def test_several_ranks_need_torch_distributed():
    with pytest.raises(ConfigError) as caught:
        tensor_parallel_group(Ranks.of(tp=2, rank=1))
    assert str(caught.value) == (
        f"world=2, rank=1 were asked for, but torch.distributed is not initialised in this process; {START}"
    )


def test_asking_for_parallel_sizes_in_one_process_says_what_starts_them():
    with pytest.raises(ConfigError) as caught:
        current_ranks(tp=4, ep=2)
    assert str(caught.value) == f"tp=4, ep=2, but torch.distributed is not initialised in this process; {START}"


def test_a_group_of_several_ranks_needs_a_process_group():
    with pytest.raises(ConfigError) as caught:
        Group(2, 0)
    assert str(caught.value) == f"a group of 2 ranks needs a process group; {START}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_collectives_join_in_rank_order(rank_pool, dtype):
    """P-07: all_gather keeps rank order on the last dim, all_reduce sums; also of tensors that are not contiguous."""
    for rank, got in enumerate(rank_pool.values(f"{HERE}:reduce_and_gather", 2, (2, dtype))):
        assert got == {
            "size": 2,
            "rank": rank,
            "last": [[1, 2, 11, 12], [3, 4, 13, 14]],
            "first": [[1, 2], [3, 4], [11, 12], [13, 14]],
            "transposed": [[1, 3, 11, 13], [2, 4, 12, 14]],
            "sum": [[12, 14], [16, 18]],
            "sum_transposed": [[12, 16], [14, 18]],
        }


def test_each_tensor_parallel_group_keeps_to_itself(rank_pool):
    """P-07: with tp 2 in a world of 4, ranks 0, 1 and ranks 2, 3 sum and gather apart."""
    got = rank_pool.values(f"{HERE}:reduce_and_gather", 4, (2, "float32"))
    assert [(item["size"], item["rank"]) for item in got] == [(2, 0), (2, 1), (2, 0), (2, 1)]
    assert got[0]["last"] == got[1]["last"] == [[1, 2, 11, 12], [3, 4, 13, 14]]
    assert got[2]["last"] == got[3]["last"] == [[21, 22, 31, 32], [23, 24, 33, 34]]
    assert got[2]["sum"] == [[52, 54], [56, 58]]


def test_a_tensor_parallel_size_of_one_leaves_every_rank_alone(rank_pool):
    got = rank_pool.values(f"{HERE}:reduce_and_gather", 2, (1, "float32"))
    assert [item["sum"] for item in got] == [[[1, 2], [3, 4]], [[11, 12], [13, 14]]]


def test_a_gathered_column_parallel_product_is_the_whole_product(rank_pool):
    """P-07: out=4 on 2 ranks, to 1e-6 on both."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(4, 6, generator=generator), torch.randn(3, 6, generator=generator)
    for got in rank_pool.values(f"{HERE}:column_parallel", 2, (weight, x)):
        torch.testing.assert_close(got, x @ weight.t(), rtol=0, atol=1e-6)


def test_a_reduced_row_parallel_product_takes_its_bias_once(rank_pool):
    """P-05: x=[1,1], W=[[1,1]], bias=[10] gives 12 on both ranks."""
    args = (torch.ones(1, 2), torch.ones(1, 2), torch.tensor([10.0]))
    assert [got.tolist() for got in rank_pool.values(f"{HERE}:row_parallel", 2, args)] == [[[12.0]], [[12.0]]]


def test_a_second_load_makes_no_second_group(rank_pool):
    assert rank_pool.values(f"{HERE}:groups_made", 4, (3,)) == [(True, 0)] * 4


def test_groups_do_not_outlive_their_process_group(rank_pool):
    """The workers are reused: the second run has a new process group, and must not use the first one's groups."""
    for _ in range(2):
        assert [value for value, _ in rank_pool.values(f"{HERE}:sum_of_ones", 4)] == [2.0] * 4


def test_ranks_that_torch_distributed_contradicts_are_refused(rank_pool):
    outcomes = rank_pool.run(f"{HERE}:refused", 2, (4, 3))
    assert [item.kind for item in outcomes] == ["ConfigError"] * 2
    assert [item.text for item in outcomes] == [
        f"world=4, rank=3 were asked for, but torch.distributed was initialised with world size 2 and rank {rank}; "
        f"{START}"
        for rank in range(2)
    ]


def test_ranks_come_from_torch_distributed(rank_pool):
    assert rank_pool.values(f"{HERE}:ranks_now", 2, (None, None, None)) == [
        Ranks(world=2, rank=rank, tp=2, ep=1, moe_tp=2) for rank in range(2)
    ]
    assert rank_pool.values(f"{HERE}:ranks_now", 4, (2, 4, None)) == [
        Ranks(world=4, rank=rank, tp=2, ep=4, moe_tp=1) for rank in range(4)
    ]
