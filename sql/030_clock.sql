/*
 * The one clock. A verb reads it once, after the last lock that it waits for. Tests replace this function; no setting
 * moves it.
 */
create or replace function baton._now()
returns timestamptz
language sql
volatile
begin atomic
  select clock_timestamp();
end;
