\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(68);

-- Granted

select baton_test.start('a') \g /dev/null
select m as am, d as ad from baton_test.take('a') \gset
select * from baton.begin_replay(:am, :ad) \gset a_
select is(:'a_outcome'::text, 'granted', 'begin: nobody holds it');
select is(
  :'a_run_id' || ' ' || :'a_workflow_name' || ' ' || :'a_last_seq' || ' ' || :'a_status', 'a w 1 running',
  'begin: it is told what to replay'
);
select is(:'a_clock'::timestamptz, baton._now(), 'begin: and the clock by which a sleep is over');
select ok(not :{?a_retry_after}, 'begin: and not to come again');
select ok(:a_replay_epoch between 0 and 9007199254740991, 'begin: an epoch is exact in JSON');
select is(baton_test.run('a'), 'running 1/0/0 0/0 held', 'begin: the run is running, and its wake is served');
select is(baton_test.messages('a'), 'keyless 00:00:30 claimed', 'begin: its message gives up its key');
select results_eq(
  $$select r.replay_message_id, r.replay_delivery, r.replay_backend, r.replay_began_at from baton.runs as r
  where r.run_id = 'a'$$,
  format('select %s::bigint, %s::bigint, null::integer, baton._now()', :am, :ad),
  'begin: the row says under which receipt, since when, and that it is a lease'
);
select is(baton_test.incidents('replay_lost'), 0::bigint, 'begin: nothing was lost');

-- Held under this receipt

select baton_test.advance('29.999999 seconds') \g /dev/null
select * from baton.begin_replay(:am, :ad, 'session') \gset again_
select is(:'again_outcome'::text, 'granted', 'begin: the same receipt is granted anew, its answer was lost');
select isnt(:again_replay_epoch::bigint, :a_replay_epoch::bigint, 'begin: with a new epoch');
select is((select r.replay_backend from baton.runs as r where r.run_id = 'a'), pg_backend_pid(), 'begin: session: the row keeps the connection');
select is(baton_test.run('a'), 'running 1/0/0 0/0 held', 'begin: that is no lapse');
select throws_ok(
  format('select baton.append_event(''a'', %s, ''x.y'')', :a_replay_epoch), 'PB001', null, 'begin: the first epoch is fenced off'
);
select is(baton_test.finish_replay('a', :a_replay_epoch, 1), 'lost running', 'begin: and can''t end the replay');

-- The receipt

select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.answer(:am, :ad), 'lost', 'begin: at its deadline a claim begins nothing');
select is(baton_test.run('a'), 'running 1/0/0 0/0 held', 'begin: which changes nothing');
select is(baton_test.answer(:am, :ad + 1), 'lost', 'begin: under another delivery it is lost');
select is(baton_test.answer(:am, null), 'lost', 'begin: under none too');
select is(baton_test.answer(null, null), 'lost', 'begin: nulls are lost');
select is(baton_test.answer(-1, 1), 'lost', 'begin: an unknown message is lost');
select * from baton_test.hold('users') \gset u
select is(baton_test.answer(:um, :ud), 'lost', 'begin: a user''s message is no run message');
select baton_test.step('a', 't', 'created') \g /dev/null
select m as tm from baton_test.task_message('a', 't', 0) \gset
select t.delivery as td from baton.claim('q', max_messages => 10) as t where t.message_id = :tm \gset
select is(baton_test.answer(:tm, :td), 'lost', 'begin: a task message is none either');
select is(baton_test.incidents('lost'), 1::bigint, 'begin: an incident for the receipt that another delivery has taken');
select is(baton_test.answer(:am, :ad), 'lost', 'begin: while that delivery''s claim lives too');
select ok((select m.claimed_at is not null and m.delivery <> :ad from baton.messages as m where m.message_id = :am), 'begin: which is left alone');
select is(baton_test.run('a'), 'running 1/0/0 0/0 held', 'begin: as the replay is');

-- The epoch

select baton_test.start('e') \g /dev/null
select m as em, d as ed from baton_test.take('e') \gset
savepoint taken_back;
select replay_epoch as first_epoch from baton.begin_replay(:em, :ed) \gset
rollback to savepoint taken_back;
select isnt((select replay_epoch from baton.begin_replay(:em, :ed)), :first_epoch::bigint, 'begin: an epoch that was rolled back never comes again');

-- Ended or unknown

select baton_test.start('b') \g /dev/null
select m as bm, d as bd from baton_test.take('b') \gset
select outcome from baton.cancel_run('b', 'enough') \g /dev/null
select is(baton_test.answer(:bm, :bd), 'terminal cancelled', 'begin: of an ended run it is told how it ended');
select is(baton_test.messages('b'), null, 'begin: and its message is gone');
select baton_test.start('c') \g /dev/null
select m as cm, d as cd from baton_test.take('c') \gset
delete from baton.runs where run_id = 'c';
select is(baton_test.answer(:cm, :cd), 'terminal', 'begin: of an unknown run: terminal, with no status');
select is(baton_test.messages('c'), null, 'begin: and its message is gone too');
select is(baton_test.answer(:bm, :bd), 'lost', 'begin: what was settled is lost');

-- Held under another receipt that lives

select baton_test.start('h') \g /dev/null
select m as hm, d as hd, e as he from baton_test.replay('h') \gset
select outcome from baton.wake_run('h') \g /dev/null
select m as h2m, d as h2d from baton_test.take('h') \gset
update baton.runs set wake_pending = false where run_id = 'h';
select baton_test.advance('29.999999 seconds') \g /dev/null
select outcome from baton.extend(:h2m, :h2d, '1 hour') \g /dev/null
select is(baton_test.answer(:h2m, :h2d), 'handed_over running', 'begin: a microsecond before its claim runs out the holder has it');
select is(baton_test.run('h'), 'running 1/0/0 0/0 wake held', 'begin: who is handed over leaves a wake');
select is(baton_test.messages('h'), 'keyless 00:00:00.000001 claimed', 'begin: and its message goes');
select is(baton_test.incidents('replay_lost'), 0::bigint, 'begin: that is no incident');
select lives_ok(format('select baton.append_event(''h'', %s, ''x.y'')', :he), 'begin: the holder goes on writing');
select is(baton_test.finish_replay('h', :he, 2), 'ended suspended', 'begin: until it ends');
select is(baton_test.messages('h'), 'wake 00:00:00', 'begin: and the wake that was handed over is sent');

-- A loser that owns bodies keeps its message

select m as hm, d as hd, e as he from baton_test.replay('h') \gset
select baton_test.body('h', :hm, :hd) \g /dev/null
select is(baton_test.finish_replay('h', :he, 2), 'ended running', 'begin: a body runs on under a message');
select outcome from baton.wake_run('h') \g /dev/null
select m as h3m, d as h3d, e as h3e from baton_test.replay('h') \gset
select is(baton_test.answer(:hm, :hd), 'handed_over running', 'begin: its owner asks while another replays');
select is(baton_test.messages('h'), 'keyless 00:00:30 claimed, keyless 00:00:30 claimed', 'begin: and keeps its message');
select is(baton_test.finish_replay('h', :h3e, 2), 'ended running', 'begin: the other ends');
select is(baton_test.answer(:hm, :hd), 'granted', 'begin: then the owner replays under it');

-- Lost, under the same message

select baton_test.start('l') \g /dev/null
select m as lm, d as ld, e as le from baton_test.replay('l') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as l2m, d as l2d from baton_test.take('l') \gset
select is(:l2m::bigint, :lm::bigint, 'begin: a dead holder''s message comes back by itself');
select is(baton_test.answer(:l2m, :l2d), 'granted', 'begin: at its deadline another takes the replay over');
select is(baton_test.run('l'), 'running 1/0/0 0/1 held', 'begin: which counts a lapse');
select is(baton_test.messages('l'), 'keyless 00:00:30 claimed', 'begin: a lost replay''s own redelivery stays');
select results_eq(
  $$select i.run_id, i.message_id, i.queue_name, i.detail ->> 'replay_epoch' from baton.incidents as i where i.kind = 'replay_lost'$$,
  format('select %L, %s::bigint, %L, %L', 'l', :lm, 'q', :le), 'begin: and leaves an incident'
);
select throws_ok(format('select baton.append_event(''l'', %s, ''x.y'')', :le), 'PB001', null, 'begin: the lost one can''t write');

-- Lost, under another message

select baton_test.start('o') \g /dev/null
select m as om, d as od, e as oe from baton_test.replay('o') \gset
select outcome from baton.signal_run('o', 's') \g /dev/null
select m as o2m, d as o2d from baton_test.take('o', '1 minute') \gset
select baton_test.advance('30 seconds') \g /dev/null
select is(baton_test.answer(:o2m, :o2d), 'granted', 'begin: a holder whose claim ran out is replaced by any message');
select is(baton_test.messages('o'), 'keyless 00:00:30 claimed', 'begin: its message goes with it');
select is(baton_test.state(:om), null, 'begin: that is the lost one''s');
select is((select outcome from baton.extend(:om, :od)), 'lost', 'begin: which can''t extend it any more');

-- Lost: a message that owns bodies stays, one that another delivery has taken too

select baton_test.start('k') \g /dev/null
select m as km, d as kd, e as ke from baton_test.replay('k') \gset
select baton_test.body('k', :km, :kd) \g /dev/null
update baton.runs set replay_backend = 2147483647 where run_id = 'k';
select outcome from baton.wake_run('k') \g /dev/null
select m as k2m, d as k2d from baton_test.take('k') \gset
select is(baton_test.answer(:k2m, :k2d), 'granted', 'begin: a session hold ends with its connection, though its claim lives');
select is(baton_test.messages('k'), 'keyless 00:00:30 claimed, keyless 00:00:30 claimed', 'begin: the bodies under its message live on');
select is((select outcome from baton.extend(:km, :kd)), 'extended', 'begin: and are extended');
select baton_test.start('n') \g /dev/null
select m as nm, d as nd, e as ne from baton_test.replay('n', '10 seconds') \gset
select outcome from baton.wake_run('n') \g /dev/null
select m as n2m, d as n2d from baton_test.take('n', '1 minute') \gset
select baton_test.advance('10 seconds') \g /dev/null
select count(*) from baton.claim('q', for_run => 'n') \g /dev/null
select is(baton_test.answer(:n2m, :n2d), 'granted', 'begin: once another claimed the lost one''s message');
select isnt(baton_test.state(:nm), null, 'begin: that message is the other''s, and stays');

-- At the limit

select baton_test.set_limits(10, 2) \g /dev/null
select baton_test.start('x') \g /dev/null
select baton_test.replay('x') \g /dev/null
select baton_test.advance('30 seconds') \g /dev/null
select baton_test.replay('x') \g /dev/null
select baton_test.body('x', (select m.message_id from baton.messages as m where m.run_id = 'x'), 1) \g /dev/null
select baton_test.advance('30 seconds') \g /dev/null
select m as xm, d as xd from baton_test.take('x') \gset
select is(baton_test.answer(:xm, :xd), 'terminal failed', 'begin: the lapse that reaches max_lapses ends the run');
select results_eq(
  $$select r.status, r.error from baton.get_run('x') as r$$, $$values ('failed', '{"reason": "max_lapses"}'::jsonb)$$,
  'begin: which says why'
);
select results_eq(
  $$select coalesce(baton_test.messages('x'), '-'), t.status, r.lapses from baton.tasks as t inner join baton.runs as r using (run_id) where t.run_id = 'x'$$,
  $$values ('-', 'cancelled', 2)$$, 'begin: its messages and tasks end with it'
);
select results_eq(
  $$select i.kind from baton.incidents as i where i.run_id = 'x' order by i.incident_id$$,
  array['replay_lost', 'replay_lost', 'limit_reached'], 'begin: and incidents tell'
);

-- Arguments

select is_empty(
  $$select h.hold from unnest(array['', 'Lease', 'advisory']) as h (hold)
  where baton_test.sqlstate_of(format('select baton.begin_replay(1, 1, %L)', h.hold)) <> '22023'$$,
  'begin: other holds are refused'
);
select baton_test.start('z') \g /dev/null
select m as zm, d as zd from baton_test.take('z') \gset
select is(baton_test.answer(:zm, :zd, null), 'granted', 'begin: null is the default hold');

-- In one statement with the claim, as in docs/guides/replay.md

select outcome from baton.start_run('w', null, 'both', queue_name => 'both') \g /dev/null
select outcome from baton.send('both', '1') \g /dev/null
select results_eq(
  $$select m.kind, r.outcome, r.run_id
  from baton.claim('both', max_messages => 2) as m
  left join lateral (
    select b.* from baton.begin_replay(m.message_id, m.delivery) as b where m.kind = 'run'
  ) as r on true
  order by m.kind$$,
  $$values ('run', 'granted', 'both'), (null, null, null)$$, 'begin: may be called in the claim''s statement'
);
select is_empty($$select from baton.incidents as i where i.queue_name = 'both'$$, 'begin: and is not, for other messages');
select * from finish();
rollback;
