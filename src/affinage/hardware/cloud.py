"""A TPU slice in Google's cloud as hardware: asked for, waited for, used by its hosts' addresses, and given back.

The protocol is that of the Cloud TPU API, version 2, `projects.locations.queuedResources` and `...nodes`:
https://docs.cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from affinage.config.claims import CloudSettings
from affinage.errors import UserError
from affinage.hardware.slices import Slice

API = "https://tpu.googleapis.com"
_GONE = ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING")  # states of the queue from which no slice comes any more
_BUSY = (429, 500, 502, 503, 504)  # HTTP status that passes by itself
_TRIES = 6
_RELEASE_HOURS = 0.5
_ACCELERATORS = {"v5e": "v5litepod"}  # where the API has another word than everybody
_IMAGES = {
    "v5e": "v2-alpha-tpuv5-lite",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


class Host(NamedTuple):
    """A machine of a slice: its address inside the cloud's network, and the outer one, "" where it has none."""

    internal: str
    external: str


class Answer(Protocol):
    """An HTTP answer, as `requests` gives it."""

    status_code: int
    text: str

    def json(self) -> Any:
        """The body, parsed."""


class Session(Protocol):
    """What speaks HTTP with credentials: `google.auth.transport.requests.AuthorizedSession`."""

    def request(self, method: str, url: str, **options: Any) -> Answer:
        """Send a request; OSError where there is no answer."""


class CloudSlice:
    """One TPU slice, by the name under which it stands in the cloud's queue; a form of `acquisition.Hardware`.

    As a context it is acquired on entering and released on leaving, whatever happens inside. A slice of the same name
    that is there already, or on its way, is taken over: a command that was killed finds what it pays for again.

    Args:
        name: in the cloud; lower-case letters, digits and dashes.
        slice: what to rent.
        settings: project, zone, image, spot or not, how long to wait.
        say: told of every change of state.
        session: None for one with the user's application-default credentials.
        pause: waits between two questions, by seconds.
        api: where the API is; default: Google's.
    """

    def __init__(
        self,
        name: str,
        slice: Slice,
        settings: CloudSettings,
        say: Callable[[str], None] = print,
        session: Session | None = None,
        pause: Callable[[float], None] = time.sleep,
        api: str = "",
    ) -> None:
        if slice.platform != "tpu":
            raise UserError(
                f"{slice.name} is not a TPU slice, and only those can be rented by name",
                where="hardware.slice",
                fix="Rent the machines yourself, then name them: affinage launch RECIPE --on ssh --machines a,b,c",
            )
        self.name, self._slice, self._settings = name, slice, settings
        self._say, self._pause = say, pause
        self._session = session or _authorized()
        self._zone = f"{api or API}/v2/projects/{settings.project}/locations/{settings.zone}"

    def __enter__(self) -> tuple[Host, ...]:
        try:
            return self.acquire()
        except BaseException:
            self.release()
            raise

    def __exit__(self, *raised: object) -> None:
        self.release()

    def acquire(self) -> tuple[Host, ...]:
        """Ask for the slice unless it is on its way, and wait until its hosts answer.

        Returns:
            The hosts, by worker number.

        Raises:
            UserError: where the cloud refuses, where the slice fails, and when it does not come in
                `settings.wait_hours`; then it still stands in the queue.
        """
        state = self.state()
        if state in _GONE:  # taken back by the cloud, or never given: its entry is in the way of a new one
            self._say(f"{self.name}: an earlier one is {state.lower()}; removed")
            self.release()
            state = None
        if state is None:
            self._call("POST", f"queuedResources?queuedResourceId={self.name}", self._wish())
            self._say(f"{self.name}: {self._slice.name} asked for in {self._settings.zone}")
        else:
            self._say(f"{self.name}: found, {state.lower()}")
        for state in self._states(self._settings.wait_hours):
            if state == "ACTIVE":
                return self.hosts()
            if state is None or state in _GONE:
                raise UserError(
                    f"the slice {self._slice.name} was not given: {state or 'it was removed'}{self._reason()}",
                    where=self._settings.zone,
                    fix="Look at the project's quota for it, take another zone, or ask for spot: hardware.cloud.spot.",
                )
        raise UserError(
            f"the slice {self.name} has not come in {self._settings.wait_hours:g} h",
            where=self._settings.zone,
            fix="Start the same command again to wait on, or raise hardware.cloud.wait_hours.",
        )

    def state(self) -> str | None:
        """The state in the cloud's queue, such as WAITING_FOR_RESOURCES or ACTIVE; None if it is not there."""
        found = self._call("GET", f"queuedResources/{self.name}", missing=None)
        return None if found is None else str(found.get("state", {}).get("state", "STATE_UNSPECIFIED"))

    def hosts(self) -> tuple[Host, ...]:
        """The machines, by worker number."""
        node = self._call("GET", f"nodes/{self.name}")
        return tuple(
            Host(end["ipAddress"], end.get("accessConfig", {}).get("externalIp", ""))
            for end in node.get("networkEndpoints", [])
        )

    def release(self) -> None:
        """Give the slice back, and wait until it is gone and no longer billed. Harmless if it is not there."""
        if self._call("DELETE", f"queuedResources/{self.name}?force=true", missing=None) is None:
            return
        for state in self._states(_RELEASE_HOURS):
            if state is None:
                self._say(f"{self.name}: given back")
                return
        raise UserError(
            f"the slice {self.name} is not gone after {_RELEASE_HOURS * 60:.0f} minutes, and may still be billed",
            where=self._settings.zone,
            fix=f"Remove it: gcloud compute tpus queued-resources delete {self.name} --force",
        )

    def _wish(self) -> dict[str, Any]:
        settings = self._settings
        network: dict[str, Any] = {"enableExternalIps": False}
        if settings.network:
            network["network"] = settings.network
        family, _, count = self._slice.name.lower().partition("-")
        node = {
            "acceleratorType": f"{_ACCELERATORS.get(family, family)}-{count}",
            "runtimeVersion": _IMAGES.get(family, "tpu-ubuntu2204-base"),
            "networkConfig": network,
            "labels": {"made-by": "affinage"},
        }
        parent = f"projects/{settings.project}/locations/{settings.zone}"
        wish: dict[str, Any] = {"tpu": {"nodeSpec": [{"parent": parent, "nodeId": self.name, "node": node}]}}
        if settings.spot:
            wish["spot"] = {}
        # The cloud forgets the wish by itself where nobody waits any more.
        wish["queueingPolicy"] = {"validUntilDuration": f"{round(settings.wait_hours * 3600)}s"}
        return wish

    def _states(self, hours: float) -> Iterator[str | None]:
        """The state, asked for again and again with growing pauses, for so many hours."""
        seen, waited, every = "", 0.0, 5.0
        while waited <= hours * 3600:
            state = self.state()
            if state and state != seen:
                self._say(f"{self.name}: {state.lower().replace('_', ' ')}")
                seen = state
            yield state
            self._pause(every)
            waited, every = waited + every, min(60.0, every * 1.5)

    def _reason(self) -> str:
        found = self._call("GET", f"queuedResources/{self.name}", missing={})
        message = found.get("state", {}).get("failedData", {}).get("error", {}).get("message", "")
        return f" ({message})" if message else ""

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, **missing: Any) -> Any:
        """What the API answers, parsed; `missing` is answered instead where there is nothing of that name."""
        for attempt in range(_TRIES):
            last = attempt == _TRIES - 1
            try:
                answer = self._session.request(method, f"{self._zone}/{path}", json=body, timeout=60)
            except Exception as error:
                if not _of_the_network(error):
                    raise
                if last:
                    raise UserError(
                        f"the cloud cannot be reached: {error}",
                        where=urlsplit(self._zone).netloc,
                        fix="Look at this machine's network, then run the same command again.",
                    ) from error
            else:
                if answer.status_code not in _BUSY or last:
                    break
            self._pause(2.0**attempt)
        if answer.status_code == 404 and "missing" in missing:
            return missing["missing"]
        if answer.status_code == 409 and method == "POST":
            return {}  # a request that the answer to was lost, sent again: it stands in the queue
        if answer.status_code >= 400:
            raise UserError(
                f"the cloud refuses ({answer.status_code}): {_message(answer)}",
                where=f"project {self._settings.project}, zone {self._settings.zone}",
                fix="Check project, zone and rights: `gcloud auth application-default login`, and the role TPU Admin.",
            )
        return answer.json()


def _of_the_network(error: BaseException | None) -> bool:
    """Whether a connection failed: an OSError of `requests`, which google-auth wraps where it gets a new token."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None


def _message(answer: Answer) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text.strip()[:200]


def _authorized() -> Session:
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError
    from google.auth.transport.requests import AuthorizedSession

    try:
        credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    except DefaultCredentialsError as error:
        raise UserError(
            "there are no credentials for Google's cloud", fix="Run: gcloud auth application-default login"
        ) from error
    session: Session = AuthorizedSession(credentials)
    return session
