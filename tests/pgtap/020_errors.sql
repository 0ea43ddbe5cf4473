\ir _begin.sql
\ir _starts.sql
select plan(57);

-- A run that has been granted a replay
select baton.start_run('w', '{}', 'r') \g /dev/null
select b.replay_epoch as epoch
from baton.claim('default') as c
cross join lateral baton.begin_replay(c.message_id, c.delivery) as b \gset

-- One statement for each condition, and what it says.
create temporary table cases (condition text, statement text, message text) on commit drop;
insert into cases (condition, statement, message) values
(
  'invalid_name', $$select baton.send(e'a\nb', '{}')$$,
  e'queue_name must be 1 to 200 bytes without control characters, not \'a\nb\''
),
(
  'invalid_function_name', $$select baton.register_worker_function('a b')$$,
  'a function name has 1 to 200 characters of A-Z a-z 0-9 . _ ~ -, not ''a b'''
),
(
  'invalid_key', $$select baton.send('work', '{}', dedupe_key => '')$$,
  'a key must be 1 to 500 bytes without control characters, not '''''
),
('reserved_queue', $$select baton.send('baton.deliveries', '{}')$$, 'queue ''baton.deliveries'' is reserved'),
('reserved_kind', $$select baton.send('work', '{}', kind => 'run')$$, 'kind ''run'' is reserved'),
(
  'invalid_interval', $$select baton.send('work', '{}', delay => '-1 second')$$,
  'delay must be between 0 and 10 years, not -00:00:01'
),
(
  'too_small', $$select baton.register_worker_function('f', debounce => '0.5 seconds')$$,
  'debounce must be at least 00:00:01, not 00:00:00.5'
),
(
  'invalid_time', format('select baton.end_replay(%L, %s, 1, %L)', 'r', :epoch, 'infinity'),
  'wake_at must be a finite time, not infinity'
),
('invalid_limit', $$select baton.claim('work', max_messages => -1)$$, 'max_messages must not be negative, not -1'),
(
  'invalid_choice', $$select baton.register_worker_function('f', start_mode => 'lambda')$$,
  'start_mode must be one of http, process, not ''lambda'''
),
('missing_argument', $$select baton.register_worker(null, 'f')$$, 'worker_id must not be null'),
('invalid_headers', $$select baton.send('work', '{}', headers => '[]')$$, 'headers must be a JSON object, not array'),
(
  'invalid_url', $$select baton.register_worker_function('f', url => 'ftp://h')$$, 'not an http or https URL: ''ftp://h'''
),
('invalid_messages', $$select * from baton.send_many('work', '{}')$$, null),
('invalid_receipts', $$select * from baton.ack_many('{}')$$, 'receipts: not an array'),
(
  'invalid_schedule', $$select baton.schedule('1.5 seconds')$$,
  'tick_every must be 1 to 59 whole seconds or one minute, not 00:00:01.5'
),
('too_large', $$select baton.send('work', to_jsonb(repeat('x', 2000000)))$$, null),
('unknown_function', $$select baton.reserve_worker_invocation('nobody')$$, 'unknown function: ''nobody'''),
(
  'invalid_inputs', $$select baton.create_step('r', 1, 's', '{"a": 1}')$$,
  'inputs must be a JSON array, one item a task, not object'
),
(
  'invalid_completions', $$select * from baton.complete_tasks('r', '[{"task_index": -1}]')$$,
  'completions: not a completion: {"task_index": -1}'
),
('invalid_keys', $$select * from baton.terminal_tasks('{}')$$, 'keys: not an array'),
(
  'invalid_event_type', $$select baton.append_event('r', 1, 'step_created')$$,
  'a type of one''s own contains a dot, not ''step_created'''
),
(
  'invalid_position', format('select baton.end_replay(%L, %s, 2)', 'r', :epoch),
  'seen_seq must be between 0 and last_seq (1), not 2'
),
(
  'superseded', format('select baton.append_event(%L, %s, %L)', 'r', :epoch - 1, 'orders.checked'),
  format('the replay of run %L was superseded: epoch %s is not current', 'r', :epoch - 1)
),
('unknown_role', $$select baton.grant_usage('nobody', 'worker')$$, 'unknown role: ''nobody'''),
('wrong_isolation', null, null);

select set_eq(
  'select e.condition from baton._errors() as e', 'select c.condition from cases as c',
  'errors: every condition has a case here'
);
select is((select count(distinct e.condition)::integer from baton._errors() as e), 26, 'errors: each is registered once');

create function baton_test.said(statement text)
returns text
language plpgsql
as $$
declare
  v_message text;
  v_hint text;
begin
  execute said.statement;
  return 'nothing';
exception
  when others then
    get stacked diagnostics v_message = message_text, v_hint = pg_exception_hint;
    return v_message || ' | ' || v_hint;
end;
$$;
select is(baton_test.raised(c.statement), e.code || ' ' || c.condition, 'errors: ' || c.condition || ' is raised, with its SQLSTATE')
from cases as c
inner join baton._errors() as e on e.condition = c.condition
where c.statement is not null;
select is(
  baton_test.said(c.statement), c.message || ' | ' || nullif(e.hint, ''), 'errors: ' || c.condition || ' says what happened, and what to do'
)
from cases as c
inner join baton._errors() as e on e.condition = c.condition
where c.message is not null;
select matches(
  baton_test.said($$select baton.send('work', to_jsonb(repeat('x', 2000000)))$$),
  '^payload with headers has [0-9]+ bytes, over the limit of 1048576 \|', 'errors: too_large says how large'
);
select is(
  (select string_agg(distinct e.code, ' ' order by e.code) from baton._errors() as e), '22023 25001 42704 54000 PB001',
  'errors: own codes only where a client must branch'
);

-- A long value is not repeated whole
select cmp_ok(
  length(baton_test.said(format('select baton.register_worker_function(%L)', repeat('x', 100000)))), '<', 300,
  'errors: a long value is cut'
);
select throws_ok($$select baton._raise('nothing_like_it', '')$$, 'P0002', null, 'errors: what is not registered can''t be raised');

-- In the caller's transaction, and with names of its own
create temporary table work (a integer) on commit drop;
create function baton_test.caught()
returns text
language plpgsql
as $$
begin
  perform baton.reserve_worker_invocation('nobody');
exception
  when undefined_object then
    return 'caught';
end;
$$;
select is(baton_test.caught(), 'caught', 'errors: a caller can catch them by their standard names');
select matches(baton.version(), '^[0-9]+[.][0-9]+[.][0-9]+(-dev)?$', 'version: of the package');
select is(
  baton_test.said($$select baton.reserve_worker_invocation('100%s')$$), 'unknown function: ''100%s'' | Register it: baton.register_worker_function(...)',
  'errors: a value is no format'
);

select * from finish();
rollback;
