"""Launch authentication and the supervisor's auth bundle (compute-driver contract 5.3). Everything here is secret."""

from __future__ import annotations

from dataclasses import dataclass, field

from openshell.isolation.errors import DocumentError
from openshell.isolation.json_fields import (
    I64_MAX,
    U64_MAX,
    Fields,
    JsonObject,
    check_generation,
    check_integer,
    check_session_id,
    check_text,
    check_unique,
    dump_json,
    verbatim_member,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationKey:
    """A public key that sandbox tokens are verified with.

    Attributes:
        key_id: the ``kid`` of the token header.
        public_key_pem: SubjectPublicKeyInfo PEM of an Ed25519 key.
    """

    key_id: str
    public_key_pem: str = field(repr=False)

    def __post_init__(self) -> None:
        check_text(self.key_id, "verification_keys.key_id", max_bytes=256)
        check_text(self.public_key_pem, "verification_keys.public_key_pem", max_bytes=16384)

    def to_object(self) -> JsonObject:
        """The form of the bootstrap: the PEM as a string."""
        return {"key_id": self.key_id, "public_key_pem": self.public_key_pem}

    def to_launch_object(self) -> JsonObject:
        """The form of launch authentication: the PEM as an array of byte integers."""
        return {"key_id": self.key_id, "public_key_pem": list(self.public_key_pem.encode("utf-8"))}

    @classmethod
    def from_fields(cls, fields: Fields) -> VerificationKey:
        """Read the bootstrap's form."""
        key = cls(key_id=fields.text("key_id"), public_key_pem=fields.text("public_key_pem"))
        fields.finish()
        return key

    @classmethod
    def from_launch_fields(cls, fields: Fields) -> VerificationKey:
        """Read launch authentication's form."""
        key_id = fields.text("key_id")
        raw = fields.byte_array("public_key_pem")
        try:
            pem = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise fields.error("public_key_pem", "is not text") from None
        fields.finish()
        return cls(key_id=key_id, public_key_pem=pem)


def check_keys(keys: tuple[VerificationKey, ...], path: str) -> None:
    """At least one key, with unique ids.

    Raises:
        DocumentError: otherwise.
    """
    if not keys:
        raise DocumentError(path, "must hold at least one key")
    check_unique([k.key_id for k in keys], path, "key ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthBundle:
    """The supervisor's credentials, the content of its auth bundle file.

    Attributes:
        session_id: one launch session.
        runtime_generation: the generation.
        session_rotation: orders attachments, at least 1.
        auth_epoch: credential epoch, at least 1.
        gateway_token: bearer for the gateway (secret).
        gateway_expires_at: Unix seconds, 0 for never.
        sandbox_token: bearer for the Sandbox Protocol (secret).
        sandbox_expires_at: Unix seconds, 0 for never.
        ssh_host_private_key: only from newer gateways (secret).
    """

    session_id: str
    runtime_generation: str
    session_rotation: int
    auth_epoch: int
    gateway_token: str = field(repr=False)
    gateway_expires_at: int
    sandbox_token: str = field(repr=False)
    sandbox_expires_at: int
    ssh_host_private_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        where = "supervisor"
        check_session_id(self.session_id, f"{where}.session_id")
        check_generation(self.runtime_generation, f"{where}.runtime_generation")
        check_integer(self.session_rotation, f"{where}.session_rotation", minimum=1)
        check_integer(self.auth_epoch, f"{where}.auth_epoch", minimum=1)
        check_text(self.gateway_token, f"{where}.gateway_token")
        check_text(self.sandbox_token, f"{where}.sandbox_token")
        check_integer(self.gateway_expires_at, f"{where}.gateway_expires_at", maximum=I64_MAX)
        check_integer(self.sandbox_expires_at, f"{where}.sandbox_expires_at", maximum=I64_MAX)

    def to_object(self) -> JsonObject:
        """The JSON object."""
        members: JsonObject = {
            "session_id": self.session_id,
            "runtime_generation": self.runtime_generation,
            "session_rotation": self.session_rotation,
            "auth_epoch": self.auth_epoch,
            "gateway_token": self.gateway_token,
            "gateway_expires_at": self.gateway_expires_at,
            "sandbox_token": self.sandbox_token,
            "sandbox_expires_at": self.sandbox_expires_at,
        }
        if self.ssh_host_private_key is not None:
            members["ssh_host_private_key"] = self.ssh_host_private_key
        return members

    def to_json(self) -> bytes:
        """The document."""
        return dump_json(self.to_object())

    @classmethod
    def from_fields(cls, fields: Fields) -> AuthBundle:
        """Read the JSON object.

        Raises:
            DocumentError: naming the member that is wrong.
        """
        bundle = cls(
            session_id=fields.session_id(),
            runtime_generation=fields.generation("runtime_generation"),
            session_rotation=fields.integer("session_rotation", minimum=1, maximum=U64_MAX),
            auth_epoch=fields.integer("auth_epoch", minimum=1, maximum=U64_MAX),
            gateway_token=fields.text("gateway_token"),
            gateway_expires_at=fields.integer("gateway_expires_at", maximum=I64_MAX),
            sandbox_token=fields.text("sandbox_token"),
            sandbox_expires_at=fields.integer("sandbox_expires_at", maximum=I64_MAX),
            ssh_host_private_key=fields.optional_text("ssh_host_private_key"),
        )
        fields.finish()
        return bundle

    @classmethod
    def from_json(cls, data: bytes) -> AuthBundle:
        """Parse the document.

        Raises:
            DocumentError: naming the member that is wrong.
        """
        return cls.from_fields(Fields.parse(data, "supervisor"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchAuthentication:
    """What the gateway hands the driver for one launch: bundle for the supervisor, public keys for the workload.

    Attributes:
        supervisor: the supervisor's bundle.
        gateway_id: id of the issuing gateway.
        verification_keys: at least one, with unique ids.
        supervisor_json: the bytes of the ``supervisor`` object exactly as received; they go verbatim into the auth
            bundle file.
    """

    supervisor: AuthBundle
    gateway_id: str
    verification_keys: tuple[VerificationKey, ...]
    supervisor_json: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        check_text(self.gateway_id, "launch_authentication.gateway_id", max_bytes=256)
        check_keys(self.verification_keys, "launch_authentication.verification_keys")
        if not self.supervisor_json:
            object.__setattr__(self, "supervisor_json", self.supervisor.to_json())

    def to_json(self) -> bytes:
        """The document."""
        return dump_json(
            {
                "supervisor": self.supervisor.to_object(),
                "gateway_id": self.gateway_id,
                "verification_keys": [k.to_launch_object() for k in self.verification_keys],
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> LaunchAuthentication:
        """Parse the bytes of the ``launch_authentication`` field.

        Raises:
            DocumentError: naming the member that is wrong.
        """
        where = "launch_authentication"
        fields = Fields.parse(data, where)
        bundle = AuthBundle.from_fields(fields.fields("supervisor"))
        path = fields.path("verification_keys")
        keys = tuple(
            VerificationKey.from_launch_fields(Fields(v, f"{path}[{i}]"))
            for i, v in enumerate(fields.array("verification_keys"))
        )
        document = cls(
            supervisor=bundle,
            gateway_id=fields.text("gateway_id"),
            verification_keys=keys,
            supervisor_json=verbatim_member(data, "supervisor", where),
        )
        fields.finish()
        return document
