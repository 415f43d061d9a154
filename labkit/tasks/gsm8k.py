"""gsm8k: grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168), openai/gsm8k on the Hugging Face hub.

7473 problems to train on; the 1319 of the test split are held out. Zero-shot, as a chat, with the instruction that
Qwen's model cards give for mathematics. The reference is what follows "####"; a completion is right if math-verify
finds the same number in it, first of all in \\boxed. Everything else is as in `labkit.tasks.dataset`.
"""

from labkit.config.own import Reward
from labkit.config.settings import Int
from labkit.tasks.dataset import DatasetOptions

GSM8K, SUBSET = "openai/gsm8k", "main"
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


class GSM8KOptions(DatasetOptions):
    prompt_column: str = "question"
    heldout_split: str = "test"
    subset: str = SUBSET
    template: str = f"{{prompt}}\n{INSTRUCTION}"
    chat: bool = True
    reward: Reward = "math-verify"
    max_new_tokens: Int = 512
