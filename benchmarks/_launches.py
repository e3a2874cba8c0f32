"""What a gateway sends to a driver for one sandbox: the request and freshly signed credentials."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from openshell.isolation.credentials import AuthBundle, LaunchAuthentication, VerificationKey
from openshell.isolation.tokens import TokenClaims, mint_gateway_token, mint_sandbox_token
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.extension.v1 import extension_pb2

GATEWAY_ID = "benchmark"
_CONTRACT = "openshell.compute.contract"
_LIFETIME_SECONDS = 3600


def gateway_metadata() -> extension_pb2.PeerMetadata:
    """Who asks, as every gateway of the split topology says it."""
    return extension_pb2.PeerMetadata(
        protocol_version=extension_pb2.ProtocolVersion(major=1, minor=0),
        implementation_name="openshell/gateway",
        implementation_version="0.1.5",
        supported_capabilities=[_CONTRACT],
        required_capabilities=[_CONTRACT],
    )


@dataclass(frozen=True, slots=True)
class Signer:
    """An Ed25519 key that signs credentials like a gateway's."""

    private_key_pem: str
    public: VerificationKey

    @classmethod
    def make(cls) -> Signer:
        """A new key."""
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return cls(private.decode(), VerificationKey(key_id="benchmark", public_key_pem=public.decode()))

    def launch_authentication(self, sandbox_id: str) -> LaunchAuthentication:
        """Credentials of one launch."""
        issued_at = int(time.time())
        generation = uuid.uuid4().hex

        def claims() -> TokenClaims:
            return TokenClaims(
                gateway_id=GATEWAY_ID,
                sandbox_id=sandbox_id,
                runtime_generation=generation,
                auth_epoch=1,
                token_id=str(uuid.uuid4()),
                issued_at=issued_at,
                expires_at=issued_at + _LIFETIME_SECONDS,
            )

        key_id = self.public.key_id
        bundle = AuthBundle(
            session_id=str(uuid.uuid4()),
            runtime_generation=generation,
            session_rotation=1,
            auth_epoch=1,
            gateway_token=mint_gateway_token(claims(), key_id=key_id, private_key_pem=self.private_key_pem),
            gateway_expires_at=issued_at + _LIFETIME_SECONDS,
            sandbox_token=mint_sandbox_token(claims(), key_id=key_id, private_key_pem=self.private_key_pem),
            sandbox_expires_at=issued_at + _LIFETIME_SECONDS,
        )
        return LaunchAuthentication(supervisor=bundle, gateway_id=GATEWAY_ID, verification_keys=(self.public,))


def driver_sandbox(sandbox_id: str, *, image: str, launch: LaunchAuthentication | None) -> pb.DriverSandbox:
    """One sandbox as a gateway asks for it."""
    spec = pb.DriverSandboxSpec(
        template=pb.DriverSandboxTemplate(image=image),
        command=["/bin/sleep", "3600"],
        launch_authentication=launch.to_json() if launch is not None else b"",
    )
    return pb.DriverSandbox(id=sandbox_id, name=f"bench-{sandbox_id[:8]}", workspace="default", spec=spec)
