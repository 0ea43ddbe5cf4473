/*
 * For the demo, in a database of its own: a begin_replay that always grants, and a fence that never refuses. Each of
 * the three functions answers as if there were no other replay; everything else is the package's. Not part of it.
 */
create or replace function baton._is_held(run baton.runs, at timestamptz)
returns boolean
language sql
immutable
begin atomic
  select false;
end;

create or replace function baton._lose_replay(run baton.runs, by_message_id bigint, at timestamptz)
returns boolean
language sql
immutable
begin atomic
  select false;
end;

create or replace function baton._check_fence(run baton.runs, replay_epoch bigint)
returns void
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $$
begin
end;
$$;
