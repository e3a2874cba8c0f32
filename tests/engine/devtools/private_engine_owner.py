"""Owns a private engine until its stdin ends; run in a network namespace of its own."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

from devtools import bridge
from devtools.engine_record import EngineRecord
from devtools.private_engine import private_engine


def main() -> None:
    """Print one JSON line when the engine answers, and one when it has ended."""
    cache = Path(sys.argv[1])
    if "--with-docker0" in sys.argv:
        bridge.create("docker0")
    with private_engine(cache) as address:
        record = EngineRecord.read(cache / "engine" / "record.json")
        if record is None or record.keeper is None or record.dockerd is None:
            raise SystemExit("there is no whole record of a running engine")
        facts = {"address": address, "keeper": record.keeper.pid, "dockerd": record.dockerd.pid}
        print(json.dumps(facts | {"interfaces": [name for _, name in socket.if_nameindex()]}), flush=True)
        sys.stdin.read()
    print(json.dumps({"interfaces": [name for _, name in socket.if_nameindex()]}), flush=True)


if __name__ == "__main__":
    main()
