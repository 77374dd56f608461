-- What PostgreSQL needs beside 0001_first.sql: ids in byte order whatever the database's locale, wide counters,
-- and triggers that refuse what domain/lifecycle.py refuses.

alter table jobs alter column id type text collate "C";
alter table dependencies alter column job type text collate "C";
alter table dependencies alter column needs type text collate "C";
alter table attempts alter column id type text collate "C";
alter table slices alter column id type text collate "C";
alter table pools alter column name type text collate "C";
alter table queues alter column name type text collate "C";
alter table teams alter column name type text collate "C";
alter table zones alter column id type text collate "C";
alter table quotas alter column scope type text collate "C";
alter table quotas alter column name type text collate "C";
alter table quotas alter column limit_chips type bigint;
alter table quotas alter column used_chips type bigint;
alter table leader alter column renewed type bigint;
alter table events alter column seq type bigint;

create function penstock_refuse() returns trigger language plpgsql as $$
begin
  raise exception using errcode = 'check_violation', message = tg_argv[0];
end $$;

create trigger jobs_start before insert on jobs for each row
when (new.version <> 1 or new.state <> 'queued')
execute function penstock_refuse('jobs: a new row starts at version 1 as queued');

create trigger jobs_step before update on jobs for each row
when (new.version <> old.version + 1 or (old.state || '>' || new.state) not in (
  'cancelled>cancelled', 'failed>failed', 'provisioning>cancelled', 'provisioning>failed',
  'provisioning>provisioning', 'provisioning>queued', 'provisioning>running', 'queued>cancelled',
  'queued>failed', 'queued>provisioning', 'queued>queued', 'running>cancelled', 'running>failed',
  'running>queued', 'running>running', 'running>succeeded', 'succeeded>succeeded'
))
execute function penstock_refuse('jobs: no such transition, or not the next version');

create trigger attempts_start before insert on attempts for each row
when (new.version <> 1 or new.state <> 'assigned')
execute function penstock_refuse('attempts: a new row starts at version 1 as assigned');

create trigger attempts_step before update on attempts for each row
when (new.version <> old.version + 1 or (old.state || '>' || new.state) not in (
  'assigned>assigned', 'assigned>closed', 'assigned>launching', 'closed>closed', 'launching>closed',
  'launching>launching', 'launching>running', 'running>closed', 'running>running'
))
execute function penstock_refuse('attempts: no such transition, or not the next version');

create trigger slices_start before insert on slices for each row
when (new.version <> 1 or new.state <> 'intended')
execute function penstock_refuse('slices: a new row starts at version 1 as intended');

create trigger slices_step before update on slices for each row
when (new.version <> old.version + 1 or (old.state || '>' || new.state) not in (
  'creating>creating', 'creating>deleting', 'creating>failed', 'creating>preempted',
  'creating>ready', 'deleting>deleting', 'deleting>gone', 'draining>deleting', 'draining>draining',
  'draining>failed', 'draining>preempted', 'failed>deleting', 'failed>failed', 'gone>gone',
  'intended>creating', 'intended>deleting', 'intended>failed', 'intended>intended',
  'intended>preempted', 'preempted>deleting', 'preempted>preempted', 'ready>deleting',
  'ready>draining', 'ready>failed', 'ready>preempted', 'ready>ready'
))
execute function penstock_refuse('slices: no such transition, or not the next version');

create trigger jobs_keep before delete on jobs for each row
when (old.state not in ('succeeded', 'failed', 'cancelled'))
execute function penstock_refuse('jobs: only a finished job may be purged');

create trigger attempts_keep before delete on attempts for each row
when (old.state <> 'closed')
execute function penstock_refuse('attempts: a live attempt may not be purged');

create trigger pools_step before update on pools for each row
when (new.version <> old.version + 1)
execute function penstock_refuse('pools: not the next version');

create trigger queues_step before update on queues for each row
when (new.version <> old.version + 1)
execute function penstock_refuse('queues: not the next version');

create trigger teams_step before update on teams for each row
when (new.version <> old.version + 1)
execute function penstock_refuse('teams: not the next version');

create trigger zones_step before update on zones for each row
when (new.version <> old.version + 1)
execute function penstock_refuse('zones: not the next version');

create trigger control_step before update on control for each row
when (new.version <> old.version + 1)
execute function penstock_refuse('control: not the next version');

create trigger quotas_step before update on quotas for each row
when (new.version not in (old.version, old.version + 1))
execute function penstock_refuse('quotas: not the next version');

create trigger leader_step before update on leader for each row
when (new.version not in (old.version, old.version + 1))
execute function penstock_refuse('leader: not the next version');

create trigger leader_epoch before update on leader for each row
when (new.epoch < old.epoch)
execute function penstock_refuse('leader: an epoch never goes back');

create trigger events_stay before update on events for each row
execute function penstock_refuse('events: the log is append-only');
