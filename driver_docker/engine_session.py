"""docker-py's transports without docker-py's configuration.

Its `APIClient` reads the docker config and every login in it when it is made, and fails where one of them is
malformed, whatever the engine. A driver reads logins when it pulls, and tells what is wrong with them there.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Final, cast

import docker
import docker.errors
import docker.utils
import requests
import requests.adapters
from docker.tls import TLSConfig
from docker.transport import UnixHTTPAdapter
from docker.transport.unixconn import UnixHTTPConnection, UnixHTTPConnectionPool

if TYPE_CHECKING:
    from driver_docker.engine_tls import EngineTls

_POOLS: Final = 25


class _UnixConnection(UnixHTTPConnection):
    def connect(self) -> None:
        """As docker-py does, but a socket that does not connect is closed rather than left to the garbage collector."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(self.timeout)
            made.connect(self.unix_socket)
        except BaseException:
            made.close()
            raise
        self.sock = made


class _UnixPool(UnixHTTPConnectionPool):
    def _new_conn(self) -> Any:
        return _UnixConnection(self.base_url, self.socket_path, cast("int", self.timeout))


class _UnixAdapter(UnixHTTPAdapter):
    def get_connection(self, url: str | bytes, proxies: object = None) -> _UnixPool:
        """One pool for the engine: docker-py has one for each URL, so that hardly a connection is ever used again."""
        with self.pools.lock:
            pool = self.pools.get(self.socket_path)
            if pool is None:
                pool = _UnixPool(str(url), self.socket_path, self.timeout, maxsize=self.max_pool_size)
                self.pools[self.socket_path] = pool
            return cast("_UnixPool", pool)


class EngineSession(docker.APIClient):
    """HTTP to one engine over a unix socket, TCP or TLS.

    Args:
        address: `unix://` or `tcp://`.
        tls: Whether and with which files TLS is spoken over TCP.
        timeout_seconds: For requests that name none.
        max_connections: Connections that are kept open for the next request.

    Raises:
        docker.errors.DockerException: The address or a TLS file cannot be used.
    """

    def __init__(self, address: str, *, tls: EngineTls | None, timeout_seconds: float, max_connections: int) -> None:
        requests.Session.__init__(self)
        self.trust_env = False  # neither proxies nor netrc of the environment belong between driver and engine
        self.timeout = int(timeout_seconds)
        self.headers["User-Agent"] = "openshell-driver-docker"
        try:
            parsed = str(docker.utils.parse_host(address, False, tls=tls is not None))
        except ValueError as error:
            raise docker.errors.DockerException(f"{address} is no address of an engine: {error}") from error
        if parsed.startswith("http+unix://"):
            self._custom_adapter = _UnixAdapter(
                parsed, self.timeout, pool_connections=_POOLS, max_pool_size=max_connections
            )
            self.adapters.clear()
            self.mount("http+docker://", self._custom_adapter)
            self.base_url = "http+docker://localhost"
            return
        if tls is not None:
            pair = (str(tls.certificate), str(tls.key)) if tls.certificate is not None and tls.key is not None else None
            TLSConfig(ca_cert=str(tls.ca), client_cert=pair, verify=True).configure_client(self)
        self.base_url = parsed
