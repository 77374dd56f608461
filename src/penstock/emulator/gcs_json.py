"""Cloud Storage's JSON dialect: what `gcloud storage`, google-cloud-storage and gcsfs speak.

`gcs` calls it with every request under /storage, /upload, /download, /resumable and /batch. It decides how a call reads
and what its answer looks like; what happens is `gcs_buckets`'s. Fields that clients send and that change nothing here
(`fields`, `projection`, `project`) are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import msgspec

from penstock.emulator.gcs_buckets import KEPT, PAGE_MAX, Asked, Buckets, Conditions, Object
from penstock.emulator.gcs_media import check_digests, media
from penstock.emulator.gcs_uploads import Progress, Uploads, Wanted
from penstock.emulator.http_words import Answer, Refused, Request, as_json, bad, name_of, number, query_of, token_of

PREFIXES: Final = ("/storage/v1/", "/upload/storage/v1/", "/resumable/upload/", "/download/storage/v1/", "/batch")
_OBJECT: Final = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o/(.+)")
_UPLOAD: Final = re.compile(r"(?:/resumable)?/upload/storage/v1/b/([^/]+)/o")
_BUCKET: Final = re.compile(r"/storage/v1/b/([^/]+)(?:/(o|storageLayout|iam))?")
#: What would change a listing; passing it over would be a wrong answer. Old versions there are none of.
_NOT_EMULATED: Final = ("filter", "includeTrailingDelimiter", "matchGlob", "softDeleted")
_COPY: Final = re.compile(r"(.+)/(copyTo|rewriteTo)/b/([^/]+)/o/(.+)")


class JsonDialect:
    """Answers requests of the JSON dialect."""

    def __init__(self, buckets: Buckets, uploads: Uploads) -> None:
        self._buckets = buckets
        self._uploads = uploads

    def answer(self, request: Request) -> Answer:
        if request.path.startswith("/batch"):
            return self._batch(request)
        if request.path == "/storage/v1/b":
            return self._all_buckets(request)
        if found := _UPLOAD.fullmatch(request.path):
            return self._upload(request, unquote(found[1]))
        if found := _BUCKET.fullmatch(request.path):
            return self._bucket(request, unquote(found[1]), found[2])
        if found := _OBJECT.fullmatch(request.path):
            return self._object(request, unquote(found[1]), found[2])
        raise Refused(404, "NotFound", "notFound", f"{request.method} {request.path} is not served here")

    def subject(self, request: Request) -> str:
        """`bucket/name` that a request is about, as far as it says; faults are aimed by it."""
        if found := _UPLOAD.fullmatch(request.path):
            wanted = self._uploads.about(request.query.get("upload_id", ""))
            if wanted is not None:
                return f"{wanted.bucket}/{wanted.name}"
            name = request.query.get("name") or str(_described(request).get("name", ""))
            return f"{unquote(found[1])}/{name}"
        if found := _BUCKET.fullmatch(request.path):
            return f"{unquote(found[1])}/{request.query.get('prefix', '')}"
        if found := _OBJECT.fullmatch(request.path):
            copied = _COPY.fullmatch(found[2])
            bucket, name = (copied[3], copied[4]) if copied else (found[1], found[2].removesuffix("/compose"))
            return f"{unquote(bucket)}/{unquote(name)}"
        return ""

    # --- buckets ---
    def _all_buckets(self, request: Request) -> Answer:
        if request.method == "POST":
            name = _decoded(request.body).get("name")
            if not isinstance(name, str):
                raise bad("Required field: name")
            self._buckets.create(name)
            return as_json(self._about_bucket(request, name))
        query = request.query
        after = name_of(query.get("pageToken", ""))
        names = [each for each in self._buckets.names() if each > after and each.startswith(query.get("prefix", ""))]
        most = number(query.get("maxResults"), "maxResults") or PAGE_MAX
        found: dict[str, Any] = {"kind": "storage#buckets"}
        if names:
            found["items"] = [self._about_bucket(request, name) for name in names[:most]]
        if len(names) > most:
            found["nextPageToken"] = token_of(names[most - 1])
        return as_json(found)

    def _bucket(self, request: Request, bucket: str, part: str | None) -> Answer:
        self._buckets.created(bucket)
        match (request.method, part):
            case ("GET", None):
                return as_json(self._about_bucket(request, bucket))
            case ("DELETE", None):
                self._buckets.drop(bucket)
                return Answer(204)
            case ("GET", "o"):
                return self._list(request, bucket)
            case ("GET", "storageLayout"):
                layout = {"kind": "storage#storageLayout", "bucket": bucket, "location": "US"}
                return as_json(layout | {"locationType": "multi-region", "hierarchicalNamespace": {"enabled": False}})
            case ("GET", "iam"):
                return as_json({"kind": "storage#policy", "version": 1, "etag": "CAE=", "bindings": []})
            case _:
                raise Refused(405, "MethodNotAllowed", "methodNotAllowed", f"{request.method} is not allowed here")

    def _about_bucket(self, request: Request, name: str) -> dict[str, Any]:
        created = _stamp(self._buckets.created(name))
        return {
            "kind": "storage#bucket",
            "id": name,
            "name": name,
            "selfLink": f"{request.origin}/storage/v1/b/{name}",
            "location": "US",
            "locationType": "multi-region",
            "storageClass": "STANDARD",
            "metageneration": "1",
            "etag": "CAE=",
            "timeCreated": created,
            "updated": created,
            "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}},
        }

    def _list(self, request: Request, bucket: str) -> Answer:
        query = request.query
        for name in _NOT_EMULATED:
            if query.get(name, "false").lower() != "false":
                raise Refused(501, "NotImplemented", "notImplemented", f"{name}: not emulated")
        most = number(query.get("maxResults"), "maxResults")
        asked = Asked(
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            after=name_of(query.get("pageToken", "")),
            first=query.get("startOffset", ""),
            before=query.get("endOffset", ""),
            most=PAGE_MAX if most is None else min(most, PAGE_MAX),
        )
        page = self._buckets.page(bucket, asked)
        found: dict[str, Any] = {"kind": "storage#objects"}
        if page.objects:
            found["items"] = [about(request, bucket, each) for each in page.objects]
        if page.prefixes:
            found["prefixes"] = page.prefixes
        if page.next is not None:
            found["nextPageToken"] = token_of(page.next)
        return as_json(found)

    # --- objects ---
    def _object(self, request: Request, bucket: str, rest: str) -> Answer:
        if request.method == "POST" and (copied := _COPY.fullmatch(rest)):
            return self._copy(request, bucket, copied)
        if request.method == "POST" and rest.endswith("/compose"):
            return self._compose(request, bucket, unquote(rest.removesuffix("/compose")))
        name = unquote(rest)
        conditions = conditions_of(request.query)
        match request.method:
            case "GET" | "HEAD":
                found = self._buckets.get(bucket, name, number(request.query.get("generation"), "generation"))
                self._buckets.check(bucket, name, conditions, reading=True)
                if request.query.get("alt") == "media" or request.path.startswith("/download/"):
                    return media(request, found, self._buckets.read(bucket, name))
                return as_json(about(request, bucket, found))
            case "DELETE":
                self._buckets.get(bucket, name, number(request.query.get("generation"), "generation"))
                self._buckets.delete(bucket, name, conditions)
                return Answer(204)
            case "PATCH" | "PUT":
                return self._patch(request, bucket, name, conditions)
            case _:
                raise Refused(405, "MethodNotAllowed", "methodNotAllowed", f"{request.method} is not allowed here")

    def _patch(self, request: Request, bucket: str, name: str, conditions: Conditions) -> Answer:
        change = _decoded(request.body)
        metadata: dict[str, str] | None = None
        if "metadata" in change:
            kept = dict(self._buckets.get(bucket, name).metadata) if request.method == "PATCH" else {}
            given = change["metadata"] or {}
            kept.update((key, value) for key, value in given.items() if value is not None)
            metadata = {key: value for key, value in kept.items() if given.get(key, "") is not None}
        kept = {**(self._buckets.get(bucket, name).kept if request.method == "PATCH" else {}), **_kept(change)}
        kept = {key: value for key, value in kept.items() if change.get(key, "") is not None}
        found = self._buckets.patch(bucket, name, conditions, metadata, change.get("contentType") or "", kept)
        return as_json(about(request, bucket, found))

    def _copy(self, request: Request, bucket: str, copied: re.Match[str]) -> Answer:
        name, verb, to_bucket, to_name = unquote(copied[1]), copied[2], unquote(copied[3]), unquote(copied[4])
        source = self._buckets.get(bucket, name, number(request.query.get("sourceGeneration"), "sourceGeneration"))
        self._buckets.check(bucket, name, conditions_of(request.query, "ifSource"))
        described = _decoded(request.body)
        made = self._buckets.put(
            to_bucket,
            to_name,
            self._buckets.read(bucket, name),
            conditions_of(request.query),
            content_type=described.get("contentType") or source.content_type,
            metadata=described.get("metadata", source.metadata),
            kept={**source.kept, **_kept(described)},
            components=source.components,
        )
        resource = about(request, to_bucket, made)
        if verb == "copyTo":
            return as_json(resource)
        rewritten = {"kind": "storage#rewriteResponse", "totalBytesRewritten": str(made.size), "done": True}
        return as_json(rewritten | {"objectSize": str(made.size), "resource": resource})

    def _compose(self, request: Request, bucket: str, name: str) -> Answer:
        wish = _decoded(request.body)
        sources = wish.get("sourceObjects") or ()
        if not 1 <= len(sources) <= 32:
            raise bad(f"sourceObjects: {len(sources)} objects, and from 1 to 32 can be composed")
        found = []
        for source in sources:
            found.append(self._buckets.get(bucket, source["name"], _whole(source, "generation")))
            wanted = _whole(source.get("objectPreconditions") or {}, "ifGenerationMatch")
            self._buckets.check(bucket, source["name"], Conditions(wanted))
        described = wish.get("destination") or {}
        made = self._buckets.put(
            bucket,
            name,
            b"".join(self._buckets.read(bucket, each.name) for each in found),
            conditions_of(request.query),
            content_type=described.get("contentType") or "",
            metadata=described.get("metadata"),
            kept=_kept(described),
            components=sum(each.components or 1 for each in found),
        )
        return as_json(about(request, bucket, made))

    # --- uploads ---
    def _upload(self, request: Request, bucket: str) -> Answer:
        self._buckets.created(bucket)
        query = request.query
        if upload := query.get("upload_id"):
            return self._resumed(request, upload)
        described = _described(request)
        wanted = Wanted(
            bucket,
            str(described.get("name") or query.get("name") or ""),
            conditions_of(query),
            str(described.get("contentType") or request.headers.get("x-upload-content-type") or ""),
            described.get("metadata") or {},
            _kept(described),
        )
        match query.get("uploadType"):
            case "media":
                return self._store(request, wanted._replace(content_type=request.headers.get("content-type", "")))
            case "multipart":
                data, content_type = _parts(request)[1]
                _check_described(described, data)
                kept = wanted._replace(content_type=wanted.content_type or content_type)
                return self._store(request._replace(body=data), kept)
            case "resumable":
                upload = self._uploads.begin(wanted)
                place = (
                    f"{request.origin}/upload/storage/v1/b/{quote(bucket)}/o?uploadType=resumable&upload_id={upload}"
                )
                return Answer(200, b"", {"location": place, "x-guploader-uploadid": upload})
            case other:
                raise bad(f"uploadType: {other!r} is not media, multipart or resumable")

    def _store(self, request: Request, wanted: Wanted) -> Answer:
        check_digests(request.headers, request.body)
        made = self._buckets.put(
            wanted.bucket,
            wanted.name,
            request.body,
            wanted.conditions,
            content_type=wanted.content_type,
            metadata=wanted.metadata,
            kept=wanted.kept,
        )
        return as_json(about(request, wanted.bucket, made))

    def _resumed(self, request: Request, upload: str) -> Answer:
        if request.method == "DELETE":
            self._uploads.abandon(upload)
            return Answer(499)
        wanted = self._uploads.about(upload)
        match self._uploads.take(upload, request.headers, request.body):
            case Progress(_, Object() as made):
                assert wanted is not None
                return as_json(about(request, wanted.bucket, made))
            case Progress(received, _):
                return Answer(308, b"", {"range": f"bytes=0-{received - 1}"} if received else {})

    # --- batches ---
    def _batch(self, request: Request) -> Answer:
        """Several calls in one: `gcloud storage rm` sends its deletions so."""
        answers = []
        for part in _mime(request).iter_parts():
            lines, _, body = part.get_payload(decode=True).partition(b"\r\n\r\n")
            first, *rest = lines.decode().splitlines()
            method, place, _ = first.split(" ", 2)
            address = urlsplit(place)
            headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
            inner = Request(method, address.path, query_of(address.query), dict(request.headers) | headers, body)
            try:
                answer = self.answer(inner)
            except Refused as error:
                answer = refusal(error)
            answers.append(
                f"--batch_penstock\r\ncontent-type: application/http\r\n"
                f"content-id: <response-{str(part.get('content-id', '')).strip('<>')}>\r\n\r\n"
                f"HTTP/1.1 {answer.status} Done\r\ncontent-length: {len(answer.body)}\r\n"
                f"content-type: application/json; charset=UTF-8\r\n\r\n{answer.body.decode()}\r\n"
            )
        text = "".join(answers) + "--batch_penstock--\r\n"
        return Answer(200, text.encode(), {"content-type": "multipart/mixed; boundary=batch_penstock"})


def refusal(error: Refused) -> Answer:
    if error.status == 304:
        return Answer(304)
    inner = {"message": str(error), "domain": "global", "reason": error.reason}
    return as_json(
        {"error": {"code": error.status, "message": str(error), "errors": [inner]}}, error.status, error.headers
    )


def about(request: Request, bucket: str, found: Object) -> dict[str, Any]:
    """An object's resource."""
    escaped = quote(found.name, safe="")
    link = f"{request.origin}/download/storage/v1/b/{bucket}/o/{escaped}?generation={found.generation}&alt=media"
    resource: dict[str, Any] = {
        "kind": "storage#object",
        "id": f"{bucket}/{found.name}/{found.generation}",
        "selfLink": f"{request.origin}/storage/v1/b/{bucket}/o/{escaped}",
        "mediaLink": link,
        "name": found.name,
        "bucket": bucket,
        "generation": str(found.generation),
        "metageneration": str(found.metageneration),
        "contentType": found.content_type,
        "storageClass": "STANDARD",
        "size": str(found.size),
        "crc32c": found.crc32c,
        "etag": f"C{found.generation}/{found.metageneration}",
        "timeCreated": _stamp(found.created),
        "updated": _stamp(found.updated),
        "timeStorageClassUpdated": _stamp(found.created),
    }
    if found.md5:
        resource["md5Hash"] = found.md5
    if found.metadata:
        resource["metadata"] = found.metadata
    if found.components:
        resource["componentCount"] = found.components
    return {**resource, **found.kept}


def conditions_of(query: Mapping[str, str], prefix: str = "if") -> Conditions:
    names = ("GenerationMatch", "GenerationNotMatch", "MetagenerationMatch", "MetagenerationNotMatch")
    return Conditions(*(number(query.get(prefix + name), prefix + name) for name in names))


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad(f"Parse Error: {error}") from error


def _described(request: Request) -> dict[str, Any]:
    """What an upload says of the object, where it says it."""
    match request.query.get("uploadType"):
        case "multipart":
            return _decoded(_parts(request)[0][0])
        case "resumable" if "upload_id" not in request.query:
            return _decoded(request.body)
        case _:
            return {}


def _whole(described: Mapping[str, Any], field: str) -> int | None:
    """A 64-bit number in JSON: a text by the rules, and a number from Google's own client."""
    return None if described.get(field) is None else number(str(described[field]), field)


def _kept(described: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(described[name]) for name in KEPT if described.get(name)}


def _check_described(described: Mapping[str, Any], data: bytes) -> None:
    said = {"md5": described.get("md5Hash"), "crc32c": described.get("crc32c")}
    check_digests({"x-goog-hash": ",".join(f"{name}={value}" for name, value in said.items() if value)}, data)


def _mime(request: Request) -> Any:
    header = f"content-type: {request.headers.get('content-type', '')}\r\n\r\n".encode()
    return BytesParser(policy=HTTP).parsebytes(header + request.body)


def _parts(request: Request) -> tuple[tuple[bytes, str], tuple[bytes, str]]:
    """The two halves of a multipart upload, the description and the bytes, each with its content type."""
    found = re.search(r"boundary=(?:'([^']+)'|\"([^\"]+)\"|([^;\s]+))", request.headers.get("content-type", ""))
    if found is None:
        raise bad("a multipart upload needs a boundary in its Content-Type")
    mark = b"--" + next(group for group in found.groups() if group).encode()
    # Not by the mail parser: it would change line ends inside the bytes.
    pieces = re.split(rb"(?:^|\r?\n)" + re.escape(mark) + rb"(?:--)?[ \t]*(?:\r?\n|$)", request.body)
    if len(pieces) < 3:
        raise bad("a multipart upload needs two parts")
    halves = []
    for piece in pieces[1:3]:
        head, _, data = re.split(rb"(\r?\n\r?\n)", piece, maxsplit=1)
        kind = re.search(rb"(?im)^content-type:[ \t]*([^\r\n]+)", head)
        halves.append((data, kind[1].decode() if kind else ""))
    return halves[0], halves[1]
