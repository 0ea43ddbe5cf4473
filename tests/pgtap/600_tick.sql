\ir _begin.sql
\ir _starts.sql
set local client_min_messages = error;
select plan(25);

-- Nothing to do
select is_empty('select t.part from baton.tick() as t', 'tick: with nothing to do it answers nothing');
select results_eq(
  'select s.last_tick_at, s.last_tick_errors from baton.state as s', 'values (baton._now(), null::jsonb)',
  'tick: but notes that it ran'
);

-- Everything periodic
update baton.settings set base_url = 'http://w.test';
select baton.register_worker_function('orders') \g /dev/null
select baton.register_worker_function('batch', start_mode => 'process') \g /dev/null
select baton.register_worker(baton_test.worker(1), 'batch') \g /dev/null
select baton.send('work', '{}') \g /dev/null
select baton.start_run('w', '{}', 'r') \g /dev/null
delete from baton.messages where run_id = 'r';
update baton.settings set max_failures = 1;
select c.message_id, c.delivery from baton.claim('work') as c \gset
update baton.messages set failures = 1, claimed_at = null, visible_at = baton._now();
select baton_test.advance('1 hour') \g /dev/null
select results_eq(
  'select t.part, t.changed::bigint, t.error from baton.tick() as t',
  $$values
    ('dead_letters', 1::bigint, null), ('recovery', 1, null), ('silent_workers', 1, null), ('queue_marks', 1, null),
    ('totals', 3, null), ('ensure_workers', 1, null)$$,
  'tick: each part that changed something, in its order'
);
select is(
  (select d.message_id from baton.dead_letters as d), :'message_id'::bigint, 'tick: users'' messages at their limit are dead'
);
select is(
  (select h.outcome from baton.heartbeat(baton_test.worker(1)) as h), 'stopped', 'tick: silent workers are stopped'
);
select is(
  (select m.run_id from baton.messages as m where m.queue_name = 'default'), 'r', 'tick: a run that nobody drives is woken'
);
select is(baton_test.state('orders'), 'pending', 'tick: workers are ensured');
select results_eq(
  'select t.part from baton.tick() as t', $$values ('queue_marks')$$, 'tick: a second one has only the marks to move'
);
select baton_test.invocation('orders') as orders \gset
select count(t.part) from generate_series(1, 10), lateral baton.tick() as t \g /dev/null
select is(baton_test.invocation('orders'), :'orders', 'tick: ten in a row request no second start');

-- ensure_workers comes last: what the other parts learned is used
select baton_test.accept('orders', :'orders', baton_test.worker(2)) \g /dev/null
select baton_test.advance('1 hour') \g /dev/null
select baton.tick() \g /dev/null
select results_eq(
  format('select w.stopped_at, f.invocation_status from baton.workers as w, baton.worker_functions as f
    where w.worker_id = %L and f.function_name = ''orders''', baton_test.worker(2)),
  $$values (baton._now(), 'pending')$$, 'tick: a silent worker is stopped and replaced in one tick'
);

-- A part that fails: one of its functions is replaced for one tick
create function baton_test.tick_without(function_name text)
returns text
language plpgsql
as $$
declare
  v_function regprocedure := to_regproc('baton.' || tick_without.function_name);
  v_before text := pg_get_functiondef(v_function);
  v_parts text;
begin
  perform baton_test.advance('1 hour');
  execute format(
    'create or replace function baton.%I(%s) returns %s language plpgsql as $body$ begin
      insert into baton.secrets (secret_name, secret) values (''half'', ''done'');
      raise exception ''broken''; end $body$',
    tick_without.function_name, pg_get_function_arguments(v_function), pg_get_function_result(v_function)
  );
  select string_agg(concat_ws(' ', t.part, t.changed, t.error), ', ') into v_parts
  from baton.tick() as t
  where t.error is not null or t.part = 'ensure_workers';
  execute v_before;
  return v_parts;
end;
$$;
select is(
  baton_test.tick_without(p.function_name), p.part || ' broken, ensure_workers 1',
  'tick: the others go on when ' || p.part || ' fails'
)
from (
  values
  ('_bury_messages', 'dead_letters'), ('_recover_runs', 'recovery'), ('_read_responses', 'responses'),
  ('_watch_pg_net', 'pg_net_queue'),
  ('_purge_cron_runs', 'cron_runs'), ('_stop_silent_workers', 'silent_workers'), ('_move_marks', 'queue_marks'),
  ('_fold_tallies', 'totals')
) as p (function_name, part);
select is_empty('select s.secret_name from baton.secrets as s', 'tick: what a failing part wrote is undone');

create or replace function baton._move_marks(at timestamptz)
returns integer
language plpgsql
as $$
begin
  perform 1 / 0;
end;
$$;
create or replace function baton._transport()
returns text
language plpgsql
as $$
begin
  raise exception 'no "transport"';
end;
$$;
select baton_test.advance('1 hour') \g /dev/null
select results_eq(
  'select t.part, t.changed, t.error from baton.tick() as t where t.part <> ''totals''',
  $$values ('queue_marks', null::integer, 'division by zero'), ('ensure_workers', null, 'no "transport"')$$,
  'tick: each failure is a row'
);
select results_eq(
  'select s.last_tick_at, s.last_tick_errors from baton.state as s',
  $$values (baton._now(), '{"queue_marks": "division by zero", "ensure_workers": "no \"transport\""}'::jsonb)$$,
  'tick: and is kept for health'
);
create or replace function baton._move_marks(at timestamptz)
returns integer
language plpgsql
as $$
begin
  return 0;
end;
$$;
create or replace function baton._transport()
returns text
language plpgsql
as $$
begin
  return 'outbox';
end;
$$;
select is_empty('select t.part from baton.tick() as t where t.error is not null', 'tick: once mended');
select is((select s.last_tick_errors from baton.state as s), null, 'tick: the errors are forgotten');

-- The clock and the caller
select baton_test.advance('-1 hour') \g /dev/null
select is_empty('select t.part from baton.tick() as t where t.error is not null', 'tick: with the clock set back it goes on');
select is((select s.last_tick_at from baton.state as s), baton._now(), 'tick: by that clock');

select * from finish();
rollback;
