"""The isolation kit: documents, Sandbox Protocol, channel, client and server of an isolation backend.

Import the module that you need: ``documents``, ``errors``, ``canonical``, ``framing`` and ``operations`` are standard
library only; ``tls`` and ``tokens`` need cryptography; ``channel``, ``server`` and ``client`` need grpc.
"""
