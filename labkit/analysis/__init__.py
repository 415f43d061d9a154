"""One stored batch, looked at: what another recipe or correction would make of it, where its mismatch comes from,
and other implementations of its policy."""

from labkit.analysis.attribution import Attribution, attribute
from labkit.analysis.batch import Batch, collect
from labkit.analysis.kernels import Kernels, kernels
from labkit.analysis.whatif import WhatIf, whatif

__all__ = ["Attribution", "Batch", "Kernels", "WhatIf", "attribute", "collect", "kernels", "whatif"]
