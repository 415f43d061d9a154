"""What a pass notes of its routers, and what it replays."""

import torch

from labkit.models.attention import PaddedAttention
from labkit.models.decoder import Decoder
from labkit.models.moe import balance_loss
from labkit.models.routing import Routes, followed
from labkit.models.warmstart import initial_weights

from .test_moe import DENSE_FIRST


def passed(routes: Routes) -> tuple[Decoder, torch.Tensor]:
    """Two sequences of nine tokens through a decoder whose first layer is dense."""
    model = Decoder(DENSE_FIRST, torch.float32)
    model.load_weights(initial_weights(DENSE_FIRST, 0))
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))
    positions, starts = torch.arange(9).expand(2, 9), torch.zeros(2, dtype=torch.int64)
    return model, model.logits(model(tokens, positions, PaddedAttention(starts, 9), routes))


def test_a_pass_that_replays_its_own_routes_is_the_pass_itself() -> None:
    first = Routes()
    _, logits = passed(first)
    assert first.own().shape == (2, 9, 2, 2), "two sequences, nine tokens, two layers with experts, two of them each"
    again = Routes(first.own().to(torch.int8))
    assert torch.equal(passed(again)[1], logits)
    assert torch.equal(again.own(), first.own())


def test_replayed_experts_are_taken_by_their_layer_and_missing_ones_are_the_routers_own() -> None:
    own = Routes()
    _, logits = passed(own)
    for place in (0, 1):  # of the two layers with experts; what the later one sees follows from the earlier
        replay = torch.full_like(own.own(), -1)
        replay[:, 4, place] = (own.own()[:, 4, place] + 1) % 8
        routes = Routes(replay.sort(-1).values)
        _, changed = passed(routes)
        differs = (changed != logits).any(-1)
        assert not differs[:, :4].any(), "tokens before it are as they were"
        assert differs[:, 4].all()
        assert torch.equal(routes.own()[:, :, : place + 1], own.own()[:, :, : place + 1]), (
            "its own choice is still noted"
        )


def test_gradients_reach_the_routers_under_replay() -> None:
    own = Routes()
    passed(own)
    model, logits = passed(Routes((own.own() + 3) % 8))
    logits.square().sum().backward()
    for layer in (1, 2):
        assert model.model.layers[layer].mlp.gate.weight.grad.norm() > 0


def test_a_set_with_a_missing_expert_is_missing() -> None:
    own = torch.tensor([[0, 1], [2, 3], [4, 5]])
    replay = torch.tensor([[6, 7], [-1, -1], [-1, 7]], dtype=torch.int8)
    assert followed(replay, own).tolist() == [[6, 7], [2, 3], [4, 5]]


def test_balance_is_the_mean_over_layers_of_the_tokens_that_count() -> None:
    routes, counting = Routes(), torch.ones(2, 9, dtype=torch.bool)
    passed(routes)
    counting[0, :5] = False
    logits, own = routes._logits, routes._own
    expected = [balance_loss(a[counting], b[counting]) for a, b in zip(logits, own, strict=True)]
    torch.testing.assert_close(routes.balance(counting), sum(expected) / 2)
    assert routes.balance() != routes.balance(counting)
