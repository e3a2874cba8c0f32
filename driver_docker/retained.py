"""What a start needs and no request sends again: kept beside the record from the create on.

Persisting it is the driver's duty (compute-driver contract 3.7). It has two parts, written at different times. The
*retained launch* is what the create decided about the workload; it is written before the workload container exists. The
*committed launch input* is one set of credentials with the documents made for them; a start replaces it as a whole, and
its last file, the credentials, makes it count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from driver_docker import log_secrets, records
from driver_docker.documents import LaunchDocuments
from driver_docker.errors import PreconditionError
from driver_docker.quantities import ResourceLimits
from driver_docker.requests import LaunchRequest
from openshell.isolation.documents import (
    AuthBundle,
    BoundaryBootstrap,
    DocumentError,
    MainProcessSpec,
    RuntimeDescriptor,
    VerificationKey,
    WorkloadIdentity,
)
from openshell.isolation.json_fields import Fields, dump_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver_docker.records import RecordStore
    from driver_docker.sandbox_record import SandboxRecord

_VERSION: Final = 1
_CREATE_AGAIN: Final = "delete it and create it again"
"""What helps where the create's own decisions are lost: no request brings them again."""
_START_WITH_NEW: Final = "start it with launch_authentication, or delete it and create it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedLaunch:
    """What the create decided about a workload."""

    main_process: MainProcessSpec
    workspace_root: str
    identity: WorkloadIdentity
    log_level: str
    gpus_attached: bool
    child_environment: Mapping[str, str] = field(repr=False)

    def to_files(self) -> dict[str, bytes]:
        """The files that hold it."""
        body = {
            "version": _VERSION,
            "identity": self.identity.to_object(),
            "log_level": self.log_level,
            "gpus_attached": self.gpus_attached,
            "child_environment": dict(self.child_environment),
        }
        return {
            records.MAIN_PROCESS_FILE: self.main_process.to_json(),
            records.WORKSPACE_ROOT_FILE: self.workspace_root.encode(),
            records.RETAINED_FILE: dump_json(body),
        }

    @classmethod
    def read(cls, store: RecordStore, sandbox_id: str) -> RetainedLaunch:
        """Read it back. Blocks; run it on a thread.

        Raises:
            PreconditionError: A file is missing or damaged; the text names it.
        """
        main_process, root, body = (
            _needed(store, sandbox_id, name, cure=_CREATE_AGAIN)
            for name in (records.MAIN_PROCESS_FILE, records.WORKSPACE_ROOT_FILE, records.RETAINED_FILE)
        )
        try:
            fields = Fields.parse(body, records.RETAINED_FILE)
            fields.integer("version", minimum=_VERSION, maximum=_VERSION)
            return cls(
                main_process=MainProcessSpec.from_json(main_process),
                workspace_root=root.decode(),
                identity=WorkloadIdentity.from_fields(fields.fields("identity")),
                log_level=fields.text("log_level", empty_ok=True),
                gpus_attached=fields.boolean("gpus_attached"),
                child_environment=_texts(fields.take("child_environment")),
            )
        except (DocumentError, ValueError) as error:
            raise _damaged(sandbox_id, "its retained launch", cure=_CREATE_AGAIN) from error

    def as_request(self, record: SandboxRecord) -> LaunchRequest:
        """The request as far as it is known; enough to plan a new supervisor."""
        return LaunchRequest(
            sandbox_id=record.sandbox_id,
            name=record.name,
            workspace=record.workspace,
            image=record.image_reference,
            labels={},
            child_environment=self.child_environment,
            log_level=self.log_level,
            # Waiting for a client was meant for the first run alone (compute-driver contract 2.2).
            main_process=replace(self.main_process, await_main_process_attachment=False),
            user="",
            group="",
            limits=ResourceLimits(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedLaunch:
    """One set of credentials and the documents made for them, which agree with each other."""

    documents: LaunchDocuments = field(repr=False)
    auth: AuthBundle = field(repr=False)
    session_id: str
    generation: str
    """The generation of the boundary; a running workload keeps it."""
    gateway_id: str
    """Whose credentials the boundary takes."""
    verification_keys: tuple[VerificationKey, ...]
    """The keys that it checks them with."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that must not appear in a log's end."""
        return log_secrets.of_bundle(self.auth)

    def check_fresh(self, sandbox_id: str) -> None:
        """Check that its credentials have not expired.

        Raises:
            PreconditionError: They have.
        """
        ends = [at for at in (self.auth.gateway_expires_at, self.auth.sandbox_expires_at) if at > 0]
        if ends and min(ends) <= time.time():
            raise PreconditionError(
                f"launch_authentication is empty and the credentials of the last launch of sandbox {sandbox_id} have "
                "expired; start it with new ones"
            )

    @classmethod
    def read(cls, store: RecordStore, sandbox_id: str) -> CommittedLaunch:
        """Read it back. Blocks; run it on a thread.

        Raises:
            PreconditionError: There is none, or its files do not belong together; the text names what is missing.
        """
        auth, bootstrap, descriptor, certificate, key = (
            _needed(store, sandbox_id, name, cure=_START_WITH_NEW)
            for name in (
                records.AUTH_FILE,
                records.BOOTSTRAP_FILE,
                records.DESCRIPTOR_FILE,
                records.CERTIFICATE_FILE,
                records.KEY_FILE,
            )
        )
        found = LaunchDocuments(
            bootstrap=bootstrap,
            server_certificate=certificate,
            server_key=key,
            descriptor=descriptor,
            auth_bundle=auth,
        )
        try:
            bundle = AuthBundle.from_json(auth)
            boundary = BoundaryBootstrap.from_json(bootstrap)
            described = RuntimeDescriptor.from_json(descriptor)
        except DocumentError as error:
            raise _damaged(sandbox_id, "its committed launch input", cure=_START_WITH_NEW) from error
        sessions = {bundle.session_id, boundary.session_id, described.session_id}
        generations = {bundle.runtime_generation, boundary.generation, described.generation}
        if len(sessions) != 1 or len(generations) != 1:
            raise _damaged(sandbox_id, "its committed launch input", cure=_START_WITH_NEW)
        return cls(
            documents=found,
            auth=bundle,
            session_id=boundary.session_id,
            generation=boundary.generation,
            gateway_id=boundary.gateway_id,
            verification_keys=boundary.verification_keys,
        )


def committed_files(documents: LaunchDocuments) -> dict[str, bytes]:
    """The files of a launch input, the one that makes them count last."""
    return {
        records.BOOTSTRAP_FILE: documents.bootstrap,
        records.CERTIFICATE_FILE: documents.server_certificate,
        records.KEY_FILE: documents.server_key,
        records.DESCRIPTOR_FILE: documents.descriptor,
        records.AUTH_FILE: documents.auth_bundle,
    }


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise ValueError("child_environment")
    return value


def _needed(store: RecordStore, sandbox_id: str, name: str, *, cure: str) -> bytes:
    data = store.read_file(sandbox_id, name)
    if data is None:
        raise PreconditionError(f"sandbox {sandbox_id} cannot be started: {name} of its last launch is missing; {cure}")
    return data


def _damaged(sandbox_id: str, what: str, *, cure: str) -> PreconditionError:
    return PreconditionError(f"sandbox {sandbox_id} cannot be started: {what} is damaged; {cure}")
