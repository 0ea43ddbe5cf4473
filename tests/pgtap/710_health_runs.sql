\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(20);

-- The oldest message that is due

select baton_test.start('a') \g /dev/null
select baton_test.advance('1 minute') \g /dev/null
select is(baton_test.findings('oldest_ready_message'), null, 'health: a message that is due for a minute is no finding');
select baton_test.advance('1 second') \g /dev/null
select is(baton_test.findings('oldest_ready_message'), 'warning: q 1 messages are due, the oldest for 00:01:01', 'health: one for longer is');
savepoint claimed;
select * from baton_test.take('a') \g /dev/null
select is(baton_test.findings('oldest_ready_message'), null, 'health: until it is claimed');
rollback to claimed;

-- Claimed often

update baton.messages set lapses = 4 where run_id = 'a';
select is(baton_test.findings('claimed_often'), null, 'health: four claims without a grant are no finding');
update baton.messages set lapses = 5 where run_id = 'a';
select is(baton_test.findings('claimed_often'), 'warning: q 1 messages were claimed up to 5 times without a grant or a start', 'health: five are');
update baton.messages set lapses = 0 where run_id = 'a';
select is(baton_test.findings('claimed_often'), null, 'health: until one is');

-- Dead letters

select is(baton_test.findings('dead_letters'), null, 'health: no dead letters');
select * from baton_test.hold('mail') \gset m
select outcome from baton.fail(:mm, :md, 'x', final => true) \g /dev/null
select is(baton_test.findings('dead_letters'), 'warning: mail 1 messages', 'health: a dead letter');
savepoint dead;
select d.outcome from baton.redrive(array[:mm]) as d \g /dev/null
select is(baton_test.findings('dead_letters'), null, 'health: until it is redriven');
rollback to dead;

-- Replays held long

select m as am, d as ad, e as ae from baton_test.take('a', '1 hour') as t, lateral (select b.replay_epoch as e from baton.begin_replay(t.m, t.d, 'session') as b) as b \gset
select baton_test.advance('5 minutes') \g /dev/null
select is(baton_test.findings('long_replay'), null, 'health: a replay of five minutes');
select baton_test.advance('1 second') \g /dev/null
select is(
  baton_test.findings('long_replay'), 'warning: a held for 00:05:01 by an anonymous worker, backend ' || pg_backend_pid(), 'health: one held for longer, with age and backend'
);
select baton_test.advance('1 hour') \g /dev/null
select is(baton_test.findings('long_replay'), null, 'health: not one that is over');

-- Wedged runs

select is(baton_test.findings('wedged_runs'), null, 'health: nothing to recover');
delete from baton.messages;
select is(baton_test.findings('wedged_runs'), 'warning: 1 runs need a driver and have none, for example a', 'health: a wedged run');
select is(baton_test.findings('recovery'), null, 'health: recovery is on');
update baton.settings set recovery = false;
select is(baton_test.findings('recovery'), 'warning: settings.recovery is off: a run whose driver is lost stays where it is', 'health: it was switched off');
select is(baton_test.findings('wedged_runs'), 'critical: 1 runs need a driver and have none, for example a', 'health: with recovery off that is critical');
update baton.settings set recovery = true;
select is(baton_test.findings('recovery'), null, 'health: it is on again');
select count(*) from baton.tick() \g /dev/null
select is(baton_test.findings('wedged_runs'), null, 'health: after a tick there is none');

-- The server

select is(baton_test.findings('read_only'), null, 'health: the database takes writes');
select * from finish();
rollback;
