-- What the cost ledger reads: attempts by when they closed, and sums by the hour of those whose jobs are forgotten.
-- Attempts of before this migration have no `closed_at` here, and are not in the ledger.

alter table attempts add column closed_at double precision;
create index attempts_closed on attempts (closed_at, id) where closed_at is not null;

create table ledger (
  hour integer not null,            -- since the epoch
  team text not null,
  queue text not null,
  owner text not null,
  zone text not null,
  price double precision not null,  -- dollars per chip and hour; -1: unknown
  useful double precision not null,
  lost double precision not null,
  unknown double precision not null,
  setup double precision not null,
  waited double precision not null,
  attempts integer not null,
  losses integer not null,
  primary key (hour, team, queue, owner, zone, price)
);
