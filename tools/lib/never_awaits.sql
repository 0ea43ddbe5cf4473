/*
 * What the ownership of tasks prevents, to be seen in tests and in the demo: a start that never waits for the one who
 * runs the task already, with inline ownership switched off.
 */
create or replace function baton._start_decision(
  is_open boolean, status text, retry_at timestamptz, owner text, at timestamptz
)
returns text
language sql
immutable
begin atomic
  select
    case
      when not coalesce(_start_decision.is_open and _start_decision.status in ('created', 'started'), false) then 'skip'
      when _start_decision.status = 'created' then 'execute'
      when _start_decision.owner = 'receipt' then 'again'
      else 'recover'
    end;
end;
update baton.settings set inline_ownership = false;
