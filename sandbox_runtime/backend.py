"""The built-in isolation backend: what a supervisor may ask of this container."""

from __future__ import annotations

import asyncio
import os
import signal as signals
from typing import TYPE_CHECKING

from openshell.isolation.errors import ConfirmError, ProcessError, TerminatedError, UnavailableError
from openshell.isolation.operations import (
    Attach,
    Confirmation,
    EnforcedProperty,
    ExitStatus,
    ImagePolicy,
    NetworkMode,
    Policy,
    ProcessKind,
    ProcessSnapshot,
    Properties,
    RetainedOutput,
    SessionSnapshot,
    Signal,
    StartAgent,
    Started,
)
from openshell.isolation.policy_grammar import is_normal_path
from openshell.isolation.server import Backend
from sandbox_runtime import confinement
from sandbox_runtime.admission import plan_confinement, refuse_unenforceable
from sandbox_runtime.confinement import ConfinementPlan, PathView, RealPaths
from sandbox_runtime.container import Container, OwnContainer
from sandbox_runtime.errors import LaunchError, PlatformError, TreeError
from sandbox_runtime.hardening import foreign_interfaces, privilege_objections
from sandbox_runtime.launch import DEFAULT_PATH
from sandbox_runtime.main_process import MainProcess, MainProgram, end_after
from sandbox_runtime.tree import GRACE_SECONDS

if TYPE_CHECKING:
    from openshell.isolation.documents import BoundaryBootstrap
    from sandbox_runtime.logs import Log
    from sandbox_runtime.output import Piece
    from sandbox_runtime.reaper import EndStatus, Reaper
    from sandbox_runtime.tree import ProcessTree

WORKSPACE = "/sandbox"
"""Where the main process starts when nobody says where (compute-driver contract 5.6: workspace root)."""
_SIGNALS = {
    Signal.TERM: signals.SIGTERM,
    Signal.KILL: signals.SIGKILL,
    Signal.INT: signals.SIGINT,
    Signal.HUP: signals.SIGHUP,
}


class SandboxBackend(Backend):
    """Runs one agent in this container.

    Args:
        bootstrap: What the boundary was provisioned as.
        reaper: The owner of waitpid.
        tree: Everything below this process.
        log: Where to say what happens.
        container: Kernel and container.
        view: The container's filesystem.
    """

    def __init__(
        self,
        *,
        bootstrap: BoundaryBootstrap,
        reaper: Reaper,
        tree: ProcessTree,
        log: Log,
        container: Container | None = None,
        view: PathView | None = None,
    ) -> None:
        self._bootstrap = bootstrap
        self._reaper = reaper
        self._tree = tree
        self._log = log
        self._container = container or OwnContainer()
        self._view = view or RealPaths()
        self._policy: Policy | None = None
        self._plan: ConfinementPlan | None = None
        self._main: MainProcess | None = None
        self._timeout: asyncio.Task[bool] | None = None
        self._frozen = False
        self._ending = False
        self._supervisor_lost = False

    @property
    def main_status(self) -> EndStatus | None:
        """How the agent ended; None when it was never started or still runs."""
        return self._main.status if self._main is not None else None

    @property
    def supervisor_lost(self) -> bool:
        """Whether the agent was ended because its supervisor did not come back."""
        return self._supervisor_lost

    def main_output(self, *, since: int = 0) -> tuple[Piece, ...]:
        """What is kept of the agent's output, from sequence number *since* on."""
        return self._main.output.since(since) if self._main is not None else ()

    async def discover_policy(self) -> ImagePolicy:
        """No place in an image is defined for a policy, so there is none."""
        return ImagePolicy(yaml=None, invalid=False)

    async def attach(self, request: Attach) -> SessionSnapshot:
        """Take the policy, if this container can enforce it.

        Raises:
            DeniedError: It cannot; a refusal of the configuration.
        """
        refuse_unenforceable(
            request.policy, identity=self._bootstrap.workload_identity, accounts=self._container.accounts()
        )
        self._plan = self._planned(request.policy, workdir=None)
        self._policy = request.policy
        if request.policy.network is NetworkMode.PROXY:
            self._log.warning(
                "The policy allows mediated egress; this container has no egress path, so all of it fails"
            )
        for note in self._plan.notes:
            self._log.warning("The filesystem policy cannot be taken literally", detail=note)
        if self._plan.missing:
            self._log.info("Paths of the filesystem policy do not exist", paths=list(self._plan.missing))
        return await self.snapshot()

    async def snapshot(self) -> SessionSnapshot:
        """What runs, or ran, here."""
        processes = []
        if self._main is not None:
            output = self._main.output
            retained = RetainedOutput(
                first_sequence=output.first_sequence, next_sequence=output.next_sequence, truncated=output.truncated
            )
            status = self._main.status
            processes.append(
                ProcessSnapshot(
                    process_id=self._main_id,
                    kind=ProcessKind.MAIN,
                    terminal=self._main.terminal,
                    status=_wire_status(status) if status is not None else None,
                    retained_output=retained,
                )
            )
        return SessionSnapshot(generation=self._bootstrap.generation, processes=tuple(processes))

    async def confirm(self) -> Confirmation:
        """State what is in force, having looked again.

        Raises:
            ConfirmError: Something is not as it must be.
        """
        if self._plan is None:
            raise ConfirmError("the boundary was not attached")
        try:
            facts = self._container.process_facts()
            interfaces = foreign_interfaces(self._container.network_devices())
        except PlatformError as error:
            raise ConfirmError(str(error)) from error
        objections = privilege_objections(facts)
        if objections:
            raise ConfirmError(f"the runtime is not at the privilege floor: {'; '.join(objections)}")
        identity = self._bootstrap.workload_identity
        if interfaces:
            raise ConfirmError(
                f"the container has an egress path that nobody mediates: network interface {', '.join(interfaces)}"
            )
        no_egress = "no egress path: the network namespace has no interface but the loopback"
        return Confirmation(
            generation=self._bootstrap.generation,
            identity=identity,
            properties=Properties(
                filesystem_confinement=EnforcedProperty(mechanism=self._plan.mechanism),
                egress_interception=EnforcedProperty(mechanism=no_egress),
                request_attribution=EnforcedProperty(mechanism=no_egress),
                privilege_floor=EnforcedProperty(
                    mechanism=f"uid {identity.uid}, gid {identity.gid}, no capabilities, no_new_privs, seccomp filter"
                ),
            ),
            session_id=self._bootstrap.session_id,
            outer_fence=self._bootstrap.outer_fence,
            resource_claims=self._bootstrap.resource_claims,
            backend_audit={
                "landlock_abi": self._plan.abi,
                "missing_paths": list(self._plan.missing[:64]),
                "notes": list(self._plan.notes[:64]),
            },
        )

    async def start_agent(self, request: StartAgent) -> Started:
        """Start the agent. What it may do was decided by attach.

        Raises:
            DeniedError: The working directory makes the attached policy one that cannot be enforced.
            ProcessError: It cannot be started; the text names the program and the cause.
            TerminatedError: The boundary is ending.
            UnavailableError: The request needs something that this runtime does not have.
        """
        if self._ending:
            raise TerminatedError("the boundary is ending")
        if self._policy is None:
            raise ProcessError("the boundary was not attached")
        if self._main is not None:
            raise ProcessError("the main process was started already")
        if request.provider_files:
            raise UnavailableError("this runtime cannot deliver provider files")
        if request.ca_cert is not None or request.ca_bundle is not None:
            self._log.warning("A certificate authority was sent; without an egress path nothing uses it")
        program = self._program(request)
        plan = self._planned(self._policy, workdir=program.working_directory)
        try:
            ruleset_fd = confinement.establish(plan)
        except PlatformError as error:
            raise ProcessError(str(error)) from error
        try:
            self._main = await MainProcess.start(program, ruleset_fd=ruleset_fd, reaper=self._reaper)
        except LaunchError as error:
            raise ProcessError(str(error)) from error
        finally:
            os.close(ruleset_fd)
        self._plan = plan
        if request.spec.timeout_secs:
            self._timeout = asyncio.create_task(
                end_after(float(request.spec.timeout_secs), self._main, grace_seconds=GRACE_SECONDS)
            )
        self._log.info("The main process runs", process_id=self._main_id, pid=self._main.pid)
        return Started(process_id=self._main_id, provider_env_revision=request.provider_env_revision)

    async def wait(self, process_id: str) -> ExitStatus:
        """Wait for the agent to end.

        Raises:
            ProcessError: There is no such process.
        """
        return _wire_status(await self._process(process_id).wait())

    async def signal(self, process_id: str, signal: Signal) -> None:
        """Signal the agent's process group.

        Raises:
            ProcessError: There is no such process, or it has ended.
        """
        if not self._process(process_id).signal(_SIGNALS[signal]):
            raise ProcessError(f"process {process_id} has ended")

    async def terminate(self, process_id: str) -> None:
        """End the agent and all that it started.

        Raises:
            ProcessError: There is no such process, or something of it cannot be ended.
        """
        self._process(process_id)
        await self._end_tree(grace_seconds=GRACE_SECONDS)

    async def terminate_boundary(self) -> None:
        """End everything; idempotent.

        Raises:
            ProcessError: Something cannot be ended.
        """
        self._ending = True
        if self._frozen:
            # Nobody mediates for a frozen tree, so it must not run again, not even for an orderly end.
            self._supervisor_lost = self.main_status is None
        await self._end_tree(grace_seconds=0 if self._frozen else GRACE_SECONDS)
        if self._timeout is not None:
            self._timeout.cancel()
            await asyncio.gather(self._timeout, return_exceptions=True)
        if self._main is not None:
            self._main.close()

    async def freeze(self) -> None:
        """Stop every process; one that cannot be stopped in time costs all of them their lives.

        Raises:
            ProcessError: The tree could neither be stopped nor ended.
        """
        if self._ending:
            return  # everything ends anyway, and a frozen process would not end in order
        self._frozen = True
        try:
            count = await self._tree.freeze()
        except TreeError as error:
            self._log.failure("The workload cannot be frozen and is ended", detail=str(error))
            await self._end_tree(grace_seconds=0)
        else:
            self._log.debug("The workload is frozen", processes=count)

    async def resume(self) -> None:
        """Continue what freeze stopped."""
        self._frozen = False
        self._tree.resume()

    @property
    def _main_id(self) -> str:
        return f"{self._bootstrap.generation}:main"

    def _process(self, process_id: str) -> MainProcess:
        if self._main is None or process_id != self._main_id:
            raise ProcessError(f"there is no process {process_id}")
        return self._main

    async def _end_tree(self, *, grace_seconds: float) -> None:
        try:
            await self._tree.terminate(grace_seconds=grace_seconds)
        except TreeError as error:
            raise ProcessError(str(error)) from error

    def _planned(self, policy: Policy, *, workdir: str | None) -> ConfinementPlan:
        return plan_confinement(policy, workdir=workdir, abi=self._container.landlock_abi(), view=self._view)

    def _program(self, request: StartAgent) -> MainProgram:
        spec = request.spec
        accounts = self._container.accounts()
        uid = self._bootstrap.workload_identity.uid
        shell = accounts.login_shell(uid)
        workdir = spec.workdir or (WORKSPACE if self._view.resolve(WORKSPACE) is not None else "/")
        if not is_normal_path(workdir):
            raise ProcessError(f"the working directory {workdir!r} is not absolute and normalised")
        arguments = (spec.program, *spec.args) if spec.program else (shell, *(spec.args or ("-l",)))
        account = accounts.user(uid)
        defaults = {
            "PATH": DEFAULT_PATH,
            "HOME": account.home if account is not None and account.home.startswith("/") else workdir,
            "SHELL": shell,
        }
        if account is not None:
            defaults |= {"USER": account.name, "LOGNAME": account.name}
        if spec.interactive:
            defaults["TERM"] = "xterm-256color"
        environment = {**defaults, **self._bootstrap.child_env, **request.provider_env}
        return MainProgram(
            arguments=arguments, environment=environment, working_directory=workdir, terminal=spec.interactive
        )


def _wire_status(status: EndStatus) -> ExitStatus:
    if status.signal_number is not None:
        return ExitStatus.signaled(status.signal_number)
    return ExitStatus.exited(status.exit_code or 0)
