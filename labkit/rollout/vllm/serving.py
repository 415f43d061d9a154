"""A vLLM that runs in this process: requests stepped through it one step at a time, and its weights.

vLLM's own `LLM.generate` returns when everything is done. Here `step()` is driven by hand, so that between two steps
the run can look for a stop; what is still in flight is then aborted, and the engine is as it was before.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.sampling_params import RequestOutputKind, SamplingParams

from labkit.fp8 import KVScales
from labkit.rollout.vllm import weights as transfer

_open: list[Any] = []  # vLLM's cores in this process


class Serving:
    def __init__(self, folder: str, arguments: Mapping[str, Any]) -> None:
        self.llm: Any = vllm.LLM(folder, **arguments)
        _open.append(self.llm.llm_engine.engine_core)
        self._release = weakref.finalize(self, _retire, self.llm.llm_engine.engine_core)
        # Parts of vLLM compile themselves in any case (seconds, on a CPU); its own switch is read when torch starts.
        self.compiling = "force_eager" if arguments.get("enforce_eager") else "default"
        self.version = vllm.__version__
        self.requests = 0

    @property
    def model(self) -> Any:
        return self.model_runner.model

    @property
    def model_runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def run(
        self, requests: Sequence[tuple[list[int], Mapping[str, Any]]], on_microstep: Callable[[], None]
    ) -> list[Any]:
        """vLLM's RequestOutput of each (prompt, sampling parameters), in their order."""
        engine = self.llm.llm_engine
        place: dict[str, str] = {}  # our name of a request -> vLLM's
        outputs: dict[str, Any] = {}
        try:
            for prompt, parameters in requests:
                params = SamplingParams(
                    **parameters, detokenize=False, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY
                )
                name, self.requests = str(self.requests), self.requests + 1
                place[name] = engine.add_request(name, {"prompt_token_ids": prompt}, params)
            while engine.has_unfinished_requests():
                with torch.compiler.set_stance(self.compiling):
                    finished = engine.step()
                outputs |= {output.request_id: output for output in finished}
                on_microstep()
        except BaseException:
            engine.abort_request([known for name, known in place.items() if name not in outputs], internal=True)
            raise
        return [outputs[name] for name in place]

    def reload(self, weights: Mapping[str, Tensor]) -> None:
        """A complete set, in checkpoint form. NaN in the cache would survive as 0 * NaN, so its blocks are zeroed."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        transfer.repack(self.model)
        for blocks in self.model_runner.kv_caches:
            blocks.zero_()
        self.llm.reset_prefix_cache()

    def read_back(self, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
        return transfer.read_back(self.model, vocab_size)

    def fp8_operands(self) -> Iterator[tuple[str, Tensor]]:
        return transfer.fp8_operands(self.model)

    def write_scales(self, scales: KVScales) -> None:
        transfer.write_scales(self.model, scales)

    def read_scales(self, version: int) -> KVScales:
        return transfer.read_scales(self.model, version)

    def linears(self) -> tuple[int, int]:
        """How many of vLLM's linear layers are FP8, and how many there are."""
        layers = transfer.linears(self.model)
        return sum(map(transfer.is_fp8, layers)), len(layers)

    def attentions(self) -> list[Any]:
        return transfer.attentions(self.model)

    def attention(self) -> tuple[str, str, bool]:
        """The backend, the cache's dtype, and whether queries are quantised as well."""
        first = self.attentions()[0]
        return first.attn_backend.get_name(), first.kv_cache_dtype, first.query_quant is not None

    def close(self) -> None:
        """Give model and cache back; also done for one that is forgotten."""
        self._release()


def _retire(core: Any) -> None:
    """vLLM's own shutdown takes down the process group that its engines in a process share: for the last one only."""
    _open.remove(core)
    if not _open:
        core.shutdown()
        return
    core.engine_core.model_executor.shutdown()
    core._finalizer.detach()  # it would be the whole shutdown
    gc.collect()  # vLLM's objects refer to each other in circles; a model is too large to wait for
