\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(70);

-- Ended

select baton_test.start('a') \g /dev/null
select m as am, d as ad, e as ae from baton_test.replay('a') \gset
update baton.runs set failures = 3, lapses = 2 where run_id = 'a';
select is(baton_test.finish_replay('a', :ae, 1), 'ended suspended', 'end: with nothing to do the run is suspended');
select is(baton_test.run('a'), 'suspended 1/0/1 0/0', 'end: it keeps what was seen, and counts begin anew');
select is(baton_test.messages('a'), null, 'end: the message is done');
select is((select outcome from baton.ack(:am, :ad)), 'lost', 'end: and its receipt spent');

-- This epoch, ended already

select is(baton_test.finish_replay('a', :ae, 1), 'ended suspended', 'end: repeated: ended');
select is(baton_test.finish_replay('a', :ae, 99, 'infinity'), 'ended suspended', 'end: whatever it says then');
select is(baton_test.run('a'), 'suspended 1/0/1 0/0', 'end: which changes nothing');
select is(baton_test.messages('a'), null, 'end: and wakes nobody');
select outcome from baton.signal_run('a', 's') \g /dev/null
delete from baton.messages where run_id = 'a';
update baton.runs set wake_pending = false where run_id = 'a';
select is(baton_test.finish_replay('a', :ae, 1), 'ended suspended', 'end: repeated after a signal whose wake was lost: ended');
select is(baton_test.messages('a'), 'wake 00:00:00', 'end: and a wake is sent for what is unread');
select is(baton_test.run('a'), 'suspended 2/2/1 0/0 wake', 'end: and noted');
select is(baton_test.finish_replay('a', :ae, 1), 'ended suspended', 'end: again');
select is(baton_test.messages('a'), 'wake 00:00:00', 'end: there is one');
select m as am, d as ad, e as ae from baton_test.replay('a') \gset
select is(baton_test.finish_replay('a', :ae, 2), 'ended suspended', 'end: once that is seen');
select is(baton_test.finish_replay('a', :ae, 2), 'ended suspended', 'end: repeated');
select is(baton_test.messages('a'), null, 'end: it wakes nobody');

-- Another epoch, or no receipt

select outcome from baton.wake_run('a') \g /dev/null

select m as am, d as ad, e as a2e from baton_test.replay('a') \gset
select is(baton_test.finish_replay('a', :ae, 2), 'lost running', 'end: an earlier epoch is lost');
select is(baton_test.finish_replay('a', null, 2), 'lost running', 'end: none is lost');
select is(baton_test.finish_replay('a', :ae, 99), 'lost running', 'end: before its position is looked at');
select is(baton_test.messages('a'), 'keyless 00:00:30 claimed', 'end: whose answer leaves the message alone');
select is(baton_test.run('a'), 'running 2/2/2 0/0 held', 'end: and the replay');
select baton_test.start('never') \g /dev/null
select is(baton_test.finish_replay('never', null, 1), 'lost pending', 'end: of a run that was never replayed: lost');
select baton_test.start('t') \g /dev/null
select m as tm, d as td, e as te from baton_test.replay('t') \gset
select baton_test.advance('30 seconds') \g /dev/null
select baton_test.start('t2') \g /dev/null
select m as t2m, d as t2d, e as t2e from baton_test.replay('t2') \gset
select baton_test.advance('30 seconds') \g /dev/null
select is(baton_test.finish_replay('t2', :t2e, 1), 'ended suspended', 'end: a claim that only ran out still ends its replay');
select count(*) from baton.claim('q', for_run => 't') \g /dev/null
select is(baton_test.finish_replay('t', :te, 1), 'lost running', 'end: once another claimed its message it is lost');
select is(
  (select string_agg(i.detail ->> 'verb', ' ') from baton.incidents as i where i.kind = 'lost' and i.message_id = :tm), 'end_replay', 'end: which an incident tells'
);
delete from baton.incidents;
select is(baton_test.finish_replay('t', :te, null), 'lost running', 'end: lost before its position is looked at');
select is((select count(*) from baton.incidents as i where i.kind = 'lost' and i.message_id = :tm), 1::bigint, 'end: the incident too');
select is(baton_test.run('t'), 'running 1/0/0 0/0 held', 'end: and the replay is there to be found lost');
select baton_test.start('busy') \g /dev/null
select m as bm, d as bd, e as be from baton_test.replay('busy') \gset
update baton.messages set claimed_at = null where message_id = :bm; -- as a begin that answered busy does
select is(baton_test.finish_replay('busy', :be, 1), 'lost running', 'end: a receipt that busy has spent ends nothing');

-- Arguments

select baton_test.start('p') \g /dev/null
select m as pm, d as pd, e as pe from baton_test.replay('p') \gset
select outcome from baton.append_event('p', :pe, 'x.y') \g /dev/null
select is_empty(
  format(
    $$select p.seen, p.wake_at from (values ('3', null), ('-1', null), (null, null), ('2', 'infinity'), ('2', '-infinity')) as p (seen, wake_at)
    where baton_test.sqlstate_of(format('select baton.end_replay(''p'', %s, %%L, %%L)', p.seen, p.wake_at)) <> '22023'$$, :pe
  ),
  'end: a position beyond the log, below it or none, and an infinite wake_at are refused'
);
select is(baton_test.run('p'), 'running 2/0/0 0/0 held', 'end: which changes nothing');
select is(baton_test.finish_replay('p', :pe, 0), 'ended suspended', 'end: less than the log is taken, if nothing in it asks for a replay');
select is(baton_test.run('p'), 'suspended 2/0/0 0/0', 'end: as what was seen');

-- Again

select baton_test.start('g') \g /dev/null
select m as gm, d as gd, e as ge from baton_test.replay('g') \gset
select outcome from baton.append_event('g', :ge, 'x.y') \g /dev/null
select outcome from baton.signal_run('g', 's') \g /dev/null
select outcome from baton.append_event('g', :ge, 'x.z') \g /dev/null
select baton_test.run('g') as before, baton_test.messages('g') as had \gset
select is(baton_test.finish_replay('g', :ge, 2), 'again 4 running', 'end: an unread signal: again, also where the replay wrote since');
select is(baton_test.run('g'), :'before'::text, 'end: again changes nothing of the run');
select is(baton_test.messages('g'), :'had'::text, 'end: and nothing of its messages');
select is(baton_test.finish_replay('g', :ge, 3), 'ended suspended', 'end: its own events never ask for a replay');
select is(baton_test.messages('g'), 'wake 00:00:00', 'end: the wake that came meanwhile is served by a replay after it');
select is(baton_test.run('g'), 'suspended 4/3/3 0/0 wake', 'end: and is still to be served');
select baton_test.start('sp') \g /dev/null
select m as spm, d as spd, e as spe from baton_test.replay('sp') \gset
select outcome from baton.signal_run('sp', 's') \g /dev/null
delete from baton.messages where message_id = (select r.wake_message_id from baton.runs as r where r.run_id = 'sp');
select is(baton_test.finish_replay('sp', :spe, 2), 'ended suspended', 'end: a wake that was lost meanwhile');
select is(baton_test.messages('sp'), 'wake 00:00:00', 'end: is sent');

-- While a task is unfinished

select baton_test.start('r') \g /dev/null
select m as rm, d as rd, e as re from baton_test.replay('r') \gset
select baton_test.step('r', 'done', 'completed', 'failed', 'skipped', 'cancelled') \g /dev/null
select is(baton_test.finish_replay('r', :re, 1), 'ended suspended', 'end: tasks that have ended keep nothing running');
select outcome from baton.wake_run('r') \g /dev/null
select m as rm, d as rd, e as re from baton_test.replay('r') \gset
select baton_test.step('r', 'open', 'completed', 'created') \g /dev/null
select is(baton_test.finish_replay('r', :re, 1), 'ended running', 'end: with a task to do the run is running');
select is(baton_test.messages('r'), null, 'end: its message goes, it owns none');
select outcome from baton.wake_run('r') \g /dev/null
select m as rm, d as rd, e as re from baton_test.replay('r') \gset
update baton.tasks set status = 'started', owner_message_id = :rm, owner_delivery = :rd where run_id = 'r' and step_slug = 'open' and task_index = 1;
select is(baton_test.finish_replay('r', :re, 1), 'ended running', 'end: with a body under the message');
select is(baton_test.messages('r'), 'keyless 00:00:30 claimed', 'end: the message stays with its handler');
select is(baton_test.run('r'), 'running 1/0/1 0/0', 'end: while the replay has ended');

-- Timers

select baton_test.idle('w', baton._now() + interval '1 hour') \g /dev/null
select is(baton_test.messages('w'), 'timer 01:00:00', 'end: wake_at has a timer message');
select is(baton_test.run('w'), 'suspended 1/0/1 0/0 01:00:00', 'end: and is kept');
select outcome from baton.wake_run('w') \g /dev/null
select m as wm, d as wd, e as we from baton_test.replay('w') \gset
select is(baton_test.finish_replay('w', :we, 1, baton._now() + interval '2 hours'), 'ended suspended', 'end: another wake_at');
select is(baton_test.messages('w'), 'timer 02:00:00', 'end: takes the place of the first');
select outcome from baton.wake_run('w') \g /dev/null
select m as wm, d as wd, e as we from baton_test.replay('w') \gset
select is(baton_test.finish_replay('w', :we, 1), 'ended suspended', 'end: no wake_at');
select is(baton_test.messages('w'), null, 'end: takes the timer away');
select is(baton_test.run('w'), 'suspended 1/0/1 0/0', 'end: and wake_at');
select outcome from baton.wake_run('w') \g /dev/null
select m as wm, d as wd, e as we from baton_test.replay('w') \gset
select is(baton_test.finish_replay('w', :we, 1, baton._now() - interval '1 hour'), 'ended suspended', 'end: a wake_at that has passed');
select is(baton_test.messages('w'), 'timer 00:00:00', 'end: is due at once, and no earlier: claims don''t look back');
select m as wm, d as wd, e as we from baton_test.replay('w') \gset
select is(baton_test.messages('w'), 'keyless 00:00:30 claimed', 'end: a timer under which a replay was granted has no key');
select baton_test.body('w', :wm, :wd) \g /dev/null
select is(baton_test.finish_replay('w', :we, 1, baton._now() + interval '1 minute'), 'ended running', 'end: it became the owner of a body');
select is(baton_test.messages('w'), 'keyless 00:00:30 claimed, timer 00:01:00', 'end: the next timer is not delayed by it');

-- A timer that somebody has claimed loses its key

select baton_test.idle('c', baton._now()) \g /dev/null
select m as cm, d as cd from baton_test.take('c') \gset
select outcome from baton.wake_run('c') \g /dev/null
select m as c2m, d as c2d, e as ce from baton_test.replay('c') \gset
select is(baton_test.finish_replay('c', :ce, 1, baton._now() + interval '1 hour'), 'ended suspended', 'end: while the old timer is claimed');
select is(baton_test.messages('c'), 'keyless 00:00:30 claimed, timer 01:00:00', 'end: it loses its key to the new one');
select is(baton_test.answer(:cm, :cd), 'granted', 'end: and its holder still replays');
select is(baton_test.messages('c'), 'keyless 00:00:30 claimed, timer 01:00:00', 'end: whose grant leaves the new one alone');
select baton_test.idle('v', baton._now()) \g /dev/null
select m as vm, d as vd from baton_test.take('v', '0') \gset
select outcome from baton.wake_run('v') \g /dev/null
select t.message_id as v2m, t.delivery as v2d from baton.runs as r, lateral (select c.* from baton.claim('q', for_run => 'v', max_messages => 2) as c) as t where t.message_id = r.wake_message_id \gset
update baton.messages set visible_at = baton._now() where message_id = :vm;
select b.replay_epoch as ve from baton.begin_replay(:v2m, :v2d) as b \gset
select is(baton_test.finish_replay('v', :ve, 1, baton._now() + interval '1 hour'), 'ended suspended', 'end: while the old timer''s claim has run out');
select is(baton_test.messages('v'), 'timer 01:00:00', 'end: it is set to the new time, and its claim is over');

-- Ended

select baton_test.start('x') \g /dev/null
select m as xm, d as xd, e as xe from baton_test.replay('x') \gset
select outcome from baton.cancel_run('x', 'enough') \g /dev/null
select is(baton_test.finish_replay('x', 1, 99), 'terminal cancelled', 'end: of an ended run, under another epoch');
select is(baton_test.messages('x'), 'keyless 00:00:30 claimed', 'end: which leaves the message alone');
select is(baton_test.finish_replay('x', :xe, 99), 'terminal cancelled', 'end: of an ended run, under its epoch');
select is(baton_test.messages('x'), null, 'end: the message goes');
select is(baton_test.finish_replay('nobody', 1, 1), 'terminal', 'end: of an unknown run');
select * from finish();
rollback;
