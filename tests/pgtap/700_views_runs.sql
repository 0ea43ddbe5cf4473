\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(10);

select baton_test.idle('a', baton._now() + interval '1 hour') \g /dev/null
select baton_test.start('b') \g /dev/null
select baton_test.idle('c') \g /dev/null
select outcome from baton.signal_run('c', 's') \g /dev/null
select baton_test.start('d') \g /dev/null
select outcome from baton.signal_run('d', 's') \g /dev/null
select outcome from baton.cancel_run('d', 'x') \g /dev/null
update baton.runs set failures = 2, lapses = 3 where run_id = 'a';
select results_eq(
  $$select o.run_id, o.workflow_name, o.queue_name, o.status, o.last_seq, o.unread, o.failures, o.lapses,
    o.wake_at - baton._now(), o.created_at, o.ended_at from baton.run_overview as o order by o.run_id$$,
  $$values ('a', 'w', 'q', 'suspended', 1::bigint, false, 2, 3, interval '1 hour', baton._now(), null::timestamptz),
    ('b', 'w', 'q', 'pending', 1, true, 0, 0, null, baton._now(), null),
    ('c', 'w', 'q', 'suspended', 2, true, 0, 0, null, baton._now(), null),
    ('d', 'w', 'q', 'cancelled', 3, false, 0, 0, null, baton._now(), baton._now())$$,
  'run_overview: a row a run'
);
select results_eq(
  $$select o.run_id from baton.run_overview as o where o.active order by o.run_id$$, $$values ('b'), ('c')$$,
  'run_overview: active are those that are pending, or have something unread'
);

select is_empty($$select * from baton.replays$$, 'replays: none has not ended');
select baton.register_worker_function('f', url => 'http://w.test') \g /dev/null
select outcome from baton.register_worker(function_name => 'f', worker_id => lpad('7', 32, '0')::uuid) \g /dev/null
select c.message_id as bm, c.delivery as bd from baton.claim('q', lpad('7', 32, '0')::uuid, for_run => 'b') as c \gset
select replay_epoch as be from baton.begin_replay(:bm, :bd, 'session') \gset
select m as cm, d as cd, e as ce from baton_test.replay('c') \gset
select baton_test.advance('10 seconds') \g /dev/null
select results_eq(
  $$select p.run_id, p.workflow_name, p.queue_name, p.replay_epoch, p.message_id, p.worker_id, p.backend, p.hold, p.age, p.claim_remaining, p.alive
    from baton.replays as p order by p.run_id$$,
  format($$values ('b', 'w', 'q', %s::bigint, %s::bigint, lpad('7', 32, '0')::uuid, pg_backend_pid(), 'session', interval '10 seconds', interval '20 seconds', true),
    ('c', 'w', 'q', %s, %s, null, null, 'lease', '10 seconds', '20 seconds', true)$$, :be, :bm, :ce, :cm),
  'replays: who replays, since when, until when'
);
select baton_test.advance('20 seconds') \g /dev/null
select results_eq($$select p.run_id, p.claim_remaining, p.alive from baton.replays as p order by p.run_id$$, $$values ('b', interval '0', false), ('c', '0', false)$$, 'replays: at its deadline a holder is not alive');
select outcome from baton.extend(:bm, :bd) \g /dev/null
update baton.runs set replay_backend = 2147483647 where run_id = 'b';
select baton_test.take('c') \g /dev/null
select results_eq(
  $$select p.run_id, p.claim_remaining, p.alive from baton.replays as p order by p.run_id$$, $$values ('b', interval '30 seconds', false), ('c', null, false)$$,
  'replays: nor where its connection is dead, or its message taken'
);
select outcome from baton.cancel_run('b', 'x') \g /dev/null
select outcome from baton.release_replay('c') \g /dev/null
select is_empty($$select * from baton.replays$$, 'replays: none of what has ended');

-- With a reader's rights

create role baton_reader;
select baton.grant_usage('baton_reader', 'observer') \g /dev/null
grant usage on schema tap to baton_reader;
select baton_test.start('l') \g /dev/null
delete from baton.messages where run_id = 'l';
set local role baton_reader;
select is((select count(*) from baton.run_overview), 5::bigint, 'observers: read run_overview');
select is((select count(*) from baton.replays), 0::bigint, 'observers: and replays');
select results_eq($$select w.run_id, w.workflow_name, w.queue_name, w.status, w.reason from baton.wedged_runs as w$$, $$values ('l', 'w', 'q', 'pending', 'replay')$$, 'observers: and wedged_runs');
reset role;
select * from finish();
rollback;
