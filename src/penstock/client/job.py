"""Handles of jobs: wait, result, logs, events, cancel, resume. One for each client; both are thin.

`Client.run`, `Client.job` and their async twins make them. A handle holds an id and its client, nothing else, so two of
the same job never disagree. It must not cache a job's state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from penstock.client import results
from penstock.client.errors import JobFailed
from penstock.domain.lifecycle import JOB_TABLE, TERMINAL_JOB_STATES, JobState
from penstock.wire import api

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient
    from penstock.client.client import Client

#: Events after which a job never changes again.
JOB_ENDINGS = frozenset(
    kind
    for (before, kind), after in JOB_TABLE.items()
    if after in TERMINAL_JOB_STATES and before not in TERMINAL_JOB_STATES
)


class Job:
    """One job of a `Client`."""

    __slots__ = ("_client", "id")

    def __init__(self, client: Client, id: str) -> None:
        self._client = client
        self.id = id

    @override
    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def view(self) -> api.JobView:
        """Everything about it, asked now."""
        return self._client.get(self.id)

    @property
    def state(self) -> str:
        """queued, provisioning, running, succeeded, failed or cancelled; asked now."""
        return self.view().state

    def wait(self, timeout_s: float | None = None) -> api.Outcome:
        """Wait until it ends, well or not. TimeoutError after `timeout_s`; the job goes on."""
        return self._client.wait(self.id, timeout_s)

    def result(self, timeout_s: float | None = None) -> object:
        """Wait, then what it left in `result`: Python values and numpy arrays. JobFailed if it did not succeed."""
        outcome = self.wait(timeout_s)
        if outcome.state != JobState.SUCCEEDED:
            raise JobFailed(outcome)
        names = results.artifacts_of(outcome.result)
        return results.decode(outcome.result, {name: self._client.artifact(self.id, name) for name in names})

    def events(self, *, follow: bool = True, after: int | None = None) -> Iterator[api.EventView]:
        """What happened to it, from the beginning; with `follow` live, until it ends."""
        return self._client.events(self.id, follow=follow, after=after)

    def logs(
        self,
        *,
        follow: bool = False,
        host: int | None = None,
        stream: str | None = None,
        attempt: str | None = None,
    ) -> Iterator[api.LogChunk]:
        """What its processes wrote; see `Client.logs`."""
        return self._client.logs(self.id, follow=follow, host=host, stream=stream, attempt=attempt)

    def log_bytes(self, *, stream: str = "out", host: int = 0, attempt: str | None = None) -> bytes:
        """One stream of one host as it was written, so far."""
        return self._client.log_bytes(self.id, stream=stream, host=host, attempt=attempt)

    def artifacts(self) -> tuple[str, ...]:
        """Names of the files it left."""
        return tuple(artifact.name for artifact in self._client.artifacts(self.id))

    def artifact(self, name: str) -> bytes:
        return self._client.artifact(self.id, name)

    def why(self) -> api.WhyView:
        """Why it is not running."""
        return self._client.why(self.id)

    def cancel(self) -> api.CancelReply:
        return self._client.cancel(self.id)

    def resume(self, *, on: Sequence[str] = ()) -> Job:
        """Go on from its last checkpoint, as a new job."""
        return Job(self._client, self._client.resume(self.id, on=on).id)

    def rerun(self, *, on: Sequence[str] = ()) -> Job:
        """Run it once more from nothing, as a new job."""
        return Job(self._client, self._client.rerun(self.id, on=on).id)


class AsyncJob:
    """One job of an `AsyncClient`."""

    __slots__ = ("_client", "id")

    def __init__(self, client: AsyncClient, id: str) -> None:
        self._client = client
        self.id = id

    @override
    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"

    async def view(self) -> api.JobView:
        """Everything about it, asked now."""
        return await self._client.get(self.id)

    async def state(self) -> str:
        """queued, provisioning, running, succeeded, failed or cancelled; asked now."""
        return (await self.view()).state

    async def wait(self, timeout_s: float | None = None) -> api.Outcome:
        """Wait until it ends, well or not. TimeoutError after `timeout_s`; the job goes on."""
        return await self._client.wait(self.id, timeout_s)

    async def result(self, timeout_s: float | None = None) -> object:
        """Wait, then what it left in `result`: Python values and numpy arrays. JobFailed if it did not succeed."""
        outcome = await self.wait(timeout_s)
        if outcome.state != JobState.SUCCEEDED:
            raise JobFailed(outcome)
        names = results.artifacts_of(outcome.result)
        return results.decode(outcome.result, {name: await self._client.artifact(self.id, name) for name in names})

    def events(self, *, follow: bool = True, after: int | None = None) -> AsyncIterator[api.EventView]:
        """What happened to it, from the beginning; with `follow` live, until it ends."""
        return self._client.events(self.id, follow=follow, after=after)

    def logs(
        self,
        *,
        follow: bool = False,
        host: int | None = None,
        stream: str | None = None,
        attempt: str | None = None,
    ) -> AsyncIterator[api.LogChunk]:
        """What its processes wrote; see `AsyncClient.logs`."""
        return self._client.logs(self.id, follow=follow, host=host, stream=stream, attempt=attempt)

    async def log_bytes(self, *, stream: str = "out", host: int = 0, attempt: str | None = None) -> bytes:
        """One stream of one host as it was written, so far."""
        return await self._client.log_bytes(self.id, stream=stream, host=host, attempt=attempt)

    async def artifacts(self) -> tuple[str, ...]:
        """Names of the files it left."""
        return tuple(artifact.name for artifact in await self._client.artifacts(self.id))

    async def artifact(self, name: str) -> bytes:
        return await self._client.artifact(self.id, name)

    async def why(self) -> api.WhyView:
        """Why it is not running."""
        return await self._client.why(self.id)

    async def cancel(self) -> api.CancelReply:
        return await self._client.cancel(self.id)

    async def resume(self, *, on: Sequence[str] = ()) -> AsyncJob:
        """Go on from its last checkpoint, as a new job."""
        return AsyncJob(self._client, (await self._client.resume(self.id, on=on)).id)

    async def rerun(self, *, on: Sequence[str] = ()) -> AsyncJob:
        """Run it once more from nothing, as a new job."""
        return AsyncJob(self._client, (await self._client.rerun(self.id, on=on)).id)
