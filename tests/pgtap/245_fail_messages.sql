\ir _begin.sql
\ir _queue.sql
select plan(39);

select * from baton_test.hold('q', 'k') \gset a
select results_eq(
  format('select outcome, visible_at from baton.fail(%s, %s, ''first'', ''1 minute'')', :am, :ad),
  $$values ('failed', timestamptz '2026-01-01 00:01:00+00')$$, 'fail: due again after the delay, from now on'
);
select is(
  baton_test.state(:am), '2026-01-01 00:01:00+00 free 1 0',
  'fail: nobody holds it; a failure is counted, no lapse'
);
select is((select last_error from baton.messages where message_id = :am), 'first', 'fail: the error is kept');
select is((select count(*) from baton.incidents), 0::bigint, 'fail: a failure is no incident');
select baton_test.advance('59.999999 seconds') \gset
select is_empty($$select * from baton.claim('q')$$, 'fail: a microsecond before that it is not offered');
select baton_test.advance('1 microsecond') \gset
select delivery as d2, failures, lapses from baton.claim('q') \gset
select results_eq(
  format('select %s, %s', :failures, :lapses), 'select 1, 0',
  'fail: at that moment it is, with its failures and no lapse'
);
select isnt(:d2::bigint, :ad::bigint, 'fail: the next delivery has a receipt of its own');
select results_eq(
  format(
    'select outcome, visible_at from baton.fail(message_id => %s, delivery => %s, error => null, delay => ''0'')',
    :am, :d2
  ),
  $$select 'failed', baton._now()$$, 'fail: a delay of nothing is taken, and an error may be null'
);
select is(
  (select last_error from baton.messages where message_id = :am), null,
  'fail: the last error is the last one''s'
);

-- At its limit

update baton.settings set max_failures = 3;
select baton_test.advance('1 second') \gset
select delivery as d3 from baton.claim('q') \gset
select results_eq(
  format('select outcome, visible_at from baton.fail(%s, %s, ''third'', ''1 hour'')', :am, :d3),
  $$values ('dead', null::timestamptz)$$, 'fail: at settings.max_failures it is dead at once, without a time'
);
select is(baton_test.state(:am), null, 'fail: the dead are not among the living');
select results_eq(
  $$select
    d.message_id, d.queue_name, d.kind, d.payload, d.headers, d.dedupe_key, d.failures, d.lapses, d.last_error,
    d.claimed_at, d.claimed_by, d.created_at, d.died_at, d.reason
  from baton.dead_messages as d$$,
  format(
    $$values (
      %s::bigint, 'q', 'mail', '"held"'::jsonb, '{"h": 1}'::jsonb, 'k', 3, 0, 'third',
      timestamptz '2026-01-01 00:01:01+00', null::uuid, timestamptz '2026-01-01 00:00:00+00',
      timestamptz '2026-01-01 00:01:01+00', 'failures'
    )$$, :am
  ),
  'fail: a dead message keeps its history'
);
select results_eq(
  $$select i.kind, i.at, i.queue_name, i.message_id, i.detail from baton.incidents as i$$,
  format(
    $$select 'limit_reached', baton._now(), 'q', %s::bigint, '{"reason": "failures"}'::jsonb$$, :am
  ),
  'fail: an incident tells of it'
);

-- Final

select * from baton_test.hold('final') \gset b
select results_eq(
  format('select outcome, visible_at from baton.fail(%s, %s, ''never'', final => true)', :bm, :bd),
  $$values ('dead', null::timestamptz)$$, 'fail: final is dead, whatever the count'
);
select results_eq(
  format('select d.failures, d.reason, d.last_error from baton.dead_messages as d where d.message_id = %s', :bm),
  $$values (1, 'final', 'never')$$, 'fail: final counts as a failure, and says why'
);
select * from baton_test.hold('final') \gset c
select is(
  (select outcome from baton.fail(:cm, :cd, 'no', final => null)), 'failed', 'fail: a null final is not final'
);

-- A claim that ran out

select * from baton_test.hold('late') \gset d
select baton_test.advance('30 seconds') \gset
select is(
  (select outcome from baton.fail(:dm, :dd, 'late', '0')), 'failed',
  'fail: at its deadline a claim still fails'
);
select is(baton_test.state(:dm) like '% free 1 0', true, 'fail: which counts a failure and no lapse');
select delivery as dd from baton.claim('late') \gset
select baton_test.advance('1 year') \gset
select is(
  (select outcome from baton.fail(:dm, :dd, 'late', '0')), 'failed',
  'fail: a year later too, while nobody has acted'
);

-- Lost

select is((select outcome from baton.fail(:dm, :dd, 'late')), 'lost', 'fail: its receipt is spent');
select is(baton_test.state(:dm) like '% free 2 0', true, 'fail: a lost one counts nothing');
select is((select visible_at from baton.fail(:dm, :dd, 'late')), null, 'fail: and says no time');
select is((select outcome from baton.fail(:bm, :bd, 'late')), 'lost', 'fail: a dead message is lost');
select is((select outcome from baton.fail(:dm, null, 'x', final => true)), 'lost', 'fail: a null delivery is lost');
select is((select outcome from baton.fail(null, null, 'x', final => true)), 'lost', 'fail: nulls are lost');
select is((select outcome from baton.fail(-1, 1, 'x')), 'lost', 'fail: an unknown message is lost');
select is(baton_test.incidents('lost'), 0::bigint, 'fail: no incident where no other delivery has the row');
select * from baton_test.hold('taken') \gset e
select baton_test.advance('30 seconds') \gset
select delivery as taker from baton.claim('taken') \gset
select baton_test.state(:em) as before \gset
select is(
  (select outcome from baton.fail(:em, :ed, 'x', final => true)), 'lost',
  'fail: once another claim has the message it is lost, final or not'
);
select is(baton_test.state(:em), :'before'::text, 'fail: and the other keeps it');
select results_eq(
  $$select i.message_id, i.detail from baton.incidents as i where i.kind = 'lost'$$,
  format(
    $$select %s::bigint, jsonb_build_object('verb', 'fail', 'delivery', %s)$$, :em, :ed
  ),
  'fail: an incident tells of it'
);

-- Back-off

update baton.settings set max_failures = 10000;
create function baton_test.backoffs(queue_name text, failures integer, tries integer)
returns setof double precision
language plpgsql
volatile
as $$
declare
  v_held record;
  v_until timestamptz;
begin
  for v_try in 1..backoffs.tries loop
    select h.m, h.d into v_held from baton_test.hold(backoffs.queue_name) as h;
    update baton.messages as m set failures = backoffs.failures - 1 where m.message_id = v_held.m;
    select f.visible_at into strict v_until from baton.fail(v_held.m, v_held.d, 'no') as f;
    return next extract(epoch from v_until - baton._now());
  end loop;
end;
$$;
select is_empty(
  $$select f.failures, b.seconds, f.expected
  from (
    values (1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (9, 256), (10, 512), (11, 900), (12, 900), (100, 900), (1999, 900)
  ) as f (failures, expected)
  cross join lateral baton_test.backoffs('backoff', f.failures, 40) as b (seconds)
  where b.seconds not between 0.8 * f.expected and 1.2 * f.expected$$,
  'fail: the back-off doubles from a second up to fifteen minutes, give or take a fifth'
);
select results_eq(
  $$select count(distinct b.seconds) > 100, min(b.seconds) < 15, max(b.seconds) > 17
  from baton_test.backoffs('jitter', 5, 200) as b (seconds)$$,
  'select true, true, true',
  'fail: spread over that range'
);
update baton.settings set backoff_base = '10 minutes', backoff_max = '10 years';
select is_empty(
  $$select b.seconds, f.expected
  from (
    values (1, 600.0), (2, 1200), (18, 78643200), (20, 314572800), (21, 315576000), (64, 315576000), (1999, 315576000)
  ) as f (failures, expected)
  cross join lateral baton_test.backoffs('settings', f.failures, 10) as b (seconds)
  where b.seconds not between 0.8 * f.expected and 1.2 * f.expected$$,
  'fail: settings say from where to where, up to ten years and thousands of failures'
);
update baton.settings set backoff_base = '0', backoff_max = '0';
select results_eq(
  $$select b.seconds from baton_test.backoffs('none', 7, 1) as b (seconds)$$, array[0::double precision],
  'fail: and may switch it off'
);

-- Arguments

select * from baton_test.hold('args') \gset g
select is_empty(
  $$select d.delay from unnest(array['-1 microsecond', '10 years 1 microsecond', '100 years']) as d (delay)
  where baton_test.sqlstate_of(format('select baton.fail(1, 1, ''x'', %L)', d.delay)) <> '22023'$$,
  'fail: a delay below zero or above ten years is refused, whatever the receipt'
);
select throws_ok(
  $$select baton.fail(1, 1, 'x', interval 'infinity')$$, baton_test.refuses_infinity(), null,
  'fail: an infinite one is refused'
);
update baton.settings set max_payload_bytes = 1024;
select throws_ok(
  format('select baton.fail(%s, %s, repeat(''ä'', 512) || ''x'')', :gm, :gd), '54000', null,
  'fail: an error over the limit of a payload is refused'
);
select is(baton_test.state(:gm) like '% claimed 0 0', true, 'fail: and nothing is counted');
select is(
  (select outcome from baton.fail(:gm, :gd, repeat('ä', 512), interval '10 years')), 'failed',
  'fail: one of exactly the limit, and ten years, are taken'
);

select * from finish();
rollback;
