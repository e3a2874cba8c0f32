"""``python -m sandbox_runtime``: the same as ``openshell-sandbox``."""

from __future__ import annotations

import sys

from sandbox_runtime.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
