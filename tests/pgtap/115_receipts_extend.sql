\ir _begin.sql
\ir _queue.sql
select plan(25);

select * from baton_test.hold('q') \gset a
select baton_test.advance('10 seconds') \gset
select results_eq(
  format('select outcome, visible_at from baton.extend(%s, %s, ''1 minute'')', :am, :ad),
  $$values ('extended', timestamptz '2026-01-01 00:01:10+00')$$, 'extend: the claim runs on, from now'
);
select is(
  baton_test.state(:am), '2026-01-01 00:01:10+00 claimed 0 0',
  'extend: it is still held, and nothing is counted'
);
select baton_test.advance('59.999999 seconds') \gset
select is_empty($$select * from baton.claim('q')$$, 'extend: a microsecond before the new deadline it is hidden');
select is(
  (select visible_at from baton.extend(:am, :ad, '0')), timestamptz '2026-01-01 00:01:10+00', 'extend: never shortens'
);
select results_eq(
  format('select outcome, visible_at from baton.extend(%s, %s, ''1 microsecond'')', :am, :ad),
  $$values ('extended', timestamptz '2026-01-01 00:01:10+00')$$, 'extend: the same deadline again is no change'
);
select results_eq(
  format('select outcome, visible_at from baton.extend(%s, %s)', :am, :ad),
  $$select 'extended', baton._now() + interval '30 seconds'$$, 'extend: by default for settings.visibility'
);
update baton.settings set visibility = '42 seconds';
select results_eq(
  format(
    'select outcome, visible_at from baton.extend(message_id => %s, delivery => %s, visibility => null)', :am, :ad
  ),
  $$select 'extended', baton._now() + interval '42 seconds'$$, 'extend: null is the default'
);
select baton_test.advance('42 seconds') \gset
select delivery as taker, lapses from baton.claim('q') \gset
select is(:lapses, 1, 'extend: at the new deadline it is given to the next, a lapse');
select is(
  (select visible_at from baton.extend(:am, :taker, interval '10 years')), baton._now() + interval '10 years',
  'extend: ten years are taken'
);

-- A claim that ran out

select * from baton_test.hold('late') \gset b
select baton_test.advance('42 seconds') \gset
select is((select outcome from baton.extend(:bm, :bd)), 'extended', 'extend: at its deadline a claim still extends');
select is_empty($$select * from baton.claim('late')$$, 'extend: and is hidden again');
select baton_test.advance('1 year') \gset
select is(
  (select visible_at from baton.extend(:bm, :bd, '1 second')), baton._now() + interval '1 second',
  'extend: a year later too, while nobody has acted'
);
select is(baton_test.state(:bm) like '% claimed 0 0', true, 'extend: which counts no lapse');
select is((select outcome from baton.ack(:bm, :bd)), 'acked', 'extend: the receipt stays the same');

-- Lost

select is((select outcome from baton.extend(:bm, :bd)), 'lost', 'extend: a message that is gone is lost');
select outcome, message_id as n from baton.send('new', '1') \gset
select is((select outcome from baton.extend(:n, null)), 'lost', 'extend: a null delivery is lost');
select is((select outcome from baton.extend(null, null)), 'lost', 'extend: nulls are lost');
select is(baton_test.state(:n) like '% free 0 0', true, 'extend: and a message that was never claimed is left alone');
select * from baton_test.hold('parked') \gset c
select outcome from baton.park(:cm, :cd) \gset
select is((select outcome from baton.extend(:cm, :cd)), 'lost', 'extend: a parked message''s receipt is spent');
select is(baton_test.incidents('lost'), 0::bigint, 'extend: no incident where no other delivery has the row');
select is(
  (select outcome from baton.extend(:am, :ad)), 'lost',
  'extend: once another claim has the message it is lost'
);
select is((select visible_at from baton.extend(:am, :ad)), null, 'extend: a lost one says no time');
select results_eq(
  $$select i.message_id, i.detail from baton.incidents as i where i.kind = 'lost'$$,
  format(
    $$select %s::bigint, jsonb_build_object('verb', 'extend', 'delivery', %s)$$, :am, :ad
  ),
  'extend: one incident tells of it, however often it is tried'
);

-- Visibility

select is_empty(
  $$select d.visibility from unnest(array['-1 microsecond', '10 years 1 microsecond', '100 years']) as d (visibility)
  where baton_test.sqlstate_of(format('select baton.extend(1, 1, %L)', d.visibility)) <> '22023'$$,
  'extend: a visibility below zero or above ten years is refused, whatever the receipt'
);
select throws_ok(
  $$select baton.extend(1, 1, interval 'infinity')$$, baton_test.refuses_infinity(), null,
  'extend: an infinite one is refused'
);

select * from finish();
rollback;
