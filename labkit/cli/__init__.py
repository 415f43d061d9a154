"""The command line: `labkit --help`.

A thin client like the notebook: it starts workers, watches run directories and draws, and imports no
torch (but for `fetch`, `warmstart` and `save`, which write models, and `whatif` and `attribute`, which score a batch).
Mistakes end in one line on stderr and exit code 2; LABKIT_DEBUG=1 shows the traceback as well. A run that was
stopped ends with exit code 130.
"""

import os
import sys

from labkit.cli import running, studying, supplying, sweeping  # noqa: F401 (their commands)
from labkit.cli.app import app


def main() -> None:
    """Entry point of the `labkit` command."""
    try:
        app()
    except Exception as error:
        if os.environ.get("LABKIT_DEBUG") == "1":
            raise
        known = isinstance(error, ValueError | OSError | ImportError)
        text = str(error) if known else f"{type(error).__name__}: {error} (LABKIT_DEBUG=1 shows where)"
        print(f"labkit: {text}", file=sys.stderr)
        sys.exit(2)
