\ir _begin.sql
\ir _queue.sql
select plan(22);

create function baton_test.claimed(queue_name text)
returns bigint
language sql
volatile
begin atomic
  select count(*) from baton.claim(claimed.queue_name);
end;

-- Pausing

select * from baton_test.hold('q') \gset h
select outcome, message_id as waiting from baton.send('q', '1') \gset
select results_eq($$select * from baton.pause_queue('q')$$, $$values ('paused', false)$$, 'pause: a queue');
select is(baton_test.claimed('q'), 0::bigint, 'pause: nothing of it is claimed');
select is(baton_test.state(:waiting), '2026-01-01 00:00:00+00 free 0 0', 'pause: what waits stays as it is');
select outcome from baton.send('other', '1') \g /dev/null
select is(baton_test.claimed('other'), 1::bigint, 'pause: other queues go on');
select is((select outcome from baton.send('q', '2')), 'sent', 'pause: sending goes on');
select is((select outcome from baton.extend(:hm, :hd)), 'extended', 'pause: what is claimed can be extended');
select is((select outcome from baton.ack(:hm, :hd)), 'acked', 'pause: and finished');
select is(
  (select paused_at from baton.queue_stats where queue_name = 'q'), '2026-01-01 00:00:00+00',
  'pause: queue_stats tells since when'
);
select baton_test.advance('2 minutes') \g /dev/null
select results_eq(
  $$select * from baton.pause_queue('q')$$, $$values ('paused', true)$$, 'pause: again changes nothing'
);
select is(
  (select paused_at from baton.queue_stats where queue_name = 'q'), '2026-01-01 00:00:00+00',
  'pause: it counts from the first time'
);
select results_eq(
  $$select h.severity, h.subject, h.detail from baton.health() as h
  where h.finding in ('paused', 'oldest_ready_message') and h.subject = 'q'$$,
  $$values ('warning', 'q', 'since 2026-01-01 00:00:00+00; 2 messages are due')$$,
  'pause: health tells, and asks nobody to add workers'
);

-- A run of a paused queue is not wedged: its message waits

select outcome from baton.start_run('w', '1', 'r', 'q') \g /dev/null
select is((select count(*) from baton.claim('q', for_run => 'r')), 0::bigint, 'pause: nor for a run');
select is_empty('select * from baton.wedged_runs', 'pause: a run that waits is not wedged');

-- A queue that was never claimed from, and ticks

select outcome from baton.pause_queue('empty') \g /dev/null
select baton_test.advance('2 hours') \g /dev/null
select part from baton.tick() \g /dev/null
select baton_test.advance('2 hours') \g /dev/null
select part from baton.tick() \g /dev/null
select outcome from baton.send('empty', '1') \g /dev/null
select is(baton_test.claimed('empty'), 0::bigint, 'pause: one that was empty for hours stays paused');
select is((select ready from baton.queue_stats where queue_name = 'empty'), 1::bigint, 'pause: its message waits');

-- Resuming

select results_eq($$select * from baton.resume_queue('q')$$, $$values ('resumed', true)$$, 'resume: a paused queue');
select is(
  (select count(*) from baton.claim('q', max_messages => 10)), 3::bigint, 'resume: all that waited is handed out'
);
select results_eq(
  $$select * from baton.resume_queue('q')$$, $$values ('resumed', false)$$, 'resume: one that is not paused'
);
select results_eq(
  $$select * from baton.resume_queue('never')$$, $$values ('resumed', false)$$, 'resume: one that is not there'
);
select results_eq(
  $$select i.queue_name, i.detail ->> 'verb' from baton.incidents as i where i.kind = 'operator' order by i.incident_id$$,
  $$values ('q', 'pause_queue'), ('empty', 'pause_queue'), ('q', 'resume_queue')$$,
  'pause and resume: an incident for what changed something'
);
select is(baton_test.sqlstate_of($$select baton.pause_queue('baton.deliveries')$$), '22023', 'pause: not the package''s own');
select is(baton_test.sqlstate_of($$select baton.resume_queue(null)$$), '22023', 'resume: a queue without a name');

select * from finish();
rollback;
