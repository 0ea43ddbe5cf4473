/*
 * For the demo, in a database of its own: a reservation that knows only the debounce, as there was before the
 * handshake. The one line that asks whether a start is pending is missing. Not part of the package.
 */
create or replace function baton._startup_state(function baton.worker_functions, is_ready boolean, at timestamptz)
returns text
language sql
immutable
begin atomic
  select
    case
      when not (_startup_state.function).enabled then 'disabled'
      when (_startup_state.function).start_mode = 'process' then 'process'
      when _startup_state.is_ready then 'ready'
      when _startup_state.at < baton._next_attempt_at(_startup_state.function, _startup_state.at) then 'throttled'
      else 'retryable'
    end;
end;
