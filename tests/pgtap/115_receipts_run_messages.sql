\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(33);

-- claim, for_run

select baton_test.start('a') \g /dev/null
select baton_test.start('b') \g /dev/null
select baton_test.start('elsewhere', queue_name => 'q2') \g /dev/null
select outcome from baton.send('q', '1') \g /dev/null
select baton_test.step('a', 's', 'created') \g /dev/null
select m as tm from baton_test.task_message('a', 's', 0) \gset
select results_eq(
  $$select c.kind, c.run_id, c.payload, c.headers from baton.claim('q', for_run => 'a', max_messages => 10) as c$$,
  $$values ('run', 'a', null::jsonb, null::jsonb)$$, 'claim: for_run: that run''s run messages, no task''s, no other run''s, no user''s'
);
select is_empty($$select * from baton.claim('q', for_run => 'a')$$, 'claim: for_run: what is claimed is not given out twice');
select is_empty($$select * from baton.claim('q', for_run => 'elsewhere')$$, 'claim: for_run: only of the queue');
select is_empty($$select * from baton.claim('q', for_run => 'nobody')$$, 'claim: for_run: of an unknown run');
select baton_test.advance('30 seconds') \g /dev/null
select is((select lapses from baton.claim('q', for_run => 'a')), 1, 'claim: for_run: a claim that ran out counts');
select is((select count(*) from baton.incidents), 0::bigint, 'claim: for_run: silently');
select results_eq(
  $$select c.kind, c.run_id, c.step_slug, c.task_index from baton.claim('q', max_messages => 10) as c order by c.kind, c.run_id$$,
  $$values ('run', 'b', null, null), ('task', 'a', 's', 0), (null, null, null, null)$$, 'claim: without it all are given out alike'
);
select baton_test.start('late', '1 hour') \g /dev/null
select is_empty($$select * from baton.claim('q', for_run => 'late')$$, 'claim: for_run: only what is due');

-- No limit of its own

select baton_test.set_limits(1, 1) \g /dev/null
select baton_test.start('l') \g /dev/null
update baton.messages set failures = 100, lapses = 100 where run_id = 'l';
select is((select lapses from baton.claim('q', for_run => 'l')), 100, 'limits: a run message has none, the run counts');
select baton_test.advance('30 seconds') \g /dev/null
select count(*) from baton.tick() \g /dev/null
select isnt(baton_test.messages('l'), null, 'limits: a tick does not bury it');
select is((select lapses from baton.claim('q', for_run => 'l')), 101, 'limits: nor does a plain claim skip it');
select baton_test.set_limits(10, 20) \g /dev/null

-- ack

select baton_test.start('k') \g /dev/null
select m as km, d as kd from baton_test.take('k') \gset
select is((select outcome from baton.ack(:km, :kd)), 'in_use', 'ack: an open run needs it');
select is((select outcome from baton.ack(:km, :kd, null)), 'in_use', 'ack: null is no force');
select is((select string_agg(a.outcome, ' ') from baton.ack_many(baton_test.receipts(:km, :kd)) as a), 'in_use', 'ack_many: the same');
select is(baton_test.messages('k'), 'wake 00:00:30 claimed', 'ack: it stays');
select is((select outcome from baton.ack(:km, 1, true)), 'lost', 'ack: by force under another delivery: lost');
select is((select outcome from baton.ack(:km, :kd, true)), 'acked', 'ack: by force it goes');
select is(baton_test.wedged() ~ 'k replay', true, 'ack: then the run is wedged');
select count(*) from baton.tick() \g /dev/null
select is(baton_test.messages('k'), 'wake 00:00:00', 'ack: until the next tick');
select baton_test.start('e') \g /dev/null
select m as em, d as ed from baton_test.take('e') \gset
select outcome from baton.cancel_run('e', 'x') \g /dev/null
select is((select outcome from baton.ack(:em, :ed)), 'acked', 'ack: of an ended run');
select baton_test.start('u') \g /dev/null
select m as um, d as ud from baton_test.take('u') \gset
delete from baton.runs where run_id = 'u';
select is((select string_agg(a.outcome, ' ') from baton.ack_many(baton_test.receipts(:um, :ud)) as a), 'acked', 'ack_many: of an unknown run');

-- extend

select baton_test.start('x') \g /dev/null
select m as xm, d as xd, e as xe from baton_test.replay('x') \gset
select baton_test.advance('29 seconds') \g /dev/null
select results_eq(format('select outcome, visible_at - baton._now() from baton.extend(%s, %s)', :xm, :xd), $$values ('extended', interval '30 seconds')$$, 'extend: a run message');
select outcome from baton.wake_run('x') \g /dev/null
select m as x2m, d as x2d from baton_test.take('x', '1 hour') \gset
select baton_test.advance('29.999999 seconds') \g /dev/null
select is(baton_test.answer(:x2m, :x2d), 'handed_over running', 'extend: and with it the replay');
select is((select outcome from baton.extend(:xm, :xd)), 'extended', 'extend: as often as needed');
select is(baton_test.run('x'), 'running 1/0/0 0/0 wake held', 'extend: it writes nothing of the run');
select outcome from baton.cancel_run('x', 'x') \g /dev/null
select results_eq(format('select outcome, visible_at from baton.extend(%s, %s)', :xm, :xd), $$values ('cancelled', null::timestamptz)$$, 'extend: of an ended run');
select is(baton_test.messages('x'), null, 'extend: it goes');
select baton_test.start('m1'), baton_test.start('m2'), baton_test.start('m3') \g /dev/null
select m as am, d as ad from baton_test.take('m1') \gset
select m as bm, d as bd from baton_test.take('m2') \gset
select m as cm, d as cd from baton_test.take('m3') \gset
select outcome from baton.cancel_run('m2', 'x') \g /dev/null
delete from baton.runs where run_id = 'm3';
select is(
  (select string_agg(a.outcome, ' ') from baton.extend_many(baton_test.receipts(:am, :ad, :bm, :bd, :cm, :cd, :am, 1)) as a),
  'extended cancelled cancelled lost', 'extend_many: of an open, an ended and an unknown run'
);
select is(concat(baton_test.messages('m2'), baton_test.messages('m3')), '', 'extend_many: those of the latter go');

-- What is the package's own

select baton_test.start('p') \g /dev/null
select message_id as pm from baton.messages where run_id = 'p' \gset
select is((select outcome from baton.remove_messages(array[:pm::bigint])), 'unknown', 'remove: a run message is none of an operator''s');
select isnt(baton_test.messages('p'), null, 'remove: it stays');
select is((select outcome from baton.redrive(array[:pm::bigint])), 'unknown', 'redrive: nor is it ever dead');
select is_empty(
  $$select k.kind from unnest(array['run', 'task']) as k (kind) where baton_test.sqlstate_of(format('select baton.send(''q'', null, kind => %L)', k.kind)) <> '22023'$$,
  'send: run and task messages can''t be sent'
);
select * from finish();
rollback;
