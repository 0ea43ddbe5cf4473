-- At another isolation level, which the including file has set, after _begin.sql and _starts.sql.
select baton.send('work', '{}') \g /dev/null
insert into baton.worker_functions (function_name, queue_name) values ('orders', 'orders');
insert into baton.workers (worker_id, function_name, handshake, started_at, last_heartbeat_at)
values (baton_test.worker(1), 'orders', true, baton._now(), baton._now());
insert into baton.runs (run_id, workflow_name, queue_name, created_at) values ('r', 'w', 'q', baton._now());
insert into baton.steps (run_id, step_slug, task_count, open_tasks, created_seq) values ('r', 's', 1, 1, 0);
insert into baton.tasks (run_id, step_slug, task_index) values ('r', 's', 0);
insert into baton.messages (
  queue_name, kind, run_id, step_slug, task_index, payload, visible_at, delivery, claimed_at, created_at
)
select
  h.queue_name, h.kind, h.run_id, case h.kind when 'task' then 's' end, case h.kind when 'task' then 0 end, h.payload,
  baton._now() + interval '1 minute', 1, baton._now(), baton._now()
from (
  values
  (
    'baton.deliveries', null, null,
    '{"function_name": "orders", "body": {"invocation_id": "00000000-0000-0000-0000-000000000009"}}'::jsonb
  ),
  ('q', 'run', 'r', null), ('tasks', 'task', 'r', null), ('work', null, null, '{}')
) as h (queue_name, kind, run_id, payload);

-- The receipt of the claimed message of a queue.
create function baton_test.held(queue_name text, out m bigint, out d bigint)
language sql
stable
begin atomic
  select h.message_id, h.delivery
  from baton.messages as h
  where h.queue_name = held.queue_name and h.claimed_at is not null;
end;

create temporary table refused (statement text) on commit drop;
insert into refused (statement) values
('select baton.register_worker_function(''orders'')'), ('select baton.unregister_worker_function(''orders'')'),
('select baton.enable_worker_function(''orders'')'), ('select baton.disable_worker_function(''orders'')'),
('select baton.deprecate_workers(''orders'')'), ('select baton.register_worker(gen_random_uuid(), ''orders'')'),
('select baton.reserve_worker_invocation(''orders'')'),
('select baton.reconcile_worker_invocation(''orders'', gen_random_uuid())'),
('select baton.accept_worker_invocation(''orders'', gen_random_uuid(), gen_random_uuid())'),
('select baton.dismiss_worker_invocation(''orders'', gen_random_uuid(), ''x'')'),
('select baton.ensure_workers()'), ('select baton.tick()'),
('select baton.fail(m, d, ''x'', final => true) from baton_test.held(''baton.deliveries'')'),
('select baton.start_run(''w'', ''{}'')'), ('select baton.start_run(''w'', null, ''r'', ''q'')'),
('select baton.signal_run(''r'', ''s'')'), ('select baton.wake_run(''r'')'), ('select baton.cancel_run(''r'', ''x'')'),
('select baton.begin_replay(m, d) from baton_test.held(''q'')'), ('select baton.end_replay(''r'', 1, 1)'),
('select baton.append_event(''r'', 1, ''x.y'')'), ('select baton.complete_run(''r'', 1, ''{}'')'),
('select baton.fail_run(''r'', 1, ''{}'')'), ('select baton.release_replay(''r'')'), ('select baton.recover_runs()'),
('select baton.park(m, d) from baton_test.held(''q'')'), ('select baton.fail(m, d, ''x'') from baton_test.held(''q'')'),
('select baton.park(m, d, force => true) from baton_test.held(''q'')'),
('select baton.park(m, d, force => true) from baton_test.held(''tasks'')'),
('select baton.fail(m, d, ''x'', force => true) from baton_test.held(''q'')'),
('select baton.fail(m, d, ''x'', force => true) from baton_test.held(''tasks'')'),
('select baton.create_step(''r'', 1, ''s'', ''[1]'')'), ('select baton.dispatch_tasks(''r'', 1)'),
('select baton.start_task(m, d) from baton_test.held(''tasks'')'), (
  'select baton.start_tasks(jsonb_build_array(jsonb_build_object(''message_id'', m, ''delivery'', d))) '
  'from baton_test.held(''tasks'')'
),
('select baton.complete_task(''r'', ''s'', 0, 1, ''1'', m, d) from baton_test.held(''tasks'')'), (
  'select baton.complete_tasks(''r'', jsonb_build_array(jsonb_build_object('
  '''step_slug'', ''s'', ''task_index'', 0, ''attempt'', 1, ''output'', 1, ''message_id'', m, ''delivery'', d))) '
  'from baton_test.held(''tasks'')'
),
('select baton.advance_run(''r'', 1, ''s'', ''1'', ''t'', ''1'')'),
('select baton.fail_task(''r'', ''s'', 0, 1, ''"x"'', m, d) from baton_test.held(''tasks'')'),
('select baton.skip_step(''r'', ''s'')'), ('select baton.skip_step(''r'', ''s'', 1)'),
('select baton.release_task(''r'', ''s'', 0)'), ('select baton.release_task(''r'', ''s'', 0, ''fail'')'),
('select baton.prune(''1 day'')'), ('select baton.after_restore()');

create temporary table safe (statement text) on commit drop;
insert into safe (statement) values
('select baton.heartbeat(baton_test.worker(1))'), ('select baton.stop_worker(baton_test.worker(1))'),
('select baton.send(''work'', ''{}'')'), ('select baton.send_many(''work'', ''[{}]'')'),
('select baton.claim(''work'')'), ('select baton.claim(''q'', for_run => ''r'')'), ('select baton.claim_deliveries()'),
('select baton.ack(m, d) from baton_test.held(''work'')'), ('select baton.ack(m, d) from baton_test.held(''q'')'),
('select baton.ack(m, d, force => true) from baton_test.held(''q'')'), (
  'select baton.ack_many(jsonb_build_array(jsonb_build_object(''message_id'', m, ''delivery'', d))) '
  'from baton_test.held(''q'')'
),
('select baton.extend(m, d) from baton_test.held(''work'')'), ('select baton.extend(m, d) from baton_test.held(''q'')'),
(
  'select baton.extend_many(jsonb_build_array(jsonb_build_object(''message_id'', m, ''delivery'', d))) '
  'from baton_test.held(''q'')'
), ('select baton.park(m, d) from baton_test.held(''work'')'),
('select baton.park(m, d) from baton_test.held(''baton.deliveries'')'),
('select baton.fail(m, d, ''x'') from baton_test.held(''work'')'),
('select baton.fail(m, d, ''x'', final => true) from baton_test.held(''work'')'),
('select baton.park(m, d, force => true) from baton_test.held(''work'')'),
('select baton.fail(m, d, ''x'', force => true) from baton_test.held(''work'')'),
('select baton.claim(''tasks'')'), ('select baton.ack(m, d) from baton_test.held(''tasks'')'),
('select baton.extend(m, d) from baton_test.held(''tasks'')'),
('select baton.park(m, d) from baton_test.held(''tasks'')'),
('select baton.fail(m, d, ''x'', final => true) from baton_test.held(''tasks'')'),
('select baton.start_task(m, d) from baton_test.held(''work'')'),
('select baton.fail(m, d, ''x'', final => false) from baton_test.held(''baton.deliveries'')'),
('select baton.redrive(''{1}'')'), ('select baton.remove_messages(''{1}'')'), ('select baton.discard(''{1}'')'),
('select baton.pause_queue(''work'')'), ('select baton.resume_queue(''work'')'),
('select baton.get_run(''r'')'), ('select baton.read_events(''r'')'),
('select baton.terminal_tasks(''[{"run_id": "r", "step_slug": "s", "task_index": 0, "attempt": 1}]'')'),
('select baton.health()'), ('select baton.metrics()'), ('select baton.version()'), ('select s from baton.worker_startup as s'),
('select r from baton.run_overview as r'), ('select r from baton.replays as r'), ('select w from baton.wedged_runs as w'),
('select o from baton.task_ownership as o'), ('select o from baton.step_outputs as o'),
('select baton.schedule()'), ('select baton.unschedule()'),
('select baton.grant_usage(current_user::text, ''client'')');

select is(baton_test.raised(r.statement), '25001 wrong_isolation', 'isolation: refused: ' || r.statement)
from refused as r;
select is(baton_test.raised(s.statement), 'nothing', 'isolation: safe: ' || s.statement) from safe as s;

create function baton_test.verb(statement text)
returns text
language sql
immutable
begin atomic
  select substring(verb.statement from '\mbaton\.(\w+)\(');
end;
select set_eq(
  'select baton_test.verb(r.statement) from refused as r',
  $$select p.proname::text from pg_proc as p
  where p.pronamespace = 'baton'::regnamespace and obj_description(p.oid, 'pg_proc') ~ 'Raises: [^\n]*25001'$$,
  'isolation: those that refuse say so'
);
select set_eq(
  $$select baton_test.verb(l.statement) from (table refused union all table safe) as l where baton_test.verb(l.statement) is not null$$,
  $$select p.proname::text from pg_proc as p where p.pronamespace = 'baton'::regnamespace and p.proname !~ '^_'$$,
  'isolation: every verb is here'
);
