"""The real engine: vLLM, with its scheduler, paged (FP8) KV cache, sampler and reload, in this process.

    plan.py            Experiment -> environment, LLM arguments, how FP8 linears are made and why: data, no vLLM
    launch.py          data -> a running vLLM, without a trace in the rest of the process
    emulation.py       FP8 linears inside vLLM where it has no kernel for the Recipe (CPUs), by vLLM's plugin API
    cache.py           its FP8 cache on a CPU, rounded to nearest
    weights.py         into vLLM and out of it: reload, tied heads, scales, and what its kernels multiply with
    engine.py          the Engine protocol on top

vLLM is imported when the first engine is built, not before. Engine and trainer compute with different kernels here, as
on a cluster, so even BF16 has a mismatch.
"""

from labkit.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
