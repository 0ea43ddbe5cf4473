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

-- For views: one time a statement, which the planner knows beforehand. It can tell then how few rows are due.
create or replace function baton._statement_time()
returns timestamptz
language sql
stable
begin atomic
  select baton._now();
end;
