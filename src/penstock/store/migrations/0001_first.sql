-- The first schema, the part both databases take as it is. What differs stands in 0001_first.sqlite.sql and
-- 0001_first.postgres.sql, which run after this file in the same transaction.
-- States are repeated here on purpose: the database defends domain/lifecycle.py against every writer, ours included.

create table jobs (
  id text not null primary key,
  team text not null,
  queue text not null,
  state text not null
    check (state in ('queued', 'provisioning', 'running', 'succeeded', 'failed', 'cancelled')),
  priority integer not null,
  version integer not null check (version >= 1),
  idempotency_key text,
  body_hash text not null,
  waiting integer not null check (waiting in (0, 1)),
  live integer not null check (live in (0, 1)),  -- was placed at least once and has not finished
  created_at double precision not null,
  finished_at double precision,
  spec text not null,     -- what was asked for, without its payload; never rewritten
  payload text not null,  -- apart, because planning never looks at it
  rest text not null,     -- where the job stands
  check (waiting = 0 or (state = 'queued' and live = 0)),
  check (live = 0 or state in ('queued', 'provisioning', 'running'))
);
create unique index jobs_one_per_key on jobs (team, idempotency_key) where idempotency_key is not null;
create index jobs_waiting on jobs (queue, priority desc, id) where waiting = 1;
create index jobs_live on jobs (id) where live = 1;
create index jobs_by_team on jobs (team, state, id);
create index jobs_by_state on jobs (state, id);

create table dependencies (
  job text not null,
  needs text not null,
  primary key (job, needs)
);
create index dependencies_by_need on dependencies (needs, job);

create table attempts (
  id text not null primary key,
  job text not null,
  replica integer not null check (replica >= 0),
  fence integer not null check (fence >= 1),
  state text not null check (state in ('assigned', 'launching', 'running', 'closed')),
  version integer not null check (version >= 1),
  body text not null
);
create unique index attempts_one_live on attempts (job, replica) where state <> 'closed';
create index attempts_live on attempts (id) where state <> 'closed';
create unique index attempts_one_per_fence on attempts (job, fence);

create table slices (
  id text not null primary key,
  state text not null check (
    state in ('intended', 'creating', 'ready', 'draining', 'preempted', 'failed', 'deleting', 'gone')
  ),
  pool text not null,
  team text not null,
  provider text not null,
  race text,
  gone_at double precision,
  version integer not null check (version >= 1),
  body text not null
);
create index slices_live on slices (id) where state <> 'gone';
create index slices_by_race on slices (race, id) where race is not null;
create index slices_gone on slices (gone_at) where state = 'gone';

create table pools (
  name text not null primary key,
  version integer not null check (version >= 1),
  body text not null
);
create table queues (
  name text not null primary key,
  version integer not null check (version >= 1),
  body text not null
);
create table teams (
  name text not null primary key,
  version integer not null check (version >= 1),
  body text not null
);
create table zones (
  id text not null primary key,
  version integer not null check (version >= 1),
  body text not null
);

-- Counters move far oftener than their limits: only a change of the limit is a version.
create table quotas (
  scope text not null,
  name text not null,
  limit_chips integer check (limit_chips >= 0),
  used_chips integer not null,
  version integer not null check (version >= 0),
  primary key (scope, name)
);

create table control (
  id text not null primary key check (id = 'control'),
  version integer not null check (version >= 0),
  body text not null
);
insert into control (id, version, body) values ('control', 0, '{}');

-- A renewal counts `renewed` and is no version: nobody but a standby cares.
create table leader (
  id text not null primary key check (id = 'leader'),
  epoch integer not null check (epoch >= 1),
  holder text not null,
  renewed integer not null,
  version integer not null check (version >= 1)
);

create table events (
  seq integer not null primary key,
  at double precision not null,
  kind text not null,
  entity text not null,
  id text not null,
  version integer not null,
  actor text not null,
  epoch integer not null,
  fence integer not null,
  body text
);
create index events_of_entity on events (entity, id, seq);
