-- What SQLite needs beside 0001_first.sql: triggers that refuse what domain/lifecycle.py refuses.

create trigger jobs_start before insert on jobs
when new.version <> 1 or new.state <> 'queued'
begin select raise(abort, 'jobs: a new row starts at version 1 as queued'); end;

create trigger jobs_step before update on jobs
when new.version <> old.version + 1 or (old.state || '>' || new.state) not in (
  'cancelled>cancelled', 'failed>failed', 'provisioning>cancelled', 'provisioning>failed',
  'provisioning>provisioning', 'provisioning>queued', 'provisioning>running', 'queued>cancelled',
  'queued>failed', 'queued>provisioning', 'queued>queued', 'running>cancelled', 'running>failed',
  'running>queued', 'running>running', 'running>succeeded', 'succeeded>succeeded'
)
begin select raise(abort, 'jobs: no such transition, or not the next version'); end;

create trigger attempts_start before insert on attempts
when new.version <> 1 or new.state <> 'assigned'
begin select raise(abort, 'attempts: a new row starts at version 1 as assigned'); end;

create trigger attempts_step before update on attempts
when new.version <> old.version + 1 or (old.state || '>' || new.state) not in (
  'assigned>assigned', 'assigned>closed', 'assigned>launching', 'closed>closed', 'launching>closed',
  'launching>launching', 'launching>running', 'running>closed', 'running>running'
)
begin select raise(abort, 'attempts: no such transition, or not the next version'); end;

create trigger slices_start before insert on slices
when new.version <> 1 or new.state <> 'intended'
begin select raise(abort, 'slices: a new row starts at version 1 as intended'); end;

create trigger slices_step before update on slices
when new.version <> old.version + 1 or (old.state || '>' || new.state) not in (
  'creating>creating', 'creating>deleting', 'creating>failed', 'creating>preempted',
  'creating>ready', 'deleting>deleting', 'deleting>gone', 'draining>deleting', 'draining>draining',
  'draining>failed', 'draining>preempted', 'failed>deleting', 'failed>failed', 'gone>gone',
  'intended>creating', 'intended>deleting', 'intended>failed', 'intended>intended',
  'intended>preempted', 'preempted>deleting', 'preempted>preempted', 'ready>deleting',
  'ready>draining', 'ready>failed', 'ready>preempted', 'ready>ready'
)
begin select raise(abort, 'slices: no such transition, or not the next version'); end;

create trigger jobs_keep before delete on jobs
when old.state not in ('succeeded', 'failed', 'cancelled')
begin select raise(abort, 'jobs: only a finished job may be purged'); end;

create trigger attempts_keep before delete on attempts
when old.state <> 'closed'
begin select raise(abort, 'attempts: a live attempt may not be purged'); end;

create trigger pools_step before update on pools
when new.version <> old.version + 1
begin select raise(abort, 'pools: not the next version'); end;

create trigger queues_step before update on queues
when new.version <> old.version + 1
begin select raise(abort, 'queues: not the next version'); end;

create trigger teams_step before update on teams
when new.version <> old.version + 1
begin select raise(abort, 'teams: not the next version'); end;

create trigger zones_step before update on zones
when new.version <> old.version + 1
begin select raise(abort, 'zones: not the next version'); end;

create trigger control_step before update on control
when new.version <> old.version + 1
begin select raise(abort, 'control: not the next version'); end;

create trigger quotas_step before update on quotas
when new.version not in (old.version, old.version + 1)
begin select raise(abort, 'quotas: not the next version'); end;

create trigger leader_step before update on leader
when new.version not in (old.version, old.version + 1)
begin select raise(abort, 'leader: not the next version'); end;

create trigger leader_epoch before update on leader
when new.epoch < old.epoch
begin select raise(abort, 'leader: an epoch never goes back'); end;

create trigger events_stay before update on events
begin select raise(abort, 'events: the log is append-only'); end;
