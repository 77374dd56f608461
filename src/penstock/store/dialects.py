"""Where the two databases need different words for the same thing: named pairs, and nothing else.

`reading.py` and `writing.py` use the pair of the link they work on; everything not named here is one text for
both. Placeholders are `$1`, `$2`, … in the order of their first use: SQLite numbers them by that, PostgreSQL
by the digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One database's side of each pair."""

    name: str
    jobs_by_ids: str
    #: Ids and how their payloads begin: the kind comes first, whatever follows.
    payloads_by_ids: str
    #: Ids, and the snapshot that each payload names, or null.
    snapshots: str
    attempts_by_ids: str
    slices_by_ids: str
    heads: str
    #: One statement answers the heads of all queues; otherwise it is asked once per queue.
    heads_at_once: bool
    #: Answers one row per trouble the database finds in its own files, or "ok".
    integrity: str

    def pack(self, ids: Sequence[str]) -> object:
        """A list as one argument."""
        return list(ids) if self.heads_at_once else msgspec.json.encode(list(ids)).decode()


SQLITE: Final = Dialect(
    name="sqlite",
    jobs_by_ids="select spec, rest from jobs where id in (select value from json_each($1)) order by id",
    payloads_by_ids="select id, substr(payload, 1, 40) from jobs where id in (select value from json_each($1))",
    snapshots="""select id, case when payload like '{"type":"command"%' then json_extract(payload, '$.snapshot') end
        from jobs where id > $1 order by id limit $2""",
    attempts_by_ids="select body from attempts where id in (select value from json_each($1)) order by id",
    slices_by_ids="select body from slices where id in (select value from json_each($1)) order by id",
    # 50 small statements take half a millisecond; a window function over the same index takes a thousand
    # times that.
    heads="""select spec, rest from jobs where queue = $1 and waiting = 1
        order by priority desc, id limit $2""",
    heads_at_once=False,
    integrity="pragma integrity_check",
)

POSTGRES: Final = Dialect(
    name="postgres",
    jobs_by_ids="select spec, rest from jobs where id = any($1::text[]) order by id",
    payloads_by_ids="select id, substr(payload, 1, 40) from jobs where id = any($1::text[])",
    snapshots="""select id, case when payload like '{"type":"command"%' then payload::json ->> 'snapshot' end
        from jobs where id > $1 order by id limit $2""",
    attempts_by_ids="select body from attempts where id = any($1::text[]) order by id",
    slices_by_ids="select body from slices where id = any($1::text[]) order by id",
    heads="""select asked.name, head.spec, head.rest
        from unnest($1::text[]) with ordinality as asked (name, place)
        cross join lateral (
          select spec, rest, priority, id from jobs where queue = asked.name and waiting = 1
          order by priority desc, id limit $2
        ) as head
        order by asked.place, head.priority desc, head.id""",
    heads_at_once=True,
    integrity="""select 'index ' || indexrelid::regclass::text || ' is not valid' from pg_index
        where not indisvalid""",
)
