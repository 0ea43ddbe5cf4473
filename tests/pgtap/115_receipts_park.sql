\ir _begin.sql
\ir _queue.sql
select plan(23);

select * from baton_test.hold('q') \gset a
select baton_test.advance('10 seconds') \gset
select results_eq(
  format('select outcome, visible_at from baton.park(%s, %s, ''1 minute'')', :am, :ad),
  $$values ('parked', timestamptz '2026-01-01 00:01:10+00')$$, 'park: due again after the delay, from now on'
);
select is(baton_test.state(:am), '2026-01-01 00:01:10+00 free 0 0', 'park: nobody holds it, and nothing is counted');
select baton_test.advance('59.999999 seconds') \gset
select is_empty($$select * from baton.claim('q')$$, 'park: a microsecond before that it is not offered');
select baton_test.advance('1 microsecond') \gset
select delivery as a_second, lapses as a_lapses from baton.claim('q') \gset
select is(:a_lapses, 0, 'park: at that moment it is, and that is no lapse');
select isnt(:a_second::bigint, :ad::bigint, 'park: the next delivery has a receipt of its own');
select results_eq(
  format('select outcome, visible_at from baton.park(%s, %s)', :am, :a_second),
  $$select 'parked', baton._now()$$, 'park: without a delay it is due at once'
);
select delivery as a_third from baton.claim('q') \gset
select results_eq(
  format('select outcome, visible_at from baton.park(message_id => %s, delivery => %s, delay => null)', :am, :a_third),
  $$select 'parked', baton._now()$$, 'park: null is the default'
);
select delivery as a_fourth from baton.claim('q') \gset
select results_eq(
  format('select outcome, visible_at from baton.park(%s, %s, interval ''10 years'')', :am, :a_fourth),
  $$select 'parked', baton._now() + interval '10 years'$$, 'park: ten years are taken'
);

-- A claim that ran out

select * from baton_test.hold('late') \gset b
select baton_test.advance('30 seconds') \gset
select is((select outcome from baton.park(:bm, :bd)), 'parked', 'park: at its deadline a claim still parks');
select is(baton_test.state(:bm) like '% free 0 0', true, 'park: which counts no lapse');
select * from baton_test.hold('counted', 'k') \gset c
select baton_test.advance('30 seconds') \gset
select delivery as cd from baton.claim('counted') \gset
select outcome from baton.fail(:cm, :cd, 'no', '0') \gset
select delivery as cd from baton.claim('counted') \gset
select outcome from baton.park(:cm, :cd) \gset
select is(baton_test.state(:cm) like '% free 1 1', true, 'park: keeps what was counted before');
select is((select last_error from baton.messages where message_id = :cm), 'no', 'park: and the last error');

-- Lost

select is((select outcome from baton.park(:cm, :cd)), 'lost', 'park: its receipt is spent');
select is((select visible_at from baton.park(:cm, :cd)), null, 'park: a lost one says no time');
select outcome, message_id as n from baton.send('new', '1') \gset
select is((select outcome from baton.park(:n, null)), 'lost', 'park: a null delivery is lost');
select is((select outcome from baton.park(null, null)), 'lost', 'park: nulls are lost');
select is((select outcome from baton.park(-1, 1)), 'lost', 'park: an unknown message is lost');
select is(baton_test.incidents('lost'), 0::bigint, 'park: no incident where no other delivery has the row');
select * from baton_test.hold('taken') \gset e
select baton_test.advance('30 seconds') \gset
select delivery as taker from baton.claim('taken') \gset
select baton_test.state(:em) as before \gset
select is((select outcome from baton.park(:em, :ed)), 'lost', 'park: once another claim has the message it is lost');
select is(baton_test.state(:em), :'before'::text, 'park: and the other keeps it');
select results_eq(
  $$select i.message_id, i.detail from baton.incidents as i where i.kind = 'lost'$$,
  format(
    $$select %s::bigint, jsonb_build_object('verb', 'park', 'delivery', %s)$$, :em, :ed
  ),
  'park: an incident tells of it'
);

-- Delays

select is_empty(
  $$select d.delay from unnest(array['-1 microsecond', '10 years 1 microsecond', '100 years']) as d (delay)
  where baton_test.sqlstate_of(format('select baton.park(1, 1, %L)', d.delay)) <> '22023'$$,
  'park: a delay below zero or above ten years is refused, whatever the receipt'
);
select throws_ok(
  $$select baton.park(1, 1, interval 'infinity')$$, baton_test.refuses_infinity(), null,
  'park: an infinite one is refused'
);

select * from finish();
rollback;
