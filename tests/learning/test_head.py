"""The chunked head against plain autograd, and on ranks whose completions are of very different lengths."""

from dataclasses import replace

import pytest
import torch

from trainer.learning.logprobs import LogprobHead


def plain(hidden, weight, targets, banned, temperature):
    logits = (hidden @ weight.t()).float() / temperature
    logits[:, banned] = float("-inf")
    logp = logits.log_softmax(-1)
    p = logp.exp()
    return logp.gather(1, targets[:, None])[:, 0], -(p * logp.masked_fill(p == 0, 0)).sum(-1)


def both(n, vocabulary, width, dtype, limit, banned=(), temperature=1.0):
    g = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, width, generator=g, dtype=torch.float32).to(dtype)
    linear = torch.nn.Linear(width, vocabulary, bias=False).to(dtype)
    linear.weight.data = (torch.randn(vocabulary, width, generator=g) / width**0.5).to(dtype)
    allowed = [i for i in range(vocabulary) if i not in banned]
    targets = torch.tensor(allowed)[torch.randint(len(allowed), (n,), generator=g)]
    head = LogprobHead(linear, list(banned), temperature)
    head.limit = limit
    weights = torch.randn(n, generator=g)
    found = []
    for score in (
        lambda h: head(h, targets)[:2],
        lambda h: plain(h, head.weight, targets, list(banned), temperature),
    ):
        head.weight.grad = None
        own = hidden.clone().requires_grad_()
        logp, entropy = score(own)
        (weights * logp).sum().backward()
        found.append((logp.detach(), entropy.detach(), own.grad, head.weight.grad.clone()))
    return found


@pytest.mark.parametrize("limit", [1, 500, 7_001, 1 << 27])
@pytest.mark.parametrize(("banned", "temperature"), [((), 1.0), ((0, 3, 499), 0.7)])
def test_chunks_are_exact_in_fp32(limit, banned, temperature):
    for ours, theirs in zip(*both(37, 500, 24, torch.float32, limit, banned, temperature), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-6


def test_greedy_hits_are_those_of_the_largest_logit():
    g = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(8, 50, bias=False)
    head, hidden = LogprobHead(linear, [3], 1.0), torch.randn(200, 8, generator=g)
    head.limit = 700
    logits = (hidden @ head.weight.t()).index_fill(1, torch.tensor([3]), float("-inf"))
    targets = torch.where(torch.arange(200) % 2 == 0, logits.argmax(-1), torch.full((200,), 7))
    assert torch.equal(head(hidden, targets)[2], (logits.argmax(-1) == targets).float())


def test_bf16_stays_within_its_rounding():
    """Against fp32 arithmetic on the same bf16 numbers, no worse than plain autograd in bf16."""
    ours, theirs = both(300, 2_000, 64, torch.bfloat16, 50_000)
    exact = both(300, 2_000, 64, torch.float32, 1 << 27)[1]
    for a, b, c in zip(ours[2:], theirs[2:], exact[2:], strict=True):

        def error(x, c=c):
            return float((x.float() - c).norm() / c.norm())

        assert error(a) < max(1.5 * error(b), 1e-2)
    assert ours[3].dtype == torch.bfloat16


def test_a_rank_without_tokens_still_has_gradients():
    logp, entropy, hidden, weight = both(0, 100, 8, torch.float32, 1_000)[0]
    assert len(logp) == len(entropy) == len(hidden) == 0
    assert weight.shape == (100, 8) and not weight.any()


def test_memory_does_not_grow_with_the_number_of_tokens():
    """The peak of live tensors beside inputs and gradients: a few times `limit`, not N x V."""
    from tests.recipes.test_activations import Live

    n = 4_096
    vocabulary = 8_000
    width = 16
    limit = 1 << 17
    head = LogprobHead(torch.nn.Linear(width, vocabulary, bias=False), [1], 1.0)
    head.limit = limit
    hidden = torch.randn(n, width, requires_grad=True)
    with Live([head.weight, hidden]) as live:
        head(hidden, torch.arange(n))[0].sum().backward()
    assert live.peak < 6 * 4 * limit + 3 * head.weight.nbytes + 4 * hidden.nbytes + 64 * n
    assert live.peak < n * vocabulary * 4 / 10


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(900, 1_100), (3, 1_100)])
def test_ranks_with_unequal_numbers_of_chunks_do_not_hang(run_ranks, small_config, first, second):
    """Nothing stays gathered, as in a model over DeepSpeed's limits; of a tiny one nothing would be
    released."""
    config = replace(small_config, run=replace(small_config.run, name=f"{first}-{second}"))
    results = run_ranks("unequal", config)
    for result in results:
        assert result["forward"] == results[0]["forward"] and result["backward"] == results[0]["backward"]
        assert min(result["forward"] + result["backward"]) > 0, "nothing was gathered, so nothing was shown"
        assert result["norm"] == pytest.approx(results[0]["norm"]) and result["norm"] > 0
        assert result["gap"] < 1e-4
