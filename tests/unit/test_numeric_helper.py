"""The comparison that numeric tests use must itself be able to fail."""

import pytest
import torch

from support.numeric import assert_tokens_close


@pytest.fixture
def reference():
    return torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))


def test_equal_tokens_are_close(reference):
    assert_tokens_close(reference.clone(), reference, min_cos=1.0 - 1e-12, max_rel=0.0)
    assert_tokens_close(torch.zeros(2, 3), torch.zeros(2, 3), min_cos=1.0, max_rel=0.0)


def test_one_wrong_token_among_many_is_named(reference):
    """X-13: a mean over tokens would pass this."""
    wrong = reference.clone()
    wrong[2, 3] = -wrong[2, 3]
    mean = torch.nn.functional.cosine_similarity(wrong, reference, dim=-1).mean()
    assert mean > 0.9
    with pytest.raises(AssertionError, match=r"^token 15 has cosine -1.000000 with its reference, under 0.9"):
        assert_tokens_close(wrong, reference, min_cos=0.9, max_rel=10.0)


def test_one_wrong_element_is_found(reference):
    """X-13: the direction of the token hardly changes."""
    wrong = reference.clone()
    wrong[1, 0, 5] += 0.1 * reference[1, 0].abs().max()
    with pytest.raises(AssertionError, match=r"^token 6 is off by 1.000e-01 of its largest value, over 0.05"):
        assert_tokens_close(wrong, reference, min_cos=0.9, max_rel=0.05)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_never_close(reference, value):
    wrong = reference.clone()
    wrong[0, 2, 0] = value
    with pytest.raises(AssertionError, match=r"^token 2 is not finite"):
        assert_tokens_close(wrong, reference, min_cos=0.0, max_rel=10.0)
    with pytest.raises(AssertionError, match=r"^token 2 of the reference is not finite"):
        assert_tokens_close(reference, wrong, min_cos=0.0, max_rel=10.0)


def test_a_token_of_zeros_allows_no_error():
    with pytest.raises(AssertionError, match=r"^token 1 is off by inf"):
        assert_tokens_close(torch.ones(2, 3), torch.tensor([[1.0] * 3, [0.0] * 3]), min_cos=0.0, max_rel=1.0)


def test_other_shapes_and_nothing_at_all_are_refused():
    with pytest.raises(AssertionError, match=r"^shapes differ: \[2, 3\] and \[3\]"):
        assert_tokens_close(torch.ones(2, 3), torch.ones(3), min_cos=0.0, max_rel=1.0)
    with pytest.raises(AssertionError, match=r"^there is nothing to compare"):
        assert_tokens_close(torch.ones(0, 3), torch.ones(0, 3), min_cos=0.0, max_rel=1.0)
