"""One stored batch, looked at: what another recipe or correction would make of it, where its mismatch comes from."""

from labkit.analysis.attribution import Attribution, attribute
from labkit.analysis.batch import Batch, collect
from labkit.analysis.whatif import WhatIf, whatif

__all__ = ["Attribution", "Batch", "WhatIf", "attribute", "collect", "whatif"]
