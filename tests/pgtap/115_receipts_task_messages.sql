\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(33);

create function baton_test.ack(message_id bigint, delivery bigint, force boolean default false)
returns text
language sql
volatile
begin atomic
  select a.outcome from baton.ack(ack.message_id, ack.delivery, ack.force) as a;
end;

create function baton_test.extend(message_id bigint, delivery bigint, visibility interval default null)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', x.outcome, x.visible_at - baton._now()) from baton.extend(extend.message_id, extend.delivery, extend.visibility) as x;
end;

-- claim gives out what start_task wants

select baton_test.queued('a', 2) \g /dev/null
select results_eq(
  $$select c.kind, c.run_id, c.step_slug, c.task_index, c.payload, c.headers, c.lapses from baton.claim('a', max_messages => 10) as c$$,
  $$values ('task', 'a', 's', 0, null::jsonb, null::jsonb, 0), ('task', 'a', 's', 1, null, null, 0)$$, 'claim: task messages'
);
select is((select count(*) from baton.claim('a', for_run => 'a')), 0::bigint, 'claim: for_run takes run messages only');
select baton_test.advance('30 seconds') \g /dev/null
select is((select c.lapses from baton.claim('a') as c), 1, 'claim: a lapse of a message');
select baton_test.set_limits(1, 1) \g /dev/null
select baton_test.advance('30 seconds') \g /dev/null
select is((select count(*) from baton.claim('a', max_messages => 10)), 2::bigint, 'claim: a task message is never at its limit');
select baton_test.advance('1 hour') \g /dev/null
select part from baton.tick() \g /dev/null
select is((select count(*) from baton.dead_messages), 0::bigint, 'tick: nor a dead letter');
select is((select count(*) from baton.messages as m where m.kind = 'task'), 2::bigint, 'tick: both are there');
update baton.settings set max_failures = default, max_lapses = default;

-- ack: only with its task

select baton_test.queued('b', 2) \g /dev/null
select m as bm, d as bd from baton_test.take_task('b') \gset
select is(baton_test.ack(:bm, :bd), 'in_use', 'ack: its task is unfinished');
select is(baton_test.begin(:bm, :bd), 'execute s/0#1', 'ack: (it starts)');
select is(baton_test.ack(:bm, :bd), 'in_use', 'ack: it runs');
select results_eq(
  format('select * from baton.ack_many(baton_test.receipts(%s, %s))', :bm, :bd), format($$values ('in_use', %s::bigint)$$, :bm), 'ack_many: too'
);
select is(baton_test.messages('b'), 's/0 00:00:30 claimed, s/1 00:00:00', 'ack: nothing is changed');
select is(baton_test.ack(:bm, :bd, true), 'acked', 'ack: by force');
select is(baton_test.task('b'), 'started 1 0/0 under nothing', 'ack: its task has nobody then');
select is(baton_test.wedged(), 'b task', 'ack: which the next round of recovery mends');
select is((select string_agg(r.run_id || ' ' || r.reason, ', ') from baton.recover_runs() as r), 'b task', 'ack: it wakes the run');
select m as b2m, d as b2d, e as b2e from baton_test.replay('b') \gset
select is(baton_test.dispatch('b', :b2e), 'enqueue s/0#1, queued s/1#0', 'ack: and the task is sent anew');
select is(baton_test.complete('b', :bm, :bd), 'completed', 'ack: the body that went on may still complete it');
select is(baton_test.messages('b'), 's/1 00:00:00, keyless 00:00:30 claimed', 'ack: and that message goes');
select baton_test.queued('c') \g /dev/null
select m as cm, d as cd from baton_test.take_task('c') \gset
update baton.tasks set status = 'completed' where run_id = 'c';
select is(baton_test.ack(:cm, :cd), 'acked', 'ack: its task has ended');
select baton_test.queued('c2') \g /dev/null
select m as cm, d as cd from baton_test.take_task('c2') \gset
delete from baton.tasks where run_id = 'c2';
select is(baton_test.ack(:cm, :cd), 'acked', 'ack: or is unknown');
select is(baton_test.ack(:cm, :cd), 'lost', 'ack: then it is gone');

-- extend: cancelled where its task has ended

select baton_test.queued('d', 4) \g /dev/null
select m as dm, d as dd, a as da from baton_test.started('d') \gset
select m as d1m, d as d1d, a as d1a from baton_test.started('d', 1) \gset
select m as d2m, d as d2d from baton_test.take_task('d', 2) \gset
select m as d3m, d as d3d from baton_test.take_task('d', 3) \gset
select is(baton_test.extend(:dm, :dd, '1 minute'), 'extended 00:01:00', 'extend: a task that runs');
select is(baton_test.extend(:d2m, :d2d, '1 minute'), 'extended 00:01:00', 'extend: one that was not started');
select baton_test.fail('d', :dm, :dd, final => true) \g /dev/null
select is(baton_test.extend(:d1m, :d1d), 'cancelled', 'extend: its step has ended');
select is(baton_test.state(:d1m), null, 'extend: the message goes');
select results_eq(
  format('select x.outcome, x.message_id, x.visible_at from baton.extend_many(baton_test.receipts(%s, %s, %s, %s, %s, %s)) as x', :d2m, :d2d, :d1m, :d1d, :d3m, :d3d),
  format($$values ('cancelled', %s::bigint, null::timestamptz), ('lost', %s, null), ('cancelled', %s, null)$$, :d2m, :d1m, :d3m), 'extend_many: too, in the caller''s order'
);
select is(baton_test.messages('d'), 'wake 00:00:00', 'extend_many: the messages go');
select baton_test.queued('e') \g /dev/null
select m as em, d as ed, a as ea from baton_test.started('e') \gset
select outcome from baton.cancel_run('e', 'x') \g /dev/null
select is(baton_test.extend(:em, :ed), 'cancelled', 'extend: its run has ended');
select baton_test.queued('f') \g /dev/null
select m as fm, d as fd, a as fa from baton_test.started('f') \gset
delete from baton.tasks where run_id = 'f';
select is(baton_test.extend(:fm, :fd), 'cancelled', 'extend: its task is unknown');
select baton_test.queued('g') \g /dev/null
select m as gm, d as gd, a as ga from baton_test.started('g') \gset
select baton_test.advance('30 seconds') \g /dev/null
select is(baton_test.extend(:gm, :gd), 'extended 00:00:30', 'extend: a claim that ran out, while nobody acted on it');
select m as g2m, d as g2d from baton_test.inline('g2') \gset
select baton_test.complete('g2', null, null) \g /dev/null
select is(baton_test.extend(:g2m, :g2d), 'extended 00:00:30', 'extend: a run message whose body has ended: its run is open');

-- Claimed, awaiting: extend is lost; what others say of such messages

select is(baton_test.sqlstate_of('select * from baton.send(''q'', null, kind => ''task'')'), '22023', 'send: nobody sends task messages');
select baton_test.queued('h') \g /dev/null
select is(
  (select string_agg(r.outcome, ' ') from baton.remove_messages(array(select m.message_id from baton.messages as m where m.run_id = 'h')) as r),
  'unknown', 'remove_messages: only users'' messages'
);
select * from finish();
rollback;
