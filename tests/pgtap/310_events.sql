\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(29);

select baton_test.start('a') \g /dev/null
select m as am, d as ad, e as ae from baton_test.replay('a') \gset
create function baton_test.append(type text, correlation_id text default null, payload jsonb default null, run_id text default 'a')
returns text
language sql
volatile
begin atomic
  select e.outcome
  from baton.runs as r, baton.append_event(r.run_id, r.replay_epoch, append.type, append.correlation_id, append.payload) as e
  where r.run_id = append.run_id;
end;

-- append_event

select is(baton_test.append('orders.checked', 'o-1', '{"n": 1}'), 'appended', 'append: a type of one''s own');
select is(baton_test.append('orders.checked', 'o-1', '{"n": 2}'), 'exists', 'append: once a correlation id');
select is(baton_test.append('orders.paid', 'o-1'), 'appended', 'append: a type');
select is(baton_test.append('orders.checked', 'o-2'), 'appended', 'append: another correlation id');
select is(baton_test.append('orders.checked'), 'appended', 'append: without one');
select is(baton_test.append('orders.checked'), 'appended', 'append: as often as one likes');
select baton_test.start('b') \g /dev/null
select baton_test.replay('b') \g /dev/null
select is(baton_test.append('orders.checked', 'o-1', run_id => 'b'), 'appended', 'append: and run');
select results_eq(
  $$select e.seq, e.type, e.correlation_id, e.payload, e.created_at from baton.read_events('a') as e$$,
  $$values (1::bigint, 'run_created', null, '{"in": 1}'::jsonb, baton._now()), (2, 'orders.checked', 'o-1', '{"n": 1}', baton._now()),
    (3, 'orders.paid', 'o-1', null, baton._now()), (4, 'orders.checked', 'o-2', null, baton._now()),
    (5, 'orders.checked', null, null, baton._now()), (6, 'orders.checked', null, null, baton._now())$$,
  'append: positions have no gaps, and what exists is kept'
);
select is(baton_test.run('a'), 'running 6/0/0 0/0 held', 'append: the run knows the last one, and that asks for no replay');
select is_empty(
  $$select t.type from unnest(array['run_completed', 'signal_received', 'x', '', null, 'x.' || repeat('y', 199), e'x.\n']) as t (type)
  where baton_test.sqlstate_of(format('select baton_test.append(%L)', t.type)) <> '22023'$$,
  'append: the package''s own types and what is no name are refused'
);
select is_empty(
  $$select k.key from unnest(array['', repeat('k', 501), e'k\t']) as k (key)
  where baton_test.sqlstate_of(format('select baton_test.append(''x.y'', %L)', k.key)) <> '22023'$$, 'append: bad correlation ids are refused'
);
select is(baton_test.append('x.' || repeat('y', 198), repeat('k', 500)), 'appended', 'append: the longest names are taken');
update baton.settings set max_payload_bytes = 1024;
select throws_ok(format('select baton_test.append(''x.y'', null, to_jsonb(%L::text))', repeat('x', 1024)), '54000', null, 'append: a payload over the limit is refused');
select is(baton_test.append('x.z', null, to_jsonb(repeat('x', 900))), 'appended', 'append: one below it is taken');
update baton.settings set max_payload_bytes = 1048576;

-- The fence

select throws_ok($$select baton.append_event('a', 1, 'x.y')$$, 'PB001', null, 'fence: another epoch is refused');
select throws_ok($$select baton.append_event('a', null, 'x.y')$$, 'PB001', null, 'fence: none too');
select baton_test.finish_replay('a', :ae, 1) \g /dev/null
select throws_ok(format('select baton.append_event(''a'', %s, ''x.y'')', :ae), 'PB001', null, 'fence: an epoch that has ended too');
select baton_test.start('never') \g /dev/null
select throws_ok($$select baton.append_event('never', null, 'x.y')$$, 'PB001', null, 'fence: and where none was granted');
select outcome from baton.wake_run('a') \g /dev/null
select m as am, d as ad, e as ae from baton_test.replay('a') \gset
select outcome from baton.cancel_run('a', 'x') \g /dev/null
select is((select outcome from baton.append_event('a', 1, 'x.y')), 'terminal', 'fence: of an ended run: terminal');
select is(baton_test.messages('a'), 'keyless 00:00:30 claimed', 'fence: which settles no other''s message');
select is((select outcome from baton.append_event('a', :ae, 'x.y')), 'terminal', 'fence: under its epoch');
select is(baton_test.messages('a'), null, 'fence: the message goes');
select is((select outcome from baton.append_event('unknown', 1, 'x.y')), 'terminal', 'fence: of an unknown run: terminal');

-- read_events

select is((select array_agg(e.seq) from baton.read_events('a', 3) as e), array[4, 5, 6, 7, 8, 9]::bigint[], 'read: from after a position');
select is((select array_agg(e.seq) from baton.read_events('a', 3, 2) as e), array[4, 5]::bigint[], 'read: a page');
select is((select count(*) from baton.read_events('a', null, null)), 9::bigint, 'read: nulls are the defaults');
select is_empty($$select * from baton.read_events('a', 9)$$, 'read: nothing after the last');
select is_empty($$select * from baton.read_events('unknown')$$, 'read: no row of an unknown run');
select throws_ok($$select * from baton.read_events('a', 0, -1)$$, '22023', null, 'read: a negative limit is refused');
select * from finish();
rollback;
