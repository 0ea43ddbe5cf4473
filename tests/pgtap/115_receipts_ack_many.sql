\ir _begin.sql
\ir _queue.sql
select plan(10);

select * from baton_test.hold('a') \gset a
select * from baton_test.hold('b') \gset b
select * from baton_test.hold('c') \gset c
select * from baton_test.hold('d') \gset d
select baton_test.advance('30 seconds') \gset
select delivery as taker from baton.claim('d') \gset
select outcome, message_id as n from baton.send('new', '1') \gset

create temporary table answers as
select a.outcome, a.message_id, a.nth
from baton.ack_many(
  baton_test.receipts(:bm, :bd, :am, :ad, :dm, :dd, :n, 1, :bm, :bd, :cm, null, null, :cd)
) with ordinality as a (outcome, message_id, nth);
select results_eq(
  $$select a.outcome, a.message_id from answers as a order by a.nth$$,
  format(
    $$values
    ('acked', %1$s::bigint), ('acked', %2$s), ('lost', %3$s), ('lost', %4$s), ('lost', %1$s), ('lost', %5$s),
    ('lost', null)$$,
    :bm, :am, :dm, :n, :cm
  ),
  'ack_many: a row a receipt, in their order; one that stands there twice is lost the second time'
);
select set_eq(
  $$select m.message_id from baton.messages as m$$, array[:cm, :dm, :n]::bigint[], 'ack_many: the acked are gone'
);
select results_eq(
  $$select i.queue_name, i.message_id, i.detail from baton.incidents as i where i.kind = 'lost'$$,
  format(
    $$select 'd', %s::bigint, jsonb_build_object('verb', 'ack_many', 'delivery', %s)$$, :dm, :dd
  ),
  'ack_many: an incident for the one that another claim has, and for no other'
);
select is(
  (
    select outcome
    from baton.ack_many(jsonb_build_array(jsonb_build_object('message_id', :'cm', 'delivery', :'cd', 'more', 1)))
  ),
  'acked', 'ack_many: numbers may be text, a claim that ran out acks, and further keys are not looked at'
);
select is_empty($$select * from baton.ack_many('[]')$$, 'ack_many: of nothing comes nothing');
select is_empty(
  $$select r.receipts
  from unnest(
    array[
      null, 'null', '{}', '{"message_id": 1, "delivery": 1}', '1', '"x"', '[1]', '[null]', '[[1, 2]]',
      '["message_id", "delivery"]', '[["message_id", "delivery"]]', '[{}]', '[{"message_id": 1}]', '[{"delivery": 1}]',
      '[{"message_id": 1.5, "delivery": 1}]', '[{"message_id": "x", "delivery": 1}]',
      '[{"message_id": 1, "delivery": true}]', '[{"message_id": 1, "delivery": {}}]',
      '[{"message_id": 1, "delivery": 99999999999999999999}]'
    ]
  ) as r (receipts)
  where baton_test.sqlstate_of(format('select baton.ack_many(%L)', r.receipts)) <> '22023'$$,
  'ack_many: what is not an array of receipts is refused'
);
select is(
  baton_test.sqlstate_of(format('select baton.ack_many(%L)', baton_test.receipts(:dm, :taker) || '[{}]')), '22023',
  'ack_many: also where another receipt is good'
);
select isnt(baton_test.state(:dm), null, 'ack_many: and then nothing is acked');
select results_eq(
  format('select count(*), count(*) filter (where a.outcome = ''acked'') from baton.ack_many(%L) as a', (
    select jsonb_agg(jsonb_build_object('message_id', r.m, 'delivery', r.d))
    from generate_series(1, 500) as i
    cross join lateral baton_test.hold('many ' || i) as r
  )),
  'values (500::bigint, 500::bigint)',
  'ack_many: five hundred at once'
);

select * from baton_test.hold('e') \gset e
select * from baton_test.hold('f') \gset f
select results_eq(
  format('select a.outcome from baton.ack_many(%L) as a', baton_test.receipts(:em, :ed, :fm, :ed, :em, :fd)),
  array['acked', 'lost', 'lost'], 'ack_many: the delivery of another message is not its own'
);

select * from finish();
rollback;
