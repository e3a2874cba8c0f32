"""``python -m devtools``: what ``./dev`` becomes once the virtual environment is fresh."""

from __future__ import annotations

import sys

from devtools.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
