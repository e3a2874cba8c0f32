"""Settings that both peers give their local HTTP/2 endpoint (isolation contract 3.2, 3.6)."""

from __future__ import annotations

AUTHORITY = "boundary.openshell.internal"
"""HTTP authority of the Sandbox Protocol."""

MAX_CONCURRENT_STREAMS = 128
STREAM_WINDOW_BYTES = 256 * 1024
KEEPALIVE_INTERVAL_SECONDS = 5
KEEPALIVE_TIMEOUT_SECONDS = 10

Options = list[tuple[str, int | str]]


def _common() -> Options:
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    ]


def server_options() -> Options:
    """Options of the local gRPC server."""
    return [
        *_common(),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        # The peer's keepalive is wanted here; the defaults would end the connection for it.
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def client_options() -> Options:
    """Options of the local gRPC channel: no retry, no proxy, no sharing of connections between channels."""
    return [
        *_common(),
        ("grpc.default_authority", AUTHORITY),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config_disable_resolution", 1),
    ]
