\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(36);

-- complete_run

select baton_test.idle('a', baton._now() + interval '1 hour') \g /dev/null
select baton_test.step('a', 'done', 'completed', 'failed', 'skipped') \g /dev/null
update baton.steps set status = 'completed' where run_id = 'a';
select baton_test.step('a', 'open', 'completed', 'created', 'started') \g /dev/null
select m as tm from baton_test.task_message('a', 'open', 1) \gset
select m as t2m from baton_test.task_message('a', 'open', 2) \gset
select c.delivery as t2d from baton.claim('q', max_messages => 10) as c where c.message_id = :t2m \gset
update baton.messages set claimed_at = null, visible_at = baton._now() where message_id = :tm;
select outcome from baton.wake_run('a') \g /dev/null
select m as am, d as ad, e as ae from baton_test.replay('a') \gset
select outcome from baton.wake_run('a') \g /dev/null
select is(baton_test.messages('a') like 'timer 01:00:00, open/1 %, open/2 % claimed, keyless 00:00:30 claimed, wake 00:00:00', true, 'complete: (a timer, two task messages, the replay''s and a wake)');
select results_eq(format('select * from baton.complete_run(''a'', %s, ''{"ok": true}'')', :ae), $$values ('done', 'completed')$$, 'complete: done');
select is(baton_test.run('a'), 'completed 2/0/1 0/0', 'complete: the replay ends with its run, nothing wakes it');
select is(baton_test.log('a'), 'run_created run_completed', 'complete: one event; tasks that close with it have none');
select results_eq(
  $$select r.status, r.output, r.error, r.ended_at, r.wake_at from baton.get_run('a') as r$$,
  $$values ('completed', '{"ok": true}'::jsonb, null::jsonb, baton._now(), null::timestamptz)$$, 'complete: with its output'
);
select is(
  (select array_agg(s.step_slug || ' ' || s.status || ' ' || s.open_tasks order by s.step_slug) from baton.steps as s where s.run_id = 'a'),
  array['done completed 0', 'open cancelled 0'], 'complete: unfinished steps are cancelled'
);
select is(
  (select array_agg(t.status order by t.task_index) from baton.tasks as t where t.run_id = 'a' and t.step_slug = 'open'),
  array['completed', 'cancelled', 'cancelled'], 'complete: and unfinished tasks'
);
select is(
  (select array_agg(t.status order by t.task_index) from baton.tasks as t where t.run_id = 'a' and t.step_slug = 'done'),
  array['completed', 'failed', 'skipped'], 'complete: others stay what they are'
);
select is((select array_agg(m.message_id) from baton.messages as m where m.run_id = 'a'), array[:t2m::bigint], 'complete: its messages go, but those that others have claimed');
select is((select outcome from baton.extend(:t2m, :t2d)), 'cancelled', 'complete: which can do nothing any more');
select is(baton_test.messages('a'), null, 'complete: and go');
select results_eq(format('select * from baton.complete_run(''a'', %s, ''1'')', :ae), $$values ('terminal', 'completed')$$, 'complete: again: terminal');
select results_eq($$select * from baton.fail_run('a', null, '1')$$, $$values ('terminal', 'completed')$$, 'fail_run: of an ended run, whatever the epoch');
select results_eq($$select * from baton.cancel_run('a', 'x')$$, $$values ('terminal', 'completed')$$, 'cancel: of an ended run');
select is(baton_test.log('a'), 'run_created run_completed', 'ends: there is one');

-- fail_run

select baton_test.start('f') \g /dev/null
select m as fm, d as fd, e as fe from baton_test.replay('f') \gset
select results_eq(format('select * from baton.fail_run(''f'', %s, ''{"why": 1}'')', :fe), $$values ('done', 'failed')$$, 'fail_run: done');
select results_eq($$select r.status, r.output, r.error from baton.get_run('f') as r$$, $$values ('failed', null::jsonb, '{"why": 1}'::jsonb)$$, 'fail_run: with its error');
select is(baton_test.messages('f'), null, 'fail_run: its message goes');

-- cancel_run

select baton_test.start('c') \g /dev/null
select m as cm, d as cd, e as ce from baton_test.replay('c') \gset
select results_eq($$select * from baton.cancel_run('c', 'no longer wanted')$$, $$values ('done', 'cancelled')$$, 'cancel: done');
select results_eq($$select r.status, r.output, r.error from baton.get_run('c') as r$$, $$values ('cancelled', null::jsonb, '"no longer wanted"'::jsonb)$$, 'cancel: with its reason');
select is(baton_test.messages('c'), 'keyless 00:00:30 claimed', 'cancel: the holder''s message stays until it asks');
select results_eq(format('select * from baton.complete_run(''c'', %s, ''1'')', :ce), $$values ('terminal', 'cancelled')$$, 'complete: after a cancellation');
select is(baton_test.messages('c'), null, 'complete: then the message goes');
select baton_test.start('c3') \g /dev/null
select m as cm, d as cd, e as ce from baton_test.replay('c3') \gset
select baton_test.advance('30 seconds') \g /dev/null
select count(*) from baton.claim('q', for_run => 'c3') \g /dev/null
select outcome from baton.cancel_run('c3', 'enough') \g /dev/null
select results_eq(format('select * from baton.complete_run(''c3'', %s, ''1'')', :ce), $$values ('terminal', 'cancelled')$$, 'complete: once another delivery has the message');
select is(baton_test.messages('c3'), 'keyless 00:00:30 claimed', 'complete: it is left to that');
select baton_test.start('c2') \g /dev/null
select m as cm, d as cd from baton_test.take('c2') \gset
select baton_test.advance('30 seconds') \g /dev/null
select outcome from baton.cancel_run('c2', null) \g /dev/null
select is(baton_test.messages('c2'), null, 'cancel: a message whose claim ran out goes');
select is((select error from baton.get_run('c2')), null, 'cancel: without a reason');
select results_eq($$select * from baton.cancel_run('nobody', 'x')$$, $$values ('terminal', null::text)$$, 'cancel: of an unknown run');
select results_eq($$select * from baton.complete_run('nobody', 1, 'null')$$, $$values ('terminal', null::text)$$, 'complete: of an unknown run');
select baton_test.start('l') \g /dev/null
select outcome from baton.cancel_run('l', repeat('ä', 2000)) \g /dev/null
select is((select length(error #>> '{}') from baton.get_run('l')), 1000, 'cancel: a long reason is cut');

-- The fence

select baton_test.start('p') \g /dev/null
select m as pm, d as pd, e as pe from baton_test.replay('p') \gset
select is_empty(
  $$select v.verb, e.epoch from unnest(array['complete_run', 'fail_run']) as v (verb), unnest(array['1', 'null']) as e (epoch)
  where baton_test.sqlstate_of(format('select baton.%s(''p'', %s, null)', v.verb, e.epoch)) <> 'PB001'$$, 'fence: another epoch or none ends no run'
);
select baton_test.finish_replay('p', :pe, 1) \g /dev/null
select throws_ok(format('select baton.complete_run(''p'', %s, null)', :pe), 'PB001', null, 'fence: nor does one that has ended');
select is(baton_test.run('p'), 'suspended 1/0/1 0/0', 'fence: the run is what it was');
select outcome from baton.wake_run('p') \g /dev/null
select m as pm, d as pd, e as pe from baton_test.replay('p') \gset
update baton.settings set max_payload_bytes = 1024;
select throws_ok(format('select baton.complete_run(''p'', %s, to_jsonb(repeat(''x'', 1024)))', :pe), '54000', null, 'complete: an output over the limit is refused');
update baton.settings set max_payload_bytes = 1048576;
select baton_test.advance('1 hour') \g /dev/null
select is((select outcome from baton.complete_run('p', :pe, null)), 'done', 'complete: while nobody took the replay over its holder may, however late');

-- Others are left alone

select baton_test.start('one'), baton_test.start('two') \g /dev/null
select outcome from baton.cancel_run('one', 'x') \g /dev/null
select is(baton_test.messages('two'), 'wake 00:00:00', 'ends: another run''s messages stay');
select * from finish();
rollback;
