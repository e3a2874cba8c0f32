"""What can go wrong in the supervisor, as types: nothing here is ever recognised by its text."""

from __future__ import annotations

from openshell.status import StatusCode
from openshell.verdicts import Category, LastWords, Stage
from supervisor_reference.exit_codes import ExitCode, exit_code_of


class SupervisorError(Exception):
    """Root of the supervisor's errors.

    Attributes:
        reason: What happened and what to do, for people.
        retryable: Whether the same attempt may succeed later without anyone changing anything.
        status: The gRPC status that describes the failure.
    """

    def __init__(self, reason: str, *, retryable: bool = False, status: StatusCode = StatusCode.INTERNAL) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable
        self.status = status


class GatewayError(SupervisorError):
    """The gateway refused a call, or did not answer it.

    Attributes:
        operation: The RPC that failed.
        detail: The gateway's own words, as they came; may be empty.
    """

    def __init__(self, reason: str, *, operation: str, detail: str, status: StatusCode) -> None:
        retryable = status in {StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.ABORTED}
        super().__init__(reason, retryable=retryable, status=status)
        self.operation = operation
        self.detail = detail


class PolicyDocumentError(SupervisorError):
    """An image's policy document cannot be used."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, status=StatusCode.INVALID_ARGUMENT)


class StageError(SupervisorError):
    """The end of a launch or of a run: how far it had come, whose turn it is, and what may be said in public.

    Attributes:
        stage: How far the supervisor had come.
        category: What kind of cause it was.
        public: Text that the owner of the sandbox may see.
        private: Text for the operator; may hold a backend's raw words.
        exit_code: What the process returns.
    """

    def __init__(
        self,
        *,
        stage: Stage,
        category: Category,
        public: str,
        private: str = "",
        status: StatusCode = StatusCode.INTERNAL,
        retryable: bool = False,
        exit_code: ExitCode | None = None,
    ) -> None:
        super().__init__(public, retryable=retryable, status=status)
        self.stage = stage
        self.category = category
        self.public = public
        self.private = private
        self.exit_code = exit_code_of(category) if exit_code is None else exit_code

    @property
    def last_words(self) -> LastWords:
        """The words to leave behind."""
        return LastWords(stage=self.stage, category=self.category, public=self.public, private=self.private)


class LaunchInputError(StageError):
    """A launch input is missing, malformed, contradictory or asks for something that is not built."""

    def __init__(self, public: str, *, private: str = "", exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(
            stage=Stage.BUILD,
            category=Category.CONFIGURATION,
            public=public,
            private=private,
            status=StatusCode.INVALID_ARGUMENT,
            exit_code=exit_code,
        )
