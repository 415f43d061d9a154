"""The tiny policies from nothing: a supervised warm start that leaves reinforcement learning something to do.

A Qwen3-shaped decoder of 0.80 M parameters, or one of 1.49 M with a mixture of experts, learns the task of
`labkit.tasks.arithmetic` from examples

    BOS 7+2*3-8=  ->  #9 EOS                       half of them: the answer at once
    BOS 7+2*3-8=  ->  7+2=9;9*3=7;7-8=9;#9 EOS     the other half: a scratchpad

where each scratchpad step is a random digit with probability 0.2 and the rest follows from it. So the policy
knows the method but has learned to slip, and prefers neither style: RL first finds that the scratchpad pays,
then sharpens the steps. Warm-started without the slips, it is wrong with confidence and RL stalls. Greedy
scratchpads must come out right before RL starts: after 700 steps all do, after 400 a third still stumbles,
mostly over subtractions.

    loss = cross-entropy of the response tokens, EOS included, mean over the batch's tokens (64 sequences)
    AdamW, betas (0.9, 0.98), weight decay 0.01 on matrices, gradient norm clipped to 1
    lr   = 2e-3, linear warm-up over 30 steps, linear decay over the last 30 % down to 10 %

The experts are kept busy alike by an auxiliary loss (`labkit.models.moe`), 0.01 balance, mean over the layers.

All in FP32 and on one thread, so that a seed gives the same bits however busy the machine is; the result is
rounded to BF16, which is where every run starts from.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.models.attention import PaddedAttention
from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.huggingface import write_folder
from labkit.models.moe import MoEConfig
from labkit.models.policy import Family, Policy
from labkit.models.routing import Routes
from labkit.models.tokenizer import Tokenizer
from labkit.tasks.arithmetic import Arithmetic

TINY = DecoderConfig(
    vocab_size=32,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=1000.0,
    qk_norm=True,
    max_positions=256,
)
# A token passes through as many weights as in a dense layer of 256; the first layer is one, as in DeepSeek's models.
TINY_MOE = replace(
    TINY,
    intermediate_size=256,
    moe=MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=128, layers=(1, 2, 3)),
)
STEPS, MOE_STEPS = 700, 1200
BALANCE = 0.01
SEQUENCES = 64
WRONG_STEP = 0.2
PEAK_LR, WARMUP_STEPS, DECAY_SHARE, LOWEST_SHARE = 2e-3, 30, 0.3, 0.1

Example = tuple[list[int], list[int]]  # prompt ids, response ids


def warmstart(
    out: str | PathLike[str],
    seed: int = 0,
    steps: int | None = None,
    progress: Callable[[int, float], None] | None = None,
    config: DecoderConfig = TINY,
) -> Policy:
    """Trains a tiny policy and writes it to the folder `out`; calls `progress(step, loss)` as it goes."""
    name, family, usual = _kind(config)
    steps = usual if steps is None else steps
    tokenizer = Tokenizer.char_level()
    task = Arithmetic()
    rng = random.Random(seed)
    decoder = Decoder(config, torch.float32)
    decoder.load_weights(initial_weights(config, seed))
    optimizer = _optimizer(decoder)
    with _one_thread():
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            loss = _update(decoder, optimizer, _examples(task, tokenizer, rng))
            if progress:
                progress(step, loss)
    policy = Policy(config, decoder.weights(), tokenizer, name, family).to(torch.bfloat16)
    write_folder(policy, out)
    return policy


def _kind(config: DecoderConfig) -> tuple[str, Family, int]:
    """Name, family, and the steps that it takes."""
    return ("tiny", "qwen3", STEPS) if config.moe is None else ("tiny-moe", "qwen3_moe", MOE_STEPS)


def initial_weights(config: DecoderConfig, seed: int) -> dict[str, Tensor]:
    """Normal, std 1/sqrt(fan-in), times 1/sqrt(2 layers) where a branch joins the residual; embedding 0.5."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    with torch.device("meta"):
        shapes = {name: w.shape for name, w in Decoder(config).weights().items()}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            continue
        std = 0.5 if "embed_tokens" in name else shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2 * config.num_layers) ** 0.5
        weights[name] = torch.randn(shape, generator=generator) * std
    return weights


def learning_rate(step: int, steps: int) -> float:
    """At step 1..steps."""
    warmup = min(1.0, step / WARMUP_STEPS)
    decay = min(1.0, max(LOWEST_SHARE, (steps - step + 1) / (DECAY_SHARE * steps)))
    return PEAK_LR * warmup * decay


def _optimizer(decoder: Decoder) -> torch.optim.AdamW:
    matrices = [p for p in decoder.parameters() if p.dim() > 1]
    vectors = [p for p in decoder.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), fused=True)


def _examples(task: Arithmetic, tokenizer: Tokenizer, rng: random.Random) -> tuple[list[Example], list[Example]]:
    """Direct and scratchpad examples, apart from each other because their lengths differ so much."""
    direct: list[Example] = []
    scratchpad: list[Example] = []
    for index in range(SEQUENCES):
        problem = task.sample(rng)
        if index < SEQUENCES // 2:
            examples, response = direct, task.direct(problem)
        else:
            examples, response = scratchpad, task.scratchpad(problem, WRONG_STEP, rng)
        prompt_ids, text_ids = tokenizer.encode(problem.prompt), tokenizer.encode(response)
        examples.append((prompt_ids, [*text_ids[1:], tokenizer.eos_id]))  # the response has no BOS of its own
    return direct, scratchpad


def _update(decoder: Decoder, optimizer: torch.optim.Optimizer, batches: tuple[list[Example], ...]) -> float:
    tokens = sum(len(response) for examples in batches for _, response in examples)
    total = 0.0
    for examples in batches:
        loss = _summed_loss(decoder, examples) / tokens
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def _summed_loss(decoder: Decoder, examples: list[Example]) -> Tensor:
    B, T = len(examples), max(len(prompt) + len(response) for prompt, response in examples)
    tokens_BT = torch.zeros(B, T, dtype=torch.int64)
    predicts_BT = torch.zeros(B, T, dtype=torch.bool)  # positions whose next token belongs to the response
    real_BT = torch.zeros_like(predicts_BT)
    for row, (prompt, response) in enumerate(examples):
        end = len(prompt) + len(response)
        tokens_BT[row, :end] = torch.tensor(prompt + response)
        real_BT[row, :end] = True
        predicts_BT[row, len(prompt) - 1 : end - 1] = True
    attention, routes = PaddedAttention(torch.zeros(B, dtype=torch.int64), T), Routes()
    hidden_BTD = decoder(tokens_BT, torch.arange(T).expand(B, T), attention, routes)
    targets_BT = tokens_BT.roll(-1, dims=1)
    logits_NV = decoder.logits(hidden_BTD[predicts_BT])
    loss = F.cross_entropy(logits_NV, targets_BT[predicts_BT], reduction="sum")
    if decoder.config.moe is None:
        return loss
    return loss + BALANCE * int(predicts_BT.sum()) * routes.balance(real_BT)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
