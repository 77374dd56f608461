"""Cloud Storage's XML dialect: what obstore speaks, and google-cloud-storage for uploads in parts.

`gcs` calls it with every request that is not of the JSON dialect. Conditions come in `x-goog-if-…` headers, an object's
generation goes out in `x-goog-generation`. It decides how a call reads and what its answer looks like only.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final
from urllib.parse import unquote
from xml.sax.saxutils import escape

from penstock.emulator.crc32c import crc32c
from penstock.emulator.gcs_buckets import ALWAYS, KEPT, PAGE_MAX, Asked, Buckets, Conditions, Object
from penstock.emulator.gcs_media import check_digests, headers_of, media
from penstock.emulator.gcs_uploads import Uploads, Wanted
from penstock.emulator.http_words import Answer, Refused, Request, bad, name_of, number, token_of

_LIST_SPACE: Final = "http://doc.s3.amazonaws.com/2006-03-01"
#: google-cloud-storage looks for its upload's id in this one.
_UPLOAD_SPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
_META: Final = "x-goog-meta-"
#: XML 1.0 cannot hold these, not even escaped.
_UNWRITABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


class XmlDialect:
    """Answers requests of the XML dialect."""

    def __init__(self, buckets: Buckets, uploads: Uploads) -> None:
        self._buckets = buckets
        self._uploads = uploads

    def answer(self, request: Request) -> Answer:
        bucket, name = _place(request)
        if not bucket:
            raise Refused(404, "NotFound", "notFound", "name a bucket in the path")
        if not name:
            return self._bucket(request, bucket)
        if "uploads" in request.query or "uploadId" in request.query:
            return self._in_parts(request, bucket, name)
        conditions = conditions_of(request.headers)
        match request.method:
            case "PUT" if "x-goog-copy-source" in request.headers:
                return self._copy(request, bucket, name, conditions)
            case "PUT":
                check_digests(request.headers, request.body)
                self._check_tags(request, bucket, name)
                made = self._buckets.put(
                    bucket,
                    name,
                    request.body,
                    conditions,
                    content_type=request.headers.get("content-type", ""),
                    metadata=_metadata(request),
                    kept=_kept(request),
                )
                return Answer(200, b"", _of_a_write(made))
            case "GET" | "HEAD":
                found = self._buckets.get(bucket, name, number(request.query.get("generation"), "generation"))
                self._buckets.check(bucket, name, conditions, reading=True)
                self._check_tags(request, bucket, name)
                return media(request, found, self._buckets.read(bucket, name))
            case "DELETE":
                self._buckets.delete(bucket, name, conditions)
                return Answer(204)
            case _:
                raise Refused(405, "MethodNotAllowed", "methodNotAllowed", f"{request.method} is not allowed here")

    def subject(self, request: Request) -> str:
        """`bucket/name` that a request is about; faults are aimed by it."""
        bucket, name = _place(request)
        return f"{bucket}/{name or request.query.get('prefix', '')}"

    def _bucket(self, request: Request, bucket: str) -> Answer:
        match request.method:
            case "PUT":
                self._buckets.create(bucket)
                return Answer(200)
            case "DELETE":
                self._buckets.drop(bucket)
                return Answer(204)
            case "HEAD":
                self._buckets.created(bucket)
                return Answer(200)
            case "GET":
                return self._list(request, bucket)
            case _:
                raise Refused(405, "MethodNotAllowed", "methodNotAllowed", f"{request.method} is not allowed here")

    def _list(self, request: Request, bucket: str) -> Answer:
        query = request.query
        if query.get("list-type") != "2":
            raise bad("list-type: only the second version of listings is emulated")
        most = number(query.get("max-keys"), "max-keys")
        asked = Asked(
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            after=name_of(query.get("continuation-token", "")) or query.get("start-after", ""),
            most=PAGE_MAX if most is None else min(most, PAGE_MAX),
        )
        page = self._buckets.page(bucket, asked)
        lines = [
            f"<Name>{_text(bucket)}</Name><Prefix>{_text(asked.prefix)}</Prefix>",
            f"<KeyCount>{len(page.objects) + len(page.prefixes)}</KeyCount><MaxKeys>{asked.most}</MaxKeys>",
            f"<IsTruncated>{'true' if page.next is not None else 'false'}</IsTruncated>",
        ]
        if page.next is not None:
            lines.append(f"<NextContinuationToken>{token_of(page.next)}</NextContinuationToken>")
        lines += [
            f"<Contents><Key>{_text(each.name)}</Key><Generation>{each.generation}</Generation>"
            f"<MetaGeneration>{each.metageneration}</MetaGeneration><LastModified>{_stamp(each.updated)}</LastModified>"
            f"<ETag>{_text(each.etag)}</ETag><Size>{each.size}</Size></Contents>"
            for each in page.objects
        ]
        lines += [f"<CommonPrefixes><Prefix>{_text(each)}</Prefix></CommonPrefixes>" for each in page.prefixes]
        return _xml("ListBucketResult", "".join(lines), space=_LIST_SPACE)

    def _copy(self, request: Request, bucket: str, name: str, conditions: Conditions) -> Answer:
        place = unquote(request.headers["x-goog-copy-source"]).removeprefix("/")
        from_bucket, _, from_name = place.partition("/")
        generation = number(request.headers.get("x-goog-copy-source-generation"), "x-goog-copy-source-generation")
        source = self._buckets.get(from_bucket, from_name, generation)
        self._buckets.check(from_bucket, from_name, conditions_of(request.headers, "x-goog-copy-source-if-"))
        made = self._buckets.put(
            bucket,
            name,
            self._buckets.read(from_bucket, from_name),
            conditions,
            content_type=source.content_type,
            metadata=source.metadata,
            kept=source.kept,
            components=source.components,
        )
        inner = f"<ETag>{_text(made.etag)}</ETag><LastModified>{_stamp(made.updated)}</LastModified>"
        return _xml("CopyObjectResult", inner, headers=_of_a_write(made))

    def _in_parts(self, request: Request, bucket: str, name: str) -> Answer:
        upload = request.query.get("uploadId", "")
        named = f"<Bucket>{_text(bucket)}</Bucket><Key>{_text(name)}</Key>"
        match request.method:
            case "POST" if "uploads" in request.query:
                content_type = request.headers.get("content-type", "")
                wanted = Wanted(bucket, name, ALWAYS, content_type, _metadata(request), _kept(request))
                begun = f"<UploadId>{self._uploads.begin_in_parts(wanted)}</UploadId>"
                return _xml("InitiateMultipartUploadResult", named + begun, space=_UPLOAD_SPACE)
            case "PUT":
                check_digests(request.headers, request.body)
                part = number(request.query.get("partNumber"), "partNumber") or 0
                self._uploads.take_part(upload, part, request.body)
                sum_of_it = crc32c(request.body)
                return Answer(200, b"", {"etag": f'"{sum_of_it:08x}-{part}"', "x-goog-hash": _crc_header(sum_of_it)})
            case "POST":
                numbers = [int(found) for found in re.findall(rb"<PartNumber>\s*(\d+)\s*</PartNumber>", request.body)]
                made = self._uploads.complete(upload, numbers, conditions_of(request.headers))
                tag = f"<ETag>{_text(made.etag)}</ETag>"
                headers = _of_a_write(made)
                return _xml("CompleteMultipartUploadResult", named + tag, space=_UPLOAD_SPACE, headers=headers)
            case "DELETE":
                self._uploads.abandon_parts(upload)
                return Answer(204)
            case _:
                raise Refused(405, "MethodNotAllowed", "methodNotAllowed", f"{request.method} is not allowed here")

    def _check_tags(self, request: Request, bucket: str, name: str) -> None:
        """`If-Match` and `If-None-Match`, for reads; a write by tag is refused, as the service has only generations."""
        match, none_match = request.headers.get("if-match"), request.headers.get("if-none-match")
        if match is None and none_match is None:
            return
        if request.method == "PUT":
            raise Refused(501, "NotImplemented", "notImplemented", "writes are conditional by generation only")
        tag = self._buckets.get(bucket, name).etag
        if match not in (None, "*", tag):
            raise Refused(412, "PreconditionFailed", "conditionNotMet", "the object has another ETag")
        if none_match in ("*", tag):
            raise Refused(304, "NotModified", "notModified", "the object has this ETag")


def refusal(error: Refused) -> Answer:
    if error.status == 304:
        return Answer(304)
    inner = f"<Code>{error.code}</Code><Message>{_text(str(error))}</Message>"
    return _xml("Error", inner, status=error.status, headers=error.headers)


def conditions_of(headers: Mapping[str, str], prefix: str = "x-goog-if-") -> Conditions:
    names = ("generation-match", "generation-not-match", "metageneration-match", "metageneration-not-match")
    return Conditions(*(number(headers.get(prefix + name), prefix + name) for name in names))


def _place(request: Request) -> tuple[str, str]:
    bucket, _, name = request.path.removeprefix("/").partition("/")
    return unquote(bucket), unquote(name)


def _metadata(request: Request) -> dict[str, str]:
    return {name.removeprefix(_META): value for name, value in request.headers.items() if name.startswith(_META)}


def _kept(request: Request) -> dict[str, str]:
    return {name: request.headers[header] for name, header in KEPT.items() if header in request.headers}


def _of_a_write(made: Object) -> dict[str, str]:
    headers = headers_of(made)
    about_bytes = {"content-type", "accept-ranges", *KEPT.values()}  # a write is answered with none of them
    return {name: value for name, value in headers.items() if name not in about_bytes}


def _crc_header(value: int) -> str:
    return f"crc32c={b64encode(value.to_bytes(4)).decode()}"


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: str) -> str:
    return escape(_UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", value))


def _xml(
    tag: str, inner: str, *, space: str = "", status: int = 200, headers: Mapping[str, str] | None = None
) -> Answer:
    opened = f"{tag} xmlns='{space}'" if space else tag
    body = f"<?xml version='1.0' encoding='UTF-8'?><{opened}>{inner}</{tag}>"
    return Answer(status, body.encode(), {**(headers or {}), "content-type": "application/xml; charset=UTF-8"})
