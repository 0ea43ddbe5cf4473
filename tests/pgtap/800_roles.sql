\ir _begin.sql
\ir _starts.sql
select plan(118);

grant usage on schema tap to public;
create function baton_test.verbs(role_name text)
returns text
language sql
stable
begin atomic
  select string_agg(p.proname::text collate "C", ' ' order by p.proname::text collate "C")
  from pg_proc as p
  where p.pronamespace = 'baton'::regnamespace and p.proname !~ '^_'
    and has_function_privilege(verbs.role_name, p.oid, 'execute');
end;
create function baton_test.internals(role_name text)
returns text
language sql
stable
begin atomic
  select string_agg(p.proname::text collate "C", ' ' order by p.proname::text collate "C")
  from pg_proc as p
  where p.pronamespace = 'baton'::regnamespace and p.proname ~ '^_'
    and has_function_privilege(internals.role_name, p.oid, 'execute');
end;
create function baton_test.relations(role_name text)
returns text
language sql
stable
begin atomic
  select string_agg(c.relname::text collate "C", ' ' order by c.relname::text collate "C")
  from pg_class as c
  where c.relnamespace = 'baton'::regnamespace
    and case
      when c.relkind = 'S' then has_sequence_privilege(relations.role_name, c.oid, 'usage, select, update')
      when c.relkind in ('r', 'v') then
        has_any_column_privilege(relations.role_name, c.oid, 'select, insert, update, references')
        or has_table_privilege(relations.role_name, c.oid, 'delete, truncate, trigger')
      else false
    end;
end;
-- What a statement raises when a role runs it.
create function baton_test.raised_by(role_name text, statement text)
returns text
language plpgsql
as $$
declare
  v_raised text;
begin
  execute format('set local role %I', raised_by.role_name);
  v_raised := baton_test.raised(raised_by.statement);
  reset role;
  return v_raised;
end;
$$;
-- Calls every function of the package and reads every table, as a role; what did not end in 42501.
create function baton_test.allowed(role_name text)
returns setof text
language plpgsql
as $$
declare
  v_object record;
begin
  for v_object in
    select p.oid::regprocedure::text as name,
      format('%s baton.%I(%s)', case p.prokind when 'p' then 'call' else 'select' end, p.proname, (
        select string_agg(
          case when p.provariadic <> 0 and a.nth = p.pronargs then 'variadic ' else '' end
          || 'null::' || format_type(a.type, null), ', ' order by a.nth
        )
        from unnest(p.proargtypes) with ordinality as a (type, nth)
      )) as statement
    from pg_proc as p
    where p.pronamespace = 'baton'::regnamespace and p.prorettype <> 'trigger'::regtype
    union all
    select c.relname::text, format('select from baton.%I', c.relname)
    from pg_class as c
    where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'v', 'S')
    union all
    select c.relname || ' (delete)', format('delete from baton.%I', c.relname)
    from pg_class as c
    where c.relnamespace = 'baton'::regnamespace and c.relkind = 'r'
  loop
    if baton_test.raised_by(allowed.role_name, v_object.statement) <> '42501' then
      return next v_object.name;
    end if;
  end loop;
end;
$$;

create role baton_test_nobody;
create role baton_test_client;
create role baton_test_worker;
create role baton_test_sender;
create role baton_test_observer;
create role baton_test_admin;
select is(
  (select g.outcome from baton.grant_usage('baton_test_' || k.kind, k.kind) as g), 'granted', 'grant_usage: ' || k.kind
)
from unnest(array['client', 'worker', 'sender', 'observer', 'admin']) as k (kind);

-- Nobody
select isnt_empty(
  $$select p.oid from pg_proc as p where p.pronamespace = 'baton'::regnamespace$$, 'roles: (there is something to call)'
);
select is_empty($$select a.* from baton_test.allowed('baton_test_nobody') as a$$, 'roles: without a grant everything is 42501');
grant usage on schema baton to baton_test_nobody;
select is_empty(
  $$select a.* from baton_test.allowed('baton_test_nobody') as a$$, 'roles: with USAGE on the schema alone too'
);

-- What each kind may: no more, no less
select is(baton_test.verbs('baton_test_' || k.kind), k.verbs, 'roles: the verbs of a ' || k.kind)
from (
  values
  ('client', 'cancel_run get_run read_events send send_many signal_run start_run version wake_run'),
  (
    'worker', 'accept_worker_invocation ack ack_many advance_run append_event begin_replay cancel_run claim complete_run '
    'complete_task complete_tasks create_step dismiss_worker_invocation dispatch_tasks end_replay extend extend_many '
    'fail fail_run fail_task get_run heartbeat park read_events reconcile_worker_invocation recover_runs '
    'register_worker reserve_worker_invocation send send_many signal_run skip_step start_run start_task start_tasks stop_worker '
    'terminal_tasks version wake_run'
  ),
  ('sender', 'ack claim_deliveries extend fail park version'),
  ('observer', 'health metrics version'),
  (
    'admin', 'after_restore cancel_run deprecate_workers disable_worker_function discard enable_worker_function ensure_workers '
    'health metrics pause_queue prune recover_runs redrive register_worker_function release_replay release_task '
    'remove_messages resume_queue schedule skip_step tick unregister_worker_function unschedule version'
  )
) as k (kind, verbs);
select is(
  baton_test.relations('baton_test_' || k.kind),
  case
    when k.kind in ('observer', 'admin')
      then
        'dead_letters incident_log message_overview queue_stats replays run_overview step_outputs task_ownership '
        'wedged_runs worker_overview worker_startup'
  end,
  'roles: no table and no sequence, and what views there are, for a ' || k.kind
)
from unnest(array['client', 'worker', 'sender', 'observer', 'admin']) as k (kind);
select is(
  baton_test.internals('baton_test_' || k.kind),
  case
    when k.kind in ('observer', 'admin')
      then
        '_connection_lives _dispatch_decision _goes_on _is_healthy _is_overdue _is_pending _lease_remaining _next_attempt_at '
        '_now _session_lock_class _startup_state _statement_time _task_key'
  end,
  'roles: of the internal functions only those that views ask, none of which writes, for a ' || k.kind
)
from unnest(array['client', 'worker', 'sender', 'observer', 'admin']) as k (kind);
select is(
  baton_test.raised_by('baton_test_' || k.kind, s.statement), '42501', 'roles: a ' || k.kind || ' may not: ' || s.statement
)
from unnest(array['client', 'worker', 'sender', 'observer', 'admin']) as k (kind)
cross join unnest(array[
  'select from baton.secrets', 'update baton.settings set transport = ''outbox''', 'select baton.grant_usage(''x'', ''admin'')'
]) as s (statement);

-- They work
update baton.settings set base_url = 'http://w.test';
set local role baton_test_admin;
select tap.is(
  (select r.outcome from baton.register_worker_function('orders') as r), 'registered', 'roles: an admin registers a function'
);
select tap.is((select e.outcome from baton.ensure_workers() as e), 'reserved', 'roles: and starts it');
reset role;
set local role baton_test_sender;
select tap.is(
  (select a.outcome from baton.claim_deliveries() as c cross join lateral baton.ack(c.message_id, c.delivery) as a), 'acked',
  'roles: a sender delivers'
);
reset role;
select baton_test.invocation('orders') as orders \gset
set local role baton_test_worker;
select tap.is(
  (select r.outcome from baton.reconcile_worker_invocation('orders', :'orders') as r), 'start', 'roles: a worker reconciles'
);
select tap.is(
  (select a.outcome from baton.accept_worker_invocation('orders', :'orders', '00000000-0000-0000-0000-000000000001') as a),
  'accepted', 'roles: and is accepted'
);
reset role;
set local role baton_test_client;
select tap.is((select s.outcome from baton.send('orders', '{}') as s), 'sent', 'roles: a client sends');
reset role;
set local role baton_test_worker;
select tap.is(
  (select a.outcome from baton.claim('orders', '00000000-0000-0000-0000-000000000001') as c
    cross join lateral baton.ack(c.message_id, c.delivery) as a), 'acked', 'roles: a worker claims and acks'
);
reset role;
set local role baton_test_client;
select tap.is((select s.outcome from baton.start_run('w', '{}', 'r', 'runs') as s), 'created', 'roles: a client starts a run');
select tap.is((select s.outcome from baton.signal_run('r', 'go') as s), 'signalled', 'roles: signals it');
select tap.is((select w.outcome from baton.wake_run('r') as w), 'woken', 'roles: wakes it');
reset role;
set local role baton_test_worker;
select b.replay_epoch as epoch
from baton.claim('runs', '00000000-0000-0000-0000-000000000001') as c
cross join lateral baton.begin_replay(c.message_id, c.delivery, 'session') as b \gset
select tap.is((select a.outcome from baton.append_event('r', :epoch, 'orders.checked') as a), 'appended', 'roles: a worker replays it');
reset role;
set local role baton_test_observer;
select tap.is(
  (select concat_ws(' ', r.message_id is not null, r.hold, r.alive) from baton.replays as r), 't session t', 'roles: an observer reads replays'
);
select tap.is((select r.status from baton.run_overview as r), 'running', 'roles: and run_overview');
select tap.is((select count(*)::integer from baton.wedged_runs), 0, 'roles: and wedged_runs');
reset role;
set local role baton_test_admin;
select tap.is((select r.outcome from baton.release_replay('r') as r), 'released', 'roles: an admin takes a replay away');
reset role;
set local role baton_test_worker;
select b.replay_epoch as epoch
from baton.claim('runs') as c
cross join lateral baton.begin_replay(c.message_id, c.delivery) as b \gset
select tap.is((select c.outcome from baton.create_step('r', :epoch, 's', '[1, 2, 3]') as c), 'created', 'roles: a worker creates a step');
select tap.is(
  (select string_agg(d.outcome, ' ' order by d.task_index) from baton.dispatch_tasks('r', :epoch) as d),
  'execute enqueue enqueue', 'roles: and dispatches its tasks'
);
reset role;
set local role baton_test_observer;
select tap.is(
  (select concat_ws(' ', o.owner_kind, o.alive, o.lease_remaining, o.decision) from baton.task_ownership as o),
  'run t 00:14:20 backstop', 'roles: an observer reads task_ownership'
);
reset role;
set local role baton_test_worker;
select tap.is((select e.outcome from baton.end_replay('r', :epoch, 5) as e), 'ended', 'roles: a worker ends a replay');
select c.message_id as m, c.delivery as d from baton.claim('runs', max_messages => 9) as c where c.task_index = 1 \gset
select tap.is(
  (select concat_ws(' ', s.outcome, s.task_index, s.input) from baton.start_task(:m, :d) as s), 'execute 1 2', 'roles: starts a task'
);
select tap.is(
  (select f.outcome from baton.fail_task('r', 's', 1, 1, '"no"', :m, :d) as f), 'retrying', 'roles: says that it failed'
);
select tap.is(
  (select c.outcome from baton.complete_task('r', 's', 0, 1, '"out"', null, null) as c), 'completed', 'roles: completes one'
);
select tap.is((select count(*)::integer from baton.complete_tasks('r', '[]')), 0, 'roles: or several');
select tap.is((select count(*)::integer from baton.start_tasks('[]')), 0, 'roles: or starts several');
reset role;
set local role baton_test_observer;
select tap.is((select o.outputs from baton.step_outputs as o), '["out"]', 'roles: an observer reads step_outputs');
reset role;
set local role baton_test_admin;
select tap.is((select r.outcome from baton.release_task('r', 's', 1) as r), 'released', 'roles: an admin releases a task');
select tap.is((select s.outcome from baton.skip_step('r', 's') as s), 'done', 'roles: and skips a step');
reset role;
set local role baton_test_worker;
select tap.is((select count(*)::integer from baton.recover_runs()), 0, 'roles: and recovers runs');
reset role;
set local role baton_test_client;
select tap.is(
  (select string_agg(e.type, ' ' order by e.seq) from baton.read_events('r') as e),
  'run_created signal_received orders.checked step_created task_started task_started task_retrying task_completed '
  'task_released step_skipped',
  'roles: a client reads the log'
);
select tap.is((select c.outcome from baton.cancel_run('r', 'no') as c), 'done', 'roles: cancels a run');
select tap.is((select g.status from baton.get_run('r') as g), 'cancelled', 'roles: and asks how it stands');
reset role;
set local role baton_test_observer;
select tap.is(
  (select concat_ws(' ', s.startup_state, s.healthy_workers) from baton.worker_startup as s), 'ready 1', 'roles: an observer reads worker_startup'
);
select tap.is((select string_agg(concat_ws(' ', q.queue_name, q.ready, q.delayed, q.in_flight), ', ') from baton.queue_stats as q), 'runs 0 0 3', 'roles: and queue_stats');
select tap.is((select count(*)::integer from baton.dead_letters), 0, 'roles: and dead_letters');
select tap.is((select string_agg(i.kind, ' ') from baton.incident_log as i), 'operator operator operator', 'roles: and incident_log');
select tap.is((select h.severity from baton.health() as h where h.finding = 'tick'), 'critical', 'roles: and health');
select tap.matches(baton.metrics(), 'baton_incidents_total\{kind="operator"\} 3\n', 'roles: and metrics');
reset role;
set local role baton_test_admin;
select tap.is((select count(*)::integer from baton.tick() as t where t.error is not null), 0, 'roles: an admin ticks');
reset role;

-- Who may grant, and to whom
select is(
  baton_test.raised('select baton.grant_usage(''baton_test_nobody'', ''owner'')'), '22023 invalid_choice', 'grant_usage: an unknown kind'
);
select is(
  baton_test.raised('select baton.grant_usage(''baton_test_nobody'', null)'), '22023 invalid_choice', 'grant_usage: no kind'
);
select is(baton_test.raised('select baton.grant_usage(null, ''client'')'), '42704 unknown_role', 'grant_usage: no role');
select is(
  baton_test.raised('select baton.grant_usage(''public'', ''client'')'), '42704 unknown_role', 'grant_usage: PUBLIC is no role'
);
create role "Odd ""role""; drop schema baton --";
create role "current_user";
select is(
  (select g.outcome from baton.grant_usage(r.name, 'client') as g) || ' ' || has_function_privilege(r.name, 'baton.send(text,jsonb,interval,text,text,jsonb)', 'execute'),
  'granted true', 'grant_usage: a role of odd name: ' || r.name
)
from unnest(array['Odd "role"; drop schema baton --', 'current_user']) as r (name);
select baton.grant_usage('baton_test_client', 'observer') \g /dev/null
select is(
  baton_test.verbs('baton_test_client'),
  'cancel_run get_run health metrics read_events send send_many signal_run start_run version wake_run', 'grant_usage: kinds add up'
);
drop owned by baton_test_client;
select is(baton_test.verbs('baton_test_client'), null, 'grant_usage: DROP OWNED takes them away');

-- A hostile caller
select baton.start_run('w', '{}', 'tasks', 'tasks') \g /dev/null
select b.replay_epoch as epoch
from baton.claim('tasks') as c
cross join lateral baton.begin_replay(c.message_id, c.delivery) as b \gset
create schema baton_test_hostile;
grant usage, create on schema baton_test_hostile to public;
create function baton_test_hostile.upper(text) returns text language plpgsql as $$begin raise exception 'hijacked'; end$$;
create function baton_test_hostile.left(text, integer) returns text language plpgsql as $$begin raise exception 'hijacked'; end$$;
create function baton_test_hostile.starts_with(text, text) returns boolean language plpgsql as $$begin raise exception 'hijacked'; end$$;
create function baton_test_hostile.octet_length(text) returns integer language plpgsql as $$begin raise exception 'hijacked'; end$$;
create function baton_test_hostile.gen_random_uuid() returns uuid language plpgsql as $$begin raise exception 'hijacked'; end$$;
create function baton_test_hostile.jsonb_typeof(jsonb) returns text language plpgsql as $$begin raise exception 'hijacked'; end$$;
create function baton_test_hostile.equal(text, text) returns boolean language plpgsql as $$begin raise exception 'hijacked'; end$$;
create function baton_test_hostile.earlier(timestamptz, timestamptz) returns boolean language plpgsql as $$begin raise exception 'hijacked'; end$$;
create function baton_test_hostile.later(timestamptz, interval) returns timestamptz language plpgsql as $$begin raise exception 'hijacked'; end$$;
create operator baton_test_hostile.= (function = baton_test_hostile.equal, leftarg = text, rightarg = text);
create operator baton_test_hostile.< (function = baton_test_hostile.earlier, leftarg = timestamptz, rightarg = timestamptz);
create operator baton_test_hostile.+ (function = baton_test_hostile.later, leftarg = timestamptz, rightarg = interval);
grant execute on all functions in schema baton_test_hostile to public;
create function baton_test.hostile(role_name text, statement text)
returns text
language plpgsql
set search_path = baton_test_hostile, pg_temp, pg_catalog
as $$
declare
  v_answer text;
begin
  execute pg_catalog.format('set local role %I', hostile.role_name);
  execute hostile.statement into v_answer;
  reset role;
  return v_answer;
exception
  when others then
    reset role;
    return sqlerrm;
end;
$$;
create temporary table settings (transport text);
create temporary table worker_functions (function_name text);
create temporary table runs (run_id text);
create temporary table messages (message_id bigint);
create temporary table pg_roles (rolname text);
create temporary view pg_class as select null::oid as oid where false;
grant all on pg_temp.settings, pg_temp.worker_functions, pg_temp.runs, pg_temp.messages, pg_temp.pg_roles, pg_temp.pg_class to public;
select is(baton_test.hostile(current_user, 'select ''a''::text = ''a'''), 'hijacked', 'roles: (the hostile path would be used)');
select is(
  baton_test.hostile('baton_test_worker', h.statement), h.answer, 'roles: a hostile search_path and temporary tables change nothing: ' || h.statement
)
from (
  values
  ('select outcome from baton.send(''work'', ''{}'', headers => ''{}'')', 'sent'),
  ('select count(message_id)::text from baton.claim(''work'')', '1'),
  ('select outcome from baton.reserve_worker_invocation(''orders'')', 'ready'),
  ('select outcome from baton.heartbeat(''00000000-0000-0000-0000-000000000001'')', 'active'),
  ('select outcome from baton.start_run(''w'', ''{}'', ''hostile'', ''hostile'')', 'created'),
  ('select outcome from baton.signal_run(''hostile'', ''go'')', 'signalled'),
  (
    'select b.outcome from baton.claim(''hostile'', for_run => ''hostile'') as c, '
    'lateral baton.begin_replay(c.message_id, c.delivery) as b', 'granted'
  ),
  (format('select outcome from baton.create_step(''tasks'', %s, ''s'', ''[1, 2]'')', :epoch), 'created'),
  (format('select pg_catalog.max(outcome) from baton.dispatch_tasks(''tasks'', %s, 0)', :epoch), 'enqueue'),
  (
    'select s.outcome from baton.claim(''tasks'') as c, lateral baton.start_task(c.message_id, c.delivery) as s', 'execute'
  ),
  (
    'select s.outcome from baton.claim(''tasks'') as c, lateral baton.start_tasks(pg_catalog.jsonb_build_array('
    'pg_catalog.jsonb_build_object(''message_id'', c.message_id, ''delivery'', c.delivery))) as s', 'execute'
  ),
  ('select outcome from baton.complete_task(''tasks'', ''s'', 0, 1, ''1'', null, null)', 'completed'),
  (
    'select outcome from baton.complete_tasks(''tasks'', ''[{"step_slug": "s", "task_index": 0, "attempt": 1}]'')',
    'already_completed'
  ),
  ('select outcome from baton.fail_task(''tasks'', ''s'', 1, 1, ''"x"'', null, null)', 'lost'),
  ('select count(run_id)::text from baton.recover_runs()', '0'),
  ('select outcome from baton.cancel_run(''hostile'', ''no'')', 'done')
) as h (statement, answer);
select is(baton_test.hostile('baton_test_admin', h.statement), h.answer, 'roles: nor for an admin: ' || h.statement)
from (
  values
  ('select outcome from baton.register_worker_function(''mail'')', 'registered'),
  ('select outcome from baton.ensure_workers()', 'reserved'),
  ('select startup_state from baton.worker_startup where function_name operator(pg_catalog.=) ''mail''', 'pending'),
  ('select count(part)::text from baton.tick() where error is not null', '0'),
  ('select pg_catalog.count(run_id)::text from baton.run_overview', '3'),
  ('select pg_catalog.max(decision) from baton.task_ownership', 'queued'),
  ('select outputs::text from baton.step_outputs where run_id operator(pg_catalog.=) ''tasks''', '[1]'),
  ('select outcome from baton.release_task(''tasks'', ''s'', 1)', 'released'),
  ('select outcome from baton.skip_step(''tasks'', ''s'')', 'done'),
  ('select pg_catalog.count(run_id)::text from baton.replays', '1'),
  ('select pg_catalog.count(run_id)::text from baton.wedged_runs', '0'),
  ('select pg_catalog.count(finding)::text from baton.health() where finding operator(pg_catalog.=) ''transport''', '1'),
  ('select pg_catalog.right(baton.metrics(), 5)', '# EOF')
) as h (statement, answer);
select is(
  baton_test.hostile(current_user, 'select outcome from baton.grant_usage(''baton_test_client'', ''client'')'), 'granted',
  'roles: nor for the owner who grants'
);

-- What an observer sees lets nobody act on a message
select message_id as m from baton.send('receipts', '1') \gset
select delivery as old from baton.claim('receipts', visibility => '0') \gset
select delivery as live from baton.claim('receipts') \gset
select outcome from baton.extend(:m, :old) \gset
set local role baton_test_observer;
select string_agg(i::text, ' ') as seen from baton.incident_log as i where i.kind = 'lost' \gset
reset role;
select matches(:'seen'::text, :'old'::text, 'roles: an incident tells of the receipt that was lost');
set local role baton_test_sender;
select tap.is_empty(
  format(
    $$select n.digits
    from regexp_matches(%L, '[0-9]{1,16}', 'g') as n (digits)
    cross join lateral baton.ack(%s, n.digits[1]::bigint) as a
    where a.outcome <> 'lost'$$, :'seen', :m
  ),
  'roles: and of none with which a sender could act'
);
select tap.is((select a.outcome from baton.ack(:m, :live) as a), 'acked', 'roles: (the live one is good)');
reset role;

select * from finish();
rollback;
