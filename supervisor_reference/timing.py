"""Every limit and interval of the supervisor, in one place, so that a test can shorten them all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Limits and intervals in seconds."""

    gateway_connect_seconds: float = 10.0
    """How long an unreachable gateway is tried at the start, and again for each later call."""
    gateway_call_seconds: float = 10.0
    """Limit of one unary call."""
    refusal_report_seconds: float = 3.0
    """Limit of each of the two calls that report an Attach refusal: one bounded attempt (isolation contract 4.3)."""
    first_backoff_seconds: float = 0.1
    """First pause between two attempts; doubles up to the last."""
    last_backoff_seconds: float = 2.0
    """Longest pause between two attempts."""
    control_socket_seconds: float = 20.0
    """How long the boundary's control socket may take to answer (compute-driver contract 5.7)."""
    control_socket_pause_seconds: float = 0.05
    """Pause between two attempts at the control socket."""
    rejection_pause_seconds: float = 2.0
    """Pause after a recorded rejection of the configuration (isolation contract 4.2)."""
    first_conflict_pause_seconds: float = 2.0
    """Pause after a first conflict with the gateway's generation (isolation contract 4.2)."""
    next_conflict_pause_seconds: float = 4.0
    """Pause after each further conflict (isolation contract 4.2)."""
    heartbeat_seconds: float = 10.0
    """Interval of heartbeats where the gateway names none."""
    first_session_seconds: float = 30.0
    """How long the first session may take to be accepted."""
    last_reconnect_seconds: float = 5.0
    """Longest pause between two attempts to get a lost session back."""
    orderly_terminate_seconds: float = 10.0
    """How long an orderly end waits for the boundary to terminate."""
    renewal_margin_seconds: float = 300.0
    """How long before its expiry a token is renewed, at most a third of what is left of its life."""
    shortest_token_use_seconds: float = 1.0
    """How long a token is used at least, whatever its expiry says."""
    renewal_retry_seconds: float = 15.0
    """Pause after a renewal that failed."""
