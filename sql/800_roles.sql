/*
 * Who may what. The package makes no roles and grants nothing to PUBLIC: grant_usage gives a role the verbs and views
 * of a kind. Views run the rules of 210, 220, 330 and 405 with their reader's rights: observers get those functions
 * too.
 */
create or replace function baton._grants()
returns table (kind text, object_type text, object_name text)
language sql
immutable
begin atomic
  select g.kind, g.object_type, o.object_name
  from (
    values
    (
      'client', 'function',
      array[
        'version', 'send', 'send_many', 'start_run', 'get_run', 'signal_run', 'wake_run', 'cancel_run', 'read_events'
      ]
    ),
    (
      'worker', 'function',
      array[
        'version', 'send', 'send_many', 'start_run', 'get_run', 'signal_run', 'wake_run', 'cancel_run', 'read_events',
        'begin_replay', 'end_replay', 'append_event', 'complete_run', 'fail_run', 'recover_runs',
        'create_step', 'dispatch_tasks', 'start_task', 'start_tasks', 'complete_task', 'complete_tasks', 'fail_task',
        'skip_step', 'advance_run', 'terminal_tasks', 'reserve_worker_invocation', 'reconcile_worker_invocation',
        'accept_worker_invocation', 'dismiss_worker_invocation', 'register_worker', 'heartbeat', 'stop_worker',
        'claim', 'ack', 'ack_many', 'park', 'fail', 'extend', 'extend_many'
      ]
    ),
    ('sender', 'function', array['version', 'claim_deliveries', 'ack', 'park', 'fail', 'extend']),
    (
      'observer', 'function',
      array[
        'version', 'health', 'metrics', '_now', '_statement_time', '_is_pending', '_is_overdue', '_next_attempt_at',
        '_startup_state', '_goes_on', '_is_healthy', '_connection_lives', '_session_lock_class', '_lease_remaining',
        '_dispatch_decision', '_task_key'
      ]
    ),
    (
      'observer', 'view',
      array[
        'worker_startup', 'worker_overview', 'queue_stats', 'message_overview', 'dead_letters', 'incident_log',
        'run_overview', 'replays', 'wedged_runs', 'task_ownership', 'step_outputs'
      ]
    ),
    (
      'admin', 'function',
      array[
        'register_worker_function', 'unregister_worker_function', 'enable_worker_function', 'disable_worker_function',
        'deprecate_workers', 'ensure_workers', 'pause_queue', 'resume_queue', 'redrive', 'discard', 'remove_messages',
        'tick', 'schedule', 'unschedule', 'release_replay', 'cancel_run', 'recover_runs', 'release_task', 'skip_step',
        'prune', 'after_restore'
      ]
    )
  ) as g (kind, object_type, object_names)
  cross join lateral unnest(g.object_names) as o (object_name);
end;

create or replace function baton.grant_usage(role_name text, kind text, out outcome text)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_object record;
begin
  perform baton._check_choice('kind', grant_usage.kind, 'client', 'worker', 'sender', 'observer', 'admin');
  if not exists (select from pg_roles as r where r.rolname = grant_usage.role_name) then
    perform baton._raise('unknown_role', quote_nullable(left(grant_usage.role_name, 60)));
  end if;
  execute format('grant usage on schema baton to %I', grant_usage.role_name);
  for v_object in
    select g.object_type, g.object_name
    from baton._grants() as g
    where g.kind = grant_usage.kind or (grant_usage.kind = 'admin' and g.kind = 'observer')
  loop
    case v_object.object_type
      when 'function' then
        execute format('grant execute on function baton.%I to %I', v_object.object_name, grant_usage.role_name);
      when 'view' then
        execute format('grant select on baton.%I to %I', v_object.object_name, grant_usage.role_name);
    end case;
  end loop;
  outcome := 'granted';
end;
$$;

comment on function baton.grant_usage(text, text) is
'Give a role the verbs and views of a kind. Called by the owner of the package; several kinds add up. REVOKE, or DROP OWNED BY, takes them away.
Arguments: kind: client (sends), worker (starts, claims and what follows), sender (delivers start requests), observer (views, health and metrics), admin (an observer''s, and the operator''s verbs).
Outcomes: granted
Raises: 22023, 42704
Locks: none of the package''s';
