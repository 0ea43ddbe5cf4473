\ir _begin.sql
\ir _queue.sql
select plan(39);

-- When a message is due

select message_id as m from baton.send('q', '{"n": 1}', '1 minute', kind => 'mail', headers => '{"h": 2}') \gset
select baton_test.advance('59.999999 seconds') \gset
select is_empty($$select * from baton.claim('q')$$, 'claim: a microsecond before visible_at it is not offered');
select baton_test.advance('1 microsecond') \gset
select is_empty($$select * from baton.claim('q', max_messages => 0)$$, 'claim: none wanted, none given');
select is_empty($$select * from baton.claim('other')$$, 'claim: it looks into its own queue only');
create temporary table got as select c.* from baton.claim('q') as c;
select results_eq(
  $$select g.message_id, g.kind, g.payload, g.headers, g.failures, g.lapses, g.visible_at from got as g$$,
  format(
    $$values (
      %s::bigint, 'mail', '{"n": 1}'::jsonb, '{"h": 2}'::jsonb, 0, 0, timestamptz '2026-01-01 00:01:30+00'
    )$$, :m
  ),
  'claim: at visible_at exactly it is given out, as it was sent, hidden for settings.visibility'
);
select results_eq(
  format(
    'select m.delivery, m.claimed_at, m.claimed_by, m.visible_at from baton.messages as m where m.message_id = %s', :m
  ),
  $$select g.delivery, timestamptz '2026-01-01 00:01:00+00', null::uuid, g.visible_at from got as g$$,
  'claim: the row bears the receipt, the moment and the deadline'
);

-- When a claim runs out

select delivery as first from got \gset
select baton_test.advance('29.999999 seconds') \gset
select is_empty($$select * from baton.claim('q')$$, 'claim: a microsecond before its deadline it is still hidden');
select baton_test.advance('1 microsecond') \gset
select delivery as second, lapses from baton.claim('q') \gset
select is(:lapses, 1, 'claim: at the deadline exactly it is given out again and counts a lapse');
select isnt(:second::bigint, :first::bigint, 'claim: with a new receipt');
select baton_test.advance('1 hour') \gset
select lapses, failures from baton.claim('q') \gset
select results_eq(
  format('select %s, %s', :lapses, :failures), 'select 2, 0',
  'claim: each claim that ran out counts one lapse, however long ago, and no failure'
);
select * from baton_test.hold('park') \gset
select baton_test.advance('30 seconds') \gset
select outcome from baton.park(:m, :d) \gset
select is((select lapses from baton.claim('park')), 0, 'claim: one that was given back late is no lapse');
select * from baton_test.hold('fail') \gset
select baton_test.advance('30 seconds') \gset
select outcome from baton.fail(:m, :d, 'no', '0') \gset
select results_eq(
  $$select c.failures, c.lapses from baton.claim('fail') as c$$, 'select 1, 0',
  'claim: one that failed late counts a failure and no lapse'
);

-- The receipt

select is_empty(
  $$select r.d
  from generate_series(1, 200) as i
  cross join lateral baton_test.hold('receipts ' || i) as r
  where r.d not between 0 and 9007199254740991$$,
  'claim: a receipt is a number below 2^53'
);
select is(
  (select count(distinct m.delivery) from baton.messages as m where m.queue_name like 'receipts %'), 200::bigint,
  'claim: no two are the same'
);
select cmp_ok(
  (select max(m.delivery) from baton.messages as m where m.queue_name like 'receipts %'), '>', 1::bigint << 51,
  'claim: all 53 bits are used'
);
select outcome from baton.send('seed', '1') \gset
savepoint before_claim;
select setseed(0.5) \gset
select delivery as first from baton.claim('seed') \gset
rollback to before_claim;
select setseed(0.5) \gset
select delivery as second from baton.claim('seed') \gset
select isnt(
  :second::bigint, :first::bigint,
  'claim: the receipt of a claim that was rolled back never comes again, setseed or not'
);

-- Order and number

select baton_test.set_clock('2026-02-01') \gset
select message_id as late from baton.send('order', '"late"', '2 seconds') \gset
select message_id as early from baton.send('order', '"early"', '1 second') \gset
select message_id as same from baton.send('order', '"same"', '1 second') \gset
select message_id as future from baton.send('order', '"future"', '3.000001 seconds') \gset
select message_id as lapsed from baton.send('lapsed', '1') \gset
select baton_test.advance('3 seconds') \gset
select results_eq(
  $$select c.payload #>> '{}' from baton.claim('order', max_messages => 2) as c$$, array['early', 'same'],
  'claim: the longest due first, equals by id, as many as wanted'
);
select results_eq(
  $$select c.payload #>> '{}' from baton.claim('order', max_messages => 100) as c$$, array['late'],
  'claim: fewer than wanted where no more is due'
);
select outcome from baton.send('default', '1') \gset
select outcome from baton.send('default', '2') \gset
select is((select count(*) from baton.claim('default')), 1::bigint, 'claim: one by default');
select is((select count(*) from baton.claim('default', max_messages => null)), 1::bigint, 'claim: null is the default');
select throws_ok(
  $$select baton.claim('default', max_messages => -1)$$, '22023', null, 'claim: a negative number is refused'
);
select outcome from baton.send('mixed', '"old"') \gset
select delivery from baton.claim('mixed', visibility => '10 seconds') \gset
select baton_test.advance('5 seconds') \gset
select outcome from baton.send('mixed', '"new"', '4 seconds') \gset
select baton_test.advance('5 seconds') \gset
select results_eq(
  $$select c.payload #>> '{}', c.lapses from baton.claim('mixed') as c
  union all
  select c.payload #>> '{}', c.lapses from baton.claim('mixed') as c$$,
  $$values ('new', 0), ('old', 1)$$,
  'claim: one whose claim ran out is due since its deadline'
);

-- Visibility

select outcome from baton.send('v', '1') \gset
select is(
  (select c.visible_at - baton._now() from baton.claim('v', visibility => '5 minutes') as c), interval '5 minutes',
  'claim: visibility says how long it is hidden'
);
update baton.settings set visibility = '42 seconds';
select outcome from baton.send('v', '1') \gset
select is(
  (select c.visible_at - baton._now() from baton.claim('v', visibility => null) as c), interval '42 seconds',
  'claim: by default settings.visibility, which holds from the next call on'
);
select outcome from baton.send('v0', '1') \gset
select is(
  (select c.visible_at - baton._now() from baton.claim('v0', visibility => '0') as c), interval '0',
  'claim: a visibility of nothing is taken'
);
select is((select c.lapses from baton.claim('v0') as c), 1, 'claim: and has run out at once');
select outcome from baton.send('v10', '1') \gset
select is(
  (select c.visible_at from baton.claim('v10', visibility => '10 years') as c), baton._now() + interval '10 years',
  'claim: a visibility of ten years is taken'
);
select throws_ok(
  $$select baton.claim('v', visibility => '10 years 0.000001 seconds')$$, '22023', null,
  'claim: a longer one is refused'
);
select throws_ok(
  $$select baton.claim('v', visibility => '-1 microsecond')$$, '22023', null, 'claim: a negative one is refused'
);
select throws_ok(
  $$select baton.claim('v', visibility => interval 'infinity')$$, baton_test.refuses_infinity(), null,
  'claim: an infinite one is refused'
);

-- Queue names

select is_empty(
  $$select n.name
  from (
    select b.name from baton_test.bad_names(200) as b
    union all
    select r.name from unnest(array['baton.', 'baton.deliveries', null]) as r (name)
  ) as n
  where baton_test.sqlstate_of(format('select baton.claim(%L)', n.name)) <> '22023'$$,
  'claim: queue names obey the rules of send'
);

-- Workers

select outcome from baton.register_worker_function('f', 'w', start_mode => 'process') \gset
select outcome from baton.register_worker('00000000-0000-0000-0000-000000000001', 'f') \gset
select outcome from baton.register_worker('00000000-0000-0000-0000-000000000002', 'f') \gset
select outcome from baton.register_worker('00000000-0000-0000-0000-000000000003', 'f') \gset
select outcome from baton.send_many('w', '[{}, {}, {}, {}]') limit 1 \gset
select is_empty(
  $$select * from baton.claim('w', '00000000-0000-0000-0000-000000000009')$$, 'claim: an unknown worker gets nothing'
);
select message_id as m from baton.claim('w', '00000000-0000-0000-0000-000000000001') \gset
select is(
  (select m.claimed_by from baton.messages as m where m.message_id = :m), '00000000-0000-0000-0000-000000000001'::uuid,
  'claim: a registered one does, and the row says who'
);
select baton_test.advance('59 minutes') \gset
select isnt_empty(
  $$select * from baton.claim('w', '00000000-0000-0000-0000-000000000001')$$, 'claim: however old its heartbeat is'
);
select outcome from baton.stop_worker('00000000-0000-0000-0000-000000000001', draining => true) \gset
select is_empty(
  $$select * from baton.claim('w', '00000000-0000-0000-0000-000000000001')$$, 'claim: a stopping one gets nothing'
);
select outcome from baton.stop_worker('00000000-0000-0000-0000-000000000002') \gset
select is_empty(
  $$select * from baton.claim('w', '00000000-0000-0000-0000-000000000002')$$, 'claim: nor a stopped one'
);
select outcome from baton.deprecate_workers('f') \gset
select is_empty(
  $$select * from baton.claim('w', '00000000-0000-0000-0000-000000000003')$$, 'claim: nor a deprecated one'
);
select isnt_empty($$select * from baton.claim('w')$$, 'claim: null is anonymous and may');

-- The clock

select outcome from baton.send('back', '1') \gset
select baton_test.advance('-1 hour') \gset
select is_empty($$select * from baton.claim('back')$$, 'claim: a clock set back delays a message by the step');
select baton_test.advance('1 hour') \gset
select isnt_empty($$select * from baton.claim('back')$$, 'claim: and loses nothing');

select * from finish();
rollback;
