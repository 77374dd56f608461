-- Arrays of which only so many jobs may be under way at once. Both columns repeat what `spec` and `rest` say:
-- the array of a member that takes one of its places, and that of a member that waits for one.

alter table jobs add column place_in text;
alter table jobs add column held_by text;
create index jobs_in_places on jobs (place_in) where place_in is not null;
create index jobs_held on jobs (held_by, priority desc, id) where held_by is not null;
