/*
 * A mark says that no due message of a queue was below it. Claims believe it for ten seconds; a tick sets it five
 * seconds behind the clock or to the earliest message, whichever is less, and looks from the start once in each quarter
 * of a minute. A message below the mark is made here by setting the clock back while it is sent.
 */
\ir _begin.sql
\ir _queue.sql
select plan(28);

create function baton_test.mark(queue_name text)
returns text
language sql
stable
begin atomic
  select format('%s %s', q.mark, q.marked_at) from baton.queue_marks as q where q.queue_name = mark.queue_name;
end;

-- A message that is due at a moment of the past.
create function baton_test.send_at(queue_name text, at timestamptz)
returns text
language plpgsql
volatile
as $$
declare
  v_now timestamptz := baton._now();
begin
  perform baton_test.set_clock(send_at.at);
  perform baton.send(send_at.queue_name, to_jsonb(send_at.at));
  perform baton_test.set_clock(v_now);
  return 'sent';
end;
$$;

create function baton_test.marks_part()
returns integer
language sql
volatile
begin atomic
  select t.changed from baton.tick() as t where t.part = 'queue_marks';
end;

-- A queue has a mark from its first claim on

select outcome from baton.send('q', '1') \gset
select is(baton_test.mark('q'), null, 'marks: a send makes none');
select is_empty($$select * from baton.claim('empty')$$, 'marks: a claim that finds nothing');
select is(baton_test.mark('empty'), null, 'marks: makes none either');
select delivery from baton.claim('q') \gset
select is(
  baton_test.mark('q'), '-infinity -infinity', 'marks: the first that finds something makes one, from the start'
);

-- Where a tick sets it

select is(baton_test.marks_part(), 1, 'marks: a tick moves it');
select is(
  baton_test.mark('q'), '2025-12-31 23:59:55+00 2026-01-01 00:00:00+00',
  'marks: five seconds behind the clock where the only message is due later'
);
select is((select count(*) from baton.send('q', '2')), 1::bigint, 'marks: a fresh message');
select isnt_empty($$select * from baton.claim('q')$$, 'marks: is not hidden by one that is in flight or delayed');
select outcome from baton.send('q', '3', '20 seconds') \gset
select baton_test.set_clock('2026-01-01 00:01:00') \gset
select baton_test.marks_part() \gset
select is(
  baton_test.mark('q'), '2026-01-01 00:00:20+00 2026-01-01 00:01:00+00',
  'marks: at the earliest message where that is longer due'
);
select isnt_empty($$select * from baton.claim('q')$$, 'marks: a message at the mark exactly is given out');
select baton_test.set_clock('2026-01-01 00:02:00') \gset
select baton_test.marks_part() \gset
select count(*) from baton.claim('q', max_messages => 10) \gset
select baton_test.marks_part() \gset
select is(
  baton_test.mark('q'), '2026-01-01 00:01:55+00 2026-01-01 00:02:00+00', 'marks: it goes up when that is gone'
);

-- How long claims believe it

select baton_test.send_at('q', '2026-01-01 00:01:54.999999') \gset
select is_empty($$select * from baton.claim('q')$$, 'marks: a message that commits below the mark waits');
savepoint hidden;
select baton_test.set_clock('2026-01-01 00:02:09.999999') \gset
select is_empty($$select * from baton.claim('q')$$, 'marks: for as long as the mark is younger than ten seconds');
select baton_test.set_clock('2026-01-01 00:02:10') \gset
select isnt_empty($$select * from baton.claim('q')$$, 'marks: one of ten seconds is not believed');
rollback to hidden;
select baton_test.set_clock('2026-01-01 00:01:59.999999') \gset
select isnt_empty($$select * from baton.claim('q')$$, 'marks: nor one from the future: the clock was set back');
rollback to hidden;
select baton_test.send_at('q', '2026-01-01 00:01:55') \gset
select isnt_empty(
  $$select * from baton.claim('q')$$, 'marks: a transaction that is open for five seconds over a tick loses nothing'
);
rollback to hidden;

-- When a tick looks from the start

select baton_test.set_clock('2026-01-01 00:02:14.999999') \gset
select baton_test.marks_part() \gset
select is(
  baton_test.mark('q'), '2026-01-01 00:02:09.999999+00 2026-01-01 00:02:14.999999+00',
  'marks: in the same quarter of a minute a tick looks on from the mark'
);
select is_empty($$select * from baton.claim('q')$$, 'marks: and what lies below still waits');
rollback to hidden;
select baton_test.set_clock('2026-01-01 00:02:15') \gset
select baton_test.marks_part() \gset
select is(
  baton_test.mark('q'), '2026-01-01 00:01:54.999999+00 2026-01-01 00:02:15+00',
  'marks: in the next one it looks from the start: the mark goes down'
);
select isnt_empty($$select * from baton.claim('q')$$, 'marks: and what lay below is given out');
rollback to hidden;

-- Each queue has its own

select * from baton_test.hold('other') \gset o
select is((select count(*) from baton.queue_marks), 2::bigint, 'marks: a row a queue');
select outcome from baton.ack(:om, :od) \gset
select baton_test.set_clock('2026-01-01 00:03:00') \gset
select outcome from baton.send('other', '1') \gset
select baton_test.set_clock('2026-01-01 00:04:00') \gset
select baton_test.marks_part() \gset
select is(baton_test.marks_part(), 2, 'marks: a tick sets all of them');
select results_eq(
  $$select q.queue_name, q.mark from baton.queue_marks as q order by q.queue_name$$,
  $$values
  ('other', timestamptz '2026-01-01 00:03:00+00'),
  ('q', '2026-01-01 00:01:54.999999+00')$$,
  'marks: each by its own messages'
);

-- The end of a queue

select baton_test.set_clock('2026-01-02') \gset
select * from baton_test.hold('gone') \gset g
select baton_test.marks_part() \gset
select outcome from baton.ack(:gm, :gd) \gset
select baton_test.advance('1 hour') \gset
select baton_test.marks_part() \gset
select isnt(baton_test.mark('gone'), null, 'marks: a queue that has been empty for an hour keeps its row');
select baton_test.advance('1 microsecond') \gset
select baton_test.marks_part() \gset
select is(baton_test.mark('gone'), null, 'marks: and loses it after that');
select isnt(baton_test.mark('other'), null, 'marks: one with messages keeps it');
select outcome from baton.send('gone', '1') \gset
select isnt_empty($$select * from baton.claim('gone')$$, 'marks: without one a claim looks from the start');
select is(baton_test.mark('gone'), '-infinity -infinity', 'marks: and makes it again');

select * from finish();
rollback;
